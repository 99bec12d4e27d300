"""`tg.write_state`: a DataFrame becomes keyed state in a new savepoint.

Spark distributes the rows: `pmod(xxhash64(key), key_group_count)` is the key-group (ADR 002), each partition is the piece
that owns its key-groups, and within a partition rows are sorted by key-group and key. Each task writes one piece of the
operator, with the other states in that piece; other tasks copy the pieces of the other operators. The driver creates the
manifest when all files are there: before that there is no savepoint, and a failure leaves nothing behind.

Rows have one of two forms, which their columns show: one row for each key, with a `value` (an array for a list, a map for a
map), or one row for each entry, as such a state is read: `map_key` and `value`, or `position` and `value`. They may have
`expires`; `key_group` and `epoch`, which a table that was read has, are ignored.

Nothing may be there twice: no key, no entry of a key's list or map, no timer. Spark gathers the entries from all partitions,
with a column that says what is wrong with them, and the task that writes the piece raises the error. So the result doesn't
depend on Spark's setting for duplicates in maps (`spark.sql.mapKeyDedupPolicy`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tidegate import arguments
from tidegate.errors import JobError, SchemaError, StoreError, TidegateError
from tidegate.snapshots.finding import find_snapshot, resolved
from tidegate.snapshots.manifest import PieceEntry
from tidegate.snapshots.savepoints import SavepointInfo, create_savepoint, savepoint_in_writing, versions_here
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_tables import AT_MS, EPOCH, KEY_GROUP, MAP_KEY, MOMENT, POSITION, VALUE, KeyColumns
from tidegate.snapshots.state_writing import (
    StateWriting,
    check_rows,
    columns_beside_key,
    declared_info,
    nullable,
    planned_writing,
)
from tidegate.state.descriptors import Descriptor
from tidegate.state.handles import KeyedState
from tidegate.state.sections import StateInfo, row_identity
from tidegate.state.ttl import COLLECTIONS, EXPIRES
from tidegate.store import layout
from tidegate.store.opening import open_store
from tidegate.types import ddl_of, parse_schema
from tidegate.types.json_form import from_json, to_json

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

GROUP, PIECE, COMPLAINT = "__group", "__piece", "__complaint"
REFUSED = "refused"

Batches = Iterator[pa.RecordBatch]


def write_state(
    df: DataFrame,
    to: str,
    *,
    operator: str,
    state: str | Descriptor | KeyedState,
    base: str | None = None,
    add: bool = False,
    key: str | Sequence[str] | None = None,
    shape: str | None = None,
    job: str | None = None,
    key_group_count: int | None = None,
    parallelism: int | None = None,
) -> SavepointInfo:
    """Write the rows as keyed state into a new savepoint in the folder `to`, with which a job can begin (`restore_from`).

    `state` is the state's name, or its declaration, `MyFunction.count`, which defines what the rows must be. `key` names the
    key's columns, by default `key`, or those of the base. `shape` ("value", "list", "map", "reducing", "aggregating") is for
    a new state that is given by name.

    Without `base` the savepoint has only this state; `job` and `key_group_count` (128) go into its manifest, and
    `parallelism` is the number of files. With `base` (a savepoint or snapshot as `restore_from` accepts it) the savepoint is
    a copy of the base in which this state is replaced, or to which it is added with `add=True`. The base is unchanged.
    """
    import pyspark

    declared = _checked(df, state, to=to, operator=operator, base=base, job=job, shape=shape)
    arguments.flag("write_state", "add", add)
    if key is not None and not isinstance(key, str):
        arguments.names("write_state", "key", key)
    for name, count in {"key_group_count": key_group_count, "parallelism": parallelism}.items():
        if count is not None:
            arguments.whole_number("write_state", name, count)
    found = None if base is None else find_snapshot(base)
    rows, info = _prepared(df, found, operator, declared, key=key, shape=shape)
    target = open_store(resolved(to))
    spark = df.sparkSession
    writing = planned_writing(
        target=target.address,
        base=found,
        operator=operator,
        info=info,
        add=add,
        job=job,
        key_group_count=key_group_count,
        parallelism=parallelism or spark.sparkContext.defaultParallelism,
    )
    created_ms = round(time.time() * 1000)
    with savepoint_in_writing(target, job=writing.job, epoch=writing.epoch):
        pieces = _write_pieces(rows, writing)
        pieces += _copy_pieces(spark, writing, found, done={piece.subtask for _, piece in pieces})
        manifest = writing.manifest(pieces, created_ms=created_ms)
        # Tasks that Spark ran more than once leave files behind.
        for name in set(target.list(layout.STATE)) - {file.name for file in manifest.files()}:
            target.delete(name)
        graph = "" if found is None or found.manifest.savepoint is None else found.manifest.savepoint.graph
        made = create_savepoint(
            target, manifest, created_ms=created_ms, graph=graph, versions={**versions_here(), "spark": pyspark.__version__}
        )
    return SavepointInfo(path=resolved(to), epoch=made.epoch, bytes=sum(made.operator_bytes().values()))


def _checked(df: object, state: object, **texts: str | None) -> str | Descriptor:
    """Return the state as it was given, if it and the other arguments have the right types."""
    if not hasattr(df, "sparkSession"):
        raise JobError(f"write_state({df!r}, …): give a DataFrame")
    for name, given in texts.items():
        if given is not None or name in ("to", "operator"):
            arguments.text("write_state", name, given)
    if isinstance(state, Descriptor):
        return state
    return arguments.text("write_state", "state", state, "the name of a state, or its declaration")


# Preparing the rows.


def _prepared(
    df: DataFrame,
    base: Snapshot | None,
    operator: str,
    state: str | Descriptor,
    *,
    key: str | Sequence[str] | None,
    shape: str | None,
) -> tuple[DataFrame, StateInfo]:
    """Return one row for each key, with the key's columns, `value` and perhaps `expires`, and what state the rows are."""
    names = _key_names(df, base, operator, key)
    beside = columns_beside_key(base, operator, state) if isinstance(state, str) else []
    if AT_MS in df.columns and VALUE not in df.columns:
        df = df.withColumnRenamed(AT_MS, VALUE)
    _check_columns(df, names, beside)
    whole, shape_of_entries = (df.drop(KEY_GROUP, EPOCH), None) if POSITION in beside else _whole(df, names)
    schema = parse_schema(whole.schema)
    fields = [pa.field(name, nullable(schema.field(name).type)) for name in names]
    key_type = fields[0].type if len(fields) == 1 else pa.struct(fields)
    value_type = nullable(schema.field(VALUE).type)
    expiring = EXPIRES in whole.columns
    info = declared_info(
        base,
        operator,
        state,
        key=key_type,
        value=value_type,
        shape=shape or (shape_of_entries if not isinstance(state, Descriptor) and not state.startswith("__") else None),
        expiring=expiring,
    )
    if info.shape == "timers" and not pa.types.is_list(value_type):
        return _prepared(_listed(whole, names), base, operator, state, key=names, shape=None)
    if isinstance(state, Descriptor) and shape_of_entries not in (None, info.shape):
        raise SchemaError(f"state {info.name!r} is a {info.shape}, and the rows are the entries of a {shape_of_entries}")
    check_rows(info, key=key_type, value=value_type)
    if expiring and EXPIRES not in info.schema.names:
        raise SchemaError(f"the rows have a column {EXPIRES!r}, and state {info.name!r} has no ttl: drop the column")
    if expiring:
        moments = pa.list_(MOMENT) if info.shape in COLLECTIONS else MOMENT
        if nullable(schema.field(EXPIRES).type) != moments:
            raise SchemaError(
                f"the column {EXPIRES!r} is {ddl_of(schema.field(EXPIRES).type)}, and must be {ddl_of(moments)}"
            )
    if info.shape == "timers":
        whole = whole.withColumn(COMPLAINT, _complaint(whole[VALUE], "the timer at"))
    for name in beside:
        names.append(name)
        whole = whole.withColumn(name, whole[name].cast("long"))
    return whole.select(*names, VALUE, *(name for name in (EXPIRES, COMPLAINT) if name in whole.columns)), info


def _key_names(df: DataFrame, base: Snapshot | None, operator: str, key: str | Sequence[str] | None) -> list[str]:
    if key is not None:
        return [key] if isinstance(key, str) else list(key)
    entry = None if base is None else base.manifest.operators.get(operator)
    keyed = [] if entry is None else [each for each in entry.states if each.kind == "keyed"]
    if keyed and "key" not in df.columns:
        return list(KeyColumns.of(keyed[0].arrow_schema().field("key").type).names)
    return ["key"]


def _check_columns(df: DataFrame, names: Sequence[str], beside: Sequence[str]) -> None:
    needed = [*names, *beside, VALUE]
    known = {*needed, MAP_KEY, POSITION, EXPIRES, KEY_GROUP, EPOCH}
    missing = [name for name in needed if name not in df.columns]
    unknown = [name for name in df.columns if name not in known]
    if missing or unknown or not names:
        raise SchemaError(
            f"the rows have the columns ({ddl_of(parse_schema(df.schema))}), "
            + (f"and {', '.join(map(repr, missing))} is missing" if missing else f"and {unknown[0]!r} isn't used")
            + f": give the key's columns (key={list(names)!r}), {VALUE!r}, {MAP_KEY!r} for entries of a map, {POSITION!r} "
            f"for items of a list, {EXPIRES!r} if the state has a ttl, and no others"
        )


def _whole(df: DataFrame, names: Sequence[str]) -> tuple[DataFrame, str | None]:
    """Return one row for each key, gathered from entries if the rows are entries, and then also the entries' shape."""
    from pyspark.sql import functions as F  # noqa: N812  (everyone's name for it)

    shape = "map" if MAP_KEY in df.columns else "list" if POSITION in df.columns else None
    if shape is None:
        return df.drop(KEY_GROUP, EPOCH), None
    place = MAP_KEY if shape == "map" else POSITION
    expiring = [EXPIRES] if EXPIRES in df.columns else []
    gathered = df.groupBy(*names).agg(F.collect_list(F.struct(place, VALUE, *expiring)).alias("entries"))
    entries = F.col("entries")
    complaint = _complaint(F.transform(entries, lambda entry: entry[place]), f"the {place}")
    if shape == "list":
        entries = F.array_sort(
            entries,
            lambda one, other: F.coalesce(  # a null position is in the complaint
                F.signum(one[POSITION] - other[POSITION]).cast("int"), F.lit(0)
            ),
        )
        value: Column = F.transform(entries, lambda entry: entry[VALUE])
    else:
        value = F.when(
            complaint.isNull(),
            F.map_from_entries(F.transform(entries, lambda entry: F.struct(entry[MAP_KEY], entry[VALUE]))),
        )
    ends = [F.transform(entries, lambda entry: entry[EXPIRES]).alias(EXPIRES)] if expiring else []
    return gathered.select(*names, value.alias(VALUE), *ends, complaint.alias(COMPLAINT)), shape


def _complaint(places: Column, what: str) -> Column:
    """Return what is wrong with the places of a key's entries, with {} for the key; null if they are right."""
    from pyspark.sql import functions as F  # noqa: N812

    # Finding the first duplicate takes long, and Spark does it only if there is one.
    twice = F.element_at(F.filter(places, lambda place, index: F.array_position(places, place) <= index), 1)
    is_null = f"{what} of an entry of the key {{}} is null: give every entry one"
    is_twice = " of the key {} comes more than once: each is written once, so keep one of them"
    return F.when(F.exists(places, lambda place: place.isNull()), F.lit(is_null)).when(
        F.size(F.array_distinct(places)) < F.size(places), F.concat(F.lit(f"{what} "), twice.cast("string"), F.lit(is_twice))
    )


def _listed(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return timers as one row for each key."""
    from pyspark.sql import functions as F  # noqa: N812

    gathered = df.groupBy(*names).agg(F.collect_list(F.struct(VALUE)).alias(VALUE))  # structs, since nulls would be dropped
    return gathered.withColumn(VALUE, F.sort_array(F.transform(VALUE, lambda timer: timer[VALUE])))


# Writing.


def _write_pieces(rows: DataFrame, writing: StateWriting) -> list[tuple[str, PieceEntry]]:
    """Write the operator's pieces, except those without rows if Spark starts no task for them."""
    from pyspark.sql import functions as F  # noqa: N812

    beside = row_identity(writing.info.schema)
    # A column of the key may have the same name.
    names = rows.columns[: rows.columns.index(VALUE) - len(beside)]
    group = F.pmod(F.xxhash64(*names), F.lit(writing.key_group_count)).cast("int")
    stops = F.array(*(F.lit(piece.key_groups[1]) for piece in writing.pieces))
    piece = F.size(F.filter(stops, lambda stop: stop <= F.col(GROUP)))
    cut = (
        rows.withColumn(GROUP, group)
        .withColumn(PIECE, piece)
        .repartitionById(len(writing.pieces), PIECE)
        .sortWithinPartitions(GROUP, *names, *beside)
    )
    return _done(cut.mapInArrow(_piece_task(writing, names), "operator string, piece string"))


def _piece_task(writing: StateWriting, names: Sequence[str]) -> Callable[[Batches], Batches]:
    def task(batches: Batches) -> Batches:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        subtask = context.partitionId()
        rows = (_as_state(batch, writing.info, names, subtask) for batch in batches if batch.num_rows)
        try:
            yield _report(writing.operator, to_json(writing.write_piece(subtask, rows)))
        except JobError as error:
            # Not raised here: Spark would try again, and its tasks would still write while the driver removes files.
            yield _report(writing.operator, {REFUSED: str(error)})

    return task


def _as_state(batch: pa.RecordBatch, info: StateInfo, names: Sequence[str], subtask: int) -> pa.RecordBatch:
    """Return rows from Spark in the types of the state."""
    if (np.asarray(batch.column(PIECE)) != subtask).any():
        raise StoreError(f"Spark gave rows of another piece to task {subtask}")
    kind = info.schema.field("key").type
    columns = [batch.column(name) for name in names]
    key = (
        columns[0]
        if len(names) == 1
        else pa.StructArray.from_arrays(
            [column.cast(field.type) for column, field in zip(columns, kind, strict=True)], fields=list(kind)
        )
    )
    if COMPLAINT in batch.schema.names:
        _refuse(batch.column(COMPLAINT), key)
    beside = [batch.column(name) for name in row_identity(info.schema)]
    made = [key.cast(kind), *beside, batch.column(VALUE).cast(info.schema.field("value").type)]
    if EXPIRES in info.schema.names:
        wanted = info.schema.field(EXPIRES).type
        in_ms = pa.timestamp("ms", tz="UTC")
        made.append(
            batch.column(EXPIRES).cast(pa.list_(in_ms) if pa.types.is_list(wanted) else in_ms, safe=False).cast(wanted)
            if EXPIRES in batch.schema.names
            else pa.nulls(len(batch), wanted)
        )
    return pa.RecordBatch.from_arrays(made, schema=info.schema)


def _refuse(complaints: pa.Array, key: pa.Array) -> None:
    for index in np.flatnonzero(complaints.is_valid()).tolist():
        raise JobError(complaints[index].as_py().replace("{}", repr(key[index].as_py()), 1))


def _copy_pieces(
    spark: SparkSession, writing: StateWriting, base: Snapshot | None, done: set[int]
) -> list[tuple[str, PieceEntry]]:
    """Copy the pieces of the other operators, and write those of this operator that have no rows."""
    operators = {} if base is None else base.manifest.operators
    wanted = [(name, each.subtask) for name, entry in operators.items() if name != writing.operator for each in entry.pieces]
    wanted += [(writing.operator, piece.subtask) for piece in writing.pieces if piece.subtask not in done]
    if not wanted:
        return []

    def task(batches: Batches) -> Batches:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                operator, subtask = wanted[index]
                written = (
                    writing.write_piece(subtask, ())
                    if operator == writing.operator
                    else writing.copy_piece(operator, subtask)
                )
                yield _report(operator, to_json(written))

    tasks = min(len(wanted), 4 * spark.sparkContext.defaultParallelism)
    return _done(spark.range(0, len(wanted), 1, tasks).mapInArrow(task, "operator string, piece string"))


def _report(operator: str, piece: dict[str, Any]) -> pa.RecordBatch:
    return pa.record_batch([pa.array([operator]), pa.array([json.dumps(piece)])], names=["operator", "piece"])


def _done(tasks: DataFrame) -> list[tuple[str, PieceEntry]]:
    """Run the tasks and return the pieces that they report. Our errors are raised without Spark's around them."""
    try:
        reports = tasks.collect()
    except Exception as error:
        raise _ours(error) from error
    found = [(row.operator, json.loads(row.piece)) for row in reports]
    for _, piece in found:
        if REFUSED in piece:
            raise JobError(piece[REFUSED])
    return [(operator, from_json(PieceEntry, piece, "piece")) for operator, piece in found]


def _ours(error: Exception) -> Exception:
    for kind in (SchemaError, JobError, StoreError, TidegateError):
        _, found, text = str(error).rpartition(f"{kind.__module__}.{kind.__name__}: ")
        if found:
            return kind("\n".join(takewhile(str.strip, text.splitlines())))
    return error
