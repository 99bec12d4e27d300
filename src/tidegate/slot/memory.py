"""The limit of a slot's memory: a warning before it is reached, and an error that says what to do instead of a kill.

Without a limit the kernel or the cluster manager kills a process that has grown too large, and the job restarts into the
same end. What is measured is the memory of the whole process (its resident set), once per heartbeat and while state is
restored; the hot loop measures nothing. So a limit must leave room for what a slot allocates within a heartbeat.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tidegate.errors import JobError

WARNING_SHARE = 0.8
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident_bytes() -> int:
    """Return the memory of this process; 0 on systems that don't report it in /proc."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class MemoryWatch:
    """The limit of one slot. `trim` gives freed memory back to the system, and is tried before the error."""

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        resident_bytes: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self.used_bytes = 0  # at the last look
        self.limit_bytes = limit_bytes
        self._resident_bytes = resident_bytes
        self._trim = trim

    @property
    def is_nearly_full(self) -> bool:
        """Whether the last look has found more than `WARNING_SHARE` of the limit."""
        return self.limit_bytes is not None and self.used_bytes > WARNING_SHARE * self.limit_bytes

    def look(self) -> int:
        """Measure, and return the bytes. Raise `JobError` if they are above the limit."""
        self.used_bytes = self._resident_bytes()
        if self.limit_bytes is not None and self.used_bytes > self.limit_bytes:
            self._trim()
            self.used_bytes = self._resident_bytes()
            if self.used_bytes > self.limit_bytes:
                raise JobError(
                    f"the slot uses {self.used_bytes:,} bytes of memory, and tg.Heap(memory=…) allows {self.limit_bytes:,}. "
                    f"Its state is larger than the heap can hold: start the job again with more slots, with "
                    f"backend=tg.RocksDB(), with a ttl for state that isn't needed any more, or with more memory. It "
                    f"resumes from its last snapshot, which any backend and any number of slots can restore"
                )
        return self.used_bytes
