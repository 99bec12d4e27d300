"""A user's own job in the simulation: built as for Spark, its output compared with that of a run without faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import GraphError
from tidegate.testing import AwaitSnapshot, Crash, Kill, Pause, ScriptedSource
from tidegate.testing.simulation import NO_FAULTS, FaultRates, Outcome, Simulation, SimulationFailed

SEEDS = 25
PAYMENTS = [(f"account {number % 3}", number) for number in range(60)]
# The accounts' balances after each payment: those of one account are in order, for it is in one split.
BALANCES = [
    (account, sum(n for other, n in PAYMENTS[: at + 1] if other == account)) for at, (account, _) in enumerate(PAYMENTS)
]


class Balance(tg.KeyedProcess):
    cents = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        self.cents.set(self.cents.get() + record.cents)
        yield record.account, self.cents.get()


class Forgetful(tg.KeyedProcess):
    """As many a first attempt: what it knows is in no snapshot."""

    def open(self, ctx: Any) -> None:
        self.cents: dict[str, int] = {}

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[str, int]]:
        self.cents[record.account] = self.cents.get(record.account, 0) + record.cents
        yield record.account, self.cents[record.account]


def job_with(function: type[tg.KeyedProcess]) -> Callable[[Pipeline], None]:
    def build(pipeline: Pipeline) -> None:
        payments = pipeline.source("payments", tg.sources.rows(PAYMENTS, "account string, cents long"))
        balances = payments.key_by("account").process("balance", function(), returns="account string, cents long")
        balances.to("out", tg.sinks.collect())

    return build


def test_a_job_commits_what_it_commits_without_faults() -> None:
    without = Simulation(job_with(Balance), seed=0, rates=NO_FAULTS).run()
    assert sorted(without.committed["out"]) == sorted(BALANCES)
    assert without.attempts == 1 and not without.faults
    outcomes = []
    for seed in range(SEEDS):
        simulation = Simulation(job_with(Balance), seed=seed)
        outcomes.append(simulation.run())
        assert sorted(outcomes[-1].committed["out"]) == sorted(BALANCES), simulation.story()
    assert sum(bool(outcome.faults) for outcome in outcomes) > SEEDS / 2
    assert sum(outcome.attempts > 1 for outcome in outcomes) > SEEDS / 3


def test_a_sink_that_gets_nothing_has_committed_no_rows() -> None:
    def build(pipeline: Pipeline) -> None:
        numbers = pipeline.source("in", tg.sources.rows([(1,), (2,)], "n long"))
        numbers.filter("n > 1").to("some", tg.sinks.collect())
        numbers.filter("n > 5").to("none", tg.sinks.collect())

    assert Simulation(build, seed=1, rates=NO_FAULTS).run().committed == {"none": [], "some": [(2,)]}


def test_state_that_is_in_no_snapshot_is_found_out() -> None:
    wrong = [
        seed
        for seed in range(SEEDS)
        if sorted(Simulation(job_with(Forgetful), seed=seed).run().committed["out"]) != sorted(BALANCES)
    ]
    assert len(wrong) > 3


def test_the_same_seed_gives_the_same_run_of_an_own_job() -> None:
    def run() -> Outcome:
        return Simulation(job_with(Balance), seed=3, rates=FaultRates(most_faults=12)).run()

    assert run() == run()


def test_the_story_says_what_happened_and_how_to_run_it_again() -> None:
    simulation = Simulation(job_with(Balance), seed=5)
    simulation.run()
    story = simulation.story("not what I wanted")
    assert story.startswith("not what I wanted") and "seed 5" in story and "seed=5" in story
    assert len(story.splitlines()) > 60


def test_a_scripted_crash_is_one_more_fault() -> None:
    def build(pipeline: Pipeline) -> None:
        script = [(1,), AwaitSnapshot(times=2), Crash(), (2,), Pause("5 ms"), (3,)]
        numbers = pipeline.source("numbers", ScriptedSource(script, schema="n long"))
        numbers.map(lambda row: (row.n,), returns="n long").to("out", tg.sinks.collect())

    outcome = Simulation(build, seed=1, rates=NO_FAULTS).run()
    assert outcome.attempts == 2
    assert sorted(outcome.committed["out"]) == [(1,), (2,), (3,)]


@dataclass(frozen=True)
class Table(tg.Sink):
    """Idempotent: a row again is the row."""

    rows: dict[str, int] = field(default_factory=dict)

    def open(self, context: tg.SinkContext) -> tg.SinkWriter:
        return Upserts(self.rows)


class Upserts(tg.SinkWriter):
    def __init__(self, rows: dict[str, int]) -> None:
        self._rows = rows

    def write(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            self._rows[row["account"]] = row["cents"]

    def commit(self, committables: Sequence[str]) -> None:
        assert not committables


@pytest.mark.parametrize("seed", range(5))
def test_an_idempotent_sink_of_ones_own_is_used_as_it_is(seed: int) -> None:
    table = Table()

    def build(pipeline: Pipeline) -> None:
        payments = pipeline.source("payments", tg.sources.rows(PAYMENTS, "account string, cents long"))
        payments.key_by("account").process("balance", Balance(), returns="account string, cents long").key_by("account").to(
            "table", table
        )

    # Without zombies: a slot that lives on after it was given up would overwrite rows, which no idempotence helps against.
    rates = FaultRates(kinds=("slot dies", "function raises", "coordinator dies"), most_interruptions=0)
    Simulation(build, seed=seed, rates=rates).run()
    assert table.rows == dict(BALANCES)


def test_a_failure_of_the_job_itself_is_told() -> None:
    def build(pipeline: Pipeline) -> None:
        numbers = pipeline.source("numbers", tg.sources.rows([(1,), (0,)], "n long"))
        numbers.map(lambda row: (1 // row.n,), returns="n long").to("out", tg.sinks.collect())

    with pytest.raises(SimulationFailed, match="ZeroDivisionError"):
        Simulation(build, seed=0).run()


def test_what_can_not_be_simulated_is_refused_at_once() -> None:
    def endless(pipeline: Pipeline) -> None:
        pipeline.source("ticks", tg.sources.generator(make_row=lambda n: (n,), schema="n long")).to(
            "out", tg.sinks.collect()
        )

    def deadly(pipeline: Pipeline) -> None:
        pipeline.source("numbers", ScriptedSource([(1,), Kill()], schema="n long")).to("out", tg.sinks.collect())

    def loose(pipeline: Pipeline) -> None:
        pipeline.source("numbers", tg.sources.rows([(1,)], "n long"))

    with pytest.raises(tg.JobError, match="never ends"):
        Simulation(endless, seed=0)
    with pytest.raises(tg.JobError, match="Kill"):
        Simulation(deadly, seed=0)
    with pytest.raises(GraphError):
        Simulation(loose, seed=0)
    with pytest.raises(tg.JobError, match="exactly_once"):
        Simulation(job_with(Balance), seed=0, mode="at_most_once")
