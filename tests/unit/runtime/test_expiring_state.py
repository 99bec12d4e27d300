"""State with a ttl in a job: forgotten in time, through snapshots and crashes; and a ttl that comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.runtime.conftest import Bench
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Crash, Pause, ScriptedSource

RECORD, NUMBERED = "key string, n long", "key string, n long, short long, long long, of_map long"


class Numbering(tg.KeyedProcess):
    """Numbers the records of a key in states that live for different times."""

    short = tg.value("long", default=0, ttl="20 ms")
    long = tg.value("long", default=0, ttl="1 day")
    by_n = tg.map("long", "long", ttl="20 ms", ttl_refresh="read")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.short.set(self.short.get() + 1)
        self.long.set(self.long.get() + 1)
        self.by_n.put(record.n, 1)
        yield record.key, record.n, self.short.get(), self.long.get(), len(self.by_n)


class Remembering(tg.KeyedProcess):
    """The same without a ttl where it had one, and the other way round."""

    short = tg.value("long", default=0)
    long = tg.value("long", default=0, ttl="1 day", ttl_refresh="read")
    by_n = tg.map("long", "long")

    process = Numbering.process


def build(job: ProcessJob, bench: Bench, function: tg.KeyedProcess, *script: Any) -> None:
    source = ScriptedSource(list(script), schema=RECORD, memory=bench.folder / f"marks-{type(function).__name__}")
    (job.source("records", source).key_by("key").process(function, returns=NUMBERED, name="numbering")
     .sink("out", tg.sinks.parquet(bench.out)))


@pytest.mark.parametrize("crash", [[], [AwaitSnapshot(times=2), Crash()]])
def test_state_that_wasn_t_written_in_its_time_is_forgotten(bench: Bench, crash: list[Any]) -> None:
    bench.finish(lambda job: build(job, bench, Numbering(), ("a", 1), *crash, Pause("200 ms"), ("a", 2), Pause("200 ms"),
                                   ("a", 3)), slots=2)
    assert sorted(committed(bench.out)) == [("a", 1, 1, 1, 1), ("a", 2, 1, 2, 1), ("a", 3, 1, 3, 1)]
