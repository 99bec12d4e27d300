"""`spark.read.format("tidegate")`: the state in a snapshot, what changed in it, and what the manifests say, as DataFrames.

Options: `path` (that of `load`; any path that `restore_from` accepts), and one of

- `state`, with `operator` if several operators have a state of that name: the state's rows (snapshots/state_tables.py).
  `per` is "entry" or "key"; `key` names the key's columns;
- the same with `diff`, an older snapshot's path, or an epoch in the same folder: what changed since then
  (snapshots/state_changes.py);
- `table`: snapshots, operators, states or sizes (snapshots/snapshot_tables.py).

`epoch` selects a snapshot of a job's folder (by default the newest); `partitions` sets the number of partitions. `keys`
(JSON) and `key_groups` ("3, 8-15") limit what is read of keyed state: only the key-groups that have it are read.

A DataFrame shows the snapshot that was there when it was made, however often it is read and whatever the job completes
meanwhile. Spark plans in one process and reads in others. Only text travels between them, and each opens the snapshot.

Options are needed beside filters because of Spark 4.3: it passes a query's filters to a source in Python, but keeps the
filtered reader with the DataFrame instead of with the query. So the next query on the same DataFrame or view, or the other
side of a union, silently reads only what the first query's filters left. Later versions keep the reader with the query (they
can be recognized by `pushLimit`), and only with those are filters on `key_group` and on the key's columns used.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema

from tidegate.errors import JobError, SchemaError, TidegateError
from tidegate.hashing import hash_columns
from tidegate.keygroups import MAX_KEY_GROUP_COUNT, groups_of
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.snapshot_tables import SnapshotTable
from tidegate.snapshots.state_changes import changes_table
from tidegate.snapshots.state_tables import KEY_GROUP, KeyColumns, Table, state_table
from tidegate.state.merging import key_codes
from tidegate.types import ddl_of, from_list

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "tidegate"
HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
OPTIONS = ("path", "state", "operator", "per", "key", "keys", "key_groups", "diff", "table", "epoch", "partitions")
FILTERS_ARE_SAFE = hasattr(DataSourceReader, "pushLimit")  # whether a query's filters apply to that query only
MAX_KEYS = 10_000  # a filter with more keys than this reads everything

_GROUPS = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


@dataclass(frozen=True, slots=True)
class TableRequest:
    """The options of a read. `address` and `before` are addresses of single snapshots."""

    path: str
    address: str
    state: str | None = None
    operator: str | None = None
    per: str = "entry"
    key: tuple[str, ...] = ()
    keys: str | None = None
    key_groups: str | None = None
    before: str | None = None
    table: str | None = None

    def open(self) -> tuple[Snapshot, Table]:
        snapshot = find_snapshot(self.address)
        if self.table is not None:
            return snapshot, SnapshotTable(snapshot, self.table, path=self.path)
        table = (
            state_table(snapshot, self.state, self.operator, key=self.key, per=self.per)
            if self.before is None
            else changes_table(find_snapshot(self.before), snapshot, self.state, self.operator, key=self.key)
        )
        if table.keys is None and (self.keys is not None or self.key_groups is not None):
            raise JobError(f"state {self.state!r} has no keys: the options 'keys' and 'key_groups' are for keyed state")
        return snapshot, table

    def wanted(self, keys: KeyColumns) -> list[pa.Array] | None:
        """Return the columns of the keys to read; None for all keys."""
        return None if self.keys is None else parsed_keys(self.keys, keys)

    def groups(self, keys: KeyColumns, group_count: int) -> set[int]:
        """Return the key-groups that both options, `keys` and `key_groups`, let through."""
        found = set(range(group_count))
        if self.key_groups is not None:
            found &= parsed_groups(self.key_groups)
        if (wanted := self.wanted(keys)) is not None:
            found &= set(groups_of(hash_columns(wanted), group_count).tolist())
        return found


class StateSource(DataSource):
    """The format "tidegate". Spark makes an object of this class with the options of a read."""

    _request: TableRequest | None = None

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        try:
            return ddl_of(self._chosen().open()[1].schema)
        except TidegateError:
            os.environ[HIDE_TRACEBACK] = (
                "1"  # Spark shows our errors without Python's frames. The process ends with this one
            )
            raise

    def reader(self, schema: StructType) -> DataSourceReader:
        kind = PushingReader if FILTERS_ARE_SAFE else StateReader
        return kind(self._chosen(), schema, _number(self.options, "partitions"))

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:
        raise JobError(
            "the format 'tidegate' can't be written, since a source in Python can't make Spark group the rows by "
            "key-group: write state with tg.write_state(df, to, operator=…, state=…)"
        )

    def _chosen(self) -> TableRequest:
        """Return the request. Spark keeps this object once it has the schema, so the snapshot is chosen once."""
        if self._request is None:
            self._request = requested(self.options)
        return self._request


def requested(options: Any) -> TableRequest:
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            raise JobError(
                f"there is no option {name!r}{f', did you mean {near[0]!r}?' if near else ''}; the options are "
                f"{', '.join(OPTIONS)}"
            )
    path, diff, table = options.get("path"), options.get("diff"), options.get("table")
    if not path:
        raise JobError(
            "no snapshot was given: use load(path) with the folder of a savepoint or of a job's snapshots, or "
            "the file of a manifest"
        )
    if table is not None and (diff is not None or options.get("state") is not None):
        raise JobError("the option 'table' is about a whole snapshot: give it without 'state' and 'diff'")
    epoch = _number(options, "epoch")
    before = None
    if diff is not None:
        before = find_snapshot(path, epoch=int(diff)) if diff.isdecimal() else find_snapshot(diff)
    return TableRequest(
        path=path,
        address=find_snapshot(path, epoch=epoch).address,
        state=options.get("state"),
        operator=options.get("operator"),
        per=options.get("per") or "entry",
        key=tuple(name.strip() for name in (options.get("key") or "").split(",") if name.strip()),
        keys=options.get("keys"),
        key_groups=options.get("key_groups"),
        before=None if before is None else before.address,
        table=table,
    )


def _number(options: Any, name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise JobError(f"the option {name!r} is {text!r}: give a whole number, 1 or more")
    return int(text)


def parsed_groups(text: str) -> set[int]:
    found: set[int] = set()
    for part in [] if text == "none" else text.split(","):
        match = _GROUPS.fullmatch(part)
        if match is None:
            raise JobError(
                f"the option 'key_groups' is {text!r}: write numbers and ranges, both ends included, such as '3, 8-15'"
            )
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def parsed_keys(text: str, keys: KeyColumns) -> list[pa.Array]:
    """Return the keys of a JSON text as columns: `5`, `[5, 6]`, `["a"]`; keys of several columns are `[["a", 5]]`."""
    try:
        found = json.loads(text)
    except ValueError:
        raise JobError(f'the option \'keys\' is {text!r}, which is not JSON: write [5, 6] or ["a", "b"]') from None
    rows = found if isinstance(found, list) else [found]
    if keys.is_split:
        rows = [[row.get(name) for name in keys.names] if isinstance(row, dict) else row for row in rows]
        if not all(isinstance(row, list) and len(row) == len(keys.names) for row in rows):
            raise JobError(
                f"the option 'keys' is {text!r}: a key is the columns {', '.join(keys.names)}, so write [[…, …], …]"
            )
    else:
        rows = [[row] for row in rows]
    columns = list(zip(*rows, strict=True)) or [()] * len(keys.names)
    try:
        return [_typed(values, kind) for values, kind in zip(columns, keys.types, strict=True)]
    except (SchemaError, pa.ArrowException) as error:
        raise SchemaError(
            f"the option 'keys' is {text!r}, and a key is ({ddl_of(pa.schema(keys.fields()))}): {error}"
        ) from None


def _typed(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the values as an array. Types that JSON lacks are given as texts."""
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.array([None if value is None else str(value) for value in values], pa.string()).cast(kind)
    return from_list(values, kind)


class StateReader(DataSourceReader):
    """Reads one table. It travels from the process that plans to those that read."""

    def __init__(self, request: TableRequest, schema: StructType, partitions: int | None) -> None:
        self._request = request
        self._schema = schema
        self._partitions = partitions
        self._pushed: set[int] | None = None

    def partitions(self) -> list[InputPartition]:
        snapshot, table = self._request.open()
        groups = self._groups(snapshot, table)
        return [InputPartition(part) for part in table.parts(groups, count=self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # so Spark calls it if there are no partitions
            return
        snapshot, table = self._request.open()
        expected = to_arrow_schema(self._schema, timezone="UTC")
        keys = table.keys
        wanted = None if keys is None else self._request.wanted(keys)
        groups = self._groups(snapshot, table)
        for rows in table.read(partition.value):
            if keys is not None and wanted is not None:
                rows = rows.filter(_among([rows.column(name) for name in keys.names], wanted))
            if groups is not None:  # a part may have more than was asked for
                rows = rows.filter(pa.array(np.isin(rows.column(KEY_GROUP), list(groups))))
            if rows.num_rows:
                yield _as_expected(rows, expected)

    def _groups(self, snapshot: Snapshot, table: Table) -> set[int] | None:
        """Return the key-groups to read; None for all."""
        if table.keys is None or (self._pushed is None and self._request.keys is self._request.key_groups is None):
            return None
        groups = self._request.groups(table.keys, snapshot.manifest.key_group_count)
        return groups if self._pushed is None else groups & self._pushed


def _among(columns: Sequence[pa.Array], wanted: Sequence[pa.Array]) -> pa.Array:
    """Return a mask of the rows whose keys are wanted."""
    together = [pa.concat_arrays(both) for both in zip(columns, wanted, strict=True)]
    names = [str(index) for index in range(len(together))]
    codes = key_codes(pa.StructArray.from_arrays(together, names)) if len(together[0]) else np.zeros(0, np.int64)
    rows = len(columns[0])
    return pa.array(np.isin(codes[:rows], codes[rows:]))


class PushingReader(StateReader):
    """A `StateReader` for versions of Spark in which filters are safe."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  (Spark's name)
        """Yield the filters that Spark must apply: all except those on `key_group`, which are applied exactly here."""
        snapshot, table = self._request.open()
        if table.keys is None:
            yield from filters
            return
        group_count = snapshot.manifest.key_group_count
        pushed = set(range(group_count))
        for each in filters:
            if (groups := groups_within(each)) is None:
                yield each
            else:
                pushed.intersection_update(groups)
        of_keys = groups_of_keys(filters, table.keys, group_count)
        self._pushed = pushed if of_keys is None else pushed & of_keys


def groups_within(condition: Filter) -> Iterable[int] | None:
    """Return the key-groups that a condition on `key_group` lets through; None for any other condition."""
    if getattr(condition, "attribute", None) != (KEY_GROUP,):
        return None
    all_groups = range(MAX_KEY_GROUP_COUNT)
    match condition:
        case EqualTo(value=int(value)) | EqualNullSafe(value=int(value)):
            return {value}
        case In(value=values):
            return {value for value in values if value is not None}
        case GreaterThan(value=int(value)):
            return all_groups[max(value + 1, 0) :]
        case GreaterThanOrEqual(value=int(value)):
            return all_groups[max(value, 0) :]
        case LessThan(value=int(value)):
            return all_groups[: max(value, 0)]
        case LessThanOrEqual(value=int(value)):
            return all_groups[: max(value + 1, 0)]
    return None


def groups_of_keys(conditions: Iterable[Filter], keys: KeyColumns, group_count: int) -> set[int] | None:
    """Return the key-groups of all keys that these conditions could let through; None if that can't be known."""
    allowed: dict[str, list[Any]] = {}
    for condition in conditions:
        path: Sequence[str] = getattr(condition, "attribute", ())
        if len(path) != 1 or path[0] not in keys.names:
            continue
        match condition:
            case EqualTo() | EqualNullSafe():
                values = [condition.value]
            case In():
                values = list(condition.value)
            case IsNull():
                values = [None]
            case _:
                continue
        allowed.setdefault(path[0], values)
    if len(allowed) < len(keys.names) or prod(map(len, allowed.values())) > MAX_KEYS:
        return None
    try:
        combined = list(zip(*product(*(allowed[name] for name in keys.names)), strict=True))
        columns = [from_list(values, kind) for values, kind in zip(combined, keys.types, strict=True)]
    except SchemaError:
        return None  # a value of another type than the column's, which Spark converts
    return set(groups_of(hash_columns(columns), group_count).tolist()) if columns else set()


def _as_expected(rows: pa.RecordBatch, expected: pa.Schema) -> pa.RecordBatch:
    """Return the rows with exactly the types that Spark expects: names of a list's items, whether they can be null."""
    if rows.schema.equals(expected):
        return rows
    if rows.schema.names != expected.names:
        raise SchemaError(
            f"the table has the columns ({ddl_of(rows.schema)}), and it is read with the schema ({ddl_of(expected)})"
        )
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(rows.columns, expected, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=expected)
