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

# Longer than the short ttl, and it begins when what came before was processed: a snapshot has it.
GAP = (AwaitSnapshot(times=2), Pause("300 ms"))
RECORD, NUMBERED = "key string, n long", "key string, n long, short long, long long, of_map long"


class Numbering(tg.KeyedProcess):
    """Numbers the records of a key in states that live for different times."""

    short = tg.value("long", default=0, ttl="200 ms")
    long = tg.value("long", default=0, ttl="1 day")
    by_n = tg.map("long", "long", ttl="200 ms", ttl_refresh="read")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        short, long = self.short.get() + 1, self.long.get() + 1
        self.short.set(short)
        self.long.set(long)
        of_map = len(self.by_n)
        self.by_n.put(record.n, 1)
        yield record.key, record.n, short, long, of_map


class Remembering(tg.KeyedProcess):
    """Where it had a short one there is none now."""

    short = tg.value("long", default=0)
    long = tg.value("long", default=0, ttl="1 day", ttl_refresh="read")
    by_n = tg.map("long", "long")
    process = Numbering.process


def numbered(bench: Bench, backend: str, function: tg.KeyedProcess, *script: Any) -> None:
    job = ProcessJob(
        "job",
        slots=2,
        restart=tg.FixedDelay(attempts=5, delay=0),
        backend=tg.Heap() if backend == "heap" else tg.RocksDB(memory="16 MB"),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="100 ms"),
    )
    source = ScriptedSource(list(script), schema=RECORD, memory=bench.folder / "marks")
    stream = job.source("in", source).key_by("key").process("numbering", function, returns=NUMBERED)
    stream.to("out", tg.sinks.parquet(bench.out))
    assert bench.start(job).wait("1 minute") is tg.Status.FINISHED


backends = pytest.mark.parametrize("backend", ["heap", "rocksdb"])


@backends
@pytest.mark.parametrize("crash", [(), (AwaitSnapshot(times=2), Crash())], ids=["as it is", "crashed"])
def test_state_that_wasn_t_written_in_its_time_is_forgotten(bench: Bench, backend: str, crash: tuple[Any, ...]) -> None:
    numbered(bench, backend, Numbering(), ("a", 1), *crash, *GAP, ("a", 2), *GAP, ("a", 3))
    assert sorted(committed(bench.out)) == [("a", 1, 1, 1, 0), ("a", 2, 1, 2, 0), ("a", 3, 1, 3, 0)]


@backends
def test_a_ttl_may_come_and_go_between_two_runs(bench: Bench, backend: str) -> None:
    first, second = (("a", 1), *GAP, ("b", 2)), (("a", 3), ("b", 4), *GAP, ("a", 5))
    numbered(bench, backend, Numbering(), *first)
    numbered(bench, backend, Remembering(), *first, *second)
    numbered(bench, backend, Numbering(), *first, *second, *GAP, ("a", 6))
    # What was left of `short` when its ttl went depends on how quickly the second run began, so b's isn't looked at.
    found = {n: rest for _, n, *rest in committed(bench.out)}
    assert found[1] == [1, 1, 0] and found[2] == [1, 1, 0]
    assert found[3] == [1, 2, 0], "expired when the ttl was taken away, and not brought back"
    assert found[5] == [2, 3, 1], "no ttl any more"
    assert found[6] == [1, 4, 0], "a ttl again, from the start on"
