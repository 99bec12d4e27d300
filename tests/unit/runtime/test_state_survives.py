"""Every kind of state comes through a crash and a change of the number of slots as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tidegate as tg
from tests.jobs import committed, completed, until
from tests.unit.runtime.conftest import Bench
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Crash, ScriptedSource

MINUTE_MS = 60_000


def crashing(
    bench: Bench, records: Sequence[tuple[Any, ...]], schema: str, *, name: str = "script", scripts: int = 2
) -> ScriptedSource:
    """The records, dealt out by their first column; each script crashes once, behind a snapshot in its middle."""
    dealt: list[list[Any]] = [[] for _ in range(scripts)]
    for record in records:
        dealt[hash_of(record[0]) % scripts].append(record)
    for index, script in enumerate(dealt):
        middle = len(script) // 2
        crash = [Crash()] if index == 0 else []
        script[middle:middle] = [AwaitSnapshot(times=2), *script[middle : middle + 2], *crash]
        del script[middle + len(crash) + 3 : middle + len(crash) + 5]
    return ScriptedSource(*dealt, schema=schema, memory=bench.folder / f"marks-{name}")


def hash_of(key: Any) -> int:
    return sum(str(key).encode())


# --- keyed state -----------------------------------------------------------------------------------------------------


class EveryShape(tg.KeyedProcess):
    """Of each record it gives what all its states say afterwards."""

    latest = tg.value("string")
    count = tg.value("long", default=0)
    pair = tg.value("struct<first:long,last:long>", name="first and last")
    numbers = tg.list("long")
    by_word = tg.map("string", "long")
    highest = tg.reducing("long", max)
    mean = tg.aggregating(
        "struct<total:double,count:long>",
        create=lambda: {"total": 0.0, "count": 0},
        add=lambda acc, n: {"total": acc["total"] + n, "count": acc["count"] + 1},
        result=lambda acc: acc["total"] / acc["count"],
    )

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        before = self.latest.get()
        self.latest.set(record.word)
        self.count.set(self.count.get() + 1)
        pair = self.pair.get() or {"first": record.n}
        self.pair.set({"first": pair["first"], "last": record.n})
        self.numbers.add(record.n)
        if len(self.numbers.get()) > 4:
            self.numbers.replace(self.numbers.get()[-2:])
        self.by_word.put(record.word, self.by_word.get(record.word, 0) + 1)
        if record.n % 7 == 0:
            self.by_word.remove("w0")
            self.latest.clear()
        self.highest.add(record.n * 37 % 101)
        self.mean.add(record.n)
        yield (
            record.key,
            before,
            self.count.get(),
            [self.pair.get()["first"], self.pair.get()["last"]],
            list(self.numbers.get()),
            sorted(self.by_word.items()),
            self.highest.get(),
            self.mean.get(),
        )


EVERY_SHAPE = (
    "key string, before string, count long, pair array<long>, numbers array<long>, "
    "by_word array<struct<word:string,n:long>>, highest long, mean double"
)


def every_shape_of(records: Sequence[tuple[str, int, str]]) -> list[tuple[Any, ...]]:
    out = []
    states: dict[str, dict[str, Any]] = {}
    for key, n, word in records:
        state = states.setdefault(key, dict(latest=None, all=[], numbers=[], words=Counter()))
        before = state["latest"]
        state["latest"] = None if n % 7 == 0 else word
        state["all"].append(n)
        state["numbers"].append(n)
        if len(state["numbers"]) > 4:
            state["numbers"] = state["numbers"][-2:]
        state["words"][word] += 1
        if n % 7 == 0:
            state["words"].pop("w0", None)
        seen = state["all"]
        out.append(
            (
                key,
                before,
                len(seen),
                [seen[0], seen[-1]],
                list(state["numbers"]),
                [{"word": w, "n": c} for w, c in sorted(state["words"].items())],
                max(m * 37 % 101 for m in seen),
                sum(seen) / len(seen),
            )
        )
    return out


def test_every_shape_of_keyed_state_survives_a_crash(bench: Bench) -> None:
    records = [(f"k{i * i % 11}", i, f"w{i % 3}") for i in range(300)]
    source = crashing(bench, records, "key string, n long, word string")

    def build(job: ProcessJob) -> None:
        stream = job.source("in", source).key_by("key").process("every shape", EveryShape(), returns=EVERY_SHAPE)
        stream.to("out", tg.sinks.parquet(bench.out))

    handle = bench.finish(build)
    assert len(handle.failures) == 1 and handle.attempts[-1].restored_epoch is not None
    assert sorted(committed(bench.out), key=repr) == sorted(every_shape_of(records), key=repr)


class TwoColumns(tg.KeyedProcess):
    count = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.count.set(self.count.get() + 1)
        assert ctx.key == (record.a, record.b)
        yield record.a, record.b, self.count.get()


def test_a_key_of_several_columns_with_nulls_survives_a_crash(bench: Bench) -> None:
    records = [(i % 4, None if i % 3 == 0 else f"b{i % 3}") for i in range(100)]
    source = crashing(bench, records, "a long, b string")

    def build(job: ProcessJob) -> None:
        stream = job.source("in", source).key_by("a", "b").process("two", TwoColumns(), returns="a long, b string, n long")
        stream.to("out", tg.sinks.parquet(bench.out))

    assert len(bench.finish(build).failures) == 1
    seen: Counter[tuple[Any, ...]] = Counter()
    expected = []
    for record in records:
        seen[record] += 1
        expected.append((*record, seen[record]))
    assert sorted(committed(bench.out), key=repr) == sorted(expected, key=repr)


# --- timers ----------------------------------------------------------------------------------------------------------


class Minutes(tg.KeyedProcess):
    """Counts the records of each minute of event time, unless one of them says to forget it."""

    counts = tg.map("long", "long")

    def process(self, record: Any, ctx: Any) -> None:
        end = (record.at // MINUTE_MS + 1) * MINUTE_MS
        self.counts.put(end, self.counts.get(end, 0) + 1)
        ctx.timers.event_time(end)
        if record.forget:
            ctx.timers.delete_event_time(end)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield ctx.key, at, self.counts.get(at)
        self.counts.remove(at)


def test_event_time_timers_survive_a_crash(bench: Bench) -> None:
    # One record each second; key k2's last one in every other minute says to forget that minute.
    records = [(f"k{i % 5}", i % 120 == 57, i * 1_000) for i in range(600)]
    source = crashing(bench, records, "key string, forget boolean, at long", scripts=1)

    def build(job: ProcessJob) -> None:
        stream = job.source("in", source).with_watermark("at", "10 s").key_by("key")
        stream.process("minutes", Minutes(), returns="key string, at long, n long").to("out", tg.sinks.parquet(bench.out))

    assert len(bench.finish(build).failures) == 1
    expected = [
        (f"k{key}", minute * MINUTE_MS, 12)
        for minute in range(1, 11)
        for key in range(5)
        if not (key == 2 and minute % 2 == 1)
    ]
    assert sorted(committed(bench.out)) == sorted(expected)


class Later(tg.KeyedProcess):
    """Answers each record some time later, by the clock."""

    asked = tg.value("long")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.asked.set(record.n)
        ctx.timers.processing_time(ctx.now_ms() + record.delay_ms)
        yield record.key, "asked", record.n

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        assert ctx.now_ms() >= at
        yield ctx.key, "answered", self.asked.get()


def test_processing_time_timers_survive_a_stop_and_another_number_of_slots(bench: Bench) -> None:
    """They are set on two slots and fire, late, on three."""

    def start(slots: int, rows: int | None) -> tg.Handle:
        job = bench.job(slots=slots)
        source = tg.sources.generator(
            make_row=lambda i: (i, i, 4_000),
            schema="key long, n long, delay_ms long",
            splits=1,
            rows=rows,
            rate=1 if rows is None else None,
        )
        stream = job.source("in", source).key_by("key")
        stream.process("later", Later(), returns="key long, what string, n long").to("out", tg.sinks.parquet(bench.out))
        return bench.start(job)

    assert start(2, 40).wait(60) is tg.Status.FINISHED
    assert sorted(committed(bench.out)) == [(n, "asked", n) for n in range(40)]
    handle = start(3, None)
    until(
        lambda: {row[0] for row in committed(bench.out) if row[1] == "answered"} >= set(range(40)),
        "all answers",
        handle=handle,
    )
    assert handle.stop() is tg.Status.STOPPED
    first = sorted(row for row in committed(bench.out) if row[0] < 40)
    assert first == sorted((n, what, n) for n in range(40) for what in ("asked", "answered"))


# --- operator state and broadcast state --------------------------------------------------------------------------------


class Hoard(tg.Process):
    """Holds every record in a list that is dealt out, and notes in one that goes to all which subtask it was."""

    kept = tg.operator_list("long", redistribute="split")
    runs = tg.operator_list("string", redistribute="union")

    def open(self, ctx: Any) -> None:
        self.restored = list(self.kept.get()), sorted(self.runs.get())
        self.runs.replace([f"{ctx.subtask} of {ctx.parallelism}"])

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.kept.add(record.n)
        yield ctx.parallelism, ctx.subtask, *self.restored


def hoard(bench: Bench, *, rows: int, slots: int) -> tg.Handle:
    # One record in a batch, so that every subtask gets one and tells what it restored.
    job = bench.job(slots=slots, every=None, tuning=tg.Tuning(max_batch_rows=1, linger_ms=0))
    stream = job.source("in", tg.sources.rows([(n,) for n in range(rows)], "n long"), parallelism=1).rebalance()
    stream.process("hoard", Hoard(), returns="of int, subtask int, kept array<long>, runs array<string>").to(
        "out", tg.sinks.parquet(bench.out)
    )
    handle = bench.start(job)
    assert handle.wait(60) is tg.Status.FINISHED
    return handle


def test_operator_lists_are_dealt_out_or_given_to_all_at_another_number_of_slots(bench: Bench) -> None:
    hoard(bench, rows=60, slots=2)
    hoard(bench, rows=90, slots=3)
    told = {(row[0], row[1]): row[2:] for row in committed(bench.out)}
    assert told[2, 0] == told[2, 1] == ([], [])
    assert sorted(n for subtask in range(3) for n in told[3, subtask][0]) == list(range(60))
    assert [len(told[3, subtask][0]) for subtask in range(3)] == [20, 20, 20]
    assert [told[3, subtask][1] for subtask in range(3)] == [["0 of 2", "1 of 2"]] * 3


def test_metadata_doesnt_grow_with_the_number_of_restarts(bench: Bench) -> None:
    """docs/promises.md, row 16: union state must not multiply."""
    sizes = [hoard(bench, rows=20, slots=2).epochs[-1].bytes for _ in range(3)]
    assert sizes[2] == sizes[1], sizes


class Reveal(tg.BroadcastProcess):
    """Tells all rules it knows for each record."""

    factors = tg.broadcast_map("string", "long")
    count = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.count.set(self.count.get() + 1)
        yield record.key, self.count.get(), [{"name": name, "factor": f} for name, f in sorted(self.factors.items())]

    def process_broadcast(self, rule: Any, ctx: Any) -> None:
        if rule.factor is None:
            self.factors.remove(rule.name)
        else:
            self.factors.put(rule.name, rule.factor)


def test_broadcast_state_is_the_same_everywhere_after_a_stop_and_at_another_number_of_slots(bench: Bench) -> None:
    def run(slots: int, records: int) -> tg.Handle:
        job = bench.job(slots=slots)
        rules = job.source(
            "rules",
            tg.sources.rows([("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", None)], "name string, factor long"),
            parallelism=1,
        )
        source = tg.sources.generator(make_row=lambda i: (i % 20,), schema="key long", rows=records, splits=4)
        stream = job.source("in", source).key_by("key").connect(rules.broadcast())
        stream.process("reveal", Reveal(), returns="key long, n long, rules array<struct<name:string,factor:long>>").to(
            "out", tg.sinks.parquet(bench.out)
        )
        return bench.start(job)

    assert run(2, 0).wait(60) is tg.Status.FINISHED
    last = run(3, 60)
    assert last.wait(60) is tg.Status.FINISHED
    assert last.attempts[0].restored_epoch is not None
    rules = [{"name": "a", "factor": 3}, {"name": "c", "factor": 4}]
    assert sorted(committed(bench.out), key=repr) == sorted(
        ((key, n, rules) for key in range(20) for n in (1, 2, 3)), key=repr
    )
    assert completed(last)
