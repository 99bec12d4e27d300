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

A transform that was built and of which no task ever came has left no processes. Its place is used again when no query can be
started with it any more: when nothing in Spark's JVM refers to its function, which every plan that it is in does.

A query that ends may be started again, and its place may be another's by then. Then the processes are shared, and batches
restore their state from snapshots whenever tasks come to a process that doesn't hold their slot (runtime/micro_batches.py):
slower, not wrong. A transform that is built again gets a place of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VARIABLE = "TIDEGATE_TRANSFORM"


class Tenant(Protocol):
    """What has its slots in a place."""

    @property
    def query(self) -> str | None:
        """The id of the streaming query whose batches it ran last; None before the first batch."""

    @property
    def has_begun(self) -> bool:
        """Whether any task of it ever came."""

    @property
    def is_settled(self) -> bool:
        """Whether the last batch was completed by the slots that the one before had left in their processes."""

    def move_out(self) -> bool:
        """End the slots that wait for the next batch of a query that is over. It waits for no batch: False if one runs."""


@dataclass(slots=True, eq=False)
class _Let:
    """`is_out_of_use`: whether no query can be started with what was made there any more."""

    tenant: Tenant
    slots: int
    spark: SparkSession
    is_out_of_use: Callable[[], bool] = lambda: False


_places: list[_Let] = []        # never fewer
_lock = threading.Lock()        # of the places
_making = threading.Lock()      # of the context's variables


def in_own_processes(spark: SparkSession, tenant: Tenant | None, slots: int, make: Callable[[], DataFrame]) -> DataFrame:
    """Return the DataFrame that `make` makes by `mapInArrow`. Its function has the tenant's processes; without a tenant,
    those of the session. The variables are the context's, so only one transform at a time is made."""
    if tenant is None:
        with _making:
            return make()
    let = _Let(tenant, slots, spark)
    place, environment = _place_for(let), spark.sparkContext.environment
    try:
        with _making:
            environment[VARIABLE] = str(place)
            try:
                made = make()
            finally:
                del environment[VARIABLE]
        let.is_out_of_use = _unreferenced(spark, made)
    except BaseException:
        let.is_out_of_use = lambda: True
        raise
    return made


def _place_for(new: _Let) -> int:
    """Rather one whose processes are waiting."""
    for place, has_begun in [(place, has_begun) for has_begun in (True, False) for place in range(len(_places))]:
        with _lock:
            let = _places[place]
            if let.slots != new.slots or let.tenant.has_begun != has_begun or not _is_free(let):
                continue
            _places[place] = new        # nobody else takes it
        # To end slots takes a moment, in which others may find a place.
        if let.tenant.move_out():
            return place
        _places[place] = let
    with _lock:
        _places.append(new)
        return len(_places) - 1


def _is_free(let: _Let) -> bool:
    """Whether its query was started, and runs no longer, and left as many processes as it had slots; or was not started and
    never can be."""
    if not let.tenant.has_begun:
        return let.is_out_of_use()
    if let.tenant.query is None or not let.tenant.is_settled:
        return False
    session: Any = let.spark._jsparkSession
    try:
        return session.streams().get(let.tenant.query) is None
    except Exception:  # noqa: BLE001  (the session was stopped, and its queries with it)
        return True


def _unreferenced(spark: SparkSession, made: DataFrame) -> Callable[[], bool]:
    """Whether the function of that `mapInArrow` is garbage in the JVM, or as good as that. Plans may be copied; all copies
    have the one function."""
    jvm: Any = spark._jvm
    function = made._jdf.queryExecution().logical().functionExpr().func()
    reference = jvm.java.lang.ref.WeakReference(function)

    def is_garbage() -> bool:
        try:
            return bool(reference.refersTo(None))
        except Exception:  # noqa: BLE001  (the JVM is gone)
            return False

    return is_garbage
