"""The savepoints that were ordered, from the order to the finished copy.

An order waits for a full epoch that is triggered after it. If that epoch is aborted, or its attempt ends, the order waits
for the next one. When the epoch is complete and all slots have reported that their sinks committed what it covers, its files
are copied, in a background of their own, since that may take long. The copy lists nothing to commit, so that it can be
restored anywhere. If the attempt ends before, it is unknown what was committed, so the order waits for the next attempt.

A complete epoch is pinned until it is copied: it is not released, and if it would have been, it is released after that. So
savepoints don't change how many snapshots are retained, and no snapshot is dropped because of one (docs/promises.md, row 3).

Orders come from the handle, and from other processes as files in the job's store, where they are answered. All methods run
in the coordinator's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from tidegate.control.background import Background, ignored
from tidegate.control.clock import Clock
from tidegate.driver.job_log import JobLog
from tidegate.errors import TidegateError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.committed import without_committables
from tidegate.snapshots.manifest import Manifest
from tidegate.snapshots.requests import Request, answer_request, open_requests
from tidegate.snapshots.savepoints import SavepointInfo, check_empty, export_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store.opening import open_store

REQUESTS_EVERY_MS = 2_000


@dataclass(slots=True, eq=False)
class SavepointOrder:
    """An order for a savepoint. When `done`, it has either `info` or `error`. `copied_bytes` grows while it is being copied.
    Other threads may read it."""

    to: str
    request: str | None = None  # the id of a request from another process
    info: SavepointInfo | None = None
    error: BaseException | None = None
    epoch: int | None = None  # the one to be copied; None until it is triggered
    copy: Callable[[], SavepointInfo] | None = None  # once that epoch is complete
    copied_bytes: int = 0

    @property
    def done(self) -> bool:
        return self.info is not None or self.error is not None


class SavepointRequests:
    """`want` asks for a full epoch. `release` is called with the epochs whose release had to wait for a copy. `copying` has
    the orders that are being copied."""

    def __init__(
        self,
        *,
        catalog: SnapshotCatalog,
        background: Background,
        clock: Clock,
        want: Callable[[], None],
        release: Callable[[Collection[int]], None],
        log: JobLog,
    ) -> None:
        self._catalog = catalog
        self._background = background
        self._clock = clock
        self._want = want
        self._release = release
        self._log = log
        self.copying: list[SavepointOrder] = []
        self._orders: list[SavepointOrder] = []  # the ones before that
        self._held_back: set[int] = set()
        self._known: set[str] = set()  # requests
        self._looking = False
        self._looked_ms: int | None = None
        self._over: str | None = None
        self._cancelled = threading.Event()

    @property
    def wanted(self) -> bool:
        """Whether an order waits for a full epoch to be triggered."""
        return any(order.epoch is None for order in self._orders)

    # Orders.

    def take(self, order: SavepointOrder, then: Callable[[], None] | None = None) -> None:
        """Take an order if its folder is empty or missing; then call `then`, which by default asks for a full epoch."""
        self._background.submit(lambda: check_empty(open_store(order.to)), partial(self._taken, order, then or self._want))

    def _taken(self, order: SavepointOrder, then: Callable[[], None], _: Any, error: BaseException | None) -> None:
        if error is None and self._over is not None:
            error = TidegateError(self._over)
        if error is not None:
            self._settle(order, error)
        elif not order.done:
            self._log.savepoint_asked(order.to)
            self._orders.append(order)
            then()

    def withdraw(self, order: SavepointOrder, error: BaseException) -> None:
        """Give an order up: nobody waits for it any more. A copy that has begun continues."""
        if order in self.copying:
            return
        if order in self._orders:
            self._orders.remove(order)
        self._settle(order, error)
        self._release_free()

    # What the epochs do.

    def on_triggered(self, epoch: int) -> None:
        """Note that a full epoch was triggered."""
        for order in self._orders:
            if order.epoch is None:
                order.epoch = epoch

    def on_aborted(self, epoch: int) -> None:
        for order in self._orders:
            if order.epoch == epoch:
                order.epoch = None

    def on_attempt_over(self) -> None:
        for order in self._orders:
            order.epoch = order.copy = None
        self._release_free()

    def on_complete(self, manifest: Manifest, *, graph: str, versions: dict[str, str]) -> None:
        """Note a complete epoch. Called before anything is released because of it or of a later one."""
        for order in self._orders:
            if order.epoch == manifest.epoch:
                order.copy = partial(self._copy, order, manifest, graph, versions)

    def on_committed(self, epoch: int) -> None:
        """Copy the epochs up to this one: all sinks have committed what they cover."""
        for order in list(self._orders):
            if order.copy is not None and order.epoch is not None and order.epoch <= epoch:
                self._orders.remove(order)
                self.copying.append(order)
                self._background.submit(order.copy, partial(self._copied, order))

    def releasable(self, epochs: Collection[int]) -> tuple[int, ...]:
        """Return the epochs that aren't pinned. `release` is called with the pinned ones later."""
        pinned = self._pinned().intersection(epochs)
        self._held_back |= pinned
        return tuple(sorted(set(epochs) - pinned))

    def _pinned(self) -> set[int]:
        return {order.epoch for order in (*self._orders, *self.copying) if order.epoch is not None}

    def _release_free(self) -> None:
        free = self._held_back - self._pinned()
        self._held_back -= free
        if free:
            self._release(free)

    def _copy(self, order: SavepointOrder, manifest: Manifest, graph: str, versions: dict[str, str]) -> SavepointInfo:
        """Copy the epoch. Runs in the background."""

        def copied(count: int) -> None:
            order.copied_bytes += count
            self._log.copying(order.to, order.copied_bytes, self._clock.monotonic_ms())

        exported = export_snapshot(
            Snapshot(self._catalog.store, without_committables(manifest)),
            open_store(order.to),
            created_ms=self._clock.now_ms(),
            graph=graph,
            versions=versions,
            cancelled=self._cancelled.is_set,
            copied=copied,
        )
        return SavepointInfo(path=order.to, epoch=manifest.epoch, bytes=sum(exported.operator_bytes().values()))

    def _copied(self, order: SavepointOrder, info: SavepointInfo | None, error: BaseException | None) -> None:
        self.copying.remove(order)
        order.info = info
        self._settle(order, error)
        self._release_free()

    def _settle(self, order: SavepointOrder, error: BaseException | None) -> None:
        if order.done and error is not None:
            return
        order.error = error
        self._log.savepoint_settled(order.to, order.info, error)
        if order.request is not None:
            outcome = order.info if order.info is not None else f"{type(error).__name__}: {error}"
            # If the answer isn't written, the process that asked times out.
            self._background.submit(partial(self._answer, order.request, outcome), ignored)

    def _answer(self, request: str, outcome: SavepointInfo | str) -> None:
        # If another driver has taken over, it answers.
        if not (isinstance(outcome, str) and self._catalog.is_superseded()):
            answer_request(self._catalog.store, request, outcome)

    # The job's end.

    def on_job_over(self, why: str, *, cancel: bool) -> None:
        """Answer the orders: no further epoch comes. Copies continue unless `cancel`."""
        self._over = f"{why} before the savepoint was taken"
        if cancel:
            self._cancelled.set()
        committing = f"{why} before its sinks had committed what the savepoint covers"
        for order in self._orders:
            self._settle(order, TidegateError(self._over if order.copy is None else committing))
        self._orders = []

    # Requests of other processes.

    def look_for_requests(self, attempt: int) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._looking or (self._looked_ms is not None and now_ms < self._looked_ms + REQUESTS_EVERY_MS):
            return
        self._looking, self._looked_ms = True, now_ms
        wall_ms, known = self._clock.now_ms(), frozenset(self._known)

        def look() -> list[Request]:
            found = open_requests(self._catalog.store, now_ms=wall_ms, known=known)
            # They are for the driver that runs the job now.
            return found if found and self._catalog.is_current(attempt) else []

        self._background.submit(look, self._looked)

    def _looked(self, found: list[Request] | None, error: BaseException | None) -> None:
        self._looking = False  # after an error: next time
        for request in found or ():
            self._known.add(request.id)
            self.take(SavepointOrder(request.to, request=request.id))
