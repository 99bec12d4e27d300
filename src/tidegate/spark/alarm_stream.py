# ruff: noqa: N802  (Spark's names)
"""The stream that asks Spark for a batch without data, as an object in the driver.

Spark's JVM calls the object through the gateway, as it calls the function of a `foreachBatch`. So the stream needs no
process; a Python data source needs one for each query, and three more for the first query of a session (docs/adr/021).

An offset counts alarms. A batch has no rows: Spark's log needs to have the batch, since the slots run in every batch. The
offsets are those of the Python data source (alarm_source.py), so a query that was started with either can be continued with
the other.

The gateway keeps a connection for each query's thread that calls Python, as it does for `foreachBatch`, and neither side
closes it when the thread has ended. Ours are closed when the next query ends. Otherwise a program that starts queries
forever would run out of sockets and threads.

Spark has no public way to make a stream of such an object. The object implements Spark's first interface for sources, which
file sources still use. `alarm.KNOWN_SPARK` lists the versions that were seen to accept it.
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
_ending: list[tuple[Any, Any]] = []  # threads of queries that were ending, with their connections
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
    """The object that Java calls. A query's trigger waits for every call except `stop`, so they wait for nothing and take no
    lock."""

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
        """Report nothing: this is only for the query's progress."""

    def prepareForTriggerAvailableNow(self) -> None:
        """Timers that become due while the query runs count as available, as with Spark's own operators."""

    def commit(self, end: Any) -> None:
        """There is nothing to release."""

    def stop(self) -> None:
        """Remember the connection of the calling thread, which calls nothing after this."""
        from py4j.java_gateway import JavaObject

        _close_connections()
        with contextlib.suppress(Exception):  # a gateway that doesn't keep a connection for each thread
            server = JavaObject("GATEWAY_SERVER", self._context._gateway._gateway_client)
            thread = self._context._jvm.java.lang.Thread.currentThread()
            _ending.append((thread, server.getCallbackClient().getPerThreadConnection()))

    def hashCode(self) -> int:
        return self._number

    def equals(self, other: Any) -> bool:
        """Return False: Scala's collections, which hold sources, compare identity first."""
        return False

    def toString(self) -> str:
        return f"{NAME}[{self._number}]"


def _close_connections() -> None:
    with _closing:
        for thread, connection in list(_ending):
            with contextlib.suppress(Exception):  # its JVM has ended since
                if thread.isAlive():
                    continue
                connection.shutdown()
            _ending.remove((thread, connection))
