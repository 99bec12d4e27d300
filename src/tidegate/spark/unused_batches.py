"""Warnings about micro-batches that Spark has committed without running the transform in their plan.

Spark runs only what the output of a batch needs. If a function of `foreachBatch` never uses its batch, and adaptive
execution is off, Spark runs nothing, and the state stays as it is, batch after batch. The first batch that is used fails,
with the numbers of the batches that were left out (driver/attempts.py). If no batch is ever used, no error would show it. So
a thread checks the active queries every few seconds: if a query is at batch n, then n−1 is committed, and each transform in
its plan has either completed n−1 or was left out.

A transform that was left out is logged once for each run of a query. A query that ends before its second check is missed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.driver.attempts import WHEN_LEFT_OUT
from tidegate.driver.job_log import LOGGER
from tidegate.snapshots.manifest import MicroBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_EVERY_S = 5.0


@dataclass(slots=True)
class _Watched:
    name: str
    spark: SparkSession
    done: Callable[[], MicroBatch | None]


@dataclass(slots=True)
class _Seen:
    """A run of a query: its batch at the first check, and the transforms in its plan."""

    first: int
    transforms: set[str] = field(default_factory=set)


_watched: dict[str, _Watched] = {}  # by the name under which the transform observes rows, different for each transform
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(spark: SparkSession, observed: str, name: str, done: Callable[[], MicroBatch | None]) -> None:
    """Watch a transform as long as the session runs. `observed` is the name under which the transform observes rows, and
    `done` returns the micro-batch that it completed last."""
    global _thread
    with _lock:
        _watched[observed] = _Watched(name, spark, done)
        if _thread is None:
            _thread = threading.Thread(target=_look_repeatedly, name="tidegate-unused-batches", daemon=True)
            _thread.start()


def unwatch(observed: str) -> None:
    """Stop watching a transform with which no query can be started any more."""
    with _lock:
        _watched.pop(observed, None)


def _look_repeatedly() -> None:
    global _thread
    seen: dict[str, _Seen] = {}
    while True:
        time.sleep(LOOK_EVERY_S)
        with _lock:
            watched = {observed: each for observed, each in _watched.items() if each.spark.sparkContext._jsc is not None}
            for observed in _watched.keys() - watched.keys():  # of sessions that were stopped
                del _watched[observed]
            if not watched:
                _thread = None
                return
        active: set[str] = set()
        for spark in {id(each.spark): each.spark for each in watched.values()}.values():
            with contextlib.suppress(Exception):  # a session or query that ends meanwhile
                active |= _look(spark, watched, seen)
        for run_id in seen.keys() - active:
            del seen[run_id]


def _look(spark: SparkSession, watched: dict[str, _Watched], seen: dict[str, _Seen]) -> set[str]:
    """Log the transforms that were left out, and return the ids of the runs of active queries."""
    session: Any = spark._jsparkSession
    active: set[str] = set()
    for query in session.streams().active():
        execution = query.streamingQuery().lastExecution()
        if execution is None:
            continue
        number, run_id, query_id = int(execution.currentBatchId()), str(query.runId().toString()), str(query.id().toString())
        active.add(run_id)
        if run_id not in seen:
            plan = str(execution.analyzed().toString())
            seen[run_id] = _Seen(number, {each for each in watched if f"CollectMetrics {each}," in plan})
        for observed in seen[run_id].transforms & watched.keys():
            done = watched[observed].done()
            is_done = done is not None and done.query == query_id and done.number >= number - 1
            if number > seen[run_id].first and not is_done:
                seen[run_id].transforms.discard(observed)
                name = watched[observed].name
                LOGGER.warning("%s", left_out(name, query_id, number - 1), extra={"event": "left-out", "job": name})
    return active


def left_out(name: str, query: str, number: int) -> str:
    return (
        f"Job {name!r}: Spark has committed micro-batch {number} of the query {query} without running the transform, so "
        f"its records are not in the state: {WHEN_LEFT_OUT}. Use the output of every batch (batch.count() does). Once "
        f"a later batch is used, the query fails, since its state can't be right"
    )
