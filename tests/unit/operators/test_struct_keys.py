"""A key that is one struct: operators that keep records give it back as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench
from tests.unit.operators.keyed_runs import BACKENDS
from tidegate.dataflow.pipeline import Pipeline

KINDS = {"struct<a: long, b: string>": {"a": 1, "b": "x"}, "struct<a: long>": {"a": 1}}


def over(left: Any, _: Any) -> Any:
    return left.with_watermark("ts", 0).key_by("k").over("op", "ts", 3, c=tg.count())


def temporal(left: Any, right: Any) -> Any:
    left, right = left.with_watermark("ts", 0).key_by("k"), right.with_watermark("at", 0).key_by("k")
    return left.join("op", right, as_of=("ts", "at"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [over, temporal])
def test_keys_of_records_that_wait(make: Callable[[Any, Any], Any], kind: str, backend: str) -> None:
    pipeline, key = Pipeline(), KINDS[kind]
    make(
        pipeline.source("l", tg.sources.rows([], f"k {kind}, ts long, n long")),
        pipeline.source("r", tg.sources.rows([], f"k {kind}, at long, m long")),
    )
    node = next(node for node in pipeline._nodes if node.name == "op")
    bench = Bench(node.spec, *node.input_schemas, returns=node.schema, make_backend=BACKENDS[backend])
    if len(node.inputs) > 1:
        bench.feed((key, 5, 2), port=1)
    bench.feed((key, 5, 2))
    bench.operator.on_watermark(10**6)
    assert [row[:3] for row in bench.out.rows] == [(key, 5, 2)]
    bench.operator.close()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_records_that_are_ranked(kind: str) -> None:
    pipeline, key = Pipeline(), KINDS[kind]
    changes = pipeline.source("in", tg.sources.rows([], f"k {kind}, n long")).as_upserts("n").as_changelog("changes")
    changes.key_by("k").top("op", 1, by="n")
    node = pipeline._nodes[-1]
    bench = Bench(node.spec, *node.input_schemas, returns=node.schema)
    assert bench.feed(("+I", key, 5), ("+I", key, 6)) == [("+I", key, 5, 1)]
    assert bench.feed(("-D", key, 5)) == [("-D", key, 5, 1), ("+I", key, 6, 1)]
