"""Records whose key is null: a key like any other, on every backend and through a kill, unless they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.unit.runtime.conftest import Bench
from tidegate.dataflow.keyed_stream import KeyedStream
from tidegate.dataflow.stream import Stream
from tidegate.errors import GraphError, JobFailed
from tidegate.runtime.settings import Backend
from tidegate.testing import AwaitSnapshot, Kill, ProcessJob, ScriptedSource

BACKENDS: dict[str, Backend] = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="16 MB")}
SCHEMA = "player string, day long"


class Count(tg.KeyedProcess):
    n = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.n.set(self.n.get() + 1)
        yield repr(ctx.key), self.n.get()


def count(stream: KeyedStream) -> Stream:
    return stream.process("count", Count(), returns="key string, n long")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("key", "last"),
    [
        (("player",), [("'a'", 2), ("None", 3)]),
        (("player", "day"), [("('a', 1)", 2), ("(None, 1)", 1), ("(None, None)", 2)]),
    ],
)
def test_null_is_a_key_like_any_other(bench: Bench, backend: str, key: tuple[str, ...], last: list[tuple[str, int]]) -> None:
    """The tuples of a key of several columns tell nulls in different columns apart."""
    script = [("a", 1), (None, None), AwaitSnapshot(times=2), Kill(), (None, None), ("a", 1), (None, 1)]
    job = ProcessJob(
        "job",
        slots=2,
        backend=BACKENDS[backend],
        restart=tg.FixedDelay(attempts=9, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
    )
    count(job.source("in", ScriptedSource(script, schema=SCHEMA)).key_by(*key)).to("out", tg.sinks.collect())
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED and len(handle.failures) == 1
    assert sorted(dict(sorted(handle.results("out"))).items()) == last


@pytest.mark.parametrize("slots", [1, 2])
def test_refused_nulls_end_the_job_with_the_operator_the_column_and_the_record(bench: Bench, slots: int) -> None:
    job = bench.job(slots=slots)
    rows = [("a", 1), (None, 7), ("b", 2)]
    count(job.source("in", tg.sources.rows(rows, SCHEMA)).key_by("player", nulls="refuse")).to("out", tg.sinks.collect())
    handle = bench.start(job)
    with pytest.raises(JobFailed) as failed:
        handle.wait("1 minute")
    assert len(handle.failures) == 1
    for told in (
        "SchemaError: operator 'count': key column 'player' is null in record {'player': None, 'day': 7}",
        "nulls='refuse'",
        "Filter such records out before key_by",
    ):
        assert told in str(failed.value)


def test_where_there_are_none_nothing_is_refused(bench: Bench) -> None:
    def build(job: ProcessJob) -> None:
        rows = [("a", None), ("b", None)]
        count(job.source("in", tg.sources.rows(rows, SCHEMA)).key_by("player", nulls="refuse")).to("out", tg.sinks.collect())

    assert sorted(bench.finish(build).results("out")) == [("'a'", 1), ("'b'", 1)]


def test_a_choice_that_there_isnt_is_refused() -> None:
    job = ProcessJob("job", slots=1)
    with pytest.raises(GraphError, match=r"nulls='drop'; choose 'keep' .* or 'refuse'"):
        job.source("in", tg.sources.rows([("a", 1)], SCHEMA)).key_by("player", nulls="drop")
