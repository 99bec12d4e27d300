# ruff: noqa: N803  (Spark's names)
"""A streaming query with a stateful processor of Spark's, the answers that a sequential computation gives, and its driver.

A file is a micro-batch. The processor has a value, a list and a map for each key and timers of event time, begins with an
initial state, and tells in every row all that it holds; a sum depends on the order of all records of the key before it. Late
rows are in every file, so that a watermark that was lost or came too early shows. Output and state are equal to those of
`expected(…)` exactly if nothing was lost, doubled or reordered in records, states, timers and event time.

The driver gives the query one file after the other. A plan says where somebody is killed (queries.py), or what goes wrong:

    initial 1000      within handleInitialState, at the account with this opening
    rows 75           within handleInputRows, at the record of this number
    timer 116         within a handleExpiredTimer, at the timer of this second
    behind 130        in the stage behind the slots, at the row of this record: their snapshot is complete, the batch isn't
    between 4         when batch 4 is over
    poison 99         a record that the processor can't take, until it is mended
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery

import tidegate as tg
from tests.faults.queries import (
    STRUCK,
    committed_files,
    fail_write_once,
    session_on,
    strike_driver,
    strike_once,
    strike_slot_once,
    struck,
)
from tests.jobs import check_clean
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.opening import open_store

INPUT = "id long, key string, kind string, at timestamp, at_ms long"
OUTPUT = "key string, what string, id long, n long, sum long, recent string, kinds string, timers string, watermark_ms long"
ROWS, KEYS = 60, 7
BEGIN_S, STEP_S = 100, 10
DELAY_MS, TIMER_AFTER_MS, OPENING_TIMER_MS = 5_000, 12_000, 116_000
MODULUS = 1_000_003
RECENT = 3
OPENINGS = {f"k{number}": 1000 * number for number in (0, 1, 2, 9)}  # there is no record of k9
POISON = "this record is poison"


def records(batch: int) -> list[dict[str, Any]]:
    found = []
    for number in range(batch * ROWS, (batch + 1) * ROWS):
        second = BEGIN_S + STEP_S * batch + number % STEP_S
        late = number % 20 == 7 and batch >= 3
        found.append(
            {
                "id": number,
                "key": f"k{number * 5 % KEYS}",
                "kind": "abc"[number % 3],
                "at_ms": 1000 * (second - 3 * STEP_S if late else second),
            }
        )
    return found


# --- what is expected ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Account:
    n: int = 0
    sum: int = 0
    recent: list[int] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    timers: list[int] = field(default_factory=list)

    def told(self, key: str, what: str, number: int, watermark_ms: int) -> tuple[Any, ...]:
        return (
            key,
            what,
            number,
            self.n,
            self.sum,
            json.dumps(self.recent),
            json.dumps(self.kinds, sort_keys=True),
            json.dumps(sorted(self.timers)),
            watermark_ms,
        )


def expected(files: int) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """All rows of the output, and the states at the end, as the driver tells them."""
    accounts = {key: Account(sum=opening, recent=[-1], timers=[OPENING_TIMER_MS]) for key, opening in OPENINGS.items()}
    out = []
    late_ms = watermark_ms = 0
    for batch in range(files):
        rows = records(batch)
        for row in rows:
            if row["at_ms"] <= late_ms:
                continue
            account = accounts.setdefault(row["key"], Account())
            account.n, account.sum = account.n + 1, (account.sum * 31 + row["id"]) % MODULUS
            account.recent = [*account.recent, row["id"]][-RECENT:]
            account.kinds[row["kind"]] = account.kinds.get(row["kind"], 0) + 1
            account.timers = sorted({*account.timers, row["at_ms"] + TIMER_AFTER_MS})
            out.append(account.told(row["key"], "row", row["id"], watermark_ms))
        for key, account in accounts.items():
            for at_ms in [each for each in account.timers if each <= watermark_ms]:
                account.kinds["timer"] = account.kinds.get("timer", 0) + 1
                out.append(account.told(key, "timer", at_ms, watermark_ms))
                account.timers.remove(at_ms)
        late_ms, watermark_ms = watermark_ms, max(watermark_ms, max(row["at_ms"] for row in rows) - DELAY_MS)
    return sorted(out), {
        "total": {key: [each.n, each.sum] for key, each in accounts.items()},
        "recent": {key: each.recent for key, each in accounts.items()},
        "kinds": {key: each.kinds for key, each in accounts.items() if each.kinds},
        "__event_timers": {key: each.timers for key, each in accounts.items() if each.timers},
    }


# --- the processor ---------------------------------------------------------------------------------------------------


class Accounts(StatefulProcessor):
    """`strikes` has the victims by their places. A victim may be a "write": of the slot's state, at the end of the batch."""

    def __init__(self, folder: str, strikes: dict[str, str]) -> None:
        self.folder = folder
        self.strikes = strikes

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long, sum long")
        self.recent = handle.getListState("recent", "id long")
        self.kinds = handle.getMapState("kinds", "kind string", "n long")
        Path(self.folder, "slots", str(os.getpid())).touch()

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.pass_by(f"initial {initialState.opening}")
        n, total = self.total.get() or (0, 0)
        self.total.update((n, total + initialState.opening))
        self.recent.appendValue((-1,))
        self.handle.registerTimer(OPENING_TIMER_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.pass_by(f"rows {row.id}")
            n, total = self.total.get() or (0, 0)
            self.total.update((n + 1, (total * 31 + row.id) % MODULUS))
            self.recent.appendValue((row.id,))
            self.recent.put(list(self.recent.get())[-RECENT:])
            self.count(row.kind)
            self.handle.registerTimer(row.at_ms + TIMER_AFTER_MS)
            yield self.told(key, "row", row.id, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at_ms = expiredTimerInfo.getExpiryTimeInMs()
        self.pass_by(f"timer {at_ms // 1000}")
        self.count("timer")
        yield self.told(key, "timer", at_ms, timerValues)

    def count(self, kind: str) -> None:
        self.kinds.updateValue((kind,), ((self.kinds.getValue((kind,)) or (0,))[0] + 1,))

    def told(self, key: Any, what: str, number: int, timer_values: Any) -> Row:
        n, total = self.total.get() or (0, 0)
        return Row(
            key=key[0],
            what=what,
            id=number,
            n=n,
            sum=total,
            recent=json.dumps([each for (each,) in self.recent.get()]),
            kinds=json.dumps({kind: n for (kind,), (n,) in self.kinds.iterator()}, sort_keys=True),
            timers=json.dumps(sorted(self.handle.listTimers())),
            watermark_ms=timer_values.getCurrentWatermarkInMs(),
        )

    def pass_by(self, place: str) -> None:
        victim = self.strikes.get(place)
        if victim == "write":
            fail_write_once(self.folder, place)
        elif victim is not None:
            strike_once(self.folder, place, victim)
        number = place.removeprefix("rows ")
        if f"poison {number}" in self.strikes and not Path(self.folder, STRUCK, f"poison {number}").exists():
            raise ValueError(POISON)


# --- the driver ------------------------------------------------------------------------------------------------------


class Driver:
    """`slots` has the number of them for each start of the query, in turn."""

    def __init__(self, spark: SparkSession, folder: Path, plan: dict[str, Any]) -> None:
        self.spark = spark
        self.spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")  # a batch for each file
        self.folder = folder
        self.strikes: dict[str, str] = plan["strikes"]
        self.slots: list[int] = plan["slots"]
        self.backend = tg.RocksDB(memory="32 MB") if plan["backend"] == "rocksdb" else None
        self.files: int = plan["files"]
        for name in ("in", "slots", "starts", STRUCK):
            (folder / name).mkdir(exist_ok=True)

    def run(self) -> None:
        """Until all files went through. A query that failed is started again."""
        self.give(0)  # or Spark would begin with a batch without data
        for _ in range(len(self.strikes) + 1):
            query = self.start()
            try:
                for number in range(self.files):
                    self.give(number)
                    query.processAllAvailable()
                    self.after(number)
                return
            except Exception as error:
                if not query.exception():
                    raise
                self.tell(f"the query failed: {str(error)[:3000]}")
                self.mend(str(error))
            finally:
                query.stop()
        raise SystemExit("the query fails again and again")

    def start(self) -> StreamingQuery:
        start = len(list((self.folder / "starts").iterdir()))
        (self.folder / "starts" / str(start)).touch()
        slots = self.slots[start % len(self.slots)]
        self.tell(f"start {start} with {slots} slots")
        stream = (
            self.spark.readStream.schema(INPUT)
            .option("maxFilesPerTrigger", 1)
            .json(str(self.folder / "in"))
            .withWatermark("at", f"{DELAY_MS} milliseconds")
        )
        initial = self.spark.createDataFrame(list(OPENINGS.items()), "name string, opening long").groupBy("name")
        rows = tg.transform_with_state(
            stream.groupBy("key"),
            Accounts(str(self.folder), self.strikes),
            OUTPUT,
            "Append",
            "EventTime",
            initial,
            name="accounts",
            slots=slots,
            snapshots=tg.Snapshots(to=str(self.folder / "snapshots")),
            backend=self.backend,
        )
        return (
            self.watched(rows)
            .writeStream.format("parquet")
            .trigger(processingTime="0 seconds")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .start(str(self.folder / "out"))
        )

    def watched(self, rows: DataFrame) -> DataFrame:
        folder, victims = (
            str(self.folder),
            {
                int(place.removeprefix("behind ")): victim
                for place, victim in self.strikes.items()
                if place.startswith("behind ")
            },
        )

        def look(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for number in set(batch.column("id").to_pylist()) & set(victims):
                    strike_once(folder, f"behind {number}", victims[number])
                yield batch

        return rows.mapInArrow(look, rows.schema) if victims else rows

    def give(self, number: int) -> None:
        path = self.folder / "in" / f"{number:03}.json"
        if not path.exists():
            hidden = self.folder / f"{number}.json"
            hidden.write_text(
                "".join(
                    json.dumps({**row, "at": datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat()}) + "\n"
                    for row in records(number)
                )
            )
            hidden.rename(path)
            self.tell(f"file {number}")

    def after(self, number: int) -> None:
        place = f"between {number}"
        victim = self.strikes.get(place)
        if victim is None or (self.folder / STRUCK / place).exists():
            return
        self.tell(f"{place}: {victim}")
        if victim == "driver":
            (self.folder / STRUCK / place).touch()
            strike_driver(self.folder)
        newest = sorted((self.folder / "slots").iterdir(), key=lambda path: -path.stat().st_mtime)
        strike_slot_once(self.folder, place, victim, [int(path.name) for path in newest])

    def mend(self, error: str) -> None:
        if POISON in error:
            for place in self.strikes:
                if place.startswith("poison "):
                    (self.folder / STRUCK / place).touch()

    def check(self) -> None:
        """The output, the state, what is in the store; and that all was done that was to be."""
        assert struck(self.folder) == set(self.strikes)
        rows, states = expected(self.files)
        written = map(pq.read_table, committed_files(self.folder / "out"))
        found = sorted(tuple(row.values()) for table in written for row in table.to_pylist())
        missing, surplus = sorted(set(rows) - set(found)), sorted(set(found) - set(rows))
        assert found == rows, f"{len(found)} rows of {len(rows)}; missing {missing[:5]}…; wrong {surplus[:5]}…"
        held = states_of(self.spark, self.folder)
        assert held == states, f"{held}\n{states}"
        check_clean(self.folder / "snapshots", "accounts")
        catalog = SnapshotCatalog(open_store(str(self.folder / "snapshots" / "accounts")))
        numbers = [each.micro_batch.number for each in catalog.manifests() if each.micro_batch]
        assert numbers == [self.files - 2, self.files - 1], numbers

    def tell(self, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


# --- the states ------------------------------------------------------------------------------------------------------


def states_of(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """As `expected` gives them."""

    def rows(state: str) -> list[Row]:
        return tg.read_state(spark, str(folder / "snapshots" / "accounts"), state).collect()

    recent: dict[str, list[int]] = {}
    for row in sorted(rows("recent"), key=lambda row: row.position):
        recent.setdefault(row.key, []).append(row.value.id)
    kinds: dict[str, dict[str, int]] = {}
    for row in rows("kinds"):
        kinds.setdefault(row.key, {})[row.map_key] = row.value.n
    timers: dict[str, list[int]] = {}
    for row in sorted(rows("__event_timers"), key=lambda row: row.at_ms):
        timers.setdefault(row.key, []).append(row.at_ms)
    return {
        "total": {row.key: [row.value.n, row.value.sum] for row in rows("total")},
        "recent": recent,
        "kinds": kinds,
        "__event_timers": timers,
    }


def main() -> None:
    url, java_options, folder, plan = sys.argv[1:5]
    asked = json.loads(plan)
    driver = Driver(session_on(url, java_options, "accounts", cores=max(asked["slots"]) + 1), Path(folder), asked)
    driver.run()
    driver.check()
