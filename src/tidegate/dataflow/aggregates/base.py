"""What an aggregate is: accumulators in vectors, and three functions on whole columns.

An `Aggregate` describes one result, such as the sum of an expression. Its accumulators are columns of a table with one row
for each key (for windows: for each key and window). `add` takes a batch, `merge` the accumulators of another table, and
`result` returns a column.

Invariants, which every aggregate keeps and every caller relies on:

- An object in a vector is never changed in place, only replaced: a frozen version of the table may hold it too.
- `add(a)` then `add(b)` equals `add(a + b)`, and equals adding them to two tables and merging the second into the first.
- `merge` takes the other side for the later one, so that `first` and `last` know the order. If the parts that are merged
  aren't in the order of arrival, as in sliding windows and sessions, these aggregates are numbered (`numbered`).
- Nulls are handled, and results are typed, as by Spark SQL's function of that name.

Vectors are those of columnar state: numbers, booleans, dates and timestamps are numpy arrays, the last two as integers; all
other types are arrays of Python objects. Not here: which row belongs to which key, and the evaluation of the inputs.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import GraphError, SchemaError
from tidegate.types import ddl_of

IntArray: TypeAlias = "npt.NDArray[np.int64]"
BoolArray: TypeAlias = "npt.NDArray[np.bool_]"


class Vector(Protocol):
    """One column of a table of accumulators, by row. `valid` says which values are not null. It is None if the column
    is never null, and if it is of Python objects, among which null is None."""

    @property
    def values(self) -> npt.NDArray[Any]: ...

    @property
    def valid(self) -> BoolArray | None: ...


Vectors: TypeAlias = Mapping[str, Vector]


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One column that an aggregate needs. A default of None means null; otherwise the column is never null."""

    name: str
    type: pa.DataType
    default: Any = None


NUMBER = "number"
"""The accumulator of an aggregate that is numbered."""


class SumTooLarge(ArithmeticError):
    """A sum that doesn't fit its type. `row` is its row in the table of accumulators."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row
        self.text = text


class Aggregate(ABC):
    """An aggregate function for `keyed.aggregate(…)`, on whole columns. Subclass it for a function of your own:

        class Range(tg.Aggregate):
            @property
            def accumulators(self):
                return tg.Accumulator("low", pa.float64(), math.inf), tg.Accumulator("high", pa.float64(), -math.inf)

            @property
            def result_type(self):
                return pa.float64()

            def add(self, vectors, rows, inputs):
                np.minimum.at(vectors["low"].values, rows, inputs[0].to_numpy())
                np.maximum.at(vectors["high"].values, rows, inputs[0].to_numpy())

            def merge(self, vectors, rows, other, other_rows):
                low, high = vectors["low"].values, vectors["high"].values
                low[rows] = np.minimum(low[rows], other["low"].values[other_rows])
                high[rows] = np.maximum(high[rows], other["high"].values[other_rows])

            def result(self, vectors, rows):
                return pa.array(vectors["high"].values[rows] - vectors["low"].values[rows])

        keyed.aggregate("spread", spread=Range("price"))

    `inputs` are expressions, evaluated for each batch. `self.types` are their Arrow types, known when `accumulators` and
    `result_type` are asked for.
    """

    types: tuple[pa.DataType, ...] = ()

    def __init__(self, *inputs: str) -> None:
        self.inputs = inputs

    @property
    @abstractmethod
    def accumulators(self) -> Sequence[Accumulator]:
        """Return the columns of its state."""

    @property
    @abstractmethod
    def result_type(self) -> pa.DataType:
        """Return the Arrow type of `result`."""

    @abstractmethod
    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        """Add a batch. `rows[i]` is the row of record i; rows repeat. `vectors` are by the accumulators' names."""

    @abstractmethod
    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        """Add what the rows `other_rows` of `other` have accumulated. No row repeats in `rows`. `other` stays as it is, and
        its records are taken to have come later; in sliding and cumulating windows and in sessions, they may have later
        times instead."""

    @abstractmethod
    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        """Return the result of each of these rows, of the result type."""

    def retract(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        """Take records back that were added before, in any order. Define it if the aggregate can do that: then it can be
        used on streams of changes."""
        raise AssertionError(f"{self.label} can't take records back")

    def numbered(self) -> Self | None:
        """Return a copy that gets the numbers of the records, in the order of their arrival, as one more input. It keeps the
        number of a record in its accumulator `NUMBER`, and merges by it. None: its result doesn't depend on that order, or
        not in a way that `merge` can know."""
        return None

    # Aggregating before the exchange (operators/combine.py).

    @property
    def combines(self) -> bool:
        """Whether records may be aggregated before they are sent to the subtask of their key, and merged there. Let it be
        True if the accumulators of many records take about as much memory as those of one."""
        return False

    @property
    def merges_repeated(self) -> bool:
        """Whether `merge` takes rows that repeat. Otherwise what such a row gets is merged in pairs first."""
        return False

    def fits(self, inputs: Sequence[pa.Array], count: int) -> bool:
        """Return whether the accumulators of up to `count` records certainly fit their types, if all of them are like these.
        Otherwise each of these records is merged by itself."""
        return True

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array] | None:
        """Return the accumulators of each of `count` records by itself, as columns. None: `add` finds them."""
        return None

    # What the engine calls.

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        """Add the records of a batch whose sign is 1, and take those back whose sign is -1."""
        for call, sign in ((self.add, 1), (self.retract, -1)):
            here = signs == sign
            if here.any():
                call(vectors, rows[here], [each.filter(pa.array(here)) for each in inputs])

    @property
    def label(self) -> str:
        """How `explain` and errors show it: sum(price)."""
        return f"{self.function}({', '.join(self.inputs)})"

    @property
    def function(self) -> str:
        """What it computes, in one word. State is named by it, so that another function doesn't go on with this one's."""
        return type(self).__name__.lower()

    def bound(self, types: Sequence[pa.DataType]) -> Self:
        """Return a copy that knows the types of its inputs. Raises `SchemaError` if it can't work on them."""
        one = copy.copy(self)
        one.types = tuple(types)
        _ = one.result_type  # which checks them
        return one


def check_input(label: str, text: object) -> str:
    """Check an argument that must be an expression, given as text."""
    if not isinstance(text, str) or not text.strip():
        raise GraphError(f"{label}: takes an expression as text, such as {label}('price'), not {text!r}")
    return text


def wrong_type(aggregate: Aggregate, takes: str, advice: str = "") -> SchemaError:
    """Return the error for inputs of a type that the aggregate can't take."""
    given = ", ".join(ddl_of(each) for each in aggregate.types)
    return SchemaError(f"{aggregate.label}: takes {takes}, and {aggregate.inputs[0]!r} is of type {given}{advice}")
