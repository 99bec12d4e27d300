"""Pending commits: the bookkeeping of a two-phase sink.

Theory of operation (Carbone et al. 2017, §4.4 "Exactly-Once Delivery Sinks", transactional sinks)
------------------------------------------------------------------------------------------------
Output becomes visible only once the job can no longer be rolled back behind it. At marker N a sink pre-commits what it
wrote in epoch N and gets *committables*: promises that any process can redeem. They are part of snapshot N. When the
coordinator reports that N is complete, they are committed. After a failure the restored snapshot hands them out again,
and they are committed once more: commits are idempotent.

An aborted epoch needs no method here. Its records are not processed again (nothing was rolled back), so its output is
neither dropped nor committed on its own: it stays pending, is listed in the next snapshot, and is committed with it.
The later epoch *subsumes* the earlier ones.

    prepared(3)   →  all() = [3]        snapshot 3 is aborted
    prepared(4)   →  all() = [3, 4]     snapshot 4 lists both
    complete(4)   →  [3, 4]             both are committed, in this order

Invariants: a committable is handed out by `complete` once, in the order of epochs, and never before an epoch that is
at least its own has completed; no epoch's output comes after a completed snapshot that should have listed it.

The caller commits what `complete` and `restored` return before the next snapshot is taken, and fails the job if that is
not possible, since no later snapshot lists these committables. Not here: committing, aborting, naming.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Committable = TypeVar("Committable")


class PendingCommits(Generic[Committable]):
    """What one subtask of a sink has pre-committed and not yet committed."""

    def __init__(self) -> None:
        self._pending: dict[int, list[Committable]] = {}
        self._completed = -1

    def prepared(self, epoch: int, committables: Iterable[Committable]) -> None:
        """The epoch's output is durable. Epochs may be reported out of order, as background threads finish."""
        assert epoch > self._completed, (
            f"output of epoch {epoch} was prepared after snapshot {self._completed} completed without it"
        )
        assert epoch not in self._pending, f"epoch {epoch} was prepared twice"
        self._pending[epoch] = list(committables)

    def all(self) -> list[Committable]:
        """Return what the next snapshot has to list, in the order of epochs."""
        return self._up_to(max(self._pending, default=-1))

    def complete(self, epoch: int) -> list[Committable]:
        """Return what to commit now that `epoch` is complete, and forget it: a repeated notice returns nothing."""
        due = self._up_to(epoch)
        self._pending = {later: each for later, each in self._pending.items() if later > epoch}
        self._completed = max(self._completed, epoch)
        return due

    def restored(self, committables: Iterable[Committable]) -> list[Committable]:
        """Return what the restored snapshot listed. All of it has to be committed (again) before any record is processed."""
        assert not self._pending and self._completed == -1, "committables are restored before anything else happens"
        return list(committables)

    def _up_to(self, epoch: int) -> list[Committable]:
        return [one for due in sorted(self._pending) if due <= epoch for one in self._pending[due]]
