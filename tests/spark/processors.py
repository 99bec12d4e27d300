"""Stateful processors as users of Spark write them, to be run on Spark's own engine and on Tidegate's.

What they do is what the public examples in Spark's documentation and tests do. They tell in their output what they saw:
keys, types, what a state gives back, which timers there are. `EitherWay` gives one text both signatures, rows and pandas.
"""
# ruff: noqa: N803  Spark's names

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pandas as pd
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

HOUR_MS = 3_600_000
ROCKSDB_STATE_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"  # Spark's own


def told(value: Any) -> str:
    """A value and its types, all the way down, the same for equal values whichever way they came."""
    match value:
        case Row():
            fields = getattr(value, "__fields__", range(len(value)))
            return "Row(" + ", ".join(f"{name}={told(each)}" for name, each in zip(fields, value, strict=True)) + ")"
        case tuple() | list():
            return f"{type(value).__name__}({', '.join(told(each) for each in value)})"
        case dict():
            return "dict(" + ", ".join(sorted(f"{told(key)}: {told(each)}" for key, each in value.items())) + ")"
        case datetime():
            return f"{type(value).__name__} {value.isoformat()}"
        case _:
            return f"{type(value).__name__} {value!r}"


class EitherWay(StatefulProcessor):
    """`rows_of` takes the rows of either signature, `result` gives them."""

    columns: ClassVar[tuple[str, ...]]

    def __init__(self, *, pandas: bool = False) -> None:
        self.pandas = pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def rows_of(self, given: Iterable[Any]) -> Iterator[Any]:
        for each in given:
            if self.pandas:
                yield from each.itertuples(index=False)
            else:
                yield each

    def result(self, *rows: tuple[Any, ...]) -> Iterator[Any]:
        if self.pandas and rows:
            yield pd.DataFrame(list(rows), columns=list(self.columns))
        elif not self.pandas:
            for row in rows:
                yield Row(**dict(zip(self.columns, row, strict=True)))


# --- value state -------------------------------------------------------------------------------------------------------


class Violations(EitherWay):
    """Counts readings, and in its state those above 100. A state that was deleted when it began can't be used."""

    columns = ("id", "readings", "violations", "scratch")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.violations = handle.getValueState("violations", "n int")
        self.scratch = handle.getValueState("scratch", "n int")
        handle.deleteIfExists("scratch")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        readings = [row.temperature for row in self.rows_of(rows) if not pd.isna(row.temperature)]
        before = held(self.violations.get())[0] if self.violations.exists() else 0
        self.violations.update((before + sum(reading > 100 for reading in readings),))
        try:
            scratch = str(self.scratch.exists())
        except PySparkRuntimeError:
            scratch = "refused"
        yield from self.result((key[0], len(readings), held(self.violations.get())[0], scratch))


class Totals(EitherWay):
    """A running total by two columns, which may begin with what an initial state says."""

    columns = ("area", "sensor", "total")

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.total = handle.getValueState("total", "total long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for row in self.rows_of([initialState]):
            self.total.update(((self.total.get() or (0,))[0] + row.opening,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        total = (self.total.get() or (0,))[0] + sum(int(row.amount) for row in self.rows_of(rows))
        self.total.update((total,))
        yield from self.result((*key, total))


class Alarms(Totals):
    """What an initial state registers, for keys with and without rows, fires in the first batch."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        super().handleInitialState(key, initialState, timerValues)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() - 1)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + HOUR_MS)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        assert expiredTimerInfo.getExpiryTimeInMs() == timerValues.getCurrentProcessingTimeInMs() - 1
        yield from self.result((f"{key[0]} expired", key[1], (self.total.get() or (None,))[0]))


# --- every method of every state ---------------------------------------------------------------------------------------


class Commands(EitherWay):
    """Runs commands on a value, a list and a map, and tells what each of them said."""

    columns = ("id", "number", "said")

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.value = handle.getValueState("one", "n int, text string")
        self.items = handle.getListState("items", "n int")
        self.words = handle.getMapState("words", "word string, part int", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        lines = [command for row in self.rows_of(rows) for command in row.commands]
        yield from self.result(
            *((key[0], number, f"{command}: {told(self.run(command))}") for number, command in enumerate(lines))
        )

    def run(self, command: str) -> Any:
        match command.split():
            case ["timer"]:
                return self.handle.registerTimer(1)
            case ["value", "set", n, text]:
                return self.value.update((int(n), text))
            case ["value", "set", "short"]:
                return self.value.update((1,))
            case ["value", "set", "text"]:
                return self.value.update(("x", "x"))
            case ["map", "set", "short"]:
                return self.words.updateValue(("x",), (1,))
            case ["value", "set", "list"]:
                return self.value.update([1, "from a list"])  # type: ignore[arg-type]
            case ["value", "set", "row"]:
                return self.value.update(Row(n=2, text="from a row"))
            case ["value", "set", "nulls"]:
                return self.value.update((None, None))
            case ["list", "put", *numbers]:
                return self.items.put([(int(n),) for n in numbers])
            case ["list", "append", n]:
                return self.items.appendValue((int(n),))
            case ["list", "extend", *numbers]:
                return self.items.appendList([(int(n),) for n in numbers])
            case ["list", "get"]:
                return list(self.items.get())
            case ["list", "twice"]:  # two iterators don't disturb each other
                one, other = self.items.get(), self.items.get()
                return [next(one), next(one), next(other), list(one), list(other)]
            case ["map", "set", word, part, n]:
                return self.words.updateValue((word, int(part)), (int(n),))
            case ["map", "get", word, part]:
                return self.words.getValue((word, int(part)))
            case ["map", "has", word, part]:
                return self.words.containsKey((word, int(part)))
            case ["map", "remove", word, part]:
                return self.words.removeKey((word, int(part)))
            case ["map", "keys" | "values" | "iterator" as what]:  # in no order that users may rely on
                return sorted(getattr(self.words, what)())
            case [state, "get" | "exists" | "clear" as what]:
                return getattr({"value": self.value, "list": self.items, "map": self.words}[state], what)()
        raise AssertionError(command)


# --- lists and maps ----------------------------------------------------------------------------------------------------


class Best(EitherWay):
    """The best three scores."""

    columns = ("player", "score")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.best = handle.getListState("best", "score double")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        scores = [score for (score,) in self.best.get()] + [row.score for row in self.rows_of(rows)]
        self.best.put([(score,) for score in sorted(scores, reverse=True)[:3]])
        yield from self.result(*((key[0], score) for (score,) in self.best.get()))


class Words(EitherWay):
    """How often each word came, by user."""

    columns = ("user", "word", "n")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.counts = handle.getMapState("counts", "word string", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for word in sorted(row.word for row in self.rows_of(rows)):
            n = held(self.counts.getValue((word,)))[0] + 1 if self.counts.containsKey((word,)) else 1
            self.counts.updateValue((word,), (n,))
            yield from self.result((key[0], word, n))


# --- types -------------------------------------------------------------------------------------------------------------

TYPES = """flag boolean, tiny byte, small short, n int, big long, ratio float, real double, text string, raw binary,
    day date, at timestamp, wall timestamp_ntz, price decimal(12, 3), tags array<string>, grid array<array<int>>,
    address struct<road: int, city: string, since: date>, people array<struct<name: string, age: int>>,
    limits map<string, int>, deep map<string, array<decimal(5, 2)>>"""


def typed(n: int) -> tuple[Any, ...]:
    return (
        n % 2 == 0,
        n,
        -n,
        1000 * n,
        2**40 + n,
        n / 4,
        n / 3,
        f"text {n}",
        bytes([n, 255]),
        date(2026, 1, 1) + timedelta(days=n),
        datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC) + timedelta(hours=n),
        datetime(2026, 1, 1, 12, 30, 15, 123456) + timedelta(hours=n),
        Decimal(n) / 8,
        ["a", None, f"{n}"],
        [[1, n], []],
        Row(road=n, city="Bergen", since=date(2020, 2, 29)),
        [Row(name="Ada", age=n), Row(name=None, age=None)],
        {"low": n, "high": None},
        {"x": [Decimal("1.25"), None]},
    )


class Typed(EitherWay):
    """Keeps a value of every type in every state, with nulls in it and without, and tells what it gets back."""

    columns = ("id", "what", "said")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", TYPES)
        self.items = handle.getListState("items", TYPES)
        self.known = handle.getMapState("known", "day date, price decimal(6, 2), text string", TYPES)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        (n,) = [int(row.n) for row in self.rows_of(rows)]
        before = self.value.get()
        yield from self.result((key[0], "value", told(before)))
        yield from self.result(*((key[0], "item", told(item)) for item in self.items.get()))
        yield from self.result(*((key[0], "entry", told(entry)) for entry in self.known.iterator()))
        new = tuple(None for _ in typed(n)) if n == 0 else typed(n)
        self.value.update(new)
        self.items.appendValue(new)
        self.items.appendList([typed(n + 1)])
        self.known.updateValue((date(2026, 1, 1), Decimal("1.50"), f"{n}"), new)
        if before is not None:  # what a state gave back, it takes
            self.items.appendValue(before)


NESTED = (
    "id string, tags array<string>, limits map<string, int>, address struct<road: int, city: string>, "
    "people array<struct<name: string, age: int>>, by_name map<string, struct<name: string, age: int>>, "
    "price decimal(10, 2), day date, at timestamp, raw binary, nothing int"
)


class Nested(EitherWay):
    """Yields every type, nested ones too."""

    columns = ("id", "tags", "limits", "address", "people", "by_name", "price", "day", "at", "raw", "nothing")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        n = (self.seen.get() or (0,))[0] + len(list(self.rows_of(rows)))
        self.seen.update((n,))
        ada = {"name": "Ada", "age": n} if self.pandas else Row(name="Ada", age=n)
        address = {"road": n, "city": None} if self.pandas else Row(road=n, city=None)
        at = datetime(2026, 1, n, 12, tzinfo=None if self.pandas else UTC)
        yield from self.result(
            (
                key[0],
                ["a", "b"][:n],
                {"low": n},
                address,
                [ada],
                {"ada": ada},
                Decimal(n) / 4,
                date(2026, 1, n),
                at,
                b"\x00\xff",
                None,
            )
        )


class Witness(EitherWay):
    """Tells its keys and rows: names, values and types. `None` is a key, too."""

    columns = ("said",)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        times = (timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs())
        seen = (
            [f"{list(frame.columns)} {told(list(frame.itertuples(index=False, name=None)))}" for frame in rows]
            if self.pandas
            else sorted(told(row) for row in rows)
        )
        yield from self.result((f"{told(key)} {times} {seen}",))


# --- time --------------------------------------------------------------------------------------------------------------


def held(value: tuple[Any, ...] | None) -> tuple[Any, ...]:
    assert value is not None, "the state is said to exist"
    return value


def ms_of(at: datetime) -> int:
    return round(at.timestamp() * 1000)


class HighWater(EitherWay):
    """The latest event time by key. A timer at the present watermark fires in the same batch and clears it."""

    columns = ("id", "at_ms", "watermark_ms")

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.latest = handle.getValueState("latest", "at_ms long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        latest = max((self.latest.get() or (0,))[0], *(ms_of(row.at) for row in self.rows_of(rows)))
        self.latest.update((latest,))
        self.handle.registerTimer(timerValues.getCurrentWatermarkInMs())
        yield from self.result((key[0], latest, timerValues.getCurrentWatermarkInMs()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        self.latest.clear()
        self.handle.deleteTimer(expiredTimerInfo.getExpiryTimeInMs())
        yield from self.result(
            (f"{key[0]} expired", expiredTimerInfo.getExpiryTimeInMs(), timerValues.getCurrentWatermarkInMs())
        )


class First(EitherWay):
    """The first event time of a batch by key, for what follows in the query."""

    columns = ("id", "first")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from self.result((key[0], min(row.at for row in self.rows_of(rows))))


class Sessions(EitherWay):
    """Sessions with a gap of five seconds, by event time: a timer for each, moved whenever the session grows."""

    columns = ("id", "start_ms", "end_ms", "n", "timers")

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.session = handle.getValueState("session", "start_ms long, end_ms long, n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        times = [ms_of(row.at) for row in self.rows_of(rows)]
        start, end, n = self.session.get() or (times[0], times[0], 0)
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.session.update((min(start, *times), max(end, *times), n + len(times)))
        self.handle.registerTimer(max(end, *times) + 5000)
        yield from self.result((key[0], None, None, n + len(times), told(list(self.handle.listTimers()))))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        start, end, n = self.session.get() or (None, None, None)
        assert end is not None and expiredTimerInfo.getExpiryTimeInMs() == end + 5000
        assert end + 5000 <= timerValues.getCurrentWatermarkInMs()
        self.session.clear()
        yield from self.result((f"{key[0]} ended", start, end, n, ""))


class Pulses(EitherWay):
    """Three timers of event time for each row, some of them the same, one deleted again; each registers a last one."""

    columns = ("id", "at_ms")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in self.rows_of(rows):
            for seconds in (1, 2, 3):
                self.handle.registerTimer(ms_of(row.at) + 1000 * seconds)
            self.handle.deleteTimer(ms_of(row.at) + 2000)
        yield from self.result(*((f"{key[0]} waits", at) for at in sorted(self.handle.listTimers())))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        if at % 1000 == 0:
            self.handle.registerTimer(at + 1)
        yield from self.result((f"{key[0]} fired", at))


class Quiet(EitherWay):
    """Counts by key; a timer of processing time, due at the next batch, clears the count of those named `timed`."""

    columns = ("id", "n", "timers")

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.count = handle.getValueState("count", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        n = (self.count.get() or (0,))[0] + len(list(self.rows_of(rows)))
        self.count.update((n,))
        if key[0].startswith("timed"):
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        yield from self.result((key[0], n, len(list(self.handle.listTimers()))))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        assert expiredTimerInfo.getExpiryTimeInMs() <= timerValues.getCurrentProcessingTimeInMs()
        n = self.count.get()
        self.count.clear()
        yield from self.result((f"{key[0]} expired", -1 if n is None else n[0], len(list(self.handle.listTimers()))))


class Fading(EitherWay):
    """Every state three times: it fades within the batch's time, it lives for an hour, it lives for ever."""

    columns = ("id", "state", "said")

    def init(self, handle: StatefulProcessorHandle) -> None:
        for name, ttl_ms in (("brief", 1), ("long", HOUR_MS), ("ever", None)):
            setattr(self, f"value_{name}", handle.getValueState(f"value_{name}", "n int", ttl_ms))
            setattr(self, f"list_{name}", handle.getListState(f"list_{name}", "n int", ttl_ms))
            setattr(self, f"map_{name}", handle.getMapState(f"map_{name}", "word string", "n int", ttl_ms))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        numbers = [(int(row.n),) for row in self.rows_of(rows)]
        for name in ("brief", "long", "ever"):
            value, items, words = (getattr(self, f"{kind}_{name}") for kind in ("value", "list", "map"))
            yield from self.result(
                (key[0], f"value_{name}", told((value.exists(), value.get()))),
                (key[0], f"list_{name}", told((items.exists(), list(items.get())))),
                (
                    key[0],
                    f"map_{name}",
                    told((words.exists(), words.containsKey(("w",)), words.getValue(("w",)), list(words.iterator()))),
                ),
            )
            for number in numbers:
                value.update(number)
                items.appendValue(number)
                words.updateValue(("w",), number)
