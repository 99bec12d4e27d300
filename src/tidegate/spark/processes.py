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

A transform that was built and of which no task ever came has left no processes. Its place is free when no query can be
started with it any more: when nothing in Spark's JVM refers to its function, which every plan that it is in does.

A query that ends may be started again, and its place may be another's by then. Then the processes are shared, and batches
restore their state from snapshots whenever tasks come to a process that doesn't hold their slot (runtime/micro_batches.py):
slower, not wrong. A transform that is built again gets a place of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VARIABLE = "TIDEGATE_TRANSFORM"
# Spark ends those that had nothing to do for a minute, and looks every ten seconds.
PROCESSES_END_AFTER_S = 120.0


class Tenant(Protocol):
    """What has its slots in a place."""

    @property
    def has_begun(self) -> bool:
        """Whether any task of it ever came."""

    @property
    def query(self) -> str | None:
        """The id of the streaming query whose batches it ran last; None before the first batch."""

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
    over_since_s: float | None = None


_places: list[_Let] = []        # never fewer
_lock = threading.Lock()        # of the places
_making = threading.Lock()      # of the context's variables

_logger = logging.getLogger(__name__)


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
        let.is_out_of_use = unreferenced(spark, made)
    except BaseException:
        let.is_out_of_use = lambda: True
        raise
    return made


def _place_for(new: _Let) -> int:
    """Rather one whose processes are waiting."""
    for is_warm, place in [(is_warm, place) for is_warm in (True, False) for place in range(len(_places))]:
        with _lock:
            let = _places[place]
            if not _is_free(let, new.slots, is_warm=is_warm):
                continue
            _places[place] = new        # nobody else takes it
        # To end slots takes a moment, in which others may find a place.
        try:
            is_empty = let.tenant.move_out()
        except Exception:
            _logger.exception("The slots of a query that is over could not be ended. Another place is taken")
            is_empty = False
        if is_empty:
            return place
        _places[place] = let
    with _lock:
        _places.append(new)
        return len(_places) - 1


def _is_free(let: _Let, slots: int, *, is_warm: bool) -> bool:
    """`is_warm`: with processes that wait, as many as slots. Otherwise, with none."""
    if not let.tenant.has_begun:
        return not is_warm and let.slots == slots and let.is_out_of_use()
    if not _is_over(let):
        let.over_since_s = None
        return False
    now_s = time.monotonic()
    if let.over_since_s is None:
        let.over_since_s = now_s
    if is_warm:
        return let.slots == slots and let.tenant.is_settled
    return now_s - let.over_since_s >= PROCESSES_END_AFTER_S


def _is_over(let: _Let) -> bool:
    """Whether its query was started, and runs no longer."""
    if let.tenant.query is None:
        return let.is_out_of_use()
    session: Any = let.spark._jsparkSession
    try:
        return session.streams().get(let.tenant.query) is None
    except Exception:  # noqa: BLE001  (the session was stopped, and its queries with it)
        return True


def unreferenced(spark: SparkSession, made: DataFrame) -> Callable[[], bool]:
    """Whether the function of that `mapInArrow` is garbage in the JVM, or as good as that. Plans may be copied; all copies
    have the one function."""
    jvm: Any = spark._jvm
    try:
        function = made._jdf.queryExecution().logical().functionExpr().func()
    except Exception:  # noqa: BLE001  (a Spark that has it elsewhere: then it is never known)
        return lambda: False
    reference = jvm.java.lang.ref.WeakReference(function)

    def is_garbage() -> bool:
        try:
            return bool(reference.refersTo(None))
        except Exception:  # noqa: BLE001  (the JVM is gone)
            return False

    return is_garbage
