"""Which of Spark's Python processes the slots of a streaming transform live in.

Spark keeps the Python processes of functions with different environment variables apart. Every streaming transform has its
own value of one variable, so its tasks come back to the processes that hold its slots.

The value is the number of a place, and places are used again: a transform takes the place of one whose query is over. Spark
keeps an interpreter for each value on every executor until the session ends, and idle processes for a minute. A place that
is used again saves the interpreter, and the second that a new process takes for its imports.

Spark hands idle processes out in turn: with one too many, no task would ever come back to its slot. So the place of a query
that has just ended goes to a transform with as many slots, if the last batch found all its slots where the batch before had
left them, which shows that there are no more processes than slots. Any other place (of a query that failed, was stopped
within a batch, had one batch only or another number of slots) is free when its processes have ended. So a program that
starts queries forever has as many places as it starts queries within two minutes.

A query that ends may be started again, and its place may be another's by then. Then the processes are shared, and batches
restore their state from snapshots whenever tasks come to a process that doesn't hold their slot (runtime/micro_batches.py):
slower, not wrong. A transform that is built again gets a place of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VARIABLE = "TIDEGATE_TRANSFORM"
# Spark ends those that had nothing to do for a minute, and looks every ten seconds.
PROCESSES_END_AFTER_S = 120.0


class Tenant(Protocol):
    """What has its slots in a place."""

    @property
    def query(self) -> str | None:
        """The id of the streaming query whose batches it ran last; None before the first batch."""

    @property
    def is_settled(self) -> bool:
        """Whether the last batch was completed by the slots that the one before had left in their processes."""

    def move_out(self) -> None:
        """Ends the slots that wait for the next batch of a query that is over."""


@dataclass(slots=True)
class _Let:
    tenant: Tenant
    slots: int
    spark: SparkSession
    over_since_s: float | None = None


_places: list[_Let] = []
_lock = threading.Lock()


@contextlib.contextmanager
def own_processes(spark: SparkSession, tenant: Tenant | None, slots: int) -> Iterator[None]:
    """Functions that are made within have the tenant's processes; without one, those of the session. The variables are the
    context's, so only one transform at a time is within."""
    environment = spark.sparkContext.environment
    with _lock:
        if tenant is not None:
            environment[VARIABLE] = str(_place_for(_Let(tenant, slots, spark)))
        try:
            yield
        finally:
            environment.pop(VARIABLE, None)


def _place_for(new: _Let) -> int:
    now_s = time.monotonic()
    free = [place for place, let in enumerate(_places) if _is_free(let, new.slots, now_s)]
    if not free:
        _places.append(new)
        return len(_places) - 1
    place = free[0]
    _places[place].tenant.move_out()
    _places[place] = new
    return place


def _is_free(let: _Let, slots: int, now_s: float) -> bool:
    if not _is_over(let):
        let.over_since_s = None
        return False
    if let.over_since_s is None:
        let.over_since_s = now_s
    is_fit = let.slots == slots and let.tenant.is_settled
    return is_fit or now_s - let.over_since_s >= PROCESSES_END_AFTER_S


def _is_over(let: _Let) -> bool:
    """Whether its query was started, and runs no longer."""
    if let.tenant.query is None:
        return False
    session: Any = let.spark._jsparkSession
    try:
        return session.streams().get(let.tenant.query) is None
    except Exception:  # noqa: BLE001  (the session was stopped, and its queries with it)
        return True
