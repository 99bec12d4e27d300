"""Aggregates over the last records of each key by event time, compared with sorted lists; restored and rescaled."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.keyed_runs import BACKENDS, Subtasks
from tests.unit.operators.windowing import subtask_of
from tidegate.dataflow.operators import over, timed_records
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.ranking import over_spec
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.types import parse_schema

RECORD = "key long, ts long, n long, text string"
SCHEMA = parse_schema(RECORD)
RETURNS = f"{RECORD}, total long, texts array<string>, newest string, of_key long"


def spec_of(rows: int) -> Any:
    aggregates = {
        "total": tg.sum("n"),
        "texts": tg.collect_list("text"),
        "newest": tg.last("text"),
        "of_key": tg.max("key * 2"),
    }
    return over_spec("op", SCHEMA, ("key",), order_by=["ts", "n"], rows=rows, late="late", aggregates=aggregates)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_each_record_has_the_aggregates_of_the_last_ones_of_its_key(
    backend: str, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over, "STEP_ROWS", 6)  # several steps for each watermark
    monkeypatch.setattr(timed_records, "MOST_OF_LENGTH", 1 + 31 * seed)  # with 1, stretches have many lengths
    rng = Random(seed)
    subtasks = Subtasks(spec_of(rows), RECORD, RETURNS, backend=backend, parallelism=2, sides={"late": RECORD})
    waiting: list[Any] = []
    gone: dict[int | None, list[Any]] = defaultdict(list)
    now, reached = 0, -(10**9)
    for number in range(40):
        what = rng.random()
        if what < 0.6:
            some = [
                (rng.randrange(5), rng.choice((None, now, now, now - 25, now - 3)), rng.randrange(4), f"{number} {i}")
                for i in range(rng.choice((1, 3, 12)))
            ]
            now += rng.randrange(900)  # stretches are a second long
            late = [each for each in some if each[1] is not None and each[1] <= reached]
            waiting += [each for each in some if each[1] is not None and each not in late]
            assert subtasks.feed(some) == []
            assert sorted(subtasks.aside("late")) == sorted(late)
        elif what < 0.85:
            reached = max(reached, now - rng.randrange(8))
            subtasks, emitted = worked(subtasks, reached, rng)
            assert sorted(emitted) == sorted(due(waiting, gone, reached, rows))
        else:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))
    _, emitted = worked(subtasks, MAX_WATERMARK_MS, rng)
    assert sorted(emitted) == sorted(due(waiting, gone, MAX_WATERMARK_MS, rows))


def worked(subtasks: Subtasks, at_ms: int, rng: Random) -> tuple[Subtasks, list[Any]]:
    """Bring a watermark, and perhaps restore all in the middle of the work."""
    emitted = subtasks.watermark(at_ms)
    while any(bench.operator.has_work() for bench in subtasks.benches):
        if rng.random() < 0.2:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))
            emitted += subtasks.watermark(at_ms)
        for bench in subtasks.benches:
            if bench.operator.has_work():
                bench.operator.work()
        emitted += subtasks.taken()
    return subtasks, emitted


def due(waiting: list[Any], gone: dict[int | None, list[Any]], at_ms: int, rows: int) -> list[Any]:
    """Take the records out that are due, and return them with their results."""
    found = []
    for each in sorted((each for each in waiting if each[1] <= at_ms), key=lambda each: (each[1], each[2])):
        waiting.remove(each)
        gone[each[0]].append(each)
        last = gone[each[0]][-rows:]
        found.append((*each, sum(one[2] for one in last), [one[3] for one in last], each[3], each[0] * 2))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_stay_in_order_if_stretches_of_several_lengths_come_together(backend: str) -> None:
    one, other = next((0, key) for key in range(1, 20) if subtask_of(key, 2) != subtask_of(0, 2))
    subtasks = Subtasks(spec_of(3), RECORD, RETURNS, backend=backend, parallelism=2, sides={"late": RECORD})
    subtasks.feed([(one, number * 1024, 0, "") for number in range(40)])  # so many that they are in longer stretches
    subtasks.feed([(other, 1500, 0, "first")])
    subtasks = subtasks.restored(1)
    subtasks.feed([(other, 1600, 0, "second"), (other, 9000, 0, "third")])
    emitted = [row for row in subtasks.watermark(10**6) if row[0] == other]
    assert [row[5] for row in emitted] == [["first"], ["first", "second"], ["first", "second", "third"]]


def test_only_what_the_aggregates_read_of_the_last_records_is_kept() -> None:
    spec = over_spec("op", SCHEMA, ("key",), order_by="ts", rows=3, late=None, aggregates={"total": tg.sum("n + key")})
    assert [field.name for field in spec.read] == ["n"]
    subtasks = Subtasks(spec, RECORD, f"{RECORD}, total long", backend="heap", parallelism=1)
    subtasks.feed([(1, number, number, "x") for number in range(10)])
    assert [row[4] for row in subtasks.watermark(20)][-2:] == [6 + 7 + 8 + 3, 7 + 8 + 9 + 3]
    frozen = subtasks.benches[0].freeze()
    assert sum(rows.num_rows for rows in frozen["last"]) == 2 and not sum(rows.num_rows for rows in frozen["waiting"])


def test_a_sum_that_is_too_large_names_the_operator_and_the_key() -> None:
    spec = over_spec("op", SCHEMA, ("key",), order_by="ts", rows=2, late=None, aggregates={"total": tg.sum("n")})
    subtasks = Subtasks(spec, RECORD, f"{RECORD}, total long", backend="heap", parallelism=1)
    subtasks.feed([(number, 1, 2**62, "x") for number in (7, 8, 8)])
    with pytest.raises(tg.UserFunctionError, match=r"(?s)'the operator'.*key 8.*doesn't fit into a long"):
        subtasks.watermark(20)


def test_mistakes_are_errors_when_the_job_is_built() -> None:
    def keyed() -> tg.KeyedStream:
        return Pipeline().source("in", tg.sources.rows([], RECORD)).key_by("key")

    for arguments, named, message in (
        (("ts", 0), {"n": tg.count()}, "from 1 to 1,000"),
        (("ts", 3), {}, "name at least one aggregate"),
        (("ts", 3), {"text": tg.count()}, "the name of a column that the result has already"),
        (("text", 3), {"c": tg.count()}, "event time is a timestamp"),
        (([], 3), {"c": tg.count()}, "there is no column ''"),
        ((["ts", "text"], 3), {"c": tg.count()}, "records are ordered by numbers"),
        (("ts", 3), {"c": tg.count(), "late": 3}, "late=3"),
    ):
        with pytest.raises(tg.TidegateError, match=message):
            keyed().over("op", *arguments, **named)
    stream = keyed().over("op", "ts", 3, c=tg.count(), late="late")
    assert stream.schema.names == [*SCHEMA.names, "c"] and stream._pipeline._nodes[-1].needs_event_time
    assert stream.side_output("late").schema.equals(SCHEMA)
