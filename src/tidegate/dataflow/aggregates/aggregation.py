"""Named aggregates of one input: what `keyed.aggregate("…", n=tg.count(), total=tg.sum("price"))` computes.

An `Aggregation` knows the aggregates' inputs, their accumulators under the names that they have in a table (`total_sum`, or
`average_mean_sum` and `average_mean_count`), and their results. It may have triggers beside them, which have accumulators
but no results. If it has to be merged by the order of arrival, some aggregates get the numbers of the records, which are one
more column of a batch. It can be pickled. It doesn't know keys, windows or state: its callers pass it vectors and rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import NUMBER, Accumulator, Aggregate, BoolArray, IntArray, Vectors
from tidegate.dataflow.aggregates.collecting import CollectSet, CountDistinct
from tidegate.dataflow.aggregates.numpy_columns import column_of, copy_rows, held_vectors
from tidegate.dataflow.aggregates.retracting import retractable
from tidegate.dataflow.triggers import Trigger
from tidegate.errors import ExpressionError, GraphError, SchemaError
from tidegate.expressions import Compiled, compile_expression

TRIGGER = "trigger"
"""What the accumulators of triggers are named by."""
_NUMBERS = -1
"""The index of the numbers of the records among the inputs: they are the last one."""


@dataclass(frozen=True, slots=True)
class Column:
    """An expression that is just a column."""

    index: int
    type: pa.DataType

    def __call__(self, batch: pa.RecordBatch) -> pa.Array:
        return batch.column(self.index)

    def first_failing(self, batch: pa.RecordBatch) -> int:
        raise AssertionError("a column can't fail")


@dataclass(frozen=True, slots=True)
class _Part:
    """One aggregate: its result's name, its inputs by their index, and its accumulators by their names in the table."""

    name: str
    aggregate: Aggregate
    inputs: tuple[int, ...]
    names: Mapping[str, str]

    def of(self, vectors: Vectors) -> Vectors:
        return {name: vectors[there] for name, there in self.names.items()}

    def inputs_in(self, inputs: Sequence[pa.Array]) -> list[pa.Array]:
        return [inputs[index] for index in self.inputs]

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        own = self.inputs_in(inputs)
        columns = self.aggregate.singles(own, count)
        if columns is None:
            vectors = held_vectors(self.aggregate.accumulators, count)
            self.aggregate.add(vectors, np.arange(count), own)
            columns = [
                column_of(vectors[each.name].values, vectors[each.name].valid, each.type)
                for each in self.aggregate.accumulators
            ]
        return columns


class Aggregation:
    """Aggregates by the names of their results, over records of one schema."""

    def __init__(
        self,
        where: str,
        named: Mapping[str, object],
        schema: pa.Schema,
        *,
        retracting: bool = False,
        triggers: Sequence[Trigger] = (),
        numbering: bool = False,
    ) -> None:
        """Raise `GraphError` or `SchemaError`, beginning with `where`, if one of them can't be computed; with `retracting`,
        also if one can't take records back. With `numbering`, those that go by the order of arrival are merged by it."""
        assert not (retracting and triggers), "windows take no records back"
        if not named:
            raise GraphError(f"{where}: name at least one aggregate, such as n=tg.count()")
        texts: dict[str, int] = {}
        self._expressions: list[Column | Compiled] = []
        parts: list[_Part] = []
        types: list[pa.DataType] = []
        accumulators: dict[str, Accumulator] = {}
        own_triggers = {f"{TRIGGER}{number or ''}": each for number, each in enumerate(triggers)}
        for name, given in [*named.items(), *own_triggers.items()]:
            aggregate = _check(where, name, given)
            for text in aggregate.inputs:
                if text not in texts:
                    texts[text] = len(texts)
                    expression = compiled(f"{where}, {name}={aggregate.label}", text, schema)
                    self._expressions.append(expression)
                    types.append(_plain(expression.type))
            inputs = tuple(texts[text] for text in aggregate.inputs)
            try:
                aggregate = aggregate.bound([types[index] for index in inputs])
                if retracting:
                    aggregate = _retracting(f"{where}, {name}={aggregate.label}", aggregate)
                if numbering and (numbered := aggregate.numbered()) is not None:
                    aggregate, inputs = numbered, (*inputs, _NUMBERS)
                own = tuple(aggregate.accumulators)
            except SchemaError as error:
                raise SchemaError(f"{where}, {name}: {error}") from error
            names = {each.name: state_name(name, aggregate, each) for each in own}
            for each in own:
                there = names[each.name]
                if there in accumulators:
                    raise GraphError(
                        f"{where}: {name}={aggregate.label} keeps {there!r} in its state, and so does another "
                        f"aggregate: rename one of them"
                    )
                accumulators[there] = Accumulator(there, each.type, each.default)
            parts.append(_Part(name, aggregate, inputs, names))
        self._parts, self._triggers = parts[: len(named)], parts[len(named) :]
        self.accumulators = tuple(accumulators.values())
        self.needs_numbers = any(_NUMBERS in part.inputs for part in parts)
        self._columns = frozenset(
            name
            for each in self._expressions
            for name in ((schema.names[each.index],) if isinstance(each, Column) else each.columns)
        )

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """The columns of the results."""
        return tuple(pa.field(part.name, part.aggregate.result_type) for part in self._parts)

    @property
    def text(self) -> str:
        """What is computed, in one line: n=count(), total=sum(price)."""
        return ", ".join(f"{part.name}={part.aggregate.label}" for part in self._parts)

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the input that the aggregates read."""
        return self._columns

    @property
    def numbers(self) -> list[str]:
        """The accumulators that hold numbers of records."""
        return [part.names[NUMBER] for part in self._parts if _NUMBERS in part.inputs]

    @property
    def labels(self) -> Mapping[str, str]:
        """The aggregates as text, by the names of their results."""
        return {part.name: part.aggregate.label for part in self._parts}

    def renamed(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Return the former names of accumulators, by their names now; `names` has those of results."""
        return {
            there: there.replace(part.name, names[part.name], 1)
            for part in self._parts
            if part.name in names
            for there in part.names.values()
        }

    def inputs(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Evaluate the expressions of all aggregates. Raises `ExpressionError` if one has no value for a record. If they
        need the numbers of the records, these are the last column."""
        numbers = batch.columns[-1:] if self.needs_numbers else []
        return [*(_decoded(expression(batch)) for expression in self._expressions), *numbers]

    def first_failing(self, batch: pa.RecordBatch) -> int:
        """Return the record for which an expression has no value. It is known that there is one."""
        failing = []
        for expression in self._expressions:
            try:
                expression(batch)
            except ExpressionError:
                failing.append(expression.first_failing(batch))
        return min(failing)

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        """Add a batch, of which `inputs` has the inputs. `rows[i]` is the row of record i."""
        for part in (*self._parts, *self._triggers):
            part.aggregate.add(part.of(vectors), rows, part.inputs_in(inputs))

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        """Add the records of a batch whose sign is 1, and take those back whose sign is -1."""
        for part in self._parts:
            part.aggregate.change(part.of(vectors), rows, part.inputs_in(inputs), signs)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        """Add what rows of another table have accumulated later. No row repeats in `rows`, unless all can handle that."""
        for part in self._parts:
            part.aggregate.merge(part.of(vectors), rows, part.of(other), other_rows)

    @property
    def combines(self) -> bool:
        """Whether records may be aggregated before the exchange."""
        return not self._triggers and all(part.aggregate.combines for part in self._parts)

    @property
    def merges_repeated(self) -> bool:
        """Whether `merge` takes rows that repeat."""
        return all(part.aggregate.merges_repeated for part in self._parts)

    def fits(self, inputs: Sequence[pa.Array], count: int) -> bool:
        """Return whether the accumulators of up to `count` records like these certainly fit their types."""
        return all(part.aggregate.fits(part.inputs_in(inputs), count) for part in self._parts)

    def singles(self, inputs: Sequence[pa.Array], count: int) -> list[pa.Array]:
        """Return the accumulators of each of `count` records by itself, as columns."""
        return [column for part in self._parts for column in part.singles(inputs, count)]

    @property
    def has_triggers(self) -> bool:
        return bool(self._triggers)

    @property
    def trigger_labels(self) -> list[str]:
        return [part.aggregate.label for part in self._triggers]

    def fires(self, vectors: Vectors, rows: IntArray) -> BoolArray:
        """Return for each of these rows whether one of the triggers fires."""
        fires = np.zeros(len(rows), bool)
        for part in self._triggers:
            assert isinstance(part.aggregate, Trigger)
            fires |= part.aggregate.fires(part.of(vectors), rows)
        return fires

    def begin_triggers(self, vectors: Vectors, rows: IntArray) -> None:
        """Let the triggers begin again at these rows."""
        own = {there for part in self._triggers for there in part.names.values()}
        begun = held_vectors([each for each in self.accumulators if each.name in own], len(rows))
        copy_rows({name: vectors[name] for name in begun}, rows, begun, np.arange(len(rows)))

    def results(self, vectors: Vectors, rows: IntArray) -> list[pa.Array]:
        """Return the columns of the results at these rows."""
        return [part.aggregate.result(part.of(vectors), rows) for part in self._parts]


def compiled(where: str, text: str, schema: pa.Schema) -> Column | Compiled:
    """Return what evaluates an expression. A column's name is an expression, whatever it looks like."""
    index = schema.get_field_index(text)
    if index >= 0:
        return Column(index, schema.field(index).type)
    try:
        return compile_expression(text, schema)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from error


def state_name(name: str, aggregate: Aggregate, accumulator: Accumulator) -> str:
    """Return the name of an accumulator in the state. The function is part of it: if the program is changed to compute
    another one under the same name, that starts empty."""
    own = "" if accumulator.name == aggregate.function else f"_{accumulator.name}"
    return f"{name}_{aggregate.function}{own}"


def _check(where: str, name: str, given: object) -> Aggregate:
    if isinstance(given, type) and issubclass(given, Aggregate):
        raise GraphError(f"{where}: {name}={given.__name__} is a class; give an instance: {name}={given.__name__}(…)")
    if not isinstance(given, Aggregate):
        raise GraphError(f"{where}: {name}={given!r} is not an aggregate; give one such as tg.count() or tg.sum('price')")
    return given


def _retracting(where: str, aggregate: Aggregate) -> Aggregate:
    found = retractable(aggregate)
    if found is None:
        distinct = isinstance(aggregate, CountDistinct | CollectSet)
        advice = (
            f"aggregate by the value first, key_by(…, {aggregate.inputs[0]!r}), and count or collect what that emits"
            if distinct
            else "use count, sum, mean, variance, stddev, min, max, min_by, max_by, first, last, any, all or collect_list"
        )
        raise GraphError(
            f"{where}: it can't take a record back, and the stream has deletions; {advice}, or use .as_append() if every "
            f"change shall be a record of its own"
        )
    return found


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _decoded(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
