"""State that grows beyond the heap's limit ends the job with an error, before the system kills the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.unit.jobs.conftest import Bench
from tidegate.testing.processes import ProcessJob


class Keep(tg.KeyedProcess):
    text = tg.value("binary")

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        self.text.set(bytes([record.key % 256]) * (1 << 20))
        yield record


def keeping(bench: Bench, memory: Any, keys: int) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=1,
        backend=tg.Heap(memory=memory),
        tuning=tg.Tuning(heartbeat="20 ms", max_batch_rows=16),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every=None),
    )
    source = tg.sources.rows([(key,) for key in range(keys)], "key long")
    job.source("in", source).key_by("key").process("keep", Keep(), returns="key long").to("out", tg.sinks.collect())
    return bench.start(job)


def test_a_heap_above_its_limit_fails_with_advice_and_no_restart(bench: Bench) -> None:
    handle = keeping(bench, "400 MB", keys=4_000)
    with pytest.raises(tg.JobFailed, match=r"tg.Heap\(memory=…\) allows 419,430,400.*backend=tg.RocksDB"):
        handle.wait("1 minute")
    assert len(handle.failures) == 1 and handle.failures[0].permanent


def test_a_heap_within_its_limit_runs_and_reports_its_memory(bench: Bench) -> None:
    handle = keeping(bench, "2 GB", keys=50)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert 50 << 20 < handle.attempts[-1].memory[0] < 2 << 30


def test_a_limit_that_no_process_can_keep_is_refused() -> None:
    with pytest.raises(tg.JobError, match="at least 268435456 bytes"):
        tg.Heap(memory="10 MB")
