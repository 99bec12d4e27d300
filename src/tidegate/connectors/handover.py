"""Records that a Spark task hands to the slot in it, and the slot's output that the task hands back to Spark.

In the DataFrame form the pipeline's sources read what Spark's partition iterator gives, and its sinks write to what the
task yields. One `Handover` stands between the two; it travels to the slot inside the sources and sinks of the plan, which
all refer to the same one, and the task finds it there (`handover_of`).

Several inputs come in one stream of batches: a column with the number of the input, one with the slot that a row was
meant for (which only the exchange before the task looks at), and the columns of all inputs side by side, null in all rows
but its own. Rows of no input (`TICK`) are there to make Spark start every task. Several outputs go out likewise.

Invariants:
- A batch is pulled from Spark only while little waits for any input, so the pressure reaches Spark.
- What is written to an output after the marker of an epoch belongs to the next one. It stays here until `begin`.
- Everything runs in the slot's thread. Pulling blocks, for as long as Spark takes to give the next batch.

Not here: Spark itself. Offsets are empty: what is read again after a failure is Spark's to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

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
"""The number of the input that rows of no input have."""

WHICH, SLOT = "which", "slot"
"""The first two columns, in both directions: the number of the input or output, and a slot."""

WAITING_ROWS = 16_384


def columns_of(index: int, count: int) -> list[str]:
    """The names that the columns of an input or output have on their way: whatever their own are, these are unique."""
    return [f"{index}_{position}" for position in range(count)]


def handed_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """How several schemas travel as one."""
    columns = [
        pa.field(name, field.type)
        for index, schema in enumerate(schemas)
        for name, field in zip(columns_of(index, len(schema)), schema, strict=True)
    ]
    return pa.schema([pa.field(WHICH, pa.int32()), pa.field(SLOT, pa.int32()), *columns])


class Handover:
    """Between one task and the slot in it, at a time."""

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
        """Its number."""
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
        """A task's input is here."""
        assert self.read, "the batch before wasn't read to its end"
        self._batches = batches
        self._sealed = set()
        for index in list(self._later):
            self._release(index)

    @property
    def read(self) -> bool:
        """Whether the sources have taken all that the task was given."""
        return self._batches is None and not any(self._waiting)

    def take(self) -> list[pa.RecordBatch]:
        """What was written since, as it goes to Spark."""
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
        """A marker has passed this output: what follows belongs to the next epoch. Where it is the second one, since the
        epoch before was aborted, what came in between belongs to the task's output after all."""
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
    """Spark's timestamps are in the session's time zone, its strings may be large ones."""
    return [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]


def _constant(value: int, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, pa.int32()), rows)


class HandedSource(Source):
    """One of the inputs."""

    def __init__(self, handover: Handover, index: int, schema: pa.Schema) -> None:
        self.handover = handover
        self.index = index
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def bounded(self) -> bool:
        return False

    def open(self, context: SourceContext) -> SourceReader:
        return _HandedReader(self.handover, self.index)


class _HandedReader(SourceReader):
    """It never finishes by itself: whoever gathers the tasks says when all that there is was read."""

    def __init__(self, handover: Handover, index: int) -> None:
        self._handover = handover
        self._index = index

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        return self._handover.poll(self._index, max_rows)

    def offsets(self) -> Mapping[str, Offset]:
        return {}

    @property
    def finished(self) -> bool:
        return False


class HandedSink(Sink):
    """One of the outputs."""

    def __init__(self, handover: Handover, index: int) -> None:
        self.handover = handover
        self.index = index

    def open(self, context: SinkContext) -> SinkWriter:
        return _HandedWriter(self.handover, self.index, context.subtask)


class _HandedWriter(SinkWriter):
    def __init__(self, handover: Handover, index: int, slot: int) -> None:
        self._handover = handover
        self._index = index
        self._slot = slot

    def write(self, batch: pa.RecordBatch) -> None:
        self._handover.write(self._index, self._slot, batch)

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        self._handover.seal(self._index)
        return lambda: ()


def handover_of(plan: Plan) -> Handover:
    """The one that all of the plan's sources and sinks refer to."""
    for node in plan.nodes:
        end = node.source or node.sink
        if isinstance(end, HandedSource | HandedSink):
            return end.handover
    raise AssertionError("a plan whose records aren't handed over")
