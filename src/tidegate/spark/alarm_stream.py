# ruff: noqa: N802  (Spark's names)
"""The stream that wakes the slots when there is no data, as an object of the driver's.

Spark's JVM calls it through the gateway, as it calls the function of a `foreachBatch`. So it needs no process; a Python data
source needs one for each query, and three more for the first of a session (docs/adr/021).

An offset counts alarms. A batch has no rows: all that is wanted is that Spark's log has the batch, since the slots run
in each. The offsets are those of the Python data source (alarm_source.py), so a query that was started with either can be
continued with the other.

For calls from the thread of a query the gateway keeps a connection, which neither side closes when the thread has ended: for
`foreachBatch` it does so, too. Ours are closed when the next query ends, or a program that starts queries forever would run
out of sockets and threads.

Spark has no public way to make a stream of such an object. It implements Spark's first interface for sources, which files
have to this day. `alarm.KNOWN_SPARK` says which versions have been seen to take it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidegate.spark.alarm import COUNT, SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "TidegateAlarm"

_numbers = itertools.count(1)
# Threads of queries that were ending, with their connections.
_ending: list[tuple[Any, Any]] = []
_closing = threading.Lock()


def alarm_stream(goes_off: Callable[[], bool], spark: SparkSession) -> DataFrame:
    """Return a streaming DataFrame without rows that asks for a batch whenever `goes_off` at a trigger."""
    from pyspark.java_gateway import ensure_callback_server_started
    from pyspark.sql.classic.dataframe import DataFrame

    context: Any = spark.sparkContext
    session: Any = spark._jsparkSession
    ensure_callback_server_started(context._gateway)
    sql = context._jvm.org.apache.spark.sql
    no_rows = session.internalCreateDataFrame(context._jsc.emptyRDD().rdd(), sql.types.StructType.fromDDL(SCHEMA), True)
    relation = getattr(sql.execution.streaming.runtime, "StreamingExecutionRelation$")
    plan = getattr(relation, "MODULE$").apply(AlarmStream(goes_off, context, no_rows), session)
    return DataFrame(sql.classic.Dataset.ofRows(session, plan), spark)


class AlarmStream:
    """What Java calls. A trigger of the query waits for each call but `stop`, so none waits for anything or takes a lock."""

    class Java:
        implements = (
            "org.apache.spark.sql.execution.streaming.Source",
            "org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow",
        )

    def __init__(self, goes_off: Callable[[], bool], context: Any, no_rows: Any) -> None:
        self._goes_off = goes_off
        self._context = context
        sql = context._jvm.org.apache.spark.sql
        self._offset = sql.execution.streaming.runtime.SerializedOffset
        self._limit = sql.connector.read.streaming.ReadLimit.allAvailable()
        self._schema = no_rows.schema()
        self._no_rows = no_rows
        self._number = next(_numbers)

    def schema(self) -> Any:
        return self._schema

    def latestOffset(self, start: Any, limit: Any) -> Any:
        if not self._goes_off():
            return start
        count = 0 if start is None else json.loads(start.json())[COUNT]
        return self._offset(json.dumps({COUNT: count + 1}))

    def getBatch(self, start: Any, end: Any) -> Any:
        return self._no_rows

    def getDefaultReadLimit(self) -> Any:
        return self._limit

    def reportLatestOffset(self) -> None:
        """Only for the query's progress."""

    def prepareForTriggerAvailableNow(self) -> None:
        """What is due is available, be it that it becomes so while the query runs: Spark's own operators ask likewise."""

    def commit(self, end: Any) -> None:
        """There is nothing to let go of."""

    def stop(self) -> None:
        """Spark's thread calls it last."""
        from py4j.java_gateway import JavaObject

        _close_connections()
        with contextlib.suppress(Exception):  # a gateway that doesn't keep a connection for each thread
            server = JavaObject("GATEWAY_SERVER", self._context._gateway._gateway_client)
            thread = self._context._jvm.java.lang.Thread.currentThread()
            _ending.append((thread, server.getCallbackClient().getPerThreadConnection()))

    def hashCode(self) -> int:
        return self._number

    def equals(self, other: Any) -> bool:
        """Not with any other object. Scala's collections, which keep sources, look first whether two are one."""
        return False

    def toString(self) -> str:
        return f"{NAME}[{self._number}]"


def _close_connections() -> None:
    with _closing:
        for each in list(_ending):
            thread, connection = each
            with contextlib.suppress(Exception):  # its JVM has ended since
                if thread.isAlive():
                    continue
                connection.shutdown()
            _ending.remove(each)
