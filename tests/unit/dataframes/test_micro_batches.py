"""Which snapshot a micro-batch goes on from, and what is said where there is no such thing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.driver.test_coordinator import World
from tidegate.control.messages import Decline, Failed, Traffic
from tidegate.dataframes.micro_batches import MicroBatches, Stillness, _end_batch
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
    with pytest.raises(RestoreError, match=r"are of a job that is no query"):
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


def test_who_takes_the_place_of_a_transform_does_not_wait_for_its_batch() -> None:
    """A query was started again: a batch begins, and may take hours."""
    begun, release = threading.Event(), threading.Event()

    class Hangs:
        def batch_times(self, batch: MicroBatch) -> BatchTimes:
            begun.set()
            release.wait(60)
            raise TidegateError("stopped")

    batches: Any = object.__new__(MicroBatches)
    batches._lock, batches._live, batches._queries, batches.is_settled = threading.Lock(), None, Hangs(), True
    run: Any = SimpleNamespace(offers=[SimpleNamespace(query="q", batch=7)])
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


def batches_in(folder: Path) -> MicroBatches:
    job = TransformJob(
        "t",
        {"input": pa.schema([("n", pa.int64())])},
        slots=1,
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
    return SimpleNamespace(offers=offers, read=False, moved=threading.Event(), ended=lambda: None)


class Script:
    """What happens while somebody waits for a run: a step at each wait."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)
        self.read = True
        self.moved = self

    def wait(self, timeout_s: float) -> None:
        self._steps.pop(0)()

    def set(self) -> None:
        """Nobody waits for it in another thread."""

    def clear(self) -> None:
        """It isn't set."""


@pytest.mark.parametrize("once", [True, False])
def test_the_error_of_a_users_function_is_what_a_run_ends_with(once: bool) -> None:
    """Between the end of its attempt and that of the job, the epoch is aborted, and nobody is to be misled by that."""
    world = World(micro_batch=MicroBatch("q", 0)).run()
    coordinator = world.coordinator
    handle = Handle("m", coordinator, lambda request: request(), lambda: None, lambda *_: pytest.fail("rescaled"))
    live: Any = SimpleNamespace(handle=handle, host=SimpleNamespace(ask=lambda request: request(coordinator)))

    def fail() -> None:
        assert coordinator.epochs[-1].aborted is None
        coordinator.on_message(0, Failed(0, "it raised", "divide", "ZeroDivisionError: division by zero", "Row(id=500)"))
        assert coordinator.epochs[-1].aborted == "the attempt ended" and not coordinator.status.terminal

    script: Any = Script(fail, lambda: None, lambda: None, world.turn)
    with pytest.raises(JobFailed, match=r"(?s)in operator 'divide', at record Row\(id=500\):\nZeroDivisionError"):
        _end_batch(script, live, None, once=once)
    assert len(coordinator.epochs) == 1, "no other epoch was asked for"


def test_an_epoch_that_was_aborted_is_no_error_of_the_users() -> None:
    world = World(micro_batch=MicroBatch("q", 0), tolerable_failures=3).run()
    handle = Handle("m", world.coordinator, lambda request: request(), lambda: None, lambda *_: pytest.fail("rescaled"))
    live: Any = SimpleNamespace(handle=handle, host=SimpleNamespace(ask=lambda request: request(world.coordinator)))
    decline = Decline(0, 0, 1, "no space left")
    script: Any = Script(lambda: world.coordinator.on_message(0, decline), world.turn)
    with pytest.raises(TidegateError, match=r"the micro-batch has to run again, .*no space left"):
        _end_batch(script, live, None, once=True)


def test_an_epoch_that_was_aborted_is_tried_again_where_a_second_end_does_no_harm() -> None:
    world = World(micro_batch=MicroBatch("q", 0), tolerable_failures=3).run()
    told: list[bool] = []
    end = BatchEnd(once=False, then=lambda: told.append(end.done))
    world.coordinator.end_batch(end)
    world.coordinator.on_message(0, Decline(0, 0, 1, "no space left"))
    assert world.coordinator.epochs[-1].aborted is not None and not end.done
    world.turn()
    assert len(world.coordinator.epochs) == 2 and not told
    world.complete()
    assert told == [True] and end.error is None
    world.turn()
    assert len(world.coordinator.epochs) == 2, "a batch has one end"


def test_after_too_many_aborted_epochs_the_error_is_the_jobs() -> None:
    world = World(micro_batch=MicroBatch("q", 0), tolerable_failures=0).run()
    end = BatchEnd(once=True, then=lambda: pytest.fail("nobody waits for it any more"))
    world.coordinator.end_batch(end)
    world.coordinator.on_message(0, Decline(0, 0, 1, "no space left"))
    world.turn()
    assert "no space left" in world.coordinator.failures[-1].message and not end.done


def test_a_manifest_tells_its_micro_batch_and_one_without_looks_as_ever() -> None:
    of_batch = manifest(3, 1, 7)
    assert Manifest.from_bytes(of_batch.to_bytes(), name="m") == of_batch
    assert b"micro_batch" not in manifest(3, 1, None).to_bytes()


class Ring:
    """Slots that send one another records, and answer when they get to it: what `Stillness` knows of a run."""

    def __init__(self, chance: random.Random, slots: int) -> None:
        self._chance = chance
        self._slots = [Traffic() for _ in range(slots)]
        self.under_way: list[int] = []  # where they go
        self._replays = chance.randrange(3)  # of the first slot
        self._asked: dict[int, int] = {}
        self._answers: dict[int, tuple[int, Traffic]] = {}
        for _ in range(5):
            self._send(0)

    @property
    def still(self) -> bool:
        return not self.under_way and not self._replays

    def probe(self, number: int) -> None:
        assert not self._asked, "one question at a time"
        self._asked = dict.fromkeys(range(len(self._slots)), number)

    def traffic(self, number: int) -> Traffic | None:
        answers = [traffic for asked, traffic in self._answers.values() if asked == number]
        return sum(answers, Traffic()) if len(answers) == len(self._slots) else None

    def step(self) -> None:
        """A record arrives, or an answer is given."""
        if self._asked and self._chance.random() < 0.5:
            slot = self._chance.choice(sorted(self._asked))
            replays = bool(slot == 0 and self._replays)
            self._answers[slot] = self._asked.pop(slot), self._slots[slot] + Traffic(replays=replays)
        elif self._replays and self._chance.random() < 0.1:
            self._replays -= 1
            self._send(0)
        elif self.under_way:
            slot = self.under_way.pop(self._chance.randrange(len(self.under_way)))
            self._slots[slot] += Traffic(taken=1)
            if self._chance.random() < 0.9:  # else it leaves the loop
                self._send(slot)

    def _send(self, slot: int) -> None:
        self._slots[slot] += Traffic(sent=1)
        self.under_way.append(self._chance.randrange(len(self._slots)))


@pytest.mark.parametrize("seed", range(50))
def test_all_is_still_when_nothing_is_on_its_way_and_never_before(seed: int) -> None:
    chance = random.Random(seed)
    ring = Ring(chance, slots=chance.randint(1, 4))
    stillness = Stillness(ring)  # type: ignore[arg-type]
    for _ in range(100_000):
        if chance.random() < 0.3 and stillness.look():
            assert ring.still
            return
        ring.step()
    raise AssertionError("it was never noticed")
