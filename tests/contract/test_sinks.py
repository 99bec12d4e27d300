"""What every transactional sink promises, asked of each: visible are the records of complete snapshots, each once.

`Engine` is the smallest engine there is: it writes numbered records, takes snapshots in the same steps as the real
one, can be killed before any step, and goes on from its last complete snapshot with another attempt and another
parallelism. Killed writers may be kept, and go on as zombies.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate import sinks
from tidegate.connectors import parquet_sink
from tidegate.connectors.collecting import delivered_rows
from tidegate.connectors.printing import DeliveryPrinter
from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import OperatorContext
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.errors import CommitError
from tidegate.state.sections import Section

SCHEMA = pa.schema([("n", pa.int64())])
EPOCHS = 3
RECORDS_PER_EPOCH = 6
RECORDS = EPOCHS * RECORDS_PER_EPOCH


class World(ABC):
    """A sink and a look at what it shows."""

    sink: Sink

    def __init__(self) -> None:
        self.delivered: list[Committable] = []

    @abstractmethod
    def visible(self) -> list[int]: ...

    def pending_count(self) -> int:
        """How much is prepared outside and neither committed nor discarded."""
        return 0

    def open(self, *, attempt: int, subtask: int, parallelism: int) -> SinkWriter:
        return self.sink.open(
            SinkContext(
                job="job",
                sink="out",
                subtask=subtask,
                parallelism=parallelism,
                attempt=attempt,
                schema=SCHEMA,
                deliver=self.delivered.append,
            )
        )


class ParquetWorld(World):
    def __init__(self, folder: Path, row_group_rows: int) -> None:
        super().__init__()
        self.folder = folder / "out"
        self.sink = sinks.parquet(self.folder, row_group_rows=row_group_rows)

    def visible(self) -> list[int]:
        """As Spark and Arrow read a folder: without what starts with `_` or `.`; every file must be whole."""
        numbers: list[int] = pq.read_table(self.folder).column("n").to_pylist()
        return sorted(numbers)

    def pending_count(self) -> int:
        return len(list((self.folder / "_tidegate").glob("*.parquet")))


class ConsumedWorld(ParquetWorld):
    """Somebody reads the committed files as soon as they appear, and takes them away."""

    def __init__(self, folder: Path, row_group_rows: int) -> None:
        super().__init__(folder, row_group_rows)
        self.consumed: list[int] = []

    def visible(self) -> list[int]:
        for part in self.folder.glob("part-*.parquet"):
            self.consumed += pq.ParquetFile(part).read().column("n").to_pylist()
            part.unlink()
        return sorted(self.consumed)


class CollectWorld(World):
    sink = sinks.collect()

    def visible(self) -> list[int]:
        return sorted(row[0] for row in delivered_rows(self.delivered))


class PrintWorld(World):
    """Exactly-once as long as the driver lives, which it does here."""

    sink = sinks.print()

    def visible(self) -> list[int]:
        lines: list[str] = []
        printer = DeliveryPrinter(lines.append)
        for committable in self.delivered:
            printer.take(committable)
        return sorted(int(line.removeprefix("out> n=")) for line in lines)


@dataclass
class Outside:
    """Transactions by name: prepared ones with their attempt, and committed ones."""

    prepared: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    committed: dict[str, list[int]] = field(default_factory=dict)


OUTSIDES: dict[str, Outside] = {}  # so that a sink which was pickled finds the same one


@dataclass(frozen=True)
class EagerSink(Sink):
    """The strictest outside there is: what was discarded is gone at once, and to commit it is an error."""

    outside: str

    def open(self, context: SinkContext) -> SinkWriter:
        return EagerWriter(OUTSIDES[self.outside], context)


class EagerWriter(SinkWriter):
    def __init__(self, outside: Outside, context: SinkContext) -> None:
        self._outside, self._context = outside, context
        self._rows: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.column("n").to_pylist()

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        rows, self._rows = self._rows, []
        return lambda: self._prepare(rows) if rows else ()

    def _prepare(self, rows: list[int]) -> Sequence[Committable]:
        name = uuid.uuid4().hex
        self._outside.prepared[name] = self._context.attempt, rows
        return (name,)

    def commit(self, committables: Sequence[Committable]) -> None:
        for name in committables:
            if name in self._outside.prepared:
                self._outside.committed[name] = self._outside.prepared.pop(name)[1]
            elif name not in self._outside.committed:
                raise CommitError(f"no transaction {name}")

    def discard_leftovers(self) -> None:
        for name, (attempt, _) in list(self._outside.prepared.items()):
            if attempt < self._context.attempt:
                del self._outside.prepared[name]


class EagerWorld(World):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.outside = OUTSIDES[str(folder)] = Outside()
        self.sink = EagerSink(str(folder))

    def visible(self) -> list[int]:
        return sorted(number for rows in self.outside.committed.values() for number in rows)

    def pending_count(self) -> int:
        return len(self.outside.prepared)


WORLDS: dict[str, Callable[[Path], World]] = {
    "eager": EagerWorld,
    "parquet": lambda folder: ParquetWorld(folder, row_group_rows=65_536),
    "parquet-consumed": lambda folder: ConsumedWorld(folder, row_group_rows=65_536),
    "parquet-small-row-groups": lambda folder: ParquetWorld(folder, row_group_rows=2),
    "collect": lambda folder: CollectWorld(),
    "print": lambda folder: PrintWorld(),
}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return WORLDS[request.param](tmp_path)


@dataclass
class Snapshot:
    written: int = 0
    committables: list[Committable] = field(default_factory=list)


class Killed(Exception):
    pass


class Engine:
    def __init__(
        self,
        world: World,
        *,
        kill_before: Sequence[int] = (),
        abort_epochs: frozenset[int] = frozenset(),
        parallelisms: Sequence[int] = (2, 3, 1),
        zombies: bool = False,
    ) -> None:
        self.world = world
        self.complete = Snapshot()
        self.zombies: list[tuple[SinkWriter, list[Committable]]] = []
        self.step_count = 0
        self._kill_before = list(kill_before)
        self._abort = abort_epochs
        self._parallelisms = parallelisms
        self._keep_zombies = zombies
        self._attempt = 0
        self._epoch = 0
        self._writers: list[SinkWriter] = []

    def run(self) -> None:
        """Until every record is in a complete snapshot and committed."""
        while True:
            try:
                self._deploy()
                while not self._epoch_ends():
                    pass
                return
            except Killed:
                if self._keep_zombies:
                    self.zombies += [(writer, list(self.complete.committables)) for writer in self._writers]

    def _step(self) -> None:
        """Each call is a moment at which the engine may be killed, and at which what is visible must be right."""
        visible = self.world.visible() if self._writers else []
        assert len(visible) == len(set(visible)), "a record is visible twice"
        assert set(visible) <= set(range(self.complete.written)), "a record is visible that may still be rolled back"
        self.step_count += 1
        for writer, committables in self.zombies if self.step_count % 5 == 0 else ():
            _haunt(writer, committables)
        if self.step_count in self._kill_before:
            raise Killed

    def _deploy(self) -> None:
        self._attempt += 1
        parallelism = self._parallelisms[self._attempt % len(self._parallelisms)]
        self._writers = []
        for subtask in range(parallelism):
            writer = self.world.open(attempt=self._attempt, subtask=subtask, parallelism=parallelism)
            self._writers.append(writer)
            self._step()
            writer.commit(self.complete.committables[subtask::parallelism])
            self._step()
        self._leftovers_due = True
        assert self.world.visible() == list(range(self.complete.written))
        self._written = self.complete.written
        self._pending: list[list[Committable]] = [[] for _ in self._writers]

    def _epoch_ends(self) -> bool:
        self._epoch += 1
        for _ in range(min(RECORDS_PER_EPOCH, RECORDS - self._written)):
            self._writers[self._written % len(self._writers)].write(pa.record_batch([[self._written]], SCHEMA))
            self._written += 1
        self._step()
        finishes = [writer.pre_commit(self._epoch) for writer in self._writers]
        snapshot = Snapshot(self._written)
        after_marker = self._written
        if self._written < RECORDS:  # the next epoch's records come while the background is still at work
            self._writers[0].write(pa.record_batch([[self._written]], SCHEMA))
            after_marker += 1
        for pending, finish in zip(self._pending, finishes, strict=True):
            self._step()
            pending += finish()
        self._written = after_marker
        self._step()
        if self._epoch in self._abort:
            return False
        snapshot.committables = [committable for pending in self._pending for committable in pending]
        self.complete = snapshot
        for writer, pending in zip(self._writers, self._pending, strict=True):
            self._step()
            writer.commit(pending)
            pending.clear()
            if self._leftovers_due:  # while the others haven't committed this epoch
                self._leftovers_due = False
                self._step()
                writer.discard_leftovers()
        self._step()
        assert self.world.visible() == list(range(snapshot.written))
        return snapshot.written == RECORDS


def _haunt(writer: SinkWriter, committables: Sequence[Committable]) -> None:
    """What a writer of an older attempt may still do: write, prepare, and commit what was complete in its time."""
    writer.write(pa.record_batch([[-1]], SCHEMA))
    with contextlib.suppress(CommitError):  # its file was taken away as a leftover: so it fails, as it should
        writer.pre_commit(10_000)()
    writer.commit(committables)


def test_all_records_are_visible_once_at_the_end(world: World) -> None:
    Engine(world).run()
    assert world.visible() == list(range(RECORDS))


@pytest.mark.parametrize("zombies", [False, True], ids=["dead", "undead"])
@pytest.mark.parametrize("kind", WORLDS)
def test_a_kill_before_any_step_changes_nothing_that_is_visible(tmp_path: Path, kind: str, zombies: bool) -> None:
    undisturbed = Engine(WORLDS[kind](tmp_path / "undisturbed"))
    undisturbed.run()
    for step in range(1, undisturbed.step_count + 1):
        again = WORLDS[kind](tmp_path / f"killed-before-{step}")
        engine = Engine(again, kill_before=[step], zombies=zombies)
        engine.run()
        assert again.visible() == list(range(RECORDS)), f"killed before step {step}"


class Machine:
    """Everything that a Parquet sink does to its folder, in one order; it can be killed before any of it."""

    DEEDS = (
        "create",
        "rename",
        "make_durable",
        "make_published_durable",
        "names",
        "delete",
        "_size_of",
        "_create_receipts",
        "_replace_receipts",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]) -> None:
        self.count = 0
        self.kill_before: int | None = None
        for name in self.DEEDS:
            deed = getattr(parquet_sink.OutputFolder, name)

            def counted(folder: Any, *args: Any, deed: Any = deed, **rest: Any) -> Any:
                self.count += 1
                if self.count == self.kill_before:
                    raise Killed
                look()
                return deed(folder, *args, **rest)

            monkeypatch.setattr(parquet_sink.OutputFolder, name, counted)


@pytest.mark.parametrize("kind", ["parquet", "parquet-consumed"])
def test_a_kill_before_anything_that_a_parquet_sink_does_to_its_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    world: list[World] = [WORLDS[kind](tmp_path / "undisturbed")]
    machine = Machine(monkeypatch, lambda: kind == "parquet-consumed" and world[0].visible())
    Engine(world[0]).run()
    deeds = machine.count
    assert deeds > 60
    for deed in range(1, deeds + 1):
        world[0] = WORLDS[kind](tmp_path / f"killed-before-{deed}")
        machine.count, machine.kill_before = 0, deed
        Engine(world[0]).run()
        assert world[0].visible() == list(range(RECORDS)), f"killed before deed {deed}"
        assert world[0].pending_count() == 0


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kills=st.lists(st.integers(1, 60), max_size=4),
    aborted=st.frozensets(st.integers(1, 6), max_size=3),
    parallelisms=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from(sorted(WORLDS)),
    zombies=st.booleans(),
)
def test_kills_aborts_and_rescaling_together_change_nothing_that_is_visible(
    tmp_path_factory: pytest.TempPathFactory,
    kills: list[int],
    aborted: frozenset[int],
    parallelisms: list[int],
    kind: str,
    zombies: bool,
) -> None:
    world = WORLDS[kind](tmp_path_factory.mktemp("world"))
    Engine(world, kill_before=kills, abort_epochs=aborted, parallelisms=parallelisms, zombies=zombies).run()
    assert world.visible() == list(range(RECORDS))


def _no_backend(key_type: pa.DataType) -> NoReturn:
    raise AssertionError("a sink has no keyed state")


class Subtask:
    """One subtask of the engine's own sink operator."""

    def __init__(self, world: World, index: int, *, attempt: int, restored: Sequence[Section] = ()) -> None:
        self.operator = SinkSpec(world.sink).create(Node(0, "out", SinkSpec(world.sink), (), SCHEMA, (SCHEMA,)))
        self.operator.open(
            OperatorContext(
                job="job",
                subtask=index,
                parallelism=2,
                attempt=attempt,
                key_group_count=8,
                now_ms=lambda: 0,
                deliver=lambda sink, committable: world.delivered.append(committable),
                make_backend=_no_backend,
                restored={section.state: [section.rows] for section in restored},
            )
        )

    def ends(self, epoch: int, *numbers: int) -> list[Section]:
        """Writes, and gives this subtask's part of the snapshot."""
        self.operator.on_batch(pa.record_batch([pa.array(numbers, pa.int64())], SCHEMA), 0)
        frozen = self.operator.freeze(epoch)
        assert frozen is not None
        return list(frozen.sections())


@pytest.mark.parametrize("kind", ["eager", "parquet"])
def test_leftovers_go_when_the_first_snapshot_of_an_attempt_is_complete_and_not_before(tmp_path: Path, kind: str) -> None:
    world = WORLDS[kind](tmp_path)
    old = [Subtask(world, index, attempt=1) for index in range(2)]
    restored = [subtask.ends(1, index) for index, subtask in enumerate(old)]
    for subtask in old:
        subtask.ends(2, -1)  # nobody will ever commit this
    first = Subtask(world, 0, attempt=2, restored=restored[0])
    first.ends(3, 10)  # an epoch that is aborted
    assert world.visible() == [0]
    assert world.pending_count() == 4, "another subtask's that is still to be committed, two leftovers and its own"
    second = Subtask(world, 1, attempt=2, restored=restored[1])
    assert world.visible() == [0, 1]
    for subtask, number in ((first, 20), (second, 21)):
        subtask.ends(4, number)
    assert world.pending_count() == 5
    first.operator.on_complete(4)
    assert world.visible() == [0, 1, 10, 20]
    assert world.pending_count() == 1, "of the present attempt"
    second.operator.on_complete(4)
    assert world.visible() == [0, 1, 10, 20, 21]
    assert world.pending_count() == 0


@pytest.mark.parametrize("kind", ["eager", "parquet"])
def test_leftovers_are_looked_for_once_by_one_subtask(tmp_path: Path, kind: str) -> None:
    world = WORLDS[kind](tmp_path)
    zombie = Subtask(world, 0, attempt=1)
    first, second = (Subtask(world, index, attempt=2) for index in range(2))
    zombie.ends(1, -1)
    second.operator.on_complete(2)
    assert world.pending_count() == 1
    first.operator.on_complete(2)
    assert world.pending_count() == 0
    zombie.ends(2, -2)
    first.operator.on_complete(3)
    assert world.pending_count() == 1


def test_committing_twice_is_committing_once(world: World) -> None:
    writer = world.open(attempt=1, subtask=0, parallelism=1)
    writer.write(pa.record_batch([[1, 2, 3]], SCHEMA))
    committables = writer.pre_commit(1)()
    for _ in range(3):
        writer.commit(committables)
    world.open(attempt=2, subtask=0, parallelism=1).commit(committables)
    assert world.visible() == [1, 2, 3]


def test_what_wasnt_committed_isnt_visible(world: World) -> None:
    writer = world.open(attempt=1, subtask=0, parallelism=1)
    writer.write(pa.record_batch([[1]], SCHEMA))
    assert world.visible() == []
    writer.pre_commit(1)()
    assert world.visible() == []
    writer.close()
    assert world.visible() == []


def test_an_epoch_without_records_has_nothing_to_commit(world: World) -> None:
    writer = world.open(attempt=1, subtask=0, parallelism=1)
    assert list(writer.pre_commit(1)()) == []
    writer.write(pa.record_batch([pa.array([], pa.int64())], SCHEMA))
    assert list(writer.pre_commit(2)()) == []
    writer.commit([])
    assert world.visible() == []


def test_committables_are_text_and_stay_small_for_small_output(world: World) -> None:
    writer = world.open(attempt=1, subtask=0, parallelism=1)
    writer.write(pa.record_batch([[1]], SCHEMA))
    (committable,) = writer.pre_commit(1)()
    assert isinstance(committable, str)
    assert len(committable) < 2_000


def test_a_committable_from_nowhere_is_no_success(tmp_path: Path) -> None:
    writer = ParquetWorld(tmp_path, 10).open(attempt=1, subtask=0, parallelism=1)
    for nonsense in ("", "{}", '{"pending": "a", "final": "b", "size": 3}', "[]"):
        with pytest.raises(CommitError):
            writer.commit([nonsense])


def test_a_sink_travels_to_the_slots_as_a_pickle(world: World) -> None:
    world.sink = cloudpickle.loads(cloudpickle.dumps(world.sink))
    world.sink.check(SCHEMA)
    Engine(world).run()
    assert world.visible() == list(range(RECORDS))
