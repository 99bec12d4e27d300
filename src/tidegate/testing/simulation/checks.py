"""The checks of what must never happen during a run, and of what must be true at its end (docs/promises.md).

The witness sees every change of the store, every announcement of a coordinator and every commit outside. The checks at the
end read the store as a user could: through the catalogue, with the engine's own reading code, at other parallelisms than
the one that wrote it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

import pyarrow as pa

from tidegate.control.messages import Complete, Message
from tidegate.dataflow.in_flight import FEEDBACK
from tidegate.driver.savepoints import SavepointOrder
from tidegate.errors import NotFound
from tidegate.protocol.epoch_coordinator import Ending
from tidegate.protocol.recovery import StateKind
from tidegate.snapshots.catalog import SnapshotCatalog, lineage
from tidegate.snapshots.committed import committable_count
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import Manifest
from tidegate.snapshots.snapshot import Snapshot
from tidegate.state.columns import key_list
from tidegate.store import layout
from tidegate.store.layout import ManifestName, OriginName
from tidegate.store.memory import MemoryStore, Operation
from tidegate.testing.simulation.external import External, Transaction
from tidegate.testing.simulation.world import World
from tidegate.types import to_list

IN_FLIGHT = "__in_flight_"


class Witness:
    """Watches a run."""

    def __init__(self, world: World, memory: MemoryStore, *, logs_in_flight: bool) -> None:
        self.completed: list[tuple[int, int]] = []  # (epoch, attempt) of manifests, in the order of creation
        self.announced: list[tuple[int, int]] = []
        self.announced_us: list[int] = []
        self.external: External | None = None
        self.origins: list[OriginName] = []
        self._world = world
        self._memory = memory
        self._logs_in_flight = logs_in_flight
        self._written: set[str] = set()
        self._needed: frozenset[str] | None = None
        self._listed: dict[str, frozenset[str]] = {}

    # The store.

    def before_access(self, user: str, operation: Operation, name: str) -> None:
        if operation is Operation.DELETE and name in self._needed_files():
            self._world.violate(f"{user} deletes {name}, which a snapshot needs")

    def after_access(self, user: str, operation: Operation, name: str, before: bytes | None) -> None:
        """Called when the access was done, even if the caller gets an error. `before` is what the file held before it."""
        if operation is Operation.WRITE:
            # Row 13: a second write of a name could replace a file that a snapshot needs.
            if name in self._written:
                self._world.violate(f"{user} writes {name} a second time")
            self._written.add(name)
            return
        confirmed = layout.parse_committed_name(name)
        if confirmed is not None and operation is Operation.CREATE and before is None:
            self._confirmed(confirmed)
        if not name.startswith((layout.MANIFESTS, layout.ORIGINS)):
            return
        self._needed = None
        if operation is Operation.CREATE and before is None:
            self._created(name)

    def _created(self, name: str) -> None:
        manifest, origin = layout.parse_manifest_name(name), layout.parse_origin_name(name)
        if manifest is not None:
            self.completed.append((manifest.epoch, manifest.attempt))
            # A manifest that a fenced coordinator creates late isn't alive, and its files may be gone already.
            alive = manifest in live_manifests(self._memory)
            created = Manifest.from_bytes(self._memory.files[name], name=name)
            for file in created.files():
                if alive and len(self._memory.files.get(file.name, b"")) != file.bytes:
                    self._world.violate(f"{name} lists {file.name}, which isn't there as it says")
            self._look_for_records(created)
        if origin is not None:
            self.origins.append(origin)
            behind = [epoch for epoch, attempt in self.announced if attempt < origin.attempt and epoch > origin.parent_epoch]
            if behind:
                self._world.violate(
                    f"attempt {origin.attempt} resumes from epoch {origin.parent_epoch}, though epoch "
                    f"{max(behind)} was announced before"
                )

    def _confirmed(self, manifest: ManifestName) -> None:
        """Row 9: a restore of a confirmed snapshot commits nothing of it again, so nothing of it may be left to commit."""
        left = (
            []
            if self.external is None
            else [
                transaction
                for transaction in self.external.prepared.values()
                if transaction.attempt == manifest.attempt and transaction.epoch <= manifest.epoch
            ]
        )
        if left or (manifest.epoch, manifest.attempt) not in self.completed:
            self._world.violate(
                f"epoch {manifest.epoch} of attempt {manifest.attempt} is marked as committed, without "
                f"{left or 'being complete'}"
            )

    def _look_for_records(self, manifest: Manifest) -> None:
        """Records in flight are only in snapshots of modes that log them, and never in one that ends the job."""
        ended = manifest.ending in (Ending.INPUT_ENDED.value, Ending.DRAIN.value)
        for operator, state in _records_in_flight(manifest):
            kept = not ended if state == FEEDBACK else self._logs_in_flight and manifest.ending is None
            if not kept:
                self._world.violate(
                    f"the snapshot of epoch {manifest.epoch} ({manifest.ending}) has records in {state} of {operator}"
                )

    def _needed_files(self) -> frozenset[str]:
        """Return the files that the snapshots of the present lineage list."""
        if self._needed is None:
            names = frozenset[str]()
            for manifest in live_manifests(self._memory):
                name = layout.manifest_name(epoch=manifest.epoch, attempt=manifest.attempt)
                if name not in self._listed:
                    files = Manifest.from_bytes(self._memory.files[name], name=name).files()
                    self._listed[name] = frozenset(file.name for file in files)
                names |= self._listed[name]
            self._needed = names
        return self._needed

    # Coordinators.

    def on_announced(self, attempt: int, message: Message) -> None:
        if not isinstance(message, Complete) or (message.epoch, attempt) in self.announced[-1:]:
            return
        epoch = message.epoch
        if (epoch, attempt) not in self.completed:
            self._world.violate(f"epoch {epoch} of attempt {attempt} was announced without a manifest")
        if any(epoch <= earlier for earlier, by in self.announced if by <= attempt):
            self._world.violate(f"epoch {epoch} of attempt {attempt} was announced after {self.announced}")
        behind = [origin for origin in self.origins if origin.attempt > attempt and origin.parent_epoch < epoch]
        if behind:
            self._world.violate(f"epoch {epoch} of attempt {attempt} was announced, though {behind} resume from before it")
        self.announced.append((epoch, attempt))
        self.announced_us.append(self._world.now_us)

    # Outside.

    def before_commit(self, transaction: Transaction) -> None:
        """Output is committed only after a snapshot with it is complete, since the job never restores an older one."""
        if not any(epoch >= transaction.epoch and attempt >= transaction.attempt for epoch, attempt in self.completed):
            self._world.violate(f"{transaction} is committed, but no snapshot that has it is complete")


def _records_in_flight(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the operators and states in which a snapshot has records in flight."""
    for operator, entry in manifest.operators.items():
        for piece in entry.pieces:
            yield from (
                (operator, state)
                for state, count in piece.item_counts.items()
                if count and state.startswith((FEEDBACK, IN_FLIGHT))
            )


def live_manifests(memory: MemoryStore) -> list[ManifestName]:
    names = [name for name in memory.files if name.startswith((layout.MANIFESTS, layout.ORIGINS))]
    origins = {origin.attempt: origin for origin in map(layout.parse_origin_name, names) if origin is not None}
    return lineage(origins, [name for name in map(layout.parse_manifest_name, names) if name is not None])


# ------------------------------------------------------------------------------------------------- at the end


def check_store(memory: MemoryStore, *, retain: int) -> Manifest:
    """Check that every retained snapshot is whole and that nothing else is there. Return the newest."""
    memory.faults = None
    live = live_manifests(memory)
    assert live, "the job has finished without a snapshot"
    epochs = [manifest.epoch for manifest in live]
    assert len(set(epochs)) == len(epochs), f"an epoch is in the lineage twice: {live}"
    by_epoch = sorted(live)
    assert by_epoch == sorted(by_epoch, key=lambda manifest: manifest.attempt), f"attempts alternate in {live}"
    catalog = SnapshotCatalog(memory, claimant="the checks")
    attempt = catalog.claim_attempt()
    catalog.sweep(attempt)
    assert catalog.epochs() == epochs
    listed: set[str] = set()
    for epoch in epochs:
        catalog.verify(epoch)
        listed |= {file.name for file in catalog.load(epoch).files()}
    assert len(epochs) <= retain, f"{epochs} are retained, of which {retain} should be"
    manifests = {layout.manifest_name(epoch=manifest.epoch, attempt=manifest.attempt) for manifest in live}
    left = [
        name
        for name in memory.files
        if name not in listed | manifests
        and layout.parse_attempt_name(name) is None
        and layout.parse_origin_name(name) is None
        and layout.parse_committed_name(name) not in live
    ]
    assert not left, f"nobody needs {left}"
    return catalog.load(epochs[-1])


def check_savepoint(order: SavepointOrder) -> None:
    """Check that a savepoint is whole if it is there, and didn't fail because its snapshot was deleted meanwhile."""
    assert not isinstance(order.error, NotFound), f"a savepoint lost its snapshot while it was copied: {order.error}"
    if order.info is not None:
        savepoint = find_snapshot(order.to)
        store, manifest = savepoint.store, savepoint.manifest
        assert manifest.epoch == order.info.epoch
        assert not committable_count(manifest), "a savepoint has something left to commit"
        logged = [(operator, state) for operator, state in _records_in_flight(manifest) if state != FEEDBACK]
        assert not logged, f"full epochs are aligned, but a savepoint has records in flight in {logged}"
        for file in manifest.files():
            content = store.read(file.name)
            assert (len(content), zlib.crc32(content)) == (file.bytes, file.checksum), f"{file.name} of a savepoint"


def check_outside(external: External, *, attempts: int) -> None:
    """Check that no transaction is left open, except those that a zombie prepared after a later attempt had cleaned up."""
    for transaction in external.prepared.values():
        discarded_us = max(
            (
                at_us
                for (sink, attempt), at_us in external.discarded_us.items()
                if sink == transaction.sink and attempt > transaction.attempt
            ),
            default=None,
        )
        of_a_zombie = discarded_us is not None and transaction.prepared_us >= discarded_us
        assert transaction.attempt < attempts and of_a_zombie, f"{transaction} is left open"


class FinalState:
    """Reads states of a snapshot as jobs of different parallelisms would, and checks that they read the same."""

    def __init__(self, manifest: Manifest, memory: MemoryStore, rng: Random) -> None:
        self._manifest = manifest
        self._memory = memory
        most = manifest.key_group_count
        self._parallelisms = dict.fromkeys((1, rng.randint(1, most), rng.randint(1, most)))
        self._rows: dict[tuple[str, int], list[Mapping[str, Iterable[pa.RecordBatch]]]] = {}
        self._asked: set[tuple[str, str]] = set()

    def __call__(self, operator: str, state: str) -> list[Any]:
        assert (operator, state) not in self._asked, "rows are read when they are taken, once"
        self._asked.add((operator, state))
        one, *others = (self._read(operator, state, parallelism) for parallelism in self._parallelisms)
        for other in others:
            assert Counter(map(repr, other)) == Counter(map(repr, one)), (
                f"{state} of {operator} differs by the parallelism that reads it: {one} and {other}"
            )
        return one

    def _read(self, operator: str, state: str, parallelism: int) -> list[Any]:
        states = self._manifest.operators[operator].states
        kind = next(StateKind(each.kind) for each in states if each.name == state)
        shares = [_items(rows[state]) for rows in self._rows_at(operator, parallelism)]
        if kind in (StateKind.UNION, StateKind.BROADCAST):
            assert all(share == shares[0] for share in shares), f"{state} of {operator} isn't the same for all"
            return shares[0]
        return [item for share in shares for item in share]

    def _rows_at(self, operator: str, parallelism: int) -> list[Mapping[str, Iterable[pa.RecordBatch]]]:
        """Return the rows of each subtask. They are cached, since several states of an operator share files."""
        if (operator, parallelism) not in self._rows:
            self._rows[operator, parallelism] = [
                Snapshot(self._memory, self._manifest).rows(operator, subtask=subtask, parallelism=parallelism)
                for subtask in range(parallelism)
            ]
        return self._rows[operator, parallelism]


def _items(rows: Iterable[pa.RecordBatch]) -> list[Any]:
    found: list[Any] = []
    for batch in rows:
        values = to_list(batch.column("value"))
        found += zip(key_list(batch.column("key")), values, strict=True) if "key" in batch.schema.names else values
    return found
