"""The slots of one attempt, as far as they have reported."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from tidegate.control.messages import RestoreStats


class Roster:
    """Which slots have registered (with their addresses), are ready, or have committed the final epoch; and when each of
    them last sent a message. `began_ms` is when the attempt began."""

    def __init__(self, slot_count: int, began_ms: int = 0) -> None:
        self.addresses: dict[int, tuple[str, int]] = {}
        self.ready: set[int] = set()
        self.done: set[int] = set()
        self.heard_ms: dict[int, int] = {}
        self._slot_count = slot_count
        self._began_ms = began_ms
        self._runs_since_ms: int | None = None

    def is_full(self, reported: Sized) -> bool:
        """Return whether all slots have reported this."""
        return len(reported) == self._slot_count

    def all_heard(self, now_ms: int) -> None:
        """Count the time without messages from now on."""
        self.heard_ms = dict.fromkeys(self.heard_ms, now_ms)

    def begin_to_run(self, now_ms: int) -> None:
        """Note that all slots are ready."""
        self.all_heard(now_ms)
        self._runs_since_ms = now_ms

    def ran_ms(self, now_ms: int) -> int:
        """Return for how long the attempt has run."""
        return 0 if self._runs_since_ms is None else now_ms - self._runs_since_ms

    def silent(self, now_ms: int, timeout_ms: int) -> list[int]:
        """Return the slots that have reported nothing for longer than the time-out."""
        return [slot for slot, heard_ms in self.heard_ms.items() if now_ms - heard_ms > timeout_ms]

    def late(self, now_ms: int, timeout_ms: int, restored: Mapping[int, RestoreStats]) -> str | None:
        """Return why the deployment has failed, if it has: slots are missing, or restore their state without a sign of life.
        A restore may take any time, as long as it advances. `restored`: how far each slot has got."""
        missing = sorted(set(range(self._slot_count)) - self.ready)
        if not self.is_full(self.addresses):
            if now_ms < self._began_ms + timeout_ms:
                return None
            return (
                f"slots {missing} were not ready within {timeout_ms} ms. A job needs {self._slot_count} task slots of Spark "
                f"at the same time: are they there and free?"
            )
        silent = [slot for slot in missing if now_ms - self.heard_ms[slot] >= timeout_ms]
        if not silent:
            return None
        so_far = ", ".join(f"{restored[slot].bytes if slot in restored else 0} bytes by slot {slot}" for slot in silent)
        return (
            f"slots {silent} got no further with restoring their state for {timeout_ms} ms ({so_far}). Their process, their "
            f"host or the snapshot store hangs. If one read of the store may take so long, set Tuning(deploy_timeout=…)"
        )
