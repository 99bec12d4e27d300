"""The built-in sources: `tg.sources`.

| source | what it reads | its end | offset |
|---|---|---|---|
| `generator` | records computed from their number | after `rows`, or never | records, per split |
| `rows` | a list in the program | after the last row | records, per split |
| `parquet` | a folder of Parquet files, new ones too | never, or `stop_at_end` | rows, per file |
| `json` | a folder of JSON lines files that may grow, new ones too | never, or `stop_at_end` | bytes, per file |
| `csv` | a folder of CSV files that may grow, new ones too | never, or `stop_at_end` | bytes, per file |

All of them are replayable: after a failure, or at another parallelism, they resume after the last record of the snapshot.
`tidegate.testing.ScriptedSource` is a list with crashes in it. Other sources implement `Source`
(tidegate/dataflow/contracts.py). The classes behind these functions are in tidegate/connectors/.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tidegate import arguments
from tidegate.arguments import ClockDuration
from tidegate.connectors.files import FolderSource
from tidegate.connectors.folders import FileFormat, address_of
from tidegate.connectors.generator import GeneratorSource, Make, RowWise
from tidegate.connectors.lines import CsvLines, JsonLines
from tidegate.connectors.parquet_source import ParquetFormat, schema_in
from tidegate.connectors.rows import RowsSource
from tidegate.dataflow.contracts import Source
from tidegate.errors import JobError
from tidegate.types import parse_schema

__all__ = ["csv", "generator", "json", "parquet", "rows"]


def generator(
    make: Make | None = None,
    *,
    schema: Any,
    make_row: Callable[[int], Sequence[Any]] | None = None,
    rows: int | None = None,
    rate: float | None = None,
    splits: int | None = None,
) -> Source:
    """Compute records, for benchmarks, demos and tests.

        def bids(split, start, count):
            n = np.arange(start, start + count)
            return {"auction": n * 7 % 1000, "price": (n % 100) * 1.5}

        tg.sources.generator(bids, schema="auction long, price double", rate=50_000)
        tg.sources.generator(make_row=lambda i: (i, f"user {i % 10}"), schema="id long, name string", rows=1000)

    `make(split, start, count)` returns the records `start … start + count - 1` of a split, as an Arrow record batch or
    table or as a dictionary of columns (numpy arrays, Arrow arrays or lists). `make_row(i)` returns record i of the
    whole as a tuple; it is simpler and much slower. Give one of the two. Both must be pure functions of the records'
    numbers: after a failure they are called again for records that they made before, in other ranges. For random
    numbers, hash the number of the record.

    `rows`: how many records in all; without it the source never ends. `rate`: records per second in all, counted from the
    time when the job started or resumed; without it, as many as the job takes. `splits` (8): how many subtasks at most
    share the work; record i of the whole is in split i % splits. It is part of the job's state, so it can't change for a
    job that resumes from a snapshot.
    """
    parsed = parse_schema(schema)
    split_count = 8 if splits is None else splits
    if (make is None) == (make_row is None):
        raise JobError("give the generator either make(split, start, count) or make_row(i)")
    if make_row is not None:
        arguments.function("sources.generator", "make_row", make_row, "a function of the record's number")
    made = make if make_row is None else RowWise(make_row, parsed, split_count)
    assert made is not None
    return GeneratorSource(schema=parsed, make=made, rows=rows, rate=rate, split_count=split_count)


def rows(values: Sequence[Sequence[Any]], schema: Any, *, splits: int = 1) -> Source:
    """Read rows that the program holds in memory, for tests, examples and small look-up tables. Bounded.

        tg.sources.rows([(1, "a"), (2, "b")], "id long, name string")

    With one split (the default) one subtask reads all rows, in order. With more, row i is in split i % splits, and the
    order holds only within each split. The rows travel to the slots with the job: use files for large data. A row that
    doesn't fit the schema is a `SchemaError` of this call.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        arguments.refuse("sources.rows", "values", values, "a list of rows, such as [(1, 'a'), (2, 'b')]")
    return RowsSource.of(list(values), parse_schema(schema), split_count=splits)


def parquet(
    path: str | os.PathLike[str],
    *,
    schema: Any = None,
    stop_at_end: bool = False,
    discover_every: ClockDuration = "1 s",
    forget_removed: ClockDuration | None = "7 days",
    incomplete_for: ClockDuration | None = "1 hour",
) -> Source:
    """Read a folder of Parquet files, and the files that are added to it while the job runs.

        tg.sources.parquet("events/", schema="player long, level int, at timestamp")

    The default schema is that of the oldest file. Columns that the schema doesn't name aren't read; a file that lacks a
    column, or has another type for it, is an error that names the file. Each file is read once, when it is complete. Names
    that start with `_` or `.` or end in `.tmp` are ignored: write a file under such a name, and rename it when it is
    complete.

    With `stop_at_end` the source is bounded: it reads the files that exist when it is opened (or opened again after a
    failure), then ends. Otherwise it looks for new files every `discover_every`, and less often if a listing takes longer
    than a tenth of that. The path is a folder (with all folders in it), a file, or a URI that Arrow knows (`s3://…`,
    `hdfs://…`).

    The order of names and times doesn't matter: a file that comes late is read. The name of a file that was read is
    remembered until the file has been gone for `forget_removed` (None: forever); if it comes back after that, it is read
    again. A file that is incomplete and hasn't changed for a minute is logged; after `incomplete_for` it ends the job with
    an error that names it (None: it is ignored).
    """
    address = address_of(path)
    parsed = schema_in(address) if schema is None else parse_schema(schema)
    incomplete_for_ms = (
        None if incomplete_for is None else arguments.clock_ms("sources.parquet", "incomplete_for", incomplete_for)
    )
    return _folder(
        address, ParquetFormat(parsed), stop_at_end, discover_every, forget_removed, incomplete_for_ms=incomplete_for_ms
    )


def json(
    path: str | os.PathLike[str],
    *,
    schema: Any,
    stop_at_end: bool = False,
    discover_every: ClockDuration = "1 s",
    forget_removed: ClockDuration | None = "7 days",
) -> Source:
    """Read a folder of JSON lines files (one object on each line), and what is added to the files and to the folder.

        tg.sources.json("logs/", schema="user string, at timestamp, ms long")

    A missing field is null; fields that the schema doesn't name aren't read; a value of another type is an error that
    shows file, line and text. Timestamps and dates are ISO 8601 text; a timestamp without a zone is in UTC. Files may grow
    at any time, but never shrink or be replaced. A line is read when it has its line break.

    `stop_at_end`, `discover_every`, `forget_removed`, the path and the ignored names are as for `parquet`. A bounded source
    also reads a last line without a line break.
    """
    return _folder(address_of(path), JsonLines(parse_schema(schema)), stop_at_end, discover_every, forget_removed)


def csv(
    path: str | os.PathLike[str],
    *,
    schema: Any,
    header: bool = True,
    delimiter: str = ",",
    stop_at_end: bool = False,
    discover_every: ClockDuration = "1 s",
    forget_removed: ClockDuration | None = "7 days",
) -> Source:
    """Read a folder of CSV files, and what is added to the files and to the folder.

        tg.sources.csv("trades/", schema="symbol string, price double, at timestamp", delimiter=";")

    With `header` the first line of each file names its columns, in any order, and columns that the schema doesn't name
    aren't read. Without it the columns are the schema's, in order. An empty value is null, `""` is the empty string;
    empty lines are skipped; a line break within a value is an error. Timestamps are ISO 8601 text, with a zone
    (`2026-01-31T12:00:00Z`) for `timestamp` and without for `timestamp_ntz`. Everything else is as for `json`.
    """
    form = CsvLines(parse_schema(schema), header, delimiter)
    return _folder(address_of(path), form, stop_at_end, discover_every, forget_removed)


def _folder(
    address: str,
    form: FileFormat,
    stop_at_end: bool,
    discover_every: ClockDuration,
    forget_removed: ClockDuration | None,
    *,
    incomplete_for_ms: int | None = None,
) -> Source:
    arguments.flag("sources", "stop_at_end", stop_at_end)
    return FolderSource(
        address=address,
        form=form,
        stop_at_end=stop_at_end,
        discover_every_ms=arguments.clock_ms("sources", "discover_every", discover_every),
        incomplete_for_ms=incomplete_for_ms,
        forget_removed_ms=None
        if forget_removed is None
        else arguments.clock_ms("sources", "forget_removed", forget_removed),
    )
