"""select, filter, with_columns and explode in whole jobs, on processes."""

from __future__ import annotations

import pytest

import tidegate as tg
from tests.unit.jobs.conftest import Bench
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Crash, ScriptedSource

ROWS = [(i, f"a{i % 3} b c", float(i % 7)) for i in range(900)]
EXPECTED = sorted(
    (i % 5, i / 2, word) for i, text, price in ROWS if price > 2 for word in text.split(" ")[: 1 if i % 2 else 3]
)


def build(job: ProcessJob, source: tg.Source) -> None:
    few = job.source("rows", source).filter("price > 2").with_columns(key="i % 5", half="i / 2")
    words = few.explode("split(text, ' ') AS word").filter("i % 2 = 0 OR word LIKE 'a%'")
    words.select("CAST(key AS int) AS key", "half", "word").key_by("key").to("out", tg.sinks.collect())


def test_a_chain_of_steps_survives_a_crash_without_loss_or_repetition(bench: Bench) -> None:
    scripts = [
        [
            *ROWS[part:400:2],
            AwaitSnapshot(times=2),
            *ROWS[400 + part : 600 : 2],
            *([Crash()] if part else []),
            *ROWS[600 + part :: 2],
        ]
        for part in range(2)
    ]
    source = ScriptedSource(*scripts, schema="i int, text string, price double", memory=bench.folder / "marks")
    handle = bench.finish(lambda job: build(job, source))
    assert len(handle.failures) == 1
    assert sorted(map(tuple, handle.results("out"))) == EXPECTED


def test_a_record_without_a_value_ends_the_job_with_the_expression_and_the_record(bench: Bench) -> None:
    job = bench.job(restart=tg.NoRestart())
    rows = job.source("rows", ScriptedSource([(4,), (0,), (2,)], schema="n int"))
    rows.select("n", "12 / n AS share", name="shares").to("out", tg.sinks.collect())
    handle = job.start()
    with pytest.raises(tg.JobFailed) as raised:
        handle.wait("1 minute")
    assert raised.value.operator == "shares" and raised.value.record == "Row(n=0)"
    assert "division by zero, in (12 / n)" in str(raised.value)
