"""Which snapshot a micro-batch goes on from, and what is said where there is no such thing."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.driver.test_coordinator import World
from tidegate.control.messages import Decline, Failed, InputRead
from tidegate.dataframes.micro_batches import MicroBatches
from tidegate.dataframes.queries import BatchTimes, StoreHolders
from tidegate.dataframes.transforming import TransformJob
from tidegate.driver.attempts import Restore, batch_before
from tidegate.driver.batches import BatchEnd
from tidegate.driver.handle import Handle
from tidegate.errors import FencedOff, JobError, JobFailed, NotFound, RestoreError, StoreError, TidegateError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import Manifest, MicroBatch
from tidegate.store.memory import MemoryStore


def manifest(epoch: int, attempt: int, batch: int | None, query: str = "q") -> Manifest:
    return Manifest(
        job="j",
        epoch=epoch,
        attempt=attempt,
        created_ms=0,
        key_group_count=8,
        ending=None,
        operators={},
        micro_batch=None if batch is None else MicroBatch(query, batch),
    )


def before(number: int, *manifests: Manifest) -> int | None:
    found = batch_before(MicroBatch("q", number), manifests, store="memory://s")
    return None if found is None else found.epoch


def test_a_batch_goes_on_from_the_one_before_it() -> None:
    assert before(0) is None
    assert before(1, manifest(4, 1, 0)) == 4
    assert before(7, manifest(4, 1, 5), manifest(5, 1, 6)) == 5


def test_a_batch_that_runs_again_passes_its_own_snapshot_over() -> None:
    assert before(0, manifest(1, 1, 0)) is None
    assert before(6, manifest(4, 1, 5), manifest(5, 1, 6)) == 4


def test_of_several_snapshots_of_the_batch_before_the_newest_counts() -> None:
    assert before(6, manifest(4, 1, 4), manifest(5, 1, 5), manifest(6, 2, 5)) == 6
    assert before(5, manifest(4, 1, 4), manifest(5, 1, 5), manifest(6, 2, 5)) == 4


def test_whatever_else_is_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RestoreError, match=r"resumes from the snapshot of micro-batch 4, and memory://s holds none"):
        before(5)
    with pytest.raises(RestoreError, match=r"has those of the micro-batches \[1, 2\]: state and stream would drift apart"):
        before(5, manifest(1, 1, 1), manifest(2, 1, 2))
    with pytest.raises(RestoreError, match=r"are of the query other\. .* restore_from='memory://s'"):
        before(1, manifest(1, 1, 0, query="other"))
    with pytest.raises(RestoreError, match=r"are of a job that is not a query"):
        before(0, manifest(1, 1, None))
    with pytest.raises(RestoreError, match=r"is at micro-batch 0, and its snapshots in memory://s are at 3"):
        before(0, manifest(1, 1, 2), manifest(2, 1, 3))


def begin(store: MemoryStore, number: int) -> World:
    """A run of this micro-batch, of an attempt of its own."""
    world = World(store=store, micro_batch=MicroBatch("q", number))
    assert world.coordinator.failures == []
    return world.run()


def complete(world: World) -> int:
    world.coordinator.snapshot()
    return world.complete()


def kept(store: MemoryStore) -> list[tuple[int, int]]:
    """Micro-batches and attempts of the snapshots that there are, whose files are all there."""
    catalog = SnapshotCatalog(store)
    for epoch in catalog.epochs():
        catalog.verify(epoch)
    return [(each.micro_batch.number, each.attempt) for each in catalog.manifests() if each.micro_batch is not None]


def test_a_snapshot_is_valid_until_its_batch_is_complete_again() -> None:
    store = MemoryStore()
    for number in range(3):
        complete(begin(store, number))
    assert kept(store) == [(1, 2), (2, 3)]
    again = begin(store, 2)
    assert again.coordinator.attempts[-1].restored_epoch == 2, "that of micro-batch 1"
    assert kept(store) == [(1, 2), (2, 3)], "the run may fail, and Spark go on all the same"
    again.coordinator.on_lost(0, "killed")
    again.turn()
    assert kept(store) == [(1, 2), (2, 3)]
    assert begin(store, 3).coordinator.attempts[-1].restored_epoch == 3, "Spark has committed 2, with the first run's output"

    third = begin(store, 2)
    assert third.coordinator.attempts[-1].restored_epoch == 2
    complete(third)
    assert kept(store) == [(1, 2), (2, third.coordinator.attempt)], "one that is complete takes the place of the other"
    complete(begin(store, 3))
    assert [number for number, _ in kept(store)] == [2, 3]


def test_a_first_batch_that_runs_again_begins_with_nothing_and_keeps_its_snapshot_likewise() -> None:
    store = MemoryStore()
    complete(begin(store, 0))
    again = begin(store, 0)
    assert again.coordinator.attempts[-1].restored_epoch is None and kept(store) == [(0, 1)]
    complete(again)
    assert kept(store) == [(0, 2)]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_a_batch_finds_the_newest_snapshot_of_the_one_before(seed: int) -> None:
    """Runs that complete, that fail, and whose coordinator is gone before what they replace is let go; batches that Spark
    runs again, or commits because an earlier run was enough."""
    chance = random.Random(seed)
    store = MemoryStore()
    number, newest = 0, {-1: 0}  # the epoch of each batch's newest complete snapshot
    for _ in range(30):
        world = begin(store, number)
        assert (world.coordinator.attempts[-1].restored_epoch or 0) == newest[number - 1]
        world.coordinator.snapshot()
        match chance.randrange(4):
            case 0:
                world.coordinator.on_lost(0, "killed")
                world.turn()
            case 1:
                epoch = world.acknowledge()
                world.background.deliver_one()  # the manifest; nobody hears of it
                newest[number] = epoch
            case _:
                newest[number] = world.complete()
        assert {each for each, _ in kept(store)} >= {each for each in newest if number - 1 <= each} - {-1}
        if number in newest and chance.random() < 0.7:
            number += 1


def test_who_takes_the_place_of_a_transform_does_not_wait_for_its_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A query was started again: a batch begins, and may take hours."""
    begun, release = threading.Event(), threading.Event()

    class Hangs:
        def batch_times(self, batch: MicroBatch) -> BatchTimes:
            begun.set()
            release.wait(60)
            raise TidegateError("stopped")

    batches: Any = batches_in(tmp_path)
    batches._queries, batches.is_settled = Hangs(), True
    run = run_of_batch(7)
    conducting = threading.Thread(target=lambda: batches.conduct(run))
    conducting.start()
    try:
        assert begun.wait(60)
        assert not batches.is_settled, "nobody takes it over"
        asked = threading.Thread(target=lambda: answers.append(batches.move_out()))
        answers: list[bool] = []
        asked.start()
        asked.join(30)
        assert answers == [False], "it waits"
    finally:
        release.set()
        conducting.join(60)
    assert batches.move_out() and not batches.is_settled
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "Job 't': micro-batch 7 of the query q failed: TidegateError: stopped"


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (StoreError("create attempts/2: connection reset by peer"), False),
        (ConnectionError("the store is away"), False),
        (RestoreError("another query's"), True),
        (NotFound("there is no snapshot to restore from"), True),
        (FencedOff("attempt 1 is over"), True),
    ],
)
def test_a_batch_whose_attempt_can_not_begin_is_final_only_if_no_other_can(
    error: Exception, final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, **_: Any) -> int:
        raise error

    monkeypatch.setattr(SnapshotCatalog, "claim_attempt", fails)
    end = batches_in(tmp_path).conduct(run_of_batch(0))
    assert str(error) in str(end.error) and end.final is final


@pytest.mark.parametrize(("error", "final"), [(StoreError("connection reset"), False), (JobError("two transforms"), True)])
def test_a_batch_that_has_no_attempt_yet_is_final_only_if_the_program_is_wrong(
    error: Exception, final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(StoreHolders, "take", fails)
    end = batches_in(tmp_path).conduct(run_of_batch(0))
    assert str(error) in str(end.error) and end.final is final


def batches_in(folder: Path, *, slots: int = 1) -> MicroBatches:
    job = TransformJob(
        "t",
        {"input": pa.schema([("n", pa.int64())])},
        slots=slots,
        writes_state=True,
        snapshots=tg.Snapshots(to=str(folder), every=None),
    )
    job.take_outputs(job.inputs["input"].map(lambda row: (row.n,), returns="n long"))
    queries: Any = SimpleNamespace(
        batch_times=lambda batch: BatchTimes(1000, 0), transforms_of=lambda *_: set(), run_of=lambda query: "r"
    )
    return MicroBatches(
        job,
        transform="x",
        store=folder.as_uri(),
        restore=Restore(),
        queries=queries,
        holders=StoreHolders(),
        observed_as="o",
    )


def run_of_batch(number: int) -> Any:
    offers = [SimpleNamespace(query="q", batch=number, task=0, attempt=None, slot=None)]
    return SimpleNamespace(offers=offers)


@pytest.mark.parametrize("gathers", [True, False])
def test_the_error_of_a_users_function_is_what_a_run_ends_with(gathers: bool) -> None:
    """Between the end of its attempt and that of the job, the epoch is aborted, and nobody is to be misled by that."""
    world = World(micro_batch=MicroBatch("q", 0)).run()
    coordinator = world.coordinator
    coordinator._epochs.batches._ends_once = gathers
    world.read()
    assert coordinator.epochs[-1].aborted is None
    coordinator.on_message(0, Failed(0, "it raised", "divide", "ZeroDivisionError: division by zero", "Row(id=500)"))
    assert coordinator.epochs[-1].aborted == "the attempt ended" and not coordinator.status.terminal
    for _ in range(3):
        world.turn()
    assert not world.ends, "it has not ended, and the job's end is what ends the waiting"
    assert len(coordinator.epochs) == 1, "no other epoch was asked for"
    handle = Handle("m", coordinator, lambda request: request(), lambda: None, lambda *_: pytest.fail("rescaled"))
    with pytest.raises(JobFailed, match=r"(?s)in operator 'divide', at record Row\(id=500\):\nZeroDivisionError"):
        handle.wait()


def test_an_epoch_that_was_aborted_ends_a_batch_that_has_one_end_only() -> None:
    """No error of the user's, and no second end, which would be a second batch to those that saw the first."""
    world = World(micro_batch=MicroBatch("q", 0), tolerable_failures=3).run()
    world.coordinator._epochs.batches._ends_once = True
    world.read()
    world.coordinator.on_message(0, Decline(0, 0, 1, "no space left"))
    world.turn()
    assert len(world.ends) == 1 and "no space left" in str(world.ends[0].error)
    world.turn(10_000)
    assert len(world.coordinator.epochs) == 1 and len(world.ends) == 1


def test_an_epoch_that_was_aborted_is_tried_again_where_a_second_end_does_no_harm() -> None:
    world = World(micro_batch=MicroBatch("q", 0), tolerable_failures=3).run()
    world.read()
    world.coordinator.on_message(0, Decline(0, 0, 1, "no space left"))
    assert world.coordinator.epochs[-1].aborted is not None and not world.ends
    world.turn()
    assert len(world.coordinator.epochs) == 2 and not world.ends
    world.complete()
    assert world.ends == [BatchEnd()]
    world.turn()
    assert len(world.coordinator.epochs) == 2, "a batch has one end"


def test_after_too_many_aborted_epochs_the_error_is_the_jobs() -> None:
    world = World(micro_batch=MicroBatch("q", 0), tolerable_failures=0).run()
    world.read()
    world.coordinator.on_message(0, Decline(0, 0, 1, "no space left"))
    world.turn()
    assert "no space left" in world.coordinator.failures[-1].message and not world.ends


def test_a_batch_ends_when_all_slots_have_read_and_the_next_one_has_to_be_read_as_well() -> None:
    world = World(micro_batch=MicroBatch("q", 0)).run()
    world.coordinator.on_message(0, InputRead())
    world.coordinator.on_message(0, InputRead())
    world.turn(10_000)
    assert not list(world.coordinator.epochs), "an epoch ends where a batch does, and nowhere else"
    world.coordinator.on_message(1, InputRead())
    world.turn()
    world.complete()
    assert world.ends == [BatchEnd()]
    world.coordinator.begin_batch(MicroBatch("q", 1))
    world.turn(1_000)
    assert len(world.coordinator.epochs) == 1
    world.read()
    world.complete()
    assert len(world.coordinator.epochs) == 2 and len(world.ends) == 2
    assert [number for number, _ in kept(world.store)] == [0, 1]


def test_a_job_of_batch_dataframes_ends_when_all_slots_have_read() -> None:
    world = World().run()
    world.read()
    world.turn()
    assert world.coordinator.epochs[-1].ending == "stop"
    world.complete()
    world.done()
    assert world.status() is tg.Status.STOPPED and not world.ends


def test_a_manifest_tells_its_micro_batch_and_one_without_looks_as_ever() -> None:
    of_batch = manifest(3, 1, 7)
    assert Manifest.from_bytes(of_batch.to_bytes(), name="m") == of_batch
    assert b"micro_batch" not in manifest(3, 1, None).to_bytes()
