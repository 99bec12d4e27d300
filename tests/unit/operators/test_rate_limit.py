"""Rate limits, compared with a bucket for each key; restored and rescaled, on both backends."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.keyed_runs import BACKENDS, Subtasks
from tidegate.dataflow.operators.rate_limit import RateLimitSpec
from tidegate.dataflow.pipeline import Pipeline

RECORD = "key long, n long"
COUNT, PER_MS, BURST = 3, 1000, 5


def limited(backend: str, parallelism: int = 1) -> Subtasks:
    spec = RateLimitSpec(("key",), COUNT, PER_MS, BURST, "excess")
    return Subtasks(spec, RECORD, RECORD, backend=backend, parallelism=parallelism, sides={"excess": RECORD})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_record_passes_if_its_key_has_a_token(backend: str, seed: int) -> None:
    rng, subtasks, now = Random(seed), limited(backend, 2), 10_000
    buckets: dict[int, tuple[Fraction, int]] = {}
    for number in range(60):
        now += rng.choice((0, 10, 333, 334, 1000, 3000))
        subtasks.at(now)
        records = [(rng.randrange(6), 100 * number + i) for i in range(rng.choice((1, 5, 40)))]
        passed: list[Any] = []
        dropped: list[Any] = []
        for key in {key for key, _ in records}:
            tokens, before = buckets.get(key, (Fraction(BURST), now))
            buckets[key] = min(Fraction(BURST), tokens + Fraction((now - before) * COUNT, PER_MS)), now
        for record in records:
            tokens, at = buckets[record[0]]
            (passed if tokens >= 1 else dropped).append(record)
            buckets[record[0]] = (tokens - 1 if tokens >= 1 else tokens), at
        assert sorted(subtasks.feed(records)) == sorted(passed)
        assert sorted(subtasks.aside("excess")) == sorted(dropped)
        if rng.random() < 0.2:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))


def test_full_buckets_are_removed() -> None:
    subtasks = limited("heap")
    subtasks.at(10_000)
    subtasks.feed([(key, 0) for key in range(50)])
    subtasks.at(11_667)
    subtasks.feed([(1, 1)])
    (rows,) = subtasks.benches[0].freeze()["buckets"]
    assert rows.column("key").to_pylist() == [1]


def test_a_clock_that_goes_back_gives_no_tokens_and_takes_none() -> None:
    subtasks = limited("heap")
    subtasks.at(10_000)
    assert len(subtasks.feed([(1, n) for n in range(4)])) == 4
    subtasks.at(5_000)
    assert len(subtasks.feed([(1, n) for n in range(4)])) == 1


def test_mistakes_are_errors_when_the_job_is_built() -> None:
    def keyed() -> tg.KeyedStream:
        return Pipeline().source("in", tg.sources.rows([], RECORD)).key_by("key")

    mistakes: tuple[tuple[Any, str], ...] = (
        (lambda: keyed().rate_limit("op", 0, per="1 s"), "rate_limit 0; give how many"),
        (lambda: keyed().rate_limit("op", 1, per="0 s"), "per='0 s'; give at least a millisecond"),
        (lambda: keyed().rate_limit("op", 1, per=5), "operator 'op': per=5: give the unit, too: '5 s' or '5 ms'"),  # type: ignore[arg-type]
        (lambda: keyed().rate_limit("op", 1, per="1 s", burst=0), "burst=0; give how many"),
        (lambda: keyed().rate_limit("op", 1, per="1 s", excess=""), "excess=''; give a name"),
    )
    for build, message in mistakes:
        with pytest.raises(tg.GraphError, match=message):
            build()
    limited = keyed().rate_limit("op", 1, per="1 s", excess="too many")
    assert limited.schema == limited.side_output("too many").schema
