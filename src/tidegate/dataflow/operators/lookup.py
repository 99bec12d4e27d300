"""Look-ups in a table outside: a user's function is called with the keys of a batch that are not in a cache.

The cache is bounded in entries. When it is full, the fourth of its keys that was used least lately is forgotten. A key
that the function doesn't know is cached as well. After the ttl a key is looked up again. The cache is no state: after a
restart it is empty, and a record that is processed again may find another row.

An error of the world outside (user_code.py) is retried, after a pause in which the subtask keeps its heartbeat and takes no
further records. What still fails then, and any other error, ends the attempt as an error in any function does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.given_batches import is_of_kind
from tidegate.dataflow.operators.lookup_join import LookUpColumns
from tidegate.dataflow.operators.rows_by_key import RowsByKey
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.operators.user_code import RAISED, blame, is_outside
from tidegate.errors import SchemaError
from tidegate.state.batch_keys import Keys, keys_of
from tidegate.state.sections import StateInfo
from tidegate.types import ddl_of

IS_KNOWN = "__is_known"
"""Whether the function knows the key: a column of the cached rows."""
FIRST_PAUSE_MS = 100
FORGOTTEN_SHARE = 4


class Lookup(ABC):
    """A table outside, of which rows are looked up by key: a database, a service.

    An instance is pickled, and unpickled once for each subtask. What can't be pickled (a connection) belongs in `open`.
    """

    def open(self) -> None:  # noqa: B027  (optional)
        """Called once per subtask, before the first look-up."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Called when the subtask ends, also by failure. A crash of the process skips it."""

    @abstractmethod
    def look_up(self, keys: pa.RecordBatch) -> pa.RecordBatch | pa.Table:
        """Return the rows of these keys: the key's columns, and those that `returns` declares. Each of the keys comes once
        in `keys`. A key that the table doesn't have has no row; no key has several."""


@dataclass(frozen=True, slots=True, eq=False)
class LookupSpec:
    """`look_up` is a `Lookup`, or a function like its method. `returned` are the columns that it adds."""

    columns: LookUpColumns
    look_up: Lookup | Callable[[pa.RecordBatch], Any]
    returned: pa.Schema
    cache: int
    ttl_ms: int | None
    retries: int
    kind: ClassVar[str] = "lookup"
    stateful: ClassVar[bool] = False
    in_columns: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return f"{self.columns.text}, cache of {self.cache:,} rows"

    def create(self, node: Node) -> Operator:
        return LookupOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


class LookupOperator(StepwiseOperator):
    def __init__(self, node: Node, spec: LookupSpec) -> None:
        super().__init__(node)
        self._spec = spec
        given = spec.look_up
        self._look_up = given.look_up if isinstance(given, Lookup) else given
        key = [_plain(node.input_schemas[0].field(name)) for name in spec.columns.left]
        self._schema = pa.schema([*key, *spec.returned, pa.field(IS_KNOWN, pa.bool_())])
        self._cached = RowsByKey(self._schema, spec.columns.left)
        # By the number of a key in the cache: when it was looked up, and in which batch it was used last.
        self._looked_up_ms = np.empty(0, np.int64)
        self._used = np.empty(0, np.int64)
        self._batch_number = 0

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._clock_ms = context.now_ms
        if isinstance(self._spec.look_up, Lookup):
            try:
                self._spec.look_up.open()
            except RAISED as error:
                blame(self.name, error, at="the call of open()")

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        columns = [batch.column(name) for name in self._spec.columns.left]
        keys = keys_of(self._spec.columns.left, columns)
        missing = self._missing(keys)
        if len(missing):
            yield from self._fetch(missing)
        numbers = self._cached.find(keys.columns.columns)
        there = numbers[numbers >= 0]
        self._used[there] = self._batch_number
        is_known = self._cached.rows(numbers).column(IS_KNOWN).fill_null(False).to_numpy(zero_copy_only=False)
        numbers[~is_known] = -1
        joined = self._spec.columns.joined(batch, self._cached, numbers[keys.of], self.node.schema)
        if joined.num_rows:
            self.emit(joined)
        self._forget()

    def close(self) -> None:
        if isinstance(self._spec.look_up, Lookup):
            try:
                self._spec.look_up.close()
            except RAISED as error:
                blame(self.name, error)

    # Inside.

    def _missing(self, keys: Keys) -> Keys:
        """Return the keys that are to be looked up: without nulls, and not in the cache or there for too long."""
        numbers = self._cached.find(keys.columns.columns)
        missing = numbers < 0
        if self._spec.ttl_ms is not None:
            there = np.flatnonzero(numbers >= 0)
            missing[there] = self._looked_up_ms[numbers[there]] <= self._clock_ms() - self._spec.ttl_ms
        for column in keys.columns.columns:
            if column.null_count:
                missing &= column.is_valid().to_numpy(zero_copy_only=False)
        return keys.where(missing)

    def _fetch(self, keys: Keys) -> Steps:
        """Look keys up, and put their rows into the cache."""
        tries, pause_ms = 0, FIRST_PAUSE_MS
        while True:
            tries += 1
            try:
                given = self._look_up(keys.columns)
                break
            except RAISED as error:
                if tries > self._spec.retries or not is_outside(error):
                    blame(self.name, error, at=f"the look-up of {len(keys)} keys")
            until_ms = self._clock_ms() + pause_ms
            while self._clock_ms() < until_ms:
                self._budget.end()
                yield
            pause_ms *= 2
        rows = self._checked(given, keys)
        numbers = self._cached.put(rows)
        if self._cached.top > len(self._used):
            more = np.zeros(max(self._cached.top - len(self._used), len(self._used)), np.int64)
            self._looked_up_ms = np.concatenate([self._looked_up_ms, more])
            self._used = np.concatenate([self._used, more])
        self._looked_up_ms[numbers] = self._clock_ms()

    def _checked(self, given: Any, keys: Keys) -> pa.RecordBatch:
        """Return a row for each of the keys: what was found, or nulls."""
        if isinstance(given, pa.Table):
            given = given.combine_chunks().to_batches()[0] if given.num_rows else given.schema.empty_table().to_batches()
            given = given if isinstance(given, pa.RecordBatch) else pa.RecordBatch.from_pylist([], self._schema)
        wanted = pa.schema(list(self._schema)[:-1])
        names = wanted.names
        if not isinstance(given, pa.RecordBatch) or any(name not in given.schema.names for name in names):
            got = ddl_of(given.schema) if isinstance(given, pa.RecordBatch) else f"a {type(given).__name__}"
            raise SchemaError(f"operator {self.name!r}: the look-up gave {got!r}; give a record batch of ({ddl_of(wanted)})")
        for field in wanted:
            found = given.schema.field(field.name).type
            if not is_of_kind(found, field.type):
                raise SchemaError(
                    f"operator {self.name!r}: the look-up gave column {field.name!r} as {ddl_of(found)}, and it is "
                    f"{'the key, of type' if field.name in self._spec.columns.left else 'declared as'} "
                    f"{ddl_of(field.type)}: give values of that type"
                )
        try:
            found = given.select(names).cast(wanted)
        except (pa.ArrowException, ValueError) as error:
            raise SchemaError(
                f"operator {self.name!r}: the look-up gave ({ddl_of(given.schema)}), which can't become ({ddl_of(wanted)}): "
                f"{error}"
            ) from error
        by_key = RowsByKey(wanted, self._spec.columns.left)
        of_found = keys_of(self._spec.columns.left, [found.column(name) for name in self._spec.columns.left])
        if len(of_found) < found.num_rows:
            twice = of_found.columns.slice(int(np.argmax(np.bincount(of_found.of))), 1).to_pylist()[0]
            raise SchemaError(
                f"operator {self.name!r}: the look-up gave several rows of the key {twice}; give one for each key"
            )
        by_key.put(found)
        numbers = by_key.find(keys.columns.columns)
        rows = by_key.rows(numbers)
        columns = [*keys.columns.columns, *rows.columns[len(self._spec.columns.left) :], pa.array(numbers >= 0)]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _forget(self) -> None:
        """Forget keys that were used least lately, if there are too many."""
        self._batch_number += 1
        if self._cached.count <= self._spec.cache:
            return
        numbers = self._cached.numbers()
        kept = self._spec.cache - self._spec.cache // FORGOTTEN_SHARE
        order: IntArray = np.argsort(self._used[numbers], kind="stable")
        self._cached.remove(numbers[order[: len(numbers) - kept]])


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
