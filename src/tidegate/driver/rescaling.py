"""The requests to change the parallelism, one at a time.

    wanted ─► the job stops with a final snapshot, or is restarting anyway ─► begun: the new layout is being deployed
           ─► deployed: all slots of the new layout are ready ─► it runs

If an attempt in the new layout fails before all its slots are ready, the job goes back to the layout that it had. Usually
there are fewer task slots than were asked for, and another try would only take longer. The request is answered when the job
runs again.

If the job has failed since its newest complete snapshot, it may fail again at the same record, although all slots are ready.
Then it counts as running when it has run for `PROBATION_MS` and has completed a snapshot after that.
"""

from __future__ import annotations

from tidegate.driver.deployment import Layout, Rescaling

PROBATION_MS = 1_000


class Rescales:
    """The requests of one job. `wanted` is the one that hasn't been deployed yet."""

    def __init__(self) -> None:
        self.wanted: Rescaling | None = None
        self._before: Layout | None = None  # the layout to go back to, once the one that is wanted is being deployed
        self._going_back: Rescaling | None = None  # to be answered when the job runs again
        self._deployed: Rescaling | None = None
        self._has_failed = False  # the job, since its newest complete snapshot
        self._until_ms: int | None = None  # the end of the probation
        self._proving_epoch: int | None = None  # the first epoch that is triggered after the probation

    def ask(self, rescaling: Rescaling, *, at_its_end: bool) -> bool:
        """Take a request. Return False, with the reason as its error, if the job can't be rescaled now."""
        if at_its_end:
            rescaling.error, rescaling.done = "it is at its end", True
        elif self.wanted is not None:
            rescaling.error, rescaling.done = "it is being rescaled already", True
        else:
            self._settle("it was rescaled again before it was known to run")
            self.wanted = rescaling
        return self.wanted is rescaling

    @property
    def begun(self) -> bool:
        """Whether the new layout is being deployed, and its slots are not all ready."""
        return self._before is not None

    def begin(self, present: Layout) -> Layout:
        """Return the layout of the next attempt. `present` is that of the attempt before."""
        if self.wanted is None:
            return present
        if self.wanted.layout is not present:
            self._before = present
        return self.wanted.layout

    def on_ready(self, layout: Layout, now_ms: int) -> None:
        """Note that all slots of an attempt are ready."""
        self._before = None
        if self._going_back is not None:
            self._going_back.done = True
            self._going_back = None
        if self.wanted is not None and self.wanted.layout is layout:
            self._deployed, self.wanted = self.wanted, None
        self._until_ms, self._proving_epoch = now_ms + PROBATION_MS, None
        if not self._has_failed:
            self._settle()

    def wants_snapshot(self, now_ms: int, *, next_epoch: int) -> bool:
        """Return whether to request a snapshot now. Called repeatedly while the job runs."""
        if self._deployed is None or self._until_ms is None or now_ms < self._until_ms:
            return False
        self._until_ms, self._proving_epoch = None, next_epoch
        return True

    def on_aborted(self, epoch: int, now_ms: int) -> None:
        """Note an aborted epoch. If its snapshot was the one that was requested, another one is."""
        if self._proves(epoch):
            self._until_ms, self._proving_epoch = now_ms + PROBATION_MS, None

    def on_complete(self, epoch: int, *, final: bool) -> None:
        """Note a complete snapshot. After the `final` one nothing can fail any more."""
        self._has_failed = self._has_failed and self._deployed is not None and not (self._proves(epoch) or final)
        if not self._has_failed:
            self._settle()

    def on_failed(self, why: str) -> Layout | None:
        """Note that an attempt has failed. Return the layout to go back to, if the new one has not come up."""
        back, self._before = self._before, None
        if back is not None:
            assert self.wanted is not None
            self._going_back, self.wanted = self.wanted, None
            self._going_back.error, self._going_back.went_back = why, True
            return back
        self._has_failed, self._until_ms = True, None
        return None

    def give_up(self, why: str) -> None:
        """Answer all requests: the job ends."""
        for rescaling in (self.wanted, self._going_back, self._deployed):
            if rescaling is not None:
                rescaling.error, rescaling.job_ends = why, True
                rescaling.done = True
        self.wanted = self._going_back = self._deployed = None

    def _proves(self, epoch: int) -> bool:
        return self._proving_epoch is not None and epoch >= self._proving_epoch

    def _settle(self, error: str | None = None) -> None:
        if self._deployed is not None:
            self._deployed.error, self._deployed.done = error, True
            self._deployed = None
