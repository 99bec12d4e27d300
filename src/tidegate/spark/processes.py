"""Which of Spark's Python processes hold the slots of a streaming transform.

Spark runs functions with different environment variables in different Python processes. Every streaming transform has its
own value of one variable, so its tasks return to the processes that hold its slots.

The value is the number of a place, and places are used again: a transform takes the place of one whose query is over. Spark
keeps an interpreter for each value on every executor until the session ends, and idle processes for a minute. A place that
is used again saves the interpreter, and the second that a new process takes for its imports.

Spark hands idle processes out in turn: with one process too many, no task would ever return to its slot. So the place of a
query that has just ended goes to a transform with as many slots, if the last batch found all its slots where the batch
before had left them, which shows that there are no more processes than slots. Any other place (of a query that failed, was
stopped within a batch, had only one batch or another number of slots) is free when its processes have ended. So a program
that starts queries forever has as many places as it starts queries within two minutes.

A transform of which no task ever came has left no processes. Its place is free when no query can be started with it any
more: when nothing in Spark's JVM refers to its function, to which every plan with the transform refers.

A query that has ended may be started again after another transform has taken its place. Then the two share the processes,
and a batch restores its state from a snapshot whenever a task comes to a process that doesn't hold its slot
(dataframes/micro_batches.py): slower, not wrong. A transform that is built again gets a place of its own.
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
PROCESSES_END_AFTER_S = 120.0  # Spark ends processes that were idle for a minute, and looks every ten seconds


class Tenant(Protocol):
    """A transform whose slots are in a place."""

    @property
    def has_begun(self) -> bool:
        """Whether any task of the transform ever came."""

    @property
    def query(self) -> str | None:
        """The id of the streaming query whose batches the transform ran last; None before the first batch."""

    @property
    def is_settled(self) -> bool:
        """Whether the last batch was completed by the slots that the batch before had left in their processes."""

    def move_out(self) -> bool:
        """End the slots that wait for the next batch of a query that is over. Return False at once if a batch runs."""


@dataclass(slots=True, eq=False)
class _Let:
    """A place that a tenant has. `is_out_of_use()`: no query can be started any more with what was made there."""

    tenant: Tenant
    slots: int
    spark: SparkSession
    is_out_of_use: Callable[[], bool] = lambda: False
    over_since_s: float | None = None


_places: list[_Let] = []  # by their numbers; none is ever removed
_lock = threading.Lock()  # for the places
_making = threading.Lock()  # for the context's variables

_logger = logging.getLogger(__name__)


def in_own_processes(spark: SparkSession, tenant: Tenant | None, slots: int, make: Callable[[], DataFrame]) -> DataFrame:
    """Return the DataFrame that `make` makes by `mapInArrow`. Its function runs in the tenant's processes; without a tenant,
    in those of the session. The environment belongs to the context, so only one transform is made at a time."""
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
    """Take a free place, if possible one whose processes are waiting, or else a new one."""
    for is_warm, place in [(is_warm, place) for is_warm in (True, False) for place in range(len(_places))]:
        with _lock:
            let = _places[place]
            if not _is_free(let, new.slots, is_warm=is_warm):
                continue
            _places[place] = new  # so that no other thread takes it
        # Without the lock: ending slots takes a moment, in which other threads may look for a place.
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
    """Whether the place is free and has as many waiting processes as slots; if not `is_warm`, free and has no processes."""
    if not let.tenant.has_begun:
        return not is_warm and let.slots == slots and let.is_out_of_use()
    if not _is_over(let):
        let.over_since_s = None
        return False
    let.over_since_s = let.over_since_s or time.monotonic()
    if is_warm:
        return let.slots == slots and let.tenant.is_settled
    return time.monotonic() - let.over_since_s >= PROCESSES_END_AFTER_S


def _is_over(let: _Let) -> bool:
    """Whether its query was started and no longer runs."""
    if let.tenant.query is None:
        return let.is_out_of_use()
    session: Any = let.spark._jsparkSession
    try:
        return session.streams().get(let.tenant.query) is None
    except Exception:  # noqa: BLE001  (the session was stopped, and its queries with it)
        return True


def unreferenced(spark: SparkSession, made: DataFrame) -> Callable[[], bool]:
    """Return a function that checks whether the function of that `mapInArrow` is garbage in the JVM. Plans may be copied;
    all copies refer to the same function."""
    jvm: Any = spark._jvm
    try:
        reference = jvm.java.lang.ref.WeakReference(made._jdf.queryExecution().logical().functionExpr().func())
    except Exception:  # noqa: BLE001  (a version of Spark that has it elsewhere: then nothing is ever known to be garbage)
        return lambda: False

    def is_garbage() -> bool:
        try:
            return bool(reference.refersTo(None))
        except Exception:  # noqa: BLE001  (the JVM is gone)
            return False

    return is_garbage
