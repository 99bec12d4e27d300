"""The coordinator in the cases that neither the simulation nor a real run reaches easily: in memory, with a clock of its
own."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tidegate as tg
from tidegate.control.failing import failed
from tidegate.control.messages import (
    Acknowledge,
    Committed,
    Done,
    Failed,
    Heartbeat,
    InputRead,
    Message,
    Ready,
    Register,
    RestoreStats,
    Restoring,
    Shutdown,
    Start,
    Trigger,
    Writing,
)
from tidegate.control.settings import DEFAULT_RESTART, JobSettings, Snapshots, Tuning
from tidegate.dataflow.plan import Plan
from tidegate.driver.attempts import Restore
from tidegate.driver.batches import BatchEnd
from tidegate.driver.coordinator import Coordinator
from tidegate.driver.reports import Failure
from tidegate.errors import CorruptFile
from tidegate.logs import Speak, keep_silent
from tidegate.protocol.ids import SubtaskId
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import FileEntry, MicroBatch, OperatorEntry, PieceEntry
from tidegate.store import layout
from tidegate.store.memory import Access, Fail, Fault, MemoryStore, Operation
from tidegate.testing.processes import ProcessJob


class FakeClock:
    def __init__(self) -> None:
        self.at_ms = 1_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ms(self) -> int:
        return self.at_ms


class Inline:
    """A background that works when asked to deliver, first in, first out."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        self._waiting.append((work, then))

    def deliver_one(self) -> None:
        """The first in the row, whose answer gets lost."""
        work, _ = self._waiting.pop(0)
        work()

    def deliver(self) -> bool:
        found = bool(self._waiting)
        while self._waiting:
            work, then = self._waiting.pop(0)
            try:
                result, error = work(), None
            except Exception as raised:  # noqa: BLE001
                result, error = None, raised
            then(result, error)
        return found


class Slots:
    """Deployments and links in one: what was deployed, cancelled and said."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.running = False
        self.cancelled = 0
        self.expected = 0
        self.said: list[tuple[int, Message]] = []

    def deploy(self, attempt: int) -> Slots:
        self.attempts.append(attempt)
        self.running = True
        return self

    def ended(self) -> str | None:
        return None if self.running else "they are gone"

    def cancel(self) -> None:
        self.cancelled += 1
        self.running = False

    def expect(self, attempt: int) -> None:
        self.expected = attempt

    def send(self, slot: int, message: Message) -> None:
        self.said.append((slot, message))


def plan_of(slots: int) -> Plan:
    job = ProcessJob("m", slots=slots, snapshots=Snapshots(to="unused"))
    job.source("in", tg.sources.rows([(1,)], "n long", splits=2)).to("out", tg.sinks.collect())
    return job.plan()


class World:
    """`held` is a second background, for the copies of savepoints, that works only when told to."""

    def __init__(
        self,
        restart: Any = None,
        *,
        tuning: Tuning | None = None,
        store: MemoryStore | None = None,
        restore: Restore | None = None,
        retain: int = 2,
        tolerable_failures: int = 0,
        snapshot_timeout: str = "10 minutes",
        speak: Speak = keep_silent,
        micro_batch: MicroBatch | None = None,
        writes_state: bool = True,
    ) -> None:
        self.ends: list[BatchEnd] = []
        self.store = store or MemoryStore()
        self.clock, self.background, self.slots, self.held = FakeClock(), Inline(), Slots(), Inline()
        self.coordinator = Coordinator(
            plan=plan_of(2),
            catalog=SnapshotCatalog(self.store),
            deployer=self.slots,
            links=self.slots,
            clock=self.clock,
            background=self.background,
            copies=self.held,
            restore=restore,
            graph="the graph",
            speak=speak,
            versions={"python": "3"},
            micro_batch=micro_batch,
            batch_ended=self.ends.append,
            settings=JobSettings(
                name="m",
                snapshots=Snapshots(
                    to="unused",
                    every="1 s" if micro_batch is None else None,
                    tolerable_failures=tolerable_failures,
                    timeout=snapshot_timeout,
                    retain=retain,
                ),
                restart=restart or tg.NoRestart(),
                tuning=tuning or Tuning(),
                writes_state=writes_state,
            ),
        )
        self.coordinator.start()
        self.turn()

    def status(self) -> tg.Status:
        """As a call, because what mypy has seen of a property it holds for settled."""
        return self.coordinator.status

    def turn(self, passed_ms: int = 0) -> None:
        self.clock.at_ms += passed_ms
        self.background.deliver()
        self.coordinator.tick()
        self.background.deliver()

    def run(self) -> World:
        """All slots register and get ready."""
        for slot in range(self.coordinator.plan.slots):
            self.coordinator.on_message(slot, Register(slot, "h", 1, 100 + slot))
        for slot in range(self.coordinator.plan.slots):
            self.coordinator.on_message(slot, Ready(slot))
        assert self.coordinator.status is tg.Status.RUNNING
        return self

    def read(self) -> None:
        """All slots of a transform read their input."""
        for slot in range(self.coordinator.plan.slots):
            self.coordinator.on_message(slot, InputRead())
        self.turn()

    def acknowledge(self) -> int:
        """The epoch under way, by all slots, each with a file of its own."""
        epoch, slots = self.coordinator.epochs[-1].epoch, self.coordinator.plan.slots
        for slot in range(slots):
            parts = {}
            for operator in ("in", "out"):
                name = layout.state_file_name(attempt=self.coordinator.attempt, operator=operator, subtask=slot, epoch=epoch)
                self.store.write(name, [b"state"])
                file = FileEntry(name=name, bytes=5, checksum=zlib.crc32(b"state"))
                piece = PieceEntry(subtask=slot, key_groups=(0, 0), files=(file,), item_counts={})
                parts[operator] = OperatorEntry(parallelism=slots, states=(), pieces=(piece,))
            self.coordinator.on_message(slot, Acknowledge(0, slot, epoch, parts))
        return epoch

    def complete(self, passed_ms: int = 0, *, commit: bool = True) -> int:
        """The epoch that is under way then; its output is committed as well, unless it is the last one."""
        if passed_ms:
            self.turn(passed_ms)
        epoch = self.acknowledge()
        self.turn()
        SnapshotCatalog(self.store).load(epoch)  # or an error
        if commit and self.coordinator.epochs[-1].ending is None:
            self.commit(epoch)
        return epoch

    def commit(self, epoch: int, *, slots: Sequence[int] | None = None) -> None:
        for slot in range(self.coordinator.plan.slots) if slots is None else slots:
            self.coordinator.on_message(slot, Committed(slot, epoch))
        self.turn()

    def done(self) -> None:
        for slot in range(self.coordinator.plan.slots):
            self.coordinator.on_message(slot, Done(slot))
        self.slots.running = False
        self.turn()

    def epochs_kept(self) -> list[int]:
        return SnapshotCatalog(self.store).epochs()

    def check_reachable(self) -> None:
        """Every file of a retained snapshot exists and is right."""
        catalog = SnapshotCatalog(self.store)
        for epoch in catalog.epochs():
            catalog.verify(epoch)

    def only(self, operation: Operation) -> Callable[[Access], Fault | None]:
        return lambda access: Fail() if access.operation is operation else None


RESTARTS = tg.FixedDelay(attempts=3, delay="500 ms")


def test_a_store_that_cant_be_used_at_the_first_start_fails_the_job_at_once() -> None:
    world = World(RESTARTS, store=MemoryStore(faults=lambda access: Fail()))
    assert world.coordinator.status is tg.Status.FAILED
    assert "StoreError" in world.coordinator.failures[-1].message
    assert world.slots.attempts == []


def test_a_store_that_is_away_at_a_restart_is_given_time_by_the_restart_strategy() -> None:
    world = World(RESTARTS).run()
    world.store.faults = world.only(Operation.CREATE)
    world.coordinator.on_lost(1, "gone")
    world.turn()
    world.turn(500)  # the second attempt can't be claimed
    assert world.coordinator.status is tg.Status.RESTARTING
    assert [failure.message.split(":")[0] for failure in world.coordinator.failures] == [
        "slot 1 (host h, pid 101) was lost",
        "StoreError",
    ]
    world.store.faults = None
    world.turn(500)
    world.turn(0)
    assert world.slots.attempts[-1] > 1 == world.slots.attempts[0]
    world.run()


def test_a_snapshot_that_cant_be_believed_is_not_tried_again() -> None:
    world = World(RESTARTS).run()
    complete_epoch(world)
    (name,) = [name for name in world.store.files if name.startswith("manifests/")]
    world.store.files[name] = world.store.files[name][:-10]
    world.coordinator.on_lost(0, "gone")
    world.turn()
    world.turn(500)
    assert world.coordinator.status is tg.Status.FAILED
    assert "CorruptFile" in world.coordinator.failures[-1].message
    assert world.slots.attempts == [1]


def test_damage_to_an_older_snapshot_stops_no_start_and_goes_when_that_snapshot_does() -> None:
    world = World(RESTARTS).run()
    first, second = complete_epoch(world), complete_epoch(world)
    (oldest, _) = sorted(name for name in world.store.files if name.startswith("manifests/"))
    world.store.files[oldest] = world.store.files[oldest][:-10]
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert world.coordinator.attempts[-1].restored_epoch == second > first
    complete_epoch(world)
    world.turn()
    assert oldest not in world.store.files


def test_the_error_of_a_damaged_newest_snapshot_names_the_file_and_what_to_do() -> None:
    world = World(RESTARTS).run()
    complete_epoch(world)
    (name,) = [name for name in world.store.files if name.startswith("manifests/")]
    world.store.files[name] = world.store.files[name][:-10]
    world.coordinator.on_lost(0, "gone")
    world.turn()
    world.turn(500)
    message = world.coordinator.failures[-1].message
    assert name in message and "Restore the file from a backup" in message and "restore_from=" in message


def test_a_damaged_file_that_a_slot_finds_is_read_twice_and_not_more() -> None:
    world = World(tg.Exponential(initial="1 ms", maximum="1 ms")).run()
    complete_epoch(world)
    error = CorruptFile("state/x: its checksum is not the one that its manifest lists")
    for count in (1, 2):
        assert world.coordinator.status is tg.Status.RUNNING
        world.coordinator.on_message(1, failed(1, error))
        world.turn(500)
        world.turn()
        if count == 1:
            world.run()
    assert world.coordinator.status is tg.Status.FAILED
    last = world.coordinator.failures[-1]
    assert "state/x" in last.message and "Restore the file from a backup" in last.message
    assert "It failed twice in the same way, in attempts 1 and 2" in last.then


def test_a_job_whose_folder_is_empty_for_a_while_waits_for_it_and_does_not_begin_again() -> None:
    """As a folder is that isn't mounted any more."""
    world = World(DEFAULT_RESTART).run()
    epoch = complete_epoch(world)
    files, world.store.files = world.store.files, {}
    world.coordinator.on_lost(0, "gone")
    for _ in range(20):
        world.turn(30_000)
        assert world.status() is tg.Status.RESTARTING, world.coordinator.failures[-1]
    assert "isn't mounted" in world.coordinator.failures[-1].message
    assert world.store.files == {}
    world.store.files = files
    world.turn(30_000)
    world.turn()
    world.run()
    assert world.coordinator.attempts[-1].restored_epoch == epoch


def test_a_running_job_whose_folder_is_empty_for_a_while_is_not_fenced_off() -> None:
    world = World(DEFAULT_RESTART, tolerable_failures=5).run()
    complete_epoch(world)
    files, world.store.files = world.store.files, {}
    with pytest.raises(AssertionError):
        complete_epoch(world)
    assert "isn't mounted" in (world.coordinator.epochs[-1].aborted or "")
    assert world.status() is tg.Status.RUNNING
    world.store.files = files
    complete_epoch(world)


def test_the_default_strategy_outlasts_an_outage_of_the_store_of_an_hour() -> None:
    world = World(DEFAULT_RESTART).run()
    complete_epoch(world)
    world.store.faults = lambda access: Fail()
    world.coordinator.on_lost(0, "gone")
    for _ in range(360):
        world.turn(10_000)
        assert world.status() is tg.Status.RESTARTING, world.coordinator.failures[-1]
    assert 100 < len(world.coordinator.failures) < 360
    world.store.faults = None
    world.turn(30_000)
    world.turn()
    world.run()
    assert world.status() is tg.Status.RUNNING
    complete_epoch(world)


def test_a_release_that_failed_is_repeated_with_the_next_one() -> None:
    world = World(RESTARTS).run()
    for _ in range(3):
        complete_epoch(world)
    world.store.faults = lambda access: Fail() if access.operation is Operation.DELETE else None
    complete_epoch(world)
    complete_epoch(world)
    world.turn()
    world.store.faults = None
    manifests = [name for name in world.store.files if name.startswith("manifests/")]
    complete_epoch(world)
    world.turn()
    kept = [name for name in world.store.files if name.startswith("manifests/")]
    assert (len(manifests), len(kept)) == (4, 2)


def test_only_the_newest_failures_and_attempts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("coordinator", "failures"):
        monkeypatch.setattr(f"tidegate.driver.{module}.KEPT_ATTEMPTS", 3)
    world = World(tg.Exponential(initial="1 ms", maximum="1 ms")).run()
    complete_epoch(world)
    for _ in range(5):
        world.coordinator.on_lost(0, "gone")
        world.turn(500)
        world.turn()
        world.run()
    assert [failure.attempt for failure in world.coordinator.failures] == [3, 4, 5]
    assert [each.attempt for each in world.coordinator.attempts] == [4, 5, 6]


def complete_epoch(world: World) -> int:
    world.turn(1_000)
    epoch = world.coordinator.epochs[-1].epoch
    for subtask in (SubtaskId(0, 0), SubtaskId(0, 1)):
        groups = (64 * subtask.subtask, 64 * subtask.subtask + 64)
        piece = PieceEntry(subtask=subtask.subtask, key_groups=groups, files=(), item_counts={})
        part = OperatorEntry(parallelism=2, states=(), pieces=(piece,))
        world.coordinator.on_message(subtask.subtask, Acknowledge(0, subtask.subtask, epoch, {"in": part, "out": part}))
    world.turn()
    assert world.coordinator.epochs[-1].completed_ms is not None
    return epoch


def test_a_coordinator_that_was_superseded_stops_instead_of_fighting_back() -> None:
    world = World(RESTARTS).run()
    complete_epoch(world)
    SnapshotCatalog(world.store).claim_attempt()  # another driver
    with pytest.raises(AssertionError):
        complete_epoch(world)
    assert "FencedOff" in world.coordinator.failures[-1].message
    world.turn()
    assert world.coordinator.status is tg.Status.FAILED
    assert world.slots.attempts == [1] and world.slots.cancelled == 1


def test_an_error_of_the_loop_itself_fails_the_job_with_a_traceback_and_ends_the_slots() -> None:
    world = World(RESTARTS).run()
    try:
        raise AssertionError("a bug")
    except AssertionError as error:
        world.coordinator.crashed(error)
    assert world.coordinator.status is tg.Status.FAILED
    assert "Traceback" in world.coordinator.failures[-1].message and "a bug" in world.coordinator.failures[-1].message
    assert world.slots.cancelled == 1


def test_slots_that_never_come_are_told_with_what_to_look_at() -> None:
    world = World(tuning=Tuning(deploy_timeout="5 s"))
    world.coordinator.on_message(0, Register(0, "h", 1, 100))
    world.turn(4_999)
    assert world.status() is tg.Status.STARTING
    world.turn(1)
    world.turn()
    assert world.coordinator.status is tg.Status.FAILED
    assert world.coordinator.failures[-1].message == (
        "slots [0, 1] were not ready within 5000 ms. A job needs 2 task slots of Spark at the same time: are they there "
        "and free?"
    )


def test_a_silent_slot_is_noticed_and_one_that_speaks_is_not() -> None:
    world = World(tuning=Tuning(heartbeat="100 ms", heartbeat_timeout="1 s")).run()
    for _ in range(5):
        world.coordinator.on_message(0, Heartbeat(0, {}))
        world.turn(250)
    world.turn()
    assert world.coordinator.failures[-1].message.startswith("slots [1] sent nothing for 1000 ms: if one call of a function")


def test_a_slot_that_orders_others_about_ends_the_attempt() -> None:
    world = World().run()
    world.coordinator.on_message(1, Trigger(7, None))
    assert world.coordinator.failures[-1].message == "slot 1 sent Trigger, which only the coordinator sends"


def test_only_the_first_failure_of_an_attempt_counts() -> None:
    world = World(RESTARTS).run()
    world.coordinator.on_message(0, Failed(0, "boom"))
    world.coordinator.on_message(1, Failed(1, "channel lost"))
    world.coordinator.on_lost(0, "closed")
    assert [failure.message for failure in world.coordinator.failures] == ["boom"]
    assert (0, Shutdown("the attempt is over")) in world.slots.said


def test_the_next_attempt_waits_until_the_old_slots_are_gone() -> None:
    world = World(RESTARTS).run()
    world.slots.cancel = lambda: None  # type: ignore[method-assign]
    world.coordinator.on_lost(0, "gone")
    world.turn(30_000)
    assert world.slots.attempts == [1]
    world.slots.running = False
    world.turn()
    world.turn()
    assert world.slots.attempts == [1, 2] and world.slots.expected == 2


def test_old_slots_that_dont_go_are_left_behind_after_a_minute() -> None:
    world = World(RESTARTS).run()
    world.slots.cancel = lambda: None  # type: ignore[method-assign]
    world.coordinator.on_lost(0, "gone")
    world.turn(59_999)
    assert world.slots.attempts == [1]
    world.turn(1)
    assert world.slots.attempts == [1, 2]


def test_a_stop_that_comes_before_the_job_runs_is_not_forgotten() -> None:
    world = World()
    world.coordinator.stop(drain=False)
    world.run()
    assert [message for _, message in world.slots.said[-4:]] == [
        Start(),
        Start(),
        Trigger(1, "stop", full=True),
        Trigger(1, "stop", full=True),
    ]


def test_epochs_grow_across_attempts_even_where_they_left_no_trace() -> None:
    world = World(RESTARTS).run()
    world.turn(1_000)
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    world.turn(1_000)
    assert [(report.attempt, report.epoch) for report in world.coordinator.epochs] == [(1, 1), (2, 2)]


def test_what_an_old_slot_wrote_late_is_swept_at_the_first_snapshot() -> None:
    world = World(RESTARTS).run()
    complete_epoch(world)
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    late = "state/a0000000001-e0000000002-s00000-out.tgs"
    world.store.write(late, [b"late"])
    complete_epoch(world)
    world.turn()
    assert late not in world.store.files


def test_a_restarting_job_that_is_stopped_ends_at_once_and_says_why_it_was_restarting() -> None:
    world = World(tg.FixedDelay(attempts=3, delay="10 minutes")).run()
    epoch = complete_epoch(world)
    world.coordinator.on_message(0, Failed(0, "boom"))
    world.turn()
    world.coordinator.stop(drain=False)
    world.turn()
    world.turn()
    assert world.coordinator.status is tg.Status.FAILED and world.slots.attempts == [1]
    (failure,) = world.coordinator.failures
    assert failure.message == "boom" and failure.stopped
    assert failure.then == (
        "The job was stopped while it was restarting, so there is no final snapshot: started again, "
        f"it resumes from snapshot {epoch}"
    )


def test_a_restarting_job_whose_next_attempt_is_on_its_way_ends_at_once_too() -> None:
    world = World(RESTARTS).run()
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    assert world.slots.attempts == [1, 2] and world.status() is tg.Status.RESTARTING
    world.coordinator.stop(drain=False)
    world.turn()
    world.turn()
    assert world.coordinator.status is tg.Status.FAILED and world.slots.cancelled == 2


def test_a_job_that_was_to_stop_before_it_failed_is_restarted_for_its_final_snapshot() -> None:
    world = World(RESTARTS).run()
    world.coordinator.stop(drain=False)
    world.coordinator.on_lost(0, "gone")
    world.turn(500)
    world.turn()
    world.run()
    assert Trigger(2, "stop", full=True) in [message for _, message in world.slots.said]


def test_a_snapshot_that_is_asked_for_before_the_job_runs_is_taken_when_it_does() -> None:
    world = World()
    world.coordinator.snapshot()
    world.run()
    assert [epoch.epoch for epoch in world.coordinator.epochs] == [1]
    world.complete()
    world.turn(500)
    assert len(world.coordinator.epochs) == 1, "it is asked for once"


def test_what_a_job_says_is_said_once_for_each_failure() -> None:
    said: list[tuple[int, str]] = []

    def speak(level: int, text: str, *args: object, **rest: object) -> None:
        said.append((level, text % args))

    world = World(tg.FixedDelay(attempts=1, delay="500 ms"), speak=speak).run()
    world.coordinator.on_message(0, Failed(0, "boom"))
    world.coordinator.on_message(1, Failed(1, "boom as well"))
    world.turn(500)
    world.turn()
    world.run()
    world.coordinator.on_lost(1, "gone")
    assert said == [
        (logging.INFO, "Job 'm', attempt 1 begins, from no snapshot."),
        (
            logging.INFO,
            "Job 'm', attempt 1 runs after 0.0 s, with 0 bytes restored: "
            "slot 0 (host h, pid 100), slot 1 (host h, pid 101).",
        ),
        (
            logging.WARNING,
            "Job 'm', attempt 1, slot 0 (host h, pid 100): boom\nRestarting from the beginning in 0.5 s (restart 1 of 1).",
        ),
        (logging.INFO, "Job 'm', attempt 2 begins, from no snapshot."),
        (
            logging.INFO,
            "Job 'm', attempt 2 runs after 0.0 s, with 0 bytes restored: "
            "slot 0 (host h, pid 100), slot 1 (host h, pid 101).",
        ),
        (logging.ERROR, "Job 'm', attempt 2: slot 1 (host h, pid 101) was lost: gone\nThe job ends."),
    ]


def test_a_deployment_may_say_that_there_is_no_use_in_trying() -> None:
    world = World(RESTARTS)
    world.slots.ended = lambda: Failure("no Python", permanent=True)  # type: ignore[method-assign,assignment,return-value]
    world.turn()
    world.turn()
    assert world.coordinator.status is tg.Status.FAILED and world.slots.attempts == [1]
    assert world.coordinator.failures[0].then == "A restart doesn't help: the job ends"


def registered(world: World) -> World:
    """All slots have registered, and are told to restore."""
    for slot in range(2):
        world.coordinator.on_message(slot, Register(slot, "h", 1, 100 + slot))
    return world


def test_a_restore_may_take_any_time_as_long_as_it_advances() -> None:
    world = registered(World(tuning=Tuning(deploy_timeout="5 s")))
    world.coordinator.on_message(0, Ready(0))
    for turn in range(1, 11):
        world.coordinator.on_message(1, Restoring(1, turn * 1_000_000))
        world.turn(4_000)
        assert world.status() is tg.Status.STARTING
        assert world.coordinator.attempts[-1].restored[1].bytes == turn * 1_000_000
    world.coordinator.on_message(1, Ready(1, RestoreStats(10_000_000, 40_000)))
    assert world.status() is tg.Status.RUNNING


def test_a_slot_that_hangs_while_it_restores_is_found_out() -> None:
    world = registered(World(tuning=Tuning(deploy_timeout="5 s")))
    world.turn(4_000)
    world.coordinator.on_message(0, Ready(0))
    world.coordinator.on_message(1, Restoring(1, 7))
    world.turn(4_999)
    assert world.status() is tg.Status.STARTING, "the ready slot is silent because it waits"
    world.turn(1)
    world.turn()
    assert world.status() is tg.Status.FAILED
    assert world.coordinator.failures[-1].message.startswith(
        "slots [1] got no further with restoring their state for 5000 ms (7 bytes by slot 1)."
    )


def test_a_long_restore_is_no_long_run_so_a_job_that_always_fails_behind_it_gives_up() -> None:
    world = World(tg.Exponential(initial="1 ms", maximum="1 ms", attempts=3, reset_after="5 minutes")).run()
    complete_epoch(world)
    for _ in range(4):
        assert world.status() is tg.Status.RUNNING
        world.coordinator.on_message(0, Failed(0, "the process is too large", is_outside=False))
        world.turn(1)
        world.turn()
        if world.status() is tg.Status.FAILED:
            break
        registered(world)
        for _ in range(60):
            for slot in (0, 1):
                world.coordinator.on_message(slot, Restoring(slot, 7))
            world.turn(10_000)
        world.run()
    assert world.status() is tg.Status.FAILED
    assert len(world.coordinator.failures) == 4


def test_slots_that_come_late_have_the_whole_time_to_restore() -> None:
    world = World(tuning=Tuning(deploy_timeout="5 s"))
    world.turn(4_900)
    registered(world).turn(4_900)
    assert world.status() is tg.Status.STARTING
    world.run()


def test_a_snapshot_may_take_any_time_as_long_as_it_is_written() -> None:
    world = World(snapshot_timeout="5 s").run()
    world.turn(1_000)
    for turn in range(1, 11):
        world.turn(4_000)
        world.coordinator.on_message(0, Writing(0, 1, turn * 1_000_000))
        world.coordinator.on_message(1, Heartbeat(1, {}))
    assert world.coordinator.epochs[-1].written == {0: 10_000_000}
    world.coordinator.on_message(0, Writing(0, 7, 1))  # of no epoch that is under way
    assert world.complete() == 1
    world.turn(1_000)
    world.turn(5_000)
    assert world.coordinator.epochs[1].aborted is not None, "this one is not being written"
