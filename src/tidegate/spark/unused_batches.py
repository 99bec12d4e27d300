"""Micro-batches that Spark commits without running the transform that is in their plan, looked for while a query runs.

Spark runs what the output of a batch needs. If a function of `foreachBatch` never uses its batch, and adaptive execution is
off, that is nothing: the state stays as it is, batch after batch. The first batch that is used fails, with the numbers of
those left out (driver/attempts.py); where none ever is, nobody would be told. So a thread looks every few seconds at the
queries that run: if one is at batch n, then n−1 is committed, and a transform in its plan has completed it or was left out.

What it finds is logged, once for each run of a query. A query that ends before it is looked at for the second time is not
noticed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tidegate.driver.attempts import WHEN_LEFT_OUT
from tidegate.driver.failures import log
from tidegate.snapshots.manifest import MicroBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_EVERY_S = 5.0


class Transform(Protocol):
    @property
    def done(self) -> MicroBatch | None:
        """What it completed last."""


@dataclass(slots=True)
class _Watched:
    name: str
    spark: SparkSession
    transform: Transform


@dataclass(slots=True)
class _Seen:
    """A run of a query: the number of the batch that it was first seen at, and the transforms in its plan."""

    first: int
    transforms: set[str] = field(default_factory=set)


_watched: dict[str, _Watched] = {}  # by the name of what the transform observes, which is its own
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(spark: SparkSession, observed: str, name: str, transform: Transform) -> None:
    """From now on, as long as the session runs. `observed` is the name of what the transform observes."""
    global _thread
    with _lock:
        _watched[observed] = _Watched(name, spark, transform)
        if _thread is None:
            _thread = threading.Thread(target=_look_again_and_again, name="tidegate-unused-batches", daemon=True)
            _thread.start()


def unwatch(observed: str) -> None:
    """No query can be started with it any more."""
    with _lock:
        _watched.pop(observed, None)


def _look_again_and_again() -> None:
    global _thread
    seen: dict[str, _Seen] = {}
    while True:
        time.sleep(LOOK_EVERY_S)
        with _lock:
            _forget_those_of_stopped_sessions()
            if not _watched:
                _thread = None
                return
            watched = dict(_watched)
        active: set[str] = set()
        for spark in {id(each.spark): each.spark for each in watched.values()}.values():
            with contextlib.suppress(Exception):  # a session or query that ends meanwhile
                active |= _look(spark, watched, seen)
        for run in seen.keys() - active:
            del seen[run]


def _forget_those_of_stopped_sessions() -> None:
    for observed, each in list(_watched.items()):
        if each.spark.sparkContext._jsc is None:
            del _watched[observed]


def _look(spark: SparkSession, watched: dict[str, _Watched], seen: dict[str, _Seen]) -> set[str]:
    """Return the runs of queries that are active."""
    session: Any = spark._jsparkSession
    active: set[str] = set()
    for query in session.streams().active():
        execution = query.streamingQuery().lastExecution()
        if execution is None:
            continue
        number, run = int(execution.currentBatchId()), str(query.runId().toString())
        active.add(run)
        if run not in seen:
            plan = str(execution.analyzed().toString())
            seen[run] = _Seen(number, {each for each in watched if f"CollectMetrics {each}," in plan})
        for observed in seen[run].transforms & watched.keys():
            done = watched[observed].transform.done
            is_done = done is not None and done.query == str(query.id().toString()) and done.number >= number - 1
            if number > seen[run].first and not is_done:
                seen[run].transforms.discard(observed)
                log(logging.WARNING, left_out(watched[observed].name, str(query.id().toString()), number - 1))
    return active


def left_out(name: str, query: str, number: int) -> str:
    return (
        f"Job {name!r}: Spark has committed micro-batch {number} of the query {query} without running the transform, so "
        f"its records are not in the state: {WHEN_LEFT_OUT}. Use the output of every batch (batch.count() does). Once "
        f"a later batch is used, the query fails, since its state can't be right"
    )
