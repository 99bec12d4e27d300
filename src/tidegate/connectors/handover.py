"""Records that a Spark task hands to the slot in it, and the slot's output that the task hands back to Spark.

In a transform the pipeline's sources read from Spark's partition iterator, and its sinks write the rows that the task
yields. One `Handover` stands between slot and task. It travels to the slot inside the plan, whose sources and sinks all
refer to it, and the task finds it there (`handover_of`).

Several inputs arrive in one stream of batches: a column with the number of the input, one with the slot that a row is for
(which only the exchange before the task uses), and the columns of all inputs side by side. In a row, the columns of all
other inputs are null. Rows of no input (`TICK`) make Spark start every task. Several outputs are sent in the same form.

Invariants:
- A batch is pulled from Spark only while few rows wait here, so the back-pressure reaches Spark.
- Rows that are written to an output after an epoch's marker belong to the next epoch. They stay here until `begin`.
- Everything runs in the slot's thread. Pulling blocks for as long as Spark takes to give the next batch.

Not here: Spark itself. Offsets are empty, because Spark decides what is read again after a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.dataflow.contracts import (
    Committable,
    Offset,
    Sink,
    SinkContext,
    SinkWriter,
    Source,
    SourceContext,
    SourceReader,
)
from tidegate.dataflow.plan import Plan
from tidegate.types import ddl_of, parse_schema

TICK = -1
"""The input number of rows that belong to no input."""

WHICH, SLOT = "which", "slot"
"""The first two columns, in both directions: the number of the input or output, and the slot."""

WAITING_ROWS = 16_384


def columns_of(index: int, count: int) -> list[str]:
    """Return unique names for the columns of an input or output on their way, whatever their own names are."""
    return [f"{index}_{position}" for position in range(count)]


def handed_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema in which rows of all these schemas travel."""
    columns = [
        pa.field(name, field.type)
        for index, schema in enumerate(schemas)
        for name, field in zip(columns_of(index, len(schema)), schema, strict=True)
    ]
    return pa.schema([pa.field(WHICH, pa.int32()), pa.field(SLOT, pa.int32()), *columns])


class Handover:
    """The link between a slot and the task that it is in; one task after the other."""

    def __init__(self, inputs: Sequence[pa.Schema], outputs: Sequence[pa.Schema] = ()) -> None:
        self._inputs = tuple(inputs)
        self._outputs: list[pa.Schema] = []
        for schema in outputs:
            self.add_output(schema)
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._waiting: list[deque[pa.RecordBatch]] = [deque() for _ in inputs]
        self._written: list[pa.RecordBatch] = []
        self._later: dict[int, list[pa.RecordBatch]] = {}
        self._sealed: set[int] = set()

    def add_output(self, schema: pa.Schema) -> int:
        """Add an output, and return its number."""
        self._outputs.append(parse_schema(ddl_of(schema)))  # in Spark's own Arrow types
        return len(self._outputs) - 1

    @property
    def output_schema(self) -> pa.Schema:
        return handed_schema(self._outputs)

    @property
    def output_columns(self) -> list[list[str]]:
        return [schema.names for schema in self._outputs]

    # What the task calls.

    def begin(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Read the input of a task."""
        assert self.read, "the batch before wasn't read to its end"
        self._batches = batches
        self._sealed = set()
        for index in list(self._later):
            self._release(index)

    @property
    def read(self) -> bool:
        """Whether the sources have read all of the task's input."""
        return self._batches is None and not any(self._waiting)

    def take(self) -> list[pa.RecordBatch]:
        """Return the rows written since the last call, in the form that Spark receives."""
        written, self._written = self._written, []
        return written

    # What sources and sinks call.

    def poll(self, index: int, max_rows: int) -> pa.RecordBatch | None:
        waiting = self._waiting[index]
        if not waiting and self._batches is not None and self._waiting_rows() < WAITING_ROWS:
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
            else:
                self._sort(batch)
        if not waiting:
            return None
        first = waiting.popleft()
        if first.num_rows > max_rows:
            waiting.appendleft(first.slice(max_rows))
            return first.slice(0, max_rows)
        return first

    def write(self, index: int, slot: int, batch: pa.RecordBatch) -> None:
        rows = batch.num_rows
        if not rows:
            return
        columns: list[pa.Array] = []
        for other, schema in enumerate(self._outputs):
            columns += _cast(batch.columns, schema) if other == index else [pa.nulls(rows, field.type) for field in schema]
        handed = pa.RecordBatch.from_arrays(
            [_constant(index, rows), _constant(slot, rows), *columns], schema=self.output_schema
        )
        (self._later.setdefault(index, []) if index in self._sealed else self._written).append(handed)

    def seal(self, index: int) -> None:
        """A marker has reached this output: rows that follow belong to the next epoch. If this is the second marker, because
        the first one's epoch was aborted, the rows between the two belong to the task's output."""
        self._sealed.add(index)
        self._release(index)

    def _release(self, index: int) -> None:
        self._written += self._later.pop(index, [])

    def _waiting_rows(self) -> int:
        return sum(batch.num_rows for waiting in self._waiting for batch in waiting)

    def _sort(self, batch: pa.RecordBatch) -> None:
        which = batch.column(0)
        found = pc.unique(which).to_pylist()
        for index in found:
            if index == TICK:
                continue
            rows = batch if len(found) == 1 else batch.filter(pc.equal(which, index))
            schema = self._inputs[index]
            columns = _cast(rows.select(columns_of(index, len(schema))).columns, schema)
            self._waiting[index].append(pa.RecordBatch.from_arrays(columns, schema=schema))


def _cast(columns: Sequence[pa.Array], schema: pa.Schema) -> list[pa.Array]:
    """Convert to the schema's types: Spark's timestamps are in the session's time zone, its strings may be large strings."""
    return [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]


def _constant(value: int, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.int32()), rows)


@dataclass(frozen=True, slots=True, eq=False)
class HandedSource(Source):
    """One of the inputs."""

    handover: Handover
    index: int
    schema: pa.Schema = field()  # without `field()`, the property of `Source` would be its default
    bounded = False

    def open(self, context: SourceContext) -> SourceReader:
        return _HandedReader(self.handover, self.index)


@dataclass(frozen=True, slots=True, eq=False)
class _HandedReader(SourceReader):
    """Never finishes: the driver, which gathers the tasks, decides when all input was read."""

    handover: Handover
    index: int
    finished = False

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        return self.handover.poll(self.index, max_rows)

    def offsets(self) -> Mapping[str, Offset]:
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class HandedSink(Sink):
    """One of the outputs."""

    handover: Handover
    index: int

    def open(self, context: SinkContext) -> SinkWriter:
        return _HandedWriter(self.handover, self.index, context.subtask)


@dataclass(frozen=True, slots=True, eq=False)
class _HandedWriter(SinkWriter):
    handover: Handover
    index: int
    slot: int

    def write(self, batch: pa.RecordBatch) -> None:
        self.handover.write(self.index, self.slot, batch)

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        self.handover.seal(self.index)
        return lambda: ()


def handover_of(plan: Plan) -> Handover:
    """Return the handover that all of the plan's sources and sinks refer to."""
    for node in plan.nodes:
        end = node.source or node.sink
        if isinstance(end, HandedSource | HandedSink):
            return end.handover
    raise AssertionError("a plan whose records aren't handed over")
