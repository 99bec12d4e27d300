"""A job is stopped, its program is changed, and it goes on from its state: whole jobs on plain processes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import check_ledger, committed, completed, until
from tests.unit.jobs.conftest import Bench
from tidegate.state.pickled import pickled
from tidegate.testing.processes import ProcessJob

KEYS = 10
RULES = [("a", 1), ("b", 2)]


def records(count: int) -> tg.Source:
    """Record i has the key i % 10."""
    return tg.sources.generator(make_row=lambda i: (i % KEYS, i), schema="key long, n long", rows=count, splits=2)


class Before(tg.KeyedProcess):
    """The program as it was."""

    count = tg.value("int", default=0)
    last = tg.value("struct<n: int, old: string>")
    numbers = tg.list("int")
    parts = tg.value(pickled(), default=())
    useless = tg.value("string")

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.count.set(self.count.get() + 1)
        self.last.set((record.n, "?"))
        self.numbers.add(record.n)
        self.parts.set((*self.parts.get(), Fraction(record.n, 2)))
        self.useless.set("x")
        yield record.key, self.count.get(), float(record.n), "before"


class After(tg.KeyedProcess):
    """Another name for `count`, wider numbers, a new field and one less, another form of pickled values, a state less."""

    seen = tg.value("long", default=0, alias="count")
    last = tg.value("struct<number: double, note: string>", renamed={"number": "n"}, added={"note": "restored"})
    numbers = tg.list("long")
    parts = tg.value(
        pickled(version=2, migrate=lambda value, version: {"sum": sum(value), "was": version}), default={"sum": 0, "was": 2}
    )

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        last = self.last.get()
        self.seen.set(self.seen.get() + 1)
        parts = self.parts.get()
        assert list(self.numbers.get()) == list(range(record.key, record.n, KEYS)), self.numbers.get()
        assert parts == {"sum": Fraction(sum(self.numbers.get()), 2), "was": 1}, parts
        self.numbers.add(record.n)
        self.parts.set({"sum": parts["sum"] + Fraction(record.n, 2), "was": 1})
        self.last.set({"number": float(record.n), "note": "new"})
        yield record.key, self.seen.get(), last["number"], last["note"]


class Hoard(tg.Process):
    kept = tg.operator_list("int")

    def process(self, record: Any, ctx: Any) -> None:
        self.kept.add(record.n)


def before(job: ProcessJob, bench: Bench) -> None:
    stream = job.source("in", records(200))
    stream.process("hoard", Hoard())
    counted = stream.key_by("key").process("count", Before(), returns="key long, n int, last double, note string")
    counted.to("out", tg.sinks.parquet(bench.out))


def after(job: ProcessJob, bench: Bench, function: tg.KeyedProcess, **names: Any) -> None:
    """All operators have new names, and the hoard is gone."""
    stream = job.source("records", records(400), alias="in").key_by("key")
    counted = stream.process("counts", function, returns="key long, n int, last double, note string", **names)
    counted.to("written", tg.sinks.parquet(bench.out), alias="out")


def test_a_job_goes_on_under_other_names_and_types_at_another_number_of_slots(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.finish(lambda job: before(job, bench))
    job = ProcessJob(
        "job",
        slots=3,
        restart=tg.NoRestart(),
        drop_state=["hoard", "count.useless"],
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
    )
    after(job, bench, After(), alias="count")
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert handle.attempts[0].restored_epoch is not None
    expected = []
    for n in range(400):
        last, note = (n, "before") if n < 200 else (n - KEYS, "restored" if n < 200 + KEYS else "new")
        expected.append((n % KEYS, n // KEYS + 1, float(last), note))
    assert sorted(committed(bench.out)) == sorted(expected)
    (lost,) = [record.message for record in caplog.records if "does not take in" in record.message]
    for part in (
        "value.old of state 'last' of operator 'counts'",
        "all of state 'useless' of operator 'counts'",
        "of operator 'hoard'",
    ):
        assert part in lost, lost


def test_a_program_that_doesn_t_fit_is_refused_before_anything_is_deployed(bench: Bench) -> None:
    class Wrong(tg.KeyedProcess):
        count = tg.value("string")
        last = tg.value("struct<n: int, old: string>")
        numbers = tg.list("short")
        parts = tg.value("binary")
        useless = tg.value("string")

        def process(self, record: Any, ctx: Any) -> None: ...

    bench.finish(lambda job: before(job, bench))
    job = bench.job(restart=tg.NoRestart())
    after(job, bench, Wrong(), alias="count")
    handle = bench.start(job)
    with pytest.raises(tg.JobFailed) as caught:
        handle.wait("1 minute")
    told = str(caught.value)
    for part in (
        "for 4 reasons",
        "keyed value int by long → keyed value string by long",
        "value: int can't become string",
        "value: int can't become short",
        "pickled(version=1) by long → keyed value binary",
        "operator 'hoard'",
        "drop_state=['hoard']",
        "What is possible",
    ):
        assert part in told, told
    assert not handle.attempts, "something was deployed"


def test_a_program_that_doesn_t_fit_ends_no_job_that_runs(bench: Bench) -> None:
    """To claim an attempt is to fence off whoever has the one before."""
    running = bench.ledger(rows=1_000, rate=1_000, gated=True)
    until(lambda: completed(running), "a snapshot", handle=running)
    other = bench.job(restart=tg.NoRestart())
    other.source("in", records(10)).to("out", tg.sinks.parquet(bench.folder / "other"))
    handle = bench.start(other)
    with pytest.raises(tg.JobFailed, match="can't be restored into the job as it is now"):
        handle.wait("1 minute")
    bench.open_gate()
    assert running.wait("1 minute") is tg.Status.FINISHED and running.failures == []
    check_ledger(committed(bench.out), 1_000)


@pytest.mark.parametrize("backend", [tg.Heap(), tg.RocksDB()], ids=["heap", "rocksdb"])
def test_a_wrong_name_in_renamed_loses_nothing(bench: Bench, backend: Any) -> None:
    """It is refused, the right one takes effect, and then either does no harm."""

    class Kept(tg.KeyedProcess):
        last = tg.value("struct<n: int>")
        all = tg.list("struct<n: int>")

        def process(self, record: Any, ctx: Any) -> None:
            self.last.set((record.n,))
            self.all.add((record.n,))

    def renamed(old: str) -> tg.KeyedProcess:
        class Renamed(tg.KeyedProcess):
            last = tg.value("struct<number: int>", renamed={"number": old})
            all = tg.list("struct<number: int>", renamed={"number": old})

            def process(self, record: Any, ctx: Any) -> None:
                held = [each["number"] for each in self.all.get()]
                assert held == list(range(record.key, record.n, KEYS)), held
                assert self.last.get()["number"] == held[-1]
                self.last.set((record.n,))
                self.all.add((record.n,))

        return Renamed()

    def run(function: tg.KeyedProcess, rows: int) -> tg.Handle:
        job = ProcessJob(
            "job",
            slots=2,
            backend=backend,
            restart=tg.NoRestart(),
            snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
        )
        job.source("in", records(rows)).key_by("key").process("keep", function)
        handle = bench.start(job)
        handle.wait("1 minute")
        return handle

    run(Kept(), 100)
    with pytest.raises(tg.JobFailed, match=r"value\.number: the snapshot has neither 'number' nor 'N', .* it has 'n'\."):
        run(renamed("N"), 200)
    assert run(renamed("n"), 200).failures == []
    assert run(renamed("n"), 300).failures == run(renamed("N"), 400).failures == []


def sums(bench: Bench, function: tg.KeyedProcess, *, rows: int) -> None:
    def build(job: ProcessJob) -> None:
        stream = job.source("in", records(rows)).key_by("key").process("sums", function, returns="key long, sum string")
        stream.to("out", tg.sinks.parquet(bench.out))

    bench.finish(build, restart=tg.NoRestart())


class Sums(tg.KeyedProcess):
    total = tg.value(pickled(), default=Fraction(0))

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        self.total.set(self.total.get() + Fraction(record.n, 2))
        yield record.key, str(self.total.get())


class SumsInPairs(tg.KeyedProcess):
    total = tg.value(pickled(version=2, migrate=lambda value, version: ("pair", value)), default=("pair", Fraction(0)))

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        _, total = self.total.get()
        self.total.set(("pair", total + Fraction(record.n, 2)))
        yield record.key, str(self.total.get()[1])


class SumsInPairsForGood(SumsInPairs):
    total = tg.value(pickled(version=2), default=("pair", Fraction(0)))


def test_a_migration_is_over_when_a_snapshot_was_taken_after_it(bench: Bench) -> None:
    """Also for the keys that nobody has written since: no value of the old version is carried along."""
    sums(bench, Sums(), rows=100)
    sums(bench, SumsInPairs(), rows=101)
    sums(bench, SumsInPairsForGood(), rows=200)
    expected = [(n % KEYS, str(Fraction(sum(range(n % KEYS, n + 1, KEYS)), 2))) for n in range(200)]
    assert sorted(committed(bench.out)) == sorted(expected)
