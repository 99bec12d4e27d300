"""The results that Spark SQL computes in batch, on the same events, and how a program's results are compared with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.nexmark.events import SIDE_INPUT, Events
from benchmarks.nexmark.suite import query
from tidegate.dataflow.contracts import Source, SourceContext

_BATCH = 1 << 16
Rows = Counter[tuple[Any, ...]]


def write_events(events: Events, folder: Path) -> None:
    """Write all events as Parquet files, a folder for each table."""
    for name, source in (("person", events.person()), ("auction", events.auction()), ("bid", events.bid())):
        (folder / name).mkdir(parents=True)
        with pq.ParquetWriter(folder / name / "all.parquet", source.schema) as writer:
            for batch in _read(source):
                writer.write_batch(batch)
    (folder / "side_input").mkdir()
    pq.write_table(pa.table({"key": range(len(SIDE_INPUT)), "value": SIDE_INPUT}), folder / "side_input" / "all.parquet")


def _read(source: Source) -> Iterator[pa.RecordBatch]:
    reader = source.open(SourceContext(0, 1, {}, lambda: 0))
    while not reader.finished:
        batch = reader.poll(_BATCH)
        assert batch is not None
        yield batch


@contextmanager
def tables(spark: Any, folder: Path) -> Iterator[Any]:
    """Give Spark the events as tables. Its time zone is UTC meanwhile."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        for name in ("person", "auction", "bid", "side_input"):
            spark.read.parquet(str(folder / name)).createOrReplaceTempView(name)
        yield spark
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def expected(spark: Any, query: str) -> Rows:
    """Return the rows of a query, in a session that has the tables."""
    return _counted([spark.sql(query).toArrow()])


def result(name: str, folder: Path, schema: pa.Schema) -> Rows:
    """Return the result of a query from what its Parquet sink has written."""
    module = query(name)
    rows = written(folder, schema, getattr(module, "KEY", ()))
    return _totals(rows, schema, *module.TOTALS) if hasattr(module, "TOTALS") else rows


def _totals(rows: Rows, schema: pa.Schema, key: str, number: str) -> Rows:
    """Return a row for each key, with the sum of a column."""
    key_place, place = schema.get_field_index(key), schema.get_field_index(number)
    totals: Counter[Any] = Counter()
    for row, count in rows.items():
        totals[row[key_place]] += row[place] * count
    return Counter(totals.items())


def written(folder: Path, schema: pa.Schema, key: Sequence[str] = ()) -> Rows:
    """Return the rows that a Parquet sink has written. With a key, a later row replaces an earlier one with the same key:
    the rows of a key are of one subtask, and their epochs are in the files' names. Of changes, return the rows that are
    left."""
    files = sorted(folder.glob("part-*.parquet"), key=_epoch)
    found = [pq.read_table(file, schema=schema) for file in files]
    if schema.names[0] == "row_kind":
        left: Rows = Counter()
        for kind, *row in _rows(found):
            left[tuple(row)] += 1 if kind == "+I" else -1
        return Counter({row: count for row, count in left.items() if count})
    if not key:
        return _counted(found)
    places = [schema.get_field_index(name) for name in key]
    last = {tuple(row[place] for place in places): row for row in _rows(found)}
    return Counter(last.values())


def difference(got: Rows, wanted: Rows) -> str | None:
    """Return what differs, for a message; None if nothing does."""
    if got == wanted:
        return None
    missing, surplus = wanted - got, got - wanted
    return (
        f"{got.total():,} rows instead of {wanted.total():,}; missing {missing.total():,}, such as "
        f"{list(missing)[:2]}; surplus {surplus.total():,}, such as {list(surplus)[:2]}"
    )


def _epoch(file: Path) -> int:
    return int(file.name.split("-")[2])


def _counted(tables: Iterable[pa.Table]) -> Rows:
    return Counter(_rows(tables))


def _rows(tables: Iterable[pa.Table]) -> Iterator[tuple[Any, ...]]:
    for table in tables:
        yield from zip(*(column.to_pylist() for column in table.columns), strict=True)
