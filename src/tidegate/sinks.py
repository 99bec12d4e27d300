"""The built-in sinks: `tg.sinks`.

| sink | where | guarantee |
|---|---|---|
| `parquet` | files in a folder, visible when their snapshot is complete | exactly-once |
| `collect` | a list on the driver | exactly-once |
| `print` | lines printed by the driver | at-least-once |

Other sinks implement `Sink` (tidegate/dataflow/contracts.py). The classes behind these functions are in
tidegate/connectors/.
"""

from __future__ import annotations

import os

from tidegate.connectors.collecting import CollectSink
from tidegate.connectors.folders import address_of
from tidegate.connectors.parquet_sink import ParquetSink
from tidegate.connectors.printing import PrintSink
from tidegate.dataflow.contracts import Sink

__all__ = ["collect", "parquet", "print"]


def parquet(path: str | os.PathLike[str], *, row_group_rows: int = 65_536, compression: str = "zstd") -> Sink:
    """Write Parquet files into a folder. A reader sees only the records of complete snapshots, each once.

        stream.to("out", tg.sinks.parquet("counts/"))
        spark.read.parquet("counts/")               # correct at every moment, also while the job runs

    Each subtask adds one file for each epoch in which it received records. Files that aren't committed yet are in the folder
    `_tidegate`, which Spark and Arrow don't read; don't touch it. The path may be a URI that Arrow knows (`s3://…`,
    `hdfs://…`). `compression` is "zstd", "snappy" or another codec of Arrow's.

    Upserts and changes are refused, since a file can't replace or delete a row of an earlier one: write `stream.as_append()`
    for a log of updates, or of changes with their `row_kind`.
    """
    return ParquetSink(address=address_of(path), row_group_rows=row_group_rows, compression=compression)


def collect() -> Sink:
    """Bring the records to the driver, each once, ordered by epoch and, within an epoch, by subtask.

    Of an upsert stream (`keyed.aggregate`) it brings every update; the last one of a key is its result. Of changes it
    brings every insertion and deletion, with its `row_kind`.

    Use it in tests and for small results: more than 32 MB from one subtask in one epoch is an error, because the records
    are part of the snapshot. Use `parquet` for more.
    """
    return CollectSink()


def print(*, limit: int = 1_000) -> Sink:
    """Print the records on the driver as `name> column=value, …`, when their snapshot is complete.

    Of an upsert stream it prints every update, and of changes every insertion and deletion. Of each epoch and subtask at
    most `limit` records are printed; the rest are counted. After a restart of the program, the last lines may be printed
    again.
    """
    return PrintSink(limit)
