"""Where records go: `tg.sinks`.

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
    """Write Parquet files into a folder; a reader sees the records of complete snapshots, each once, and no others.

        stream.to("out", tg.sinks.parquet("counts/"))
        spark.read.parquet("counts/")               # right at every moment, also while the job runs

    Each subtask adds one file for each epoch in which it got records. Files that aren't committed yet are in the folder
    `_tidegate`, which Spark and Arrow don't read; leave it there. The path may be a URI that Arrow knows (`s3://…`,
    `hdfs://…`). `compression` is "zstd", "snappy" or another codec of Arrow's.
    """
    return ParquetSink(address=address_of(path), row_group_rows=row_group_rows, compression=compression)


def collect() -> Sink:
    """Bring the records to the driver, each once, in order of epochs and within an epoch of subtasks.

    For tests and results of modest size: more than 32 MB from a subtask in one epoch is an error, for the records
    travel through the snapshot. Use `parquet` for more.
    """
    return CollectSink()


def print(*, limit: int = 1_000) -> Sink:
    """Print the records on the driver as `name> column=value, …`, when their snapshot is complete.

    For a look at the data. Of each epoch and subtask at most `limit` records are printed, the others are counted. A
    line can be printed twice, if the program was stopped between printing it and noting that.
    """
    return PrintSink(limit)
