"""Files that are each in the order of event time, and overlap: no record is late, however many files a subtask reads."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_job_backends import BACKENDS
from tidegate.testing.processes import ProcessJob

FILES, ROWS, KEYS = 5, 1_200, 3
STEP_MS, SECOND_MS = 25, 1_000
RECORD = "key long, at long"
LATE = -1


def records_of(file: int) -> list[tuple[int, int]]:
    """All files are of the same half minute; the last of them only of its end."""
    return [(number % KEYS, number * STEP_MS + file) for number in range(ROWS) if file < FILES - 1 or number > ROWS // 2]


def write_files(folder: Path, form: str) -> None:
    folder.mkdir()
    for file in range(FILES):
        records = records_of(file)
        if form == "json":
            lines = [json.dumps({"key": key, "at": at}) for key, at in records]
            (folder / f"{file}.json").write_text("\n".join(lines) + "\n")
        else:
            keys, times = zip(*records, strict=True)
            pq.write_table(pa.table({"key": keys, "at": times}), folder / f"{file}.parquet", row_group_size=100)


class Seconds(tg.KeyedProcess):
    """Counts the records of each second; those that come behind its end are late."""

    counts = tg.map("long", "long")
    most = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        end = (record.at // SECOND_MS + 1) * SECOND_MS
        if end <= ctx.watermark_ms:
            yield record.key, end, LATE
            return
        self.counts.put(end, self.counts.get(end, 0) + 1)
        self.most.set(max(self.most.get(), len(self.counts)))
        ctx.timers.event_time(end)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[int, int, int | None]]:
        yield ctx.key, at, self.counts.get(at)
        self.counts.remove(at)
        if not self.counts:
            yield ctx.key, 0, self.most.get()


class DiesOnce:
    """Takes its time, and is killed in the middle, when there is a snapshot to go back to."""

    def __init__(self, bench: Bench, at: int) -> None:
        self._flag = str(bench.folder / "flag")
        self._manifests = str(bench.snapshots / "job" / "manifests")
        self._at = at
        self._seen = 0

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self._seen += batch.num_rows
        time.sleep(0.005)
        if self._seen > self._at and not os.path.exists(self._flag) and any(Path(self._manifests).glob("*")):
            Path(self._flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def expected_counts() -> Counter[tuple[int, int]]:
    return Counter((key, (at // SECOND_MS + 1) * SECOND_MS) for file in range(FILES) for key, at in records_of(file))


@pytest.mark.parametrize("form", ["json", "parquet"])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_record_is_late_though_a_subtask_reads_several_files(bench: Bench, form: str, slots: int, backend: str) -> None:
    write_files(bench.folder / "in", form)
    job = ProcessJob(
        "job",
        slots=slots,
        restart=tg.FixedDelay(attempts=3, delay=0),
        backend=BACKENDS[backend],
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
        tuning=tg.Tuning(max_batch_rows=50),
    )
    source = getattr(tg.sources, form)(bench.folder / "in", schema=RECORD, stop_at_end=True)
    (
        job.source("in", source)
        .map_batches(DiesOnce(bench, FILES * ROWS // slots // 3), returns=RECORD)
        .with_watermark("at", "0.1 s")
        .key_by("key")
        .process("seconds", Seconds(), returns="key long, at long, n long")
        .to("out", tg.sinks.parquet(bench.out))
    )
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.attempts) == 2 and handle.attempts[1].restored_epoch is not None
    rows = committed(bench.out)
    assert not [row for row in rows if row[2] == LATE]
    assert sorted(row for row in rows if row[1]) == sorted((key, end, n) for (key, end), n in expected_counts().items())
    at_once = max(n for _, at, n in rows if not at)
    assert at_once <= 4 + ROWS * STEP_MS // SECOND_MS // 2, "they are read in the order of event time, so state stays small"


class Slow(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        time.sleep(0.001)
        yield record


def test_no_split_becomes_idle_while_its_slot_is_busy_with_others(bench: Bench) -> None:
    """Both splits have records all the time, and each is in order. The slot takes longer than `idle_after` for a batch."""
    job = bench.job(slots=1)
    source = tg.sources.generator(make_row=lambda i: (i, i * 10), schema="id long, ts long", splits=2, rows=5000, rate=3000)
    keyed = job.source("in", source).with_watermark("ts", "500 ms", idle_after="100 ms").key_by("id")
    windows = keyed.window(tg.tumbling("ts", 1000), late="late").aggregate("windows", n=tg.count())
    windows.to("out", tg.sinks.collect())
    windows.side_output("late").to("late", tg.sinks.collect())
    keyed.process("slow", Slow(), returns="id long, ts long").to("slowly", tg.sinks.collect())
    handle = bench.start(job)
    handle.wait(timeout="60 s")
    assert handle.results("late") == []
    assert len(handle.results("out")) == 5000
