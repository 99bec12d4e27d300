"""What an attempt goes on from, the job's own snapshots or a savepoint that the user named, and what it adds to them.

The rules. A job's own snapshots win where they descend from that very savepoint, so that the same program can be started
again and again. Where they descend from something else, or from nothing, the two contradict each other, and nobody but
the user knows which is meant: `RestoreError`. Where there are none, the job begins with the savepoint, at epochs and
attempts above the savepoint's. A savepoint that is gone is not missed by a job whose snapshots say that they came from
that path: with `claim` it was deleted by the job itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.plan import Plan
from tidegate.errors import NotFound, RestoreError
from tidegate.protocol.recovery import newest_complete
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot, restored_from, shown_path
from tidegate.snapshots.manifest import Manifest, MicroBatch, RestoredFrom
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store.layout import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What the user said about where to begin, and whether what is there may be deleted."""

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
        """What the user named, if the attempt resumes from it."""
        return None if self.is_own else self.snapshot


NO_ORIGIN = Origin(None, True, None)


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt that was claimed, with the job's own complete epochs and the number of its first one."""

    attempt: int
    epochs: list[int]
    origin: Origin
    next_epoch: int
    superseded: list[int] = field(default_factory=list)  # of a batch that runs again: valid until it is complete again
    losses: tuple[str, ...] = ()  # what it begins with, and the program doesn't take in


def open_attempt(
    catalog: SnapshotCatalog,
    named: Snapshot | NotFound | None,
    restore: Restore,
    *,
    plan: Plan,
    drop: Collection[str],
    micro_batch: MicroBatch | None,
) -> Opened:
    """Fences older attempts and finds what the new one resumes from. `named` is what the user gave to begin with."""

    def chosen(epochs: list[int]) -> tuple[Origin, int]:
        """With the epoch of the own snapshot that counts, 0 if none does."""
        if micro_batch is None:
            newest = newest_complete(epochs)
            own = None if newest is None else catalog.load(newest)
        else:
            own = batch_before(micro_batch, catalog.manifests(), store=catalog.store.address)
        origin = choose_origin(
            None if own is None else Snapshot(catalog.store, own), named, restore, store=catalog.store.address
        )
        return origin, 0 if own is None else own.epoch

    def losses_of(origin: Origin) -> tuple[str, ...]:
        """What the program doesn't take in of it; an error if that isn't allowed."""
        if origin.snapshot is None:
            return ()
        # A sink that is gone stands in the way only if it has output that is still to be committed.
        plan_of = origin.snapshot.still_to_commit().plan(
            declared_operators(plan), key_group_count=plan.key_group_count, drop=drop
        )
        plan_of.check()
        return plan_of.losses

    try:  # before a driver that runs is fenced off for nothing
        losses_of(chosen(catalog.epochs())[0])
    except NotFound:
        if isinstance(named, NotFound):
            raise
        # A driver that runs may just have released what was the newest.
    attempt = catalog.claim_attempt(above=named.manifest.attempt if isinstance(named, Snapshot) else 0)
    epochs = catalog.epochs()
    origin, own_epoch = chosen(epochs)
    highest = max([catalog.highest_epoch_seen(), *epochs], default=0)
    losses = losses_of(origin)
    highest = max(highest, origin.epoch or 0)
    catalog.sweep(attempt)
    kept = [epoch for epoch in epochs if epoch <= own_epoch]
    return Opened(attempt, kept, origin, highest + 1, epochs[len(kept) :], losses)


def named_snapshot(restore: Restore) -> Snapshot | NotFound | None:
    """What is at the path that the user gave; an error where nothing is, which may turn out not to matter."""
    if restore.path is None:
        return None
    try:
        named = find_snapshot(restore.path)
    except NotFound as error:
        return error
    if restore.claim and not named.is_savepoint:
        raise RestoreError(
            f"claim=True deletes what the job began with, and {shown(restore.path)} is no savepoint but "
            f"snapshots of the job {named.manifest.job!r}, which are its own to delete: leave claim out"
        )
    return named


def choose_origin(own: Snapshot | None, named: Snapshot | NotFound | None, restore: Restore, *, store: str) -> Origin:
    """`own` is the newest of the job's own snapshots, which are in the store at that address."""
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
            f"folder, Snapshots(to=…); to go on from its own, leave restore_from out"
        )
    return Origin(own, True, theirs)


def batch_before(batch: MicroBatch, manifests: Sequence[Manifest], *, store: str) -> Manifest | None:
    """The snapshot that a micro-batch resumes from: that of the one before, exactly; None for the first.

    Where Spark has run a batch more than once there may be several of it, and the newest counts. One of the batch itself is
    passed over. What Spark and the snapshots don't agree on is a `RestoreError`.
    """
    where = shown(store)
    ours: dict[int, Manifest] = {}
    for each in manifests:
        other = each.micro_batch
        if other is not None and other.query == batch.query:
            ours[other.number] = each
            continue
        whose = "a job that is no query" if other is None else f"the query {other.query}"
        raise RestoreError(
            f"micro-batch {batch.number} of the query {batch.query}: the snapshots in {where} are of {whose}. A query goes "
            f"on with the snapshots that belong to its checkpointLocation: give it the location that it had, or give the "
            f"transform a name (or a folder) of its own; restore_from={where!r} lets a new query begin with their state"
        )
    if batch.number == 0:
        if max(ours, default=0) > 0:
            raise RestoreError(
                f"the query {batch.query} is at micro-batch 0, and its snapshots in {where} are at "
                f"{max(ours)}: bring its checkpointLocation back, or give the transform a new folder"
            )
        return None
    if batch.number - 1 not in ours:
        has = f"has those of the micro-batches {sorted(ours)}" if ours else "holds none"
        raise RestoreError(
            f"micro-batch {batch.number} of the query {batch.query} resumes from the snapshot of micro-batch "
            f"{batch.number - 1}, and {where} {has}: state and stream would drift apart. Give the folder that the query's "
            f"snapshots are in, bring back the checkpointLocation or the snapshots that belong together, or start with both "
            f"of them new. If no folder was moved or deleted, Spark has committed the batches in between without running "
            f"the transform: {WHEN_LEFT_OUT}. Then their records are not in the state"
        )
    return ours[batch.number - 1]


WHEN_LEFT_OUT = (
    "it runs only what the query's output needs, which is nothing if foreachBatch gets a function that doesn't "
    "use the batch, or if a filter behind the transform is false whatever comes"
)


def left_out(batch: MicroBatch, done: MicroBatch, *, name: str, store: str) -> str:
    """What to say if Spark has run nothing of a query's transform between two micro-batches."""
    numbers = range(done.number + 1, batch.number)
    which = f"micro-batch {numbers[0]}" if len(numbers) == 1 else f"the micro-batches {numbers[0]} to {numbers[-1]}"
    return (
        f"Spark has committed {which} of the query {batch.query} without running the transform {name!r}, so their "
        f"records are not in its state, and micro-batch {batch.number} can't run: {WHEN_LEFT_OUT}. Use the output of "
        f"every batch (batch.count() does). Spark doesn't give the records again: start with a new checkpointLocation "
        f"and a new folder of snapshots, and read the input from its beginning; or give restore_from={shown(store)!r} as "
        f"well, to keep the state as of micro-batch {done.number}, and have the source begin behind that batch"
    )
