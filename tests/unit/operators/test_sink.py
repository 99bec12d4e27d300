"""Sinks: what is committed is what a complete snapshot listed, once at least, in order; nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, Restored
from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.dataflow.operators.sink import COMMITTABLES, SinkSpec
from tidegate.errors import CommitError, NotFound, UserFunctionError
from tidegate.state.sections import FrozenState


@dataclass
class Ledger(Sink):
    """Notes every call. An epoch's committable is the list of its rows."""

    calls: list[Any] = field(default_factory=list)
    contexts: list[SinkContext] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)

    def open(self, context: SinkContext) -> SinkWriter:
        self.contexts.append(context)
        self.fail("open")
        return LedgerWriter(self, context)

    def fail(self, where: str) -> None:
        if where in self.failures:
            raise self.failures[where]

    def called(self, *names: str) -> list[Any]:
        return [call for call in self.calls if call[0] in names]


class LedgerWriter(SinkWriter):
    def __init__(self, ledger: Ledger, context: SinkContext) -> None:
        self.ledger = ledger
        self.context = context
        self.rows: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.ledger.fail("write")
        self.rows += batch.column(0).to_pylist()

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        self.ledger.fail("pre_commit")
        rows, self.rows = self.rows, []

        def finish() -> Sequence[Committable]:
            self.ledger.calls.append(("finish", epoch))
            self.ledger.fail("finish")
            return [f"{epoch}:{rows}"] if rows else []

        return finish

    def commit(self, committables: Sequence[Committable]) -> None:
        self.ledger.fail("commit")
        self.ledger.calls.append(("commit", *committables))
        for committable in committables:
            self.context.deliver(committable)

    def discard_leftovers(self) -> None:
        self.ledger.fail("discard")
        self.ledger.calls.append(("discard",))

    def close(self) -> None:
        self.ledger.fail("close")
        self.ledger.calls.append(("close",))


def writing(ledger: Ledger, **more: Any) -> Bench:
    return Bench(SinkSpec(ledger), "a long", name="out", **more)


def frozen(bench: Bench, epoch: int) -> FrozenState:
    state = bench.operator.freeze(epoch)
    assert state is not None
    return state


def listed(state: FrozenState) -> list[str]:
    """What a snapshot lists: reading it is what the background thread does."""
    return [item for section in state.sections() for item in section.rows.column("value").to_pylist()]


def restored(*committables: str) -> Restored:
    return {COMMITTABLES.name: [pa.record_batch([pa.array(committables)], schema=COMMITTABLES.schema)]}


def test_output_is_committed_when_its_snapshot_is_complete_and_not_before() -> None:
    ledger = Ledger()
    bench = writing(ledger)
    bench.feed((1,), (2,))
    assert listed(frozen(bench, 5)) == ["5:[1, 2]"]
    bench.feed((3,))
    assert ledger.called("commit") == []
    bench.operator.on_complete(5)
    assert ledger.called("commit") == [("commit", "5:[1, 2]")]
    assert bench.delivered == [("out", "5:[1, 2]")]
    assert listed(frozen(bench, 6)) == ["6:[3]"], "what was committed is listed no more"


def test_a_repeated_notice_commits_nothing_again() -> None:
    ledger = Ledger()
    bench = writing(ledger)
    bench.feed((1,))
    listed(frozen(bench, 5))
    bench.operator.on_complete(5)
    bench.operator.on_complete(5)
    assert len(ledger.called("commit")) == 1


def test_output_of_an_aborted_epoch_goes_with_the_next_complete_one() -> None:
    ledger = Ledger()
    bench = writing(ledger)
    bench.feed((1,))
    assert listed(frozen(bench, 5)) == ["5:[1]"]  # written, then aborted because of another subtask
    bench.feed((2,))
    assert listed(frozen(bench, 6)) == ["5:[1]", "6:[2]"]
    bench.feed((3,))
    assert listed(frozen(bench, 7)) == ["5:[1]", "6:[2]", "7:[3]"]
    bench.operator.on_complete(7)
    assert ledger.called("commit") == [("commit", "5:[1]", "6:[2]", "7:[3]")]
    assert ledger.called("finish") == [("finish", 5), ("finish", 6), ("finish", 7)], "each once"


def test_an_epoch_whose_file_was_never_written_is_finished_by_the_next_one() -> None:
    """The store refused the state file before the sink's part was read: the epoch is aborted, its output is not lost."""
    ledger = Ledger()
    bench = writing(ledger)
    bench.feed((1,))
    frozen(bench, 5).release()
    bench.feed((2,))
    assert listed(frozen(bench, 6)) == ["5:[1]", "6:[2]"]
    bench.operator.on_complete(6)
    assert ledger.called("commit") == [("commit", "5:[1]", "6:[2]")]


def test_a_snapshot_that_completes_while_the_next_is_written_commits_its_own_output_only() -> None:
    ledger = Ledger()
    bench = writing(ledger)
    bench.feed((1,))
    listed(frozen(bench, 5))
    bench.feed((2,))
    waiting = frozen(bench, 6)
    bench.operator.on_complete(5)
    assert ledger.called("commit") == [("commit", "5:[1]")]
    assert listed(waiting) == ["5:[1]", "6:[2]"], "committed again after a restore: commits are idempotent"
    bench.operator.on_complete(6)
    assert ledger.called("commit")[1:] == [("commit", "6:[2]")]


def test_an_epoch_without_output_commits_nothing() -> None:
    ledger = Ledger()
    bench = writing(ledger)
    assert listed(frozen(bench, 5)) == []
    bench.operator.on_complete(5)
    assert ledger.called("commit") == []


def test_restored_committables_are_committed_again_before_anything_else() -> None:
    ledger = Ledger()
    bench = writing(ledger, restored=restored("4:[8]", "5:[9]"), subtask=1, parallelism=2)
    assert ledger.calls == [("commit", "4:[8]", "5:[9]")]
    bench.feed((1,))
    assert listed(frozen(bench, 6)) == ["6:[1]"]
    (context,) = ledger.contexts
    assert (context.job, context.sink, context.subtask, context.parallelism, context.attempt) == ("job", "out", 1, 2, 7)
    assert context.schema == bench.schemas[0]


@pytest.mark.parametrize(("subtask", "discards"), [(0, 1), (1, 0)])
def test_leftovers_go_when_the_first_snapshot_is_complete_once_on_one_subtask(subtask: int, discards: int) -> None:
    """Not when opened: other subtasks may not have committed yet what they restored."""
    ledger = Ledger()
    bench = writing(ledger, restored=restored("4:[8]"), subtask=subtask, parallelism=2)
    bench.feed((1,))
    listed(frozen(bench, 5))
    assert ledger.called("discard") == []
    bench.operator.on_complete(5)
    assert [call[0] for call in ledger.called("commit", "discard")] == ["commit", "commit"] + ["discard"] * discards
    listed(frozen(bench, 6))
    bench.operator.on_complete(6)
    assert len(ledger.called("discard")) == discards


@pytest.mark.parametrize("failure", [OSError("disk full"), NotFound("gone"), CommitError("fenced")])
def test_a_pre_commit_that_fails_in_the_background_fails_the_job_by_the_sink_s_name(failure: Exception) -> None:
    """Also where it is a StoreError: that of a state file only aborts the epoch, but this output is in no other."""
    ledger = Ledger(failures={"finish": failure})
    bench = writing(ledger)
    bench.feed((1,))
    with pytest.raises(UserFunctionError, match="operator 'out' raised") as failed:
        listed(frozen(bench, 5))
    assert failed.value.__cause__ is failure
    ledger.failures = {}
    with pytest.raises(CommitError, match="'out'"):
        listed(frozen(bench, 6))
    assert ledger.called("finish") == [("finish", 5)], "it is not tried again"
    bench.operator.on_complete(4)
    assert ledger.called("commit") == []


@pytest.mark.parametrize("where", ["open", "write", "pre_commit", "commit", "discard", "close"])
def test_an_error_in_a_writer_names_the_sink(where: str) -> None:
    bench = Bench(SinkSpec(Ledger(failures={where: ConnectionError("no database")})), "a long", name="out", open=False)
    with pytest.raises(UserFunctionError, match="no database") as failed:
        live(bench)
    assert failed.value.operator == "out"


@pytest.mark.parametrize("where", ["write", "commit"])
def test_an_error_of_the_engine_s_own_passes_as_it_is(where: str) -> None:
    bench = Bench(SinkSpec(Ledger(failures={where: CommitError("unknown outcome")})), "a long", open=False)
    with pytest.raises(CommitError, match="unknown outcome"):
        live(bench)


def live(bench: Bench) -> None:
    bench.operator.open(bench.context)
    bench.feed((1,))
    listed(frozen(bench, 5))
    bench.operator.on_complete(5)
    bench.operator.close()


def test_a_sink_that_was_never_opened_can_be_closed() -> None:
    ledger = Ledger()
    writing(ledger, open=False).operator.close()
    assert ledger.calls == []
