# ruff: noqa: N803  (Spark's names)
"""A stateful processor whose states change between two starts of a query: fields that are new, gone, renamed, wider or in
another order, and a state with another name; with the same checkpoint and the same folder of snapshots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tidegate as tg
from tests.faults.queries import STRUCK, strike_once, struck
from tests.spark.processors import ROCKSDB_STATE_STORE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUT = "key string, said string"
HEAP = pytest.param(tg.Heap(), id="heap")
ROCKSDB = pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb")
LONG_ROCKSDB = pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb", marks=pytest.mark.long)
on_both = pytest.mark.parametrize("backend", [HEAP, LONG_ROCKSDB])


class Account(StatefulProcessor):
    """Tells what its states hold, then changes them by a function of its own and the amounts that came. `states` are calls
    of the handle. With a `folder` its process is killed once, at the amount 13."""

    def __init__(
        self,
        states: dict[str, tuple[Any, ...]],
        step: Callable[[Any, int], None],
        *,
        pandas: bool = False,
        folder: str | None = None,
    ) -> None:
        self.states = states
        self.step = step
        self.pandas = pandas
        self.folder = folder

    def init(self, handle: Any) -> None:
        self.held = {
            name: getattr(handle, f"get{kind}State")(name, *schemas) for name, (kind, *schemas) in self.states.items()
        }

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        said = " ".join(f"{name}={self.shown(name)}" for name in self.held)
        for each in rows:
            for amount in each["amount"].tolist() if self.pandas else [each.amount]:
                if amount == 13 and self.folder is not None:
                    strike_once(self.folder, "amount 13", "process")
                self.step(self.held, amount)
        yield pd.DataFrame({"key": [key[0]], "said": [said]}) if self.pandas else Row(key=key[0], said=said)

    def shown(self, name: str) -> str:
        state = self.held[name]
        match self.states[name][0]:
            case "Value":
                return str(state.get())
            case "List":
                return str(list(state.get()))
            case _:
                return str(sorted(state.iterator()))


def before(held: Any, amount: int) -> None:
    cents, orders = held["account"].get() or (0, 0)
    held["account"].update((cents + amount, orders + 1))
    held["items"].appendValue((amount,))
    held["kinds"].updateValue((f"of {amount}",), (amount,))


BEFORE = {
    "account": ("Value", "cents int, orders int"),
    "items": ("List", "cents int"),
    "kinds": ("Map", "kind string", "cents int"),
}


def nothing(held: Any, amount: int) -> None:
    pass


class Query:
    """Starts a query with one processor after the other. Each start gets a file of its own. Without a backend it is Spark's
    own engine."""

    def __init__(self, spark: SparkSession, folder: Path, backend: Any) -> None:
        self.spark = spark
        self.folder = folder
        self.backend = backend
        (folder / "in").mkdir()
        (folder / STRUCK).mkdir()

    def run(self, processor: Account, *amounts: int, **more: Any) -> str:
        """What the processor said of key a at the start, before it took these amounts."""
        number = len(list((self.folder / "in").iterdir()))
        hidden = self.folder / "hidden.json"
        hidden.write_text("".join(json.dumps({"key": "a", "amount": amount}) + "\n" for amount in amounts))
        os.utime(hidden, (1e9 + number, 1e9 + number))
        hidden.rename(self.folder / "in" / f"{number}.json")
        grouped = self.spark.readStream.schema("key string, amount int").json(str(self.folder / "in")).groupBy("key")
        if self.backend is None:  # Spark's own
            run = grouped.transformWithStateInPandas if processor.pandas else grouped.transformWithState
            frame = run(processor, OUT, "Update", "None")
        else:
            ours = tg.transform_with_state_in_pandas if processor.pandas else tg.transform_with_state
            more = {"name": "accounts", "slots": 1, "snapshots": tg.Snapshots(to=str(self.folder / "state")), **more}
            frame = ours(grouped, processor, OUT, "Update", "None", backend=self.backend, **more)
        said: list[str] = []
        query = (
            frame.writeStream.foreachBatch(lambda batch, _: said.extend(row.said for row in batch.collect()))
            .option("checkpointLocation", str(self.folder / "query"))
            .outputMode("update")
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()
        return said[0]  # a batch that failed before comes first, in a batch of its own


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path, backend: Any) -> Query:
    return Query(spark, tmp_path, backend)


@pytest.fixture
def sparks(spark: SparkSession, tmp_path: Path) -> Callable[[str], Query]:
    """A query of Spark's own engine, by the encoding of its states."""

    def of(encoding: str) -> Query:
        session = spark.newSession()
        for name, value in {
            "stateStore.encodingFormat": encoding,
            "noDataMicroBatches.enabled": "false",
            "stateStore.providerClass": ROCKSDB_STATE_STORE,
        }.items():
            session.conf.set(f"spark.sql.streaming.{name}", value)
        (tmp_path / encoding).mkdir()
        return Query(session, tmp_path / encoding, None)

    return of


@pytest.mark.parametrize("backend", [HEAP, LONG_ROCKSDB, pytest.param(None, id="spark", marks=pytest.mark.long)])
@pytest.mark.parametrize("pandas", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_spark_evolves_evolves_without_a_word(query: Query, pandas: bool, sparks: Callable[[str], Query]) -> None:
    """Added, dropped, widened and in another order, in a value, a list and a map."""
    query = sparks("avro") if query.backend is None else query
    query.run(Account(BEFORE, before, pandas=pandas), 5, 7)
    wider = {
        "account": ("Value", "note string, orders long, cents long"),
        "items": ("List", "note string, cents long"),
        "kinds": ("Map", "kind string", "note string, cents long"),
    }
    assert query.run(Account(wider, nothing, pandas=pandas), 1) == (
        "account=(None, 2, 12) items=[(None, 5), (None, 7)] kinds=[(('of 5',), (None, 5)), (('of 7',), (None, 7))]"
    )
    fewer = {"account": ("Value", "cents long"), "items": wider["items"], "kinds": wider["kinds"]}
    assert query.run(Account(fewer, nothing, pandas=pandas), 1).startswith("account=(12,) items")


RENAMED = {
    "balance": ("Value", "amount long, orders int, currency string"),
    "items": ("List", "amount int"),
    "kinds": ("Map", "kind string", "amount int, weight double"),
}
EVOLVE = {
    "balance": tg.Evolution(alias="account", renamed={"amount": "cents"}, added={"currency": "NOK"}),
    "items": tg.Evolution(renamed={"amount": "cents"}),
    "kinds": tg.Evolution(renamed={"amount": "cents"}, added={"weight": 0.5}),
}
SAID = "balance=(12, 2, 'NOK') items=[(5,), (7,)] kinds=[(('of 5',), (5, 0.5)), (('of 7',), (7, 0.5))]"


@on_both
@pytest.mark.parametrize("pandas", [False, pytest.param(True, marks=pytest.mark.long)])
def test_names_and_defaults_are_said_beside_the_processor(query: Query, pandas: bool) -> None:
    query.run(Account(BEFORE, before, pandas=pandas), 5, 7)
    wrong = {**EVOLVE, "kinds": tg.Evolution(renamed={"amount": "cent"}, added={"weight": 0.5})}
    with pytest.raises(Exception, match=r"value\.amount: the snapshot has neither 'amount' nor 'cent', .* it has 'cents'"):
        query.run(Account(RENAMED, nothing, pandas=pandas), evolve=wrong)
    assert query.run(Account(RENAMED, nothing, pandas=pandas), 1, evolve=EVOLVE) == SAID
    assert query.run(Account(RENAMED, nothing, pandas=pandas), 1, evolve=EVOLVE) == SAID, "it may stay in the program"
    assert query.run(Account(RENAMED, nothing, pandas=pandas), 1) == SAID, "and may go"


@pytest.mark.long
@pytest.mark.parametrize("backend", [HEAP, ROCKSDB])
def test_a_field_that_is_not_null_is_refused_by_sparks_avro_only(query: Query, sparks: Callable[[str], Query]) -> None:
    strict = Account({"account": ("Value", "cents int NOT NULL")}, lambda held, _: held["account"].update((None,)))
    with pytest.raises(Exception, match="TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE"):
        sparks("avro").run(strict, 1)
    for other, held in ((sparks("unsaferow"), "account=(0,)"), (query, "account=(None,)")):
        assert [other.run(strict, 1), other.run(strict, 1)] == ["account=None", held]


@pytest.mark.long
@pytest.mark.parametrize("backend", [HEAP, ROCKSDB])
@pytest.mark.parametrize("pandas", [False, True])
def test_a_process_that_is_killed_while_its_state_evolves_changes_nothing(query: Query, pandas: bool) -> None:
    query.run(Account(BEFORE, before, pandas=pandas), 5, 7)

    def after(held: Any, amount: int) -> None:
        cents, orders, currency = held["balance"].get()
        held["balance"].update((cents + amount, orders + 1, currency + "!"))

    assert query.run(Account(RENAMED, after, pandas=pandas, folder=str(query.folder)), 10, 13, evolve=EVOLVE) == SAID
    assert struck(query.folder) == {"amount 13"}
    assert query.run(Account(RENAMED, nothing, pandas=pandas), 1).startswith("balance=(35, 4, 'NOK!!') items")


@pytest.mark.parametrize("backend", [HEAP])
def test_what_can_not_be_is_refused_with_what_can_be_written(query: Query) -> None:
    query.run(Account(BEFORE, before), 5, 7)
    changed = {"balance": ("Value", "cents int, orders int"), "items": ("List", "cents string"), "kinds": BEFORE["kinds"]}
    with pytest.raises(Exception) as failed:
        query.run(Account(changed, nothing), 1)
    told = str(failed.value)
    for advice in (
        "give it to another state, by evolve={'balance': tg.Evolution(alias='account')}, or drop it",
        "drop_state=['accounts.account']",
        "int can't become string",
        "evolve={<state>: tg.Evolution(added={<field>: <default>})}",
        "evolve={<state>: tg.Evolution(renamed={<new>: <old>})}",
        "arguments of tg.transform_with_state",
    ):
        assert advice in told, advice
    changed["items"] = BEFORE["items"]
    assert query.run(Account(changed, nothing), 1, evolve={"balance": tg.Evolution(alias="account")}).startswith(
        "balance=(12, 2) items=[(5,), (7,)]"
    )


@pytest.mark.long
@pytest.mark.parametrize("backend", [HEAP])
def test_an_operator_with_another_name_goes_on_with_a_savepoint(query: Query) -> None:
    query.run(Account(BEFORE, before), 5, 7)
    (newest,) = sorted((query.folder / "state").iterdir())
    for number in (1, 2):
        (query.folder / str(number)).mkdir()
    first, second = (Query(query.spark, query.folder / str(number), query.backend) for number in (1, 2))
    with pytest.raises(Exception, match="alias='accounts', to keep its state"):
        first.run(Account(BEFORE, nothing), 1, name="ledger", restore_from=str(newest))
    assert second.run(Account(BEFORE, nothing), 1, name="ledger", alias="accounts", restore_from=str(newest)).startswith(
        "account=(12, 2) items"
    )


@on_both
def test_the_key_of_a_map_stays_what_it_was(query: Query) -> None:
    """Of several fields it is text in the state, which would be read as something else."""

    def count(held: Any, amount: int) -> None:
        held["pairs"].updateValue(("x", amount), (1,))

    query.run(Account({"pairs": ("Map", "word string, part int", "n int")}, count), 5)
    for other in ("part int, word string", "word string", "word string, part int, more int"):
        with pytest.raises(Exception, match=r"a key of the map was \(string, int\) and is now"):
            query.run(Account({"pairs": ("Map", other, "n int")}, nothing), 1)
    assert query.run(Account({"pairs": ("Map", "text string, number int", "n long")}, nothing), 1) == (
        "pairs=[(('x', 5), (1,))]"
    )


@pytest.mark.parametrize(
    ("evolve", "match"),
    [
        (
            {"nosuch": tg.Evolution()},
            "evolve= has 'nosuch', and init of the processor of 'accounts' declares 'account', 'items'",
        ),
        ({"account": {"added": {}}}, r"give tg\.Evolution\(…\)"),
        (
            {"account": tg.Evolution(added={"nosuch": 1})},
            r"evolve=\{'account': …\}: added=\{'nosuch': …\}: .* no such field",
        ),
        ({"account": tg.Evolution(added={"orders": "x"})}, r"evolve=\{'account': …\}: added=\{'orders': 'x'\}"),
        ({"account": tg.Evolution(renamed={"orders": "orders"})}, "give the name that the field had before"),
        ({"account": tg.Evolution(alias="items")}, "alias that is the name or alias of another state"),
        ({"account": tg.Evolution(alias="__x")}, "give the name that it had"),
    ],
)
def test_what_is_said_wrongly_is_refused_when_the_query_is_built(spark: SparkSession, evolve: Any, match: str) -> None:
    data = spark.createDataFrame([("a", 1)], "key string, amount int")
    with pytest.raises(tg.JobError, match=match):
        tg.transform_with_state(data.groupBy("key"), Account(BEFORE, nothing), OUT, name="accounts", evolve=evolve)
