"""Which snapshot an attempt resumes from: one of the job's own, or the one that the user named.

The rules:
- If the job's own snapshots descend from the named one, they win, so that the same program can be started again.
- If they descend from another one, or from none, only the user knows which is meant: `RestoreError`.
- If there are none, the job begins with the named one, at epochs and attempts above it.
- If the named one is gone, and the job's own snapshots came from that path, they win: with `claim` the job deleted it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.plan import Plan
from tidegate.errors import CorruptFile, NotFound, RestoreError
from tidegate.protocol.recovery import newest_complete
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot, restored_from, shown_path
from tidegate.snapshots.manifest import Manifest, MicroBatch, RestoredFrom
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store.layout import shown

_log = logging.getLogger("tidegate.job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The path of the snapshot that the user wants to begin with, and whether the job may delete it."""

    path: str | None = None
    claim: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """The snapshot that an attempt resumes from: one of the job's own, the one that the user named, or none."""

    snapshot: Snapshot | None
    is_own: bool
    restored_from: RestoredFrom | None  # what all of the job's snapshots descend from

    @property
    def epoch(self) -> int | None:
        return None if self.snapshot is None else self.snapshot.manifest.epoch

    @property
    def named(self) -> Snapshot | None:
        """The snapshot that the user named, if the attempt resumes from it."""
        return None if self.is_own else self.snapshot


NO_ORIGIN = Origin(None, True, None)


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt that was claimed, the job's own complete epochs, and the number of the attempt's first epoch."""

    attempt: int
    epochs: list[int]
    origin: Origin
    next_epoch: int
    superseded: list[int] = field(default_factory=list)  # of a batch that runs again: valid until it is complete again
    losses: tuple[str, ...] = ()  # state in the snapshot that the program discards


def open_attempt(
    catalog: SnapshotCatalog,
    named: Snapshot | NotFound | None,
    restore: Restore,
    *,
    plan: Plan,
    drop: Collection[str],
    micro_batch: MicroBatch | None,
) -> Opened:
    """Fence older attempts, and find the snapshot that the new one resumes from. `named` is the one that the user gave."""

    def chosen(epochs: list[int]) -> tuple[Origin, int]:
        """Return it with the epoch of the own snapshot that counts, or 0 if none does."""
        if micro_batch is None:
            newest = newest_complete(epochs)
            own = None if newest is None else catalog.load(newest)
        else:
            own = _own_before(micro_batch, catalog)
        origin = choose_origin(
            None if own is None else Snapshot(catalog.store, own), named, restore, store=catalog.store.address
        )
        return origin, 0 if own is None else own.epoch

    def losses_of(origin: Origin) -> tuple[str, ...]:
        """Return the state that the program discards. Raises an error if it must not."""
        if origin.snapshot is None:
            return ()
        # A sink that the program no longer has matters only if its output is still to be committed.
        plan_of = origin.snapshot.still_to_commit().plan(
            declared_operators(plan), key_group_count=plan.key_group_count, drop=drop
        )
        plan_of.check()
        return plan_of.losses

    try:  # now, so that an error doesn't fence off a driver that runs
        losses_of(chosen(catalog.epochs())[0])
    except NotFound:
        if isinstance(named, NotFound):
            raise
        # A driver that runs may just have released the newest one.
    attempt = catalog.claim_attempt(above=named.manifest.attempt if isinstance(named, Snapshot) else 0)
    epochs = catalog.epochs()
    origin, own_epoch = chosen(epochs)
    highest = max(catalog.highest_epoch_seen(), origin.epoch or 0, *epochs)
    losses = losses_of(origin)
    try:
        catalog.sweep(attempt)
    except CorruptFile as error:  # in an older snapshot, or its own would not have been loaded
        _log.warning("Nothing is deleted now that older attempts have left, because an older snapshot is damaged: %s", error)
    kept = [epoch for epoch in epochs if epoch <= own_epoch]
    return Opened(attempt, kept, origin, highest + 1, epochs[len(kept) :], losses)


def _own_before(batch: MicroBatch, catalog: SnapshotCatalog) -> Manifest | None:
    """Return the manifest of the batch before. The damage of another one doesn't matter."""
    intact, damaged = catalog.intact_manifests()
    try:
        return batch_before(batch, intact, store=catalog.store.address)
    except RestoreError:
        if damaged:
            raise damaged[-1] from None  # it may be the one that is missing
        raise


def named_snapshot(restore: Restore) -> Snapshot | NotFound | None:
    """Return the snapshot at the path that the user gave, or the error if there is none, which may not matter."""
    if restore.path is None:
        return None
    try:
        named = find_snapshot(restore.path)
    except NotFound as error:
        return error
    if restore.claim and not named.is_savepoint:
        raise RestoreError(
            f"claim=True deletes what the job began with, and {shown(restore.path)} is not a savepoint. It holds "
            f"snapshots of the job {named.manifest.job!r}, which only that job deletes: omit claim"
        )
    return named


def choose_origin(own: Snapshot | None, named: Snapshot | NotFound | None, restore: Restore, *, store: str) -> Origin:
    """Return what the attempt resumes from. `own` is the newest of the job's own snapshots; `store` is their address."""
    if restore.path is None or named is None:
        return Origin(own, True, None if own is None else own.manifest.restored_from)
    if own is None:
        if isinstance(named, NotFound):
            raise named
        return Origin(named, False, restored_from(restore.path, named))
    theirs = own.manifest.restored_from
    if isinstance(named, NotFound):
        if theirs is None or theirs.path != shown_path(restore.path):
            raise named
    elif theirs is None or theirs.id != restored_from(restore.path, named).id:
        descend = "were not begun with any" if theirs is None else f"descend from {theirs.path}"
        raise RestoreError(
            f"the job has snapshots of its own in {shown(store)}, up to epoch {own.manifest.epoch}, which {descend}: they "
            f"and restore_from={shown(restore.path)!r} contradict each other. To begin with the latter, give the job a new "
            f"folder, Snapshots(to=…); to resume from its own, omit restore_from"
        )
    return Origin(own, True, theirs)


def batch_before(batch: MicroBatch, manifests: Sequence[Manifest], *, store: str) -> Manifest | None:
    """Return the snapshot that a micro-batch resumes from, which is that of the batch before it. None for the first batch.

    If Spark has run that batch more than once, it may have several snapshots, and the newest counts. A snapshot of the batch
    itself is ignored. Raises `RestoreError` if the snapshots don't fit what Spark has committed.
    """
    where = shown(store)
    ours: dict[int, Manifest] = {}
    for each in manifests:
        other = each.micro_batch
        if other is not None and other.query == batch.query:
            ours[other.number] = each
            continue
        whose = "a job that is not a query" if other is None else f"the query {other.query}"
        raise RestoreError(
            f"micro-batch {batch.number} of the query {batch.query}: the snapshots in {where} are of {whose}. A query "
            f"resumes from the snapshots that belong to its checkpointLocation. Give it the location that it had, or give "
            f"the transform another name or folder; restore_from={where!r} lets a new query begin with their state"
        )
    if batch.number == 0:
        if max(ours, default=0) > 0:
            raise RestoreError(
                f"the query {batch.query} is at micro-batch 0, and its snapshots in {where} are at "
                f"{max(ours)}. Restore its checkpointLocation, or give the transform a new folder"
            )
        return None
    if batch.number - 1 not in ours:
        has = f"has those of the micro-batches {sorted(ours)}" if ours else "holds none"
        raise RestoreError(
            f"micro-batch {batch.number} of the query {batch.query} resumes from the snapshot of micro-batch "
            f"{batch.number - 1}, and {where} {has}: state and stream would drift apart. Give the folder that the query's "
            f"snapshots are in, restore the checkpointLocation and the snapshots together, or start with both of them "
            f"empty. If no folder was moved or deleted, Spark has committed the batches in between without running "
            f"the transform: {WHEN_LEFT_OUT}. Then their records are not in the state"
        )
    return ours[batch.number - 1]


WHEN_LEFT_OUT = (
    "it runs only what the query's output needs, which is nothing if foreachBatch gets a function that doesn't "
    "use the batch, or if a filter behind the transform is always false"
)


def left_out(batch: MicroBatch, done: MicroBatch, *, name: str, store: str) -> str:
    """Return the error's text if Spark has committed micro-batches without running the transform."""
    numbers = range(done.number + 1, batch.number)
    which = f"micro-batch {numbers[0]}" if len(numbers) == 1 else f"the micro-batches {numbers[0]} to {numbers[-1]}"
    return (
        f"Spark has committed {which} of the query {batch.query} without running the transform {name!r}, so their "
        f"records are not in its state, and micro-batch {batch.number} can't run: {WHEN_LEFT_OUT}. Use the output of "
        f"every batch (batch.count() does). Spark doesn't read the records again. Start with a new checkpointLocation "
        f"and a new folder of snapshots, and read the input from its beginning; or give restore_from={shown(store)!r} as "
        f"well, to keep the state as of micro-batch {done.number}, and let the source begin after that batch"
    )
