"""`nexmark`: every query on two slots, with exactly-once snapshots every second; and whether its result is Spark's.

The peer is the bare generator: two processes that make the same columns of the same records, and drop them. A ratio of 0.5
says that the engine, its shuffle and its state cost as much as making the events does.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tidegate as tg
from benchmarks.nexmark import oracle
from benchmarks.nexmark.events import EVENTS as CYCLE
from benchmarks.nexmark.events import Events
from benchmarks.nexmark.suite import QUERIES, build, query
from benchmarks.workloads import Discard, measure, session
from tidegate.connectors.generator import GeneratorSource
from tidegate.dataflow.contracts import Source, SourceContext

COUNT, FEW = 20_000_000, 2_000_000  # events; few, if a query keeps all bids
CHECKED = Events(50_000, rate=200)  # 250 seconds of event time
BATCH = 65_536


def run(scale: float, queries: Sequence[str] = QUERIES) -> Iterator[dict[str, Any]]:
    """Yield a line for each query."""
    spark = session()
    with tempfile.TemporaryDirectory(prefix="tidegate-nexmark-") as folder:
        oracle.write_events(CHECKED, Path(folder) / "tables")
        for name in queries:
            out = Path(folder) / name
            with oracle.tables(spark, Path(folder) / "tables") as tables:
                wanted = oracle.expected(tables, query(name).SQL)
            job = _job(spark, name)
            schema = build(job, name, CHECKED, tg.sinks.parquet(out))
            job.run()
            got = oracle.result(name, out, schema)
            yield _measured(spark, name, scale) | {
                "equals_spark": got == wanted,
                "difference": oracle.difference(got, wanted),
                "checked_events": CHECKED.count,
                "rows": wanted.total(),
            }


def _measured(spark: Any, name: str, scale: float) -> dict[str, Any]:
    count = FEW if getattr(query(name), "KEEPS_BIDS", False) else COUNT
    events = Events(int(count * scale) // CYCLE * CYCLE)
    job = _job(spark, name)
    build(job, name, events, Discard())
    sources = [node.source for node in job._nodes if node.source is not None]
    records = sum(source.rows or 0 for source in sources if isinstance(source, GeneratorSource))
    ours = measure(job, records)
    bare = records / _generate_all(sources)
    return {
        "name": "nexmark",
        "query": name,
        "against": "bare generator, two processes",
        "ratio": round(ours.records_per_s / bare, 4),
        "peer_records_per_s": round(bare),
        "events": events.count,
        "events_per_s": round(events.count / ours.seconds),
        "records": records,
        "records_per_s": round(ours.records_per_s),
        "seconds": round(ours.seconds, 2),
        "slots": 2,
        "snapshots": ours.epochs,
    }


def _job(spark: Any, name: str) -> tg.Job:
    snapshots = tg.Snapshots(every="1 s", to=tempfile.mkdtemp(prefix="tidegate-bench-"))
    return tg.Job(f"nexmark {name}", spark, slots=2, restart=tg.NoRestart(), snapshots=snapshots)


def _generate_all(sources: Sequence[Source]) -> float:
    """Read the sources in two processes, and return how many seconds it takes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, _take_barrier, (context.Barrier(2),)) as pool:
        return max(pool.map(_generate, [(sources, index) for index in range(2)], chunksize=1))


_ready: Any = None  # the barrier, in a process of the pool


def _take_barrier(ready: Any) -> None:
    global _ready
    _ready = ready


def _generate(task: tuple[Sequence[Source], int]) -> float:
    sources, index = task
    readers = [source.open(SourceContext(index, 2, {}, lambda: 0)) for source in sources]
    for source in sources:
        source.open(SourceContext(index, 2, {}, lambda: 0)).poll(1)  # makes the tables of texts
    _ready.wait()
    started = time.perf_counter()
    while readers:
        for reader in readers:
            reader.poll(BATCH)
        readers = [reader for reader in readers if not reader.finished]
    return time.perf_counter() - started
