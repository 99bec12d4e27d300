"""The changes of parallelism that were asked for, one at a time, and what becomes of each.

    wanted ─► the job stops with a final snapshot, or is restarting anyway ─► deployed: all slots of the new layout are
    ready ─► it runs

Slots that are ready need not get anywhere: a job that has failed since its newest complete snapshot may fail again at the
same record. Then it is known to run when it has done so for `PROBATION_MS` and has completed a snapshot after that.
"""

from __future__ import annotations

from tidegate.runtime.deployment import Layout, Rescaling

PROBATION_MS = 1_000


class Rescales:
    """`wanted` is what hasn't been deployed yet."""

    def __init__(self) -> None:
        self.wanted: Rescaling | None = None
        self._deployed: Rescaling | None = None
        self._has_failed = False                # since the newest complete snapshot
        self._until_ms: int | None = None       # the end of the probation
        self._proving_epoch: int | None = None  # the first that ends after the probation

    def ask(self, rescaling: Rescaling, *, at_its_end: bool) -> bool:
        """Whether the job can be rescaled now. If not, the one who asked is told so."""
        if at_its_end:
            rescaling.error, rescaling.done = "it is at its end", True
        elif self.wanted is not None:
            rescaling.error, rescaling.done = "it is being rescaled already", True
        else:
            self._settle("it was rescaled again before it was known to run")
            self.wanted = rescaling
        return self.wanted is rescaling

    def on_ready(self, layout: Layout, now_ms: int) -> None:
        """All slots of an attempt are ready."""
        if self.wanted is not None and self.wanted.layout is layout:
            self._deployed, self.wanted = self.wanted, None
        self._until_ms, self._proving_epoch = now_ms + PROBATION_MS, None
        if not self._has_failed:
            self._settle()

    def wants_snapshot(self, now_ms: int, *, next_epoch: int) -> bool:
        """Whether one is to be asked for now. To be called now and then while the job runs."""
        if self._deployed is None or self._until_ms is None or now_ms < self._until_ms:
            return False
        self._until_ms, self._proving_epoch = None, next_epoch
        return True

    def on_aborted(self, epoch: int, now_ms: int) -> None:
        """A snapshot was. If it was the one that was asked for, another one has to be."""
        if self._proves(epoch):
            self._until_ms, self._proving_epoch = now_ms + PROBATION_MS, None

    def on_complete(self, epoch: int, *, final: bool) -> None:
        """A snapshot is. After the `final` one nothing is left that could fail."""
        self._has_failed = self._has_failed and self._deployed is not None and not (self._proves(epoch) or final)
        if not self._has_failed:
            self._settle()

    def on_failed(self) -> None:
        self._has_failed, self._until_ms = True, None

    def give_up(self, why: str) -> None:
        """The job ends."""
        for rescaling in (self.wanted, self._deployed):
            if rescaling is not None:
                rescaling.error, rescaling.job_ends = why, True
                rescaling.done = True
        self.wanted = self._deployed = None

    def _proves(self, epoch: int) -> bool:
        return self._proving_epoch is not None and epoch >= self._proving_epoch

    def _settle(self, error: str | None = None) -> None:
        if self._deployed is not None:
            self._deployed.error, self._deployed.done = error, True
            self._deployed = None
