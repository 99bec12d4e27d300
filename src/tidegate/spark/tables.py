"""State as tables: registering the format "tidegate" with a session, and a shorthand for reading.

PySpark is imported when it is needed, so that `import tidegate` works without it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from tidegate import arguments
from tidegate.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

FORMAT = "tidegate"
_registered: WeakKeyDictionary[SparkSession, str] = WeakKeyDictionary()  # the name of the format in each session


def register(spark: SparkSession) -> None:
    """Register the format "tidegate" with this session. `tg.Job(…, spark)` does it, too."""
    from pyspark.errors import AnalysisException

    from tidegate.spark.state_source import FILTERS_ARE_SAFE, StateSource

    if not hasattr(spark, "dataSource"):
        raise JobError(f"register({spark!r}): give a SparkSession")
    if spark in _registered:  # Spark warns if a source is registered again
        return
    if FILTERS_ARE_SAFE:
        # Spark passes filters to a source in Python only with this setting. Without it, Spark refuses a source that asks for
        # them.
        spark.conf.set(PUSHDOWN, "true")
    try:
        spark.dataSource.register(StateSource)
        _registered[spark] = FORMAT
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        _registered[spark] = register_under_own_name(spark, StateSource, FORMAT)  # `read_state` works with any name


def register_under_own_name(spark: SparkSession, source: type[DataSource], prefix: str) -> str:
    """Register a source with this session under a name that no other session has, and return the name.

    Spark 4.3.0 doesn't know in one session what another has registered, and yet refuses to register that name again if the
    other session is the first of its process.
    """
    name = f"{prefix}_{uuid4().hex}"
    spark.dataSource.register(type("Named", (source,), {"name": classmethod(lambda cls: name)}))
    return name


def read_state(
    spark: SparkSession,
    path: str,
    state: str,
    *,
    operator: str | None = None,
    per: str = "entry",
    key: str | Sequence[str] = (),
    keys: Any = None,
    key_groups: range | Sequence[int] | None = None,
    epoch: int | None = None,
    diff: str | int | None = None,
) -> DataFrame:
    """Return a state of a snapshot as a DataFrame: `spark.read.format("tidegate")` with its options.

    With `keys` (a key or a list of keys; a key of several columns is a tuple) or `key_groups`, nothing else is read. With
    `diff`, an older snapshot, the rows are what changed since then.

    If the state can't be read, this call raises `NotFound` or `JobError`, which say what the snapshot has.
    """
    from tidegate.spark.state_source import requested

    _check_arguments(path, state, operator=operator, key=key, key_groups=key_groups, diff=diff)
    register(spark)
    options: dict[str, Any] = {
        "state": state,
        "operator": operator,
        "per": per,
        "epoch": epoch,
        "diff": diff,
        "key": key if isinstance(key, str) else ", ".join(key),
        "keys": None if keys is None else json.dumps(keys, default=str),
        "key_groups": None if key_groups is None else ", ".join(map(str, key_groups)) or "none",
    }
    given = {name: str(value) for name, value in options.items() if value not in (None, "")}
    # Spark would start a Python process for this, and wrap what is wrong in errors of its own.
    requested({"path": path, **given}).open()
    return spark.read.format(_registered[spark]).options(**given).load(path)


def _check_arguments(path: Any, state: Any, *, operator: Any, key: Any, key_groups: Any, diff: Any) -> None:
    arguments.text("read_state", "path", path, "the folder of a savepoint or of snapshots")
    arguments.text("read_state", "state", state, "the name of a state, such as 'count'")
    if operator is not None:
        arguments.text("read_state", "operator", operator, "the name of the state's operator")
    if not isinstance(key, str):
        arguments.names("read_state", "key", key)
    if key_groups is not None:
        if isinstance(key_groups, str) or not isinstance(key_groups, Collection):
            arguments.refuse("read_state", "key_groups", key_groups, "a list or a range of key-groups")
        for each in key_groups:
            arguments.whole_number("read_state", "key_groups", each)
    if diff is not None and not isinstance(diff, str):
        arguments.whole_number("read_state", "diff", diff, at_least=1)
