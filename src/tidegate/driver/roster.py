"""The slots of one attempt, as far as they have reported."""

from __future__ import annotations

from collections.abc import Sized


class Roster:
    """Which slots have registered (with their addresses), are ready, or have committed the final epoch; and when each of
    them last sent a message."""

    def __init__(self, slot_count: int) -> None:
        self.addresses: dict[int, tuple[str, int]] = {}
        self.ready: set[int] = set()
        self.done: set[int] = set()
        self.heard_ms: dict[int, int] = {}
        self._slot_count = slot_count

    def is_full(self, reported: Sized) -> bool:
        """Return whether all slots have reported this."""
        return len(reported) == self._slot_count

    def all_heard(self, now_ms: int) -> None:
        """Count the time without messages from now on."""
        self.heard_ms = dict.fromkeys(self.heard_ms, now_ms)

    def silent(self, now_ms: int, timeout_ms: int) -> list[int]:
        """Return the slots that have reported nothing for longer than the time-out."""
        return [slot for slot, heard_ms in self.heard_ms.items() if now_ms - heard_ms > timeout_ms]
