"""What `ps` and `top` show of a slot's process: the slot, the job and the attempt.

On Linux a process is shown by the bytes of its own memory that its arguments came in, and by a name of 15 characters. Both
are written here, and restored when the slot ends, since Spark may reuse the process. If that can't be done (another system,
a sandbox without these files) nothing changes, since the title is only for people.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_SELF = Path("/proc/self")
_ARG_START, _ARG_END = 47, 48  # fields of /proc/<pid>/stat, from 0
_COMM_BYTES = 15


@contextlib.contextmanager
def process_title(index: int, job: str, attempt: int) -> Iterator[None]:
    """Name the process "tidegate slot 1 of bid counts, attempt 2" for a while. Enter it in the main thread."""
    before = _shown()
    if before is None:
        yield
        return
    arguments, name = before
    _show(f"tidegate slot {index} of {job}, attempt {attempt}".encode(), f"tidegate slot {index}".encode())
    try:
        yield
    finally:
        _show(arguments, name)


def _shown() -> tuple[bytes, bytes] | None:
    try:
        start, end = _argument_bytes()
        arguments = (_SELF / "cmdline").read_bytes()
        if not 0 < start < end or len(arguments) != end - start:
            return None
        return arguments, (_SELF / "comm").read_bytes().rstrip(b"\n")
    except (OSError, ValueError, IndexError):
        return None


def _show(arguments: bytes, name: bytes) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        start, end = _argument_bytes()
        # The last byte stays 0: otherwise the system takes the environment, which follows, for arguments as well.
        text = arguments[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
        (_SELF / "comm").write_bytes(name[:_COMM_BYTES])


def _argument_bytes() -> tuple[int, int]:
    """Return where this process's memory holds its arguments."""
    fields = (_SELF / "stat").read_text().rpartition(")")[2].split()
    return int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
