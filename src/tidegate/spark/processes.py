"""Which of Spark's Python processes the slots of a streaming transform live in.

Spark keeps the Python processes of functions with different environment variables apart. Every streaming transform has its
own value of one variable, so its tasks come back to the processes that hold its slots.

The value is the number of a place, and places are used again: the next transform with as many slots takes the place of one
whose query is over. Spark keeps an interpreter for each value on every executor until the session ends, and idle processes
for a minute. A place that is used again saves the interpreter, and the second that a new process takes for its imports.
Spark hands idle processes out in turn: with one too many, no task would ever come back to its slot. So the number of slots
must be the same, and the last batch of the query that is over must have found all its slots where the batch before had
left them, which shows that there are no more processes than slots. A query that failed, was stopped within a batch or had
one batch only leaves its place to nobody.

A query that ends may be started again, and its place may be another's by then. Then the processes are shared, and batches
restore their state from snapshots whenever tasks come to a process that doesn't hold their slot (runtime/micro_batches.py):
slower, not wrong. A transform that is built again gets a place of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VARIABLE = "TIDEGATE_TRANSFORM"


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


@dataclass(frozen=True, slots=True)
class _Let:
    tenant: Tenant
    slots: int
    spark: SparkSession


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
    for place, let in enumerate(_places):
        if let.slots == new.slots and _is_over(let):
            let.tenant.move_out()
            _places[place] = new
            return place
    _places.append(new)
    return len(_places) - 1


def _is_over(let: _Let) -> bool:
    """Whether its query was started, and runs no longer, and left as many processes as it had slots."""
    if let.tenant.query is None or not let.tenant.is_settled:
        return False
    session: Any = let.spark._jsparkSession
    try:
        return session.streams().get(let.tenant.query) is None
    except Exception:  # noqa: BLE001  (the session was stopped, and its queries with it)
        return True
