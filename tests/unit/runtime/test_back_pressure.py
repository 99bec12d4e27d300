"""A slow sink slows its sources down; what is under way, and so memory, stays bounded."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg
from tests.jobs import completed, until
from tests.unit.runtime.conftest import Bench, stat_of
from tidegate.dataflow.contracts import SinkContext, SinkWriter

ROW_BYTES = 4_000
BATCH_ROWS = 256


class _SlowWriter(SinkWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        time.sleep(0.02)


class SlowSink(tg.Sink):
    def open(self, context: SinkContext) -> SinkWriter:
        return _SlowWriter()


TEXTS = pa.array(["x" * ROW_BYTES] * BATCH_ROWS)


def wide(split: int, start: int, count: int) -> dict[str, Any]:
    return {"key": np.arange(start, start + count), "text": TEXTS.slice(0, count)}


class Pass(tg.KeyedProcess):
    seen = tg.value("boolean")

    def process(self, record: Any, ctx: Any) -> Any:
        yield tuple(record)


def test_a_slow_sink_holds_its_sources_back_and_memory_doesnt_grow(bench: Bench) -> None:
    """The sink is in slot 0 only: what slot 1 reads has to wait for it across two shuffles."""
    job = bench.job(slots=2, every="500 ms", tuning=tg.Tuning(heartbeat="50 ms", max_batch_rows=BATCH_ROWS))
    source = tg.sources.generator(wide, schema="key long, text string", splits=2)
    stream = job.source("in", source).key_by("key").process("pass", Pass(), returns="key long, text string")
    stream.rebalance().to("out", SlowSink(), parallelism=1)
    handle = bench.start(job)

    def under_way() -> int:
        """Rows that were read and not yet written; the counters are as old as the last heartbeat, at most 50 ms."""
        read = {name: values["records_in"] for name, values in handle.metrics.items()}
        written = read.pop("v2[0]", 0)
        return read["v0[0]"] + read["v0[1]"] - written if len(read) == 4 and written > 10 * BATCH_ROWS else 0

    until(under_way, "records at the sink", handle=handle)
    time.sleep(1)  # the queues fill up
    started = len(completed(handle))
    resident = {pid: stat_of(pid, "VmRSS") for pid in handle.attempts[-1].slots.values()}
    most = 0
    give_up_s = time.monotonic() + 2
    while time.monotonic() < give_up_s:
        most = max(most, under_way())
        time.sleep(0.05)
    grown = {pid: stat_of(pid, "VmRSS") - before for pid, before in resident.items()}
    # Four channels on the first shuffle and two on the second, of which each holds 4 MB at either end and 4 MB in the
    # kernel, and passes its bounds by a batch.
    assert most * ROW_BYTES < 6 * (4 + 4 + 4 + 4) << 20, f"{most} rows are under way"
    assert max(grown.values()) < 64 << 20, grown
    assert len(completed(handle)) > started, "snapshots still complete under pressure"
    assert handle.failures == []
    handle.cancel()
