"""A slot: subtask i of every vertex, in one single-threaded loop.

The slot does no I/O of its own and reads no clock: network, store, clock, background and the link to the coordinator are
injected, so that the same code runs in a Spark task and in the simulation. The caller calls `on_message` for the
coordinator's messages, and `step` as long as that makes progress. When the slot has `ended`, the caller closes it; a failure
has been reported by then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tidegate.channels.elements import Marker
from tidegate.control.failing import failed, is_final
from tidegate.control.messages import (
    Abort,
    Acknowledge,
    Committed,
    Complete,
    Counted,
    Decline,
    Deploy,
    Done,
    EndInput,
    Heartbeat,
    LeastTimes,
    Message,
    MoveTime,
    Probe,
    Ready,
    RestoreStats,
    Shutdown,
    Start,
    SubtaskMetrics,
    Traffic,
    Trigger,
)
from tidegate.control.settings import JobSettings
from tidegate.dataflow.plan import Plan
from tidegate.errors import ProtocolError, StoreError
from tidegate.protocol.epoch_coordinator import Ending
from tidegate.protocol.ids import SubtaskId
from tidegate.slot.assembly import Assembly, RestoredSnapshot
from tidegate.slot.inner import InnerSubtask
from tidegate.slot.progress import RestoreProgress
from tidegate.slot.slot_log import SlotLog
from tidegate.slot.step_times import StepTimes
from tidegate.slot.subtask import FrozenPiece, SourceSubtask, Subtask
from tidegate.slot.time_group_members import TimeGroupMembers
from tidegate.slot.world import SlotWorld
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import OperatorEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.stats import SubtaskStats
from tidegate.state.cutting import without_rests
from tidegate.store.local_copy import LocalCopyStore

CHANNEL_LOST_PATIENCE_MS = 5_000


class Slot:
    def __init__(self, index: int, *, plan: Plan, settings: JobSettings, attempt: int, world: SlotWorld) -> None:
        self.index = index
        self.ended = False
        self._plan = plan
        self._settings = settings
        self._attempt = attempt
        self._world = world
        self._subtasks: list[Subtask] = []
        self._time_groups = TimeGroupMembers(index, (), world.tell, repeat_ms=settings.tuning.heartbeat_ms)
        self._running = False
        self._next_heartbeat_ms = 0
        self._writing: dict[tuple[SubtaskId, int], int] = {}  # by subtask and epoch, since when
        self._steps = StepTimes()
        self._log = SlotLog(index, plan=plan, settings=settings, attempt=attempt, speak=world.speak)
        self._assembly: Assembly | None = None
        self._lost: tuple[str, int] | None = None  # a channel that is lost, and until when its other end may report why

    # What the host's loop calls.

    def on_message(self, message: Message) -> None:
        try:
            self._handle(message)
        except Exception as error:  # noqa: BLE001  (the coordinator decides what follows)
            self._fail(error)

    def step(self) -> bool:
        """Do a unit of work for every subtask, downstream first, and return whether anything was done."""
        if self._lost is not None and self._world.clock.monotonic_ms() >= self._lost[1]:
            self._fail(ProtocolError(self._lost[0]))
        if self.ended or not self._running:
            return False
        started = time.perf_counter()
        try:
            self._heartbeat()
            now_ms = self._world.clock.now_ms()
            progress = False
            for subtask in self._subtasks:
                progress |= subtask.on_time(now_ms)
                if subtask.step():
                    progress = True
                    subtask.maintain()
            self._time_groups.step(self._world.clock.monotonic_ms())
            if progress:
                ended = time.perf_counter()
                self._steps.took(ended, (ended - started) * 1000)
            return progress
        except Exception as error:  # noqa: BLE001
            self._fail(error)
            return False

    def on_channel_lost(self, reason: str) -> None:
        """Wait before the lost channel is reported. Usually the slot at its other end has failed, and reports the cause."""
        if self._lost is None:
            self._running = False
            self._lost = reason, self._world.clock.monotonic_ms() + CHANNEL_LOST_PATIENCE_MS

    def on_link_lost(self, reason: str) -> None:
        """The coordinator can't be reached any more. Whoever drives the loop ends it."""
        if not self.ended:
            self._log.orphaned(reason)

    def wait_ms(self) -> int:
        """Return how long the loop may wait for something to arrive before it steps again."""
        clock = self._world.clock
        monotonic_ms, now_ms = clock.monotonic_ms(), clock.now_ms()
        waits = [self._next_heartbeat_ms - monotonic_ms] if self._running else [self._settings.tuning.heartbeat_ms]
        for subtask in self._subtasks if self._running else ():
            if (until_ms := subtask.wait_until_ms()) is not None:
                waits.append(until_ms - monotonic_ms)
            if (deadline_ms := subtask.deadline_ms()) is not None:
                waits.append(deadline_ms - now_ms)
        return max(0, min(waits))

    def close(self) -> None:
        self.ended = True
        for subtask in self._subtasks:
            subtask.close()
        self._subtasks = []
        if self._assembly is not None:
            self._assembly.close()

    # Messages.

    def _handle(self, message: Message) -> None:
        match message:
            case Deploy(addresses, epoch, restore_from):
                restored = self._deploy(addresses, epoch, restore_from)
                self._log.deployed(epoch, restored)
                self._world.tell(Ready(self.index, restored))
            case Start():
                self._running = True
            case Trigger(epoch, ending, full, base):
                self._trigger(Marker(epoch, base=base, full=full), None if ending is None else Ending(ending))
            case LeastTimes(least):
                self._time_groups.on_least(least)
            case EndInput():
                for subtask in self._subtasks:
                    if isinstance(subtask, SourceSubtask):
                        subtask.end_input()
            case Complete(epoch, ending):
                for subtask in self._subtasks:
                    subtask.complete(epoch)
                self._report(is_last=ending is not None)  # there may be no further heartbeat
                self._world.tell(Committed(self.index, epoch) if ending is None else Done(self.index))
            case Abort(epoch):
                for subtask in self._subtasks:
                    subtask.abort(epoch)
            case Probe(number):
                traffic = sum((subtask.traffic() for subtask in self._subtasks), Traffic())
                self._world.tell(Counted(number, traffic.sent, traffic.taken, traffic.replays))
            case MoveTime():  # no record is under way
                for subtask in self._subtasks:
                    subtask.move_time(message)
            case Shutdown():
                self.ended = True
            case _:
                raise AssertionError(f"a slot doesn't expect {message}")

    def _trigger(self, marker: Marker, ending: Ending | None) -> None:
        hurry_after_ms = self._settings.snapshots.hurry_after_ms
        for subtask in self._subtasks:
            if isinstance(subtask, SourceSubtask):
                subtask.trigger(marker, ending)
            elif isinstance(subtask, InnerSubtask) and hurry_after_ms is not None and not marker.full:
                # A full snapshot is aligned, so that the job can be changed: it has no records in flight.
                subtask.expect(marker.epoch, hurry_after_ms=hurry_after_ms)

    def _heartbeat(self) -> None:
        monotonic_ms = self._world.clock.monotonic_ms()
        if monotonic_ms >= self._next_heartbeat_ms:
            self._next_heartbeat_ms = monotonic_ms + self._settings.tuning.heartbeat_ms
            memory = self._world.memory
            memory.look()
            self._report()
            if memory.is_nearly_full:
                self._log.nearly_full(memory, monotonic_ms)
            self._log.look_at_alignments(self._subtasks, monotonic_ms)
            self._log.look_at_writes(self._writing, monotonic_ms)
            if self._writing and self._assembly is not None:
                self._assembly.written.report()
            self._log.look_at_waits(self._time_groups.stuck(monotonic_ms), monotonic_ms)
            for subtask in self._subtasks:
                subtask.maintain()  # even if nothing arrives, state may expire

    def _report(self, *, is_last: bool = False) -> None:
        self._world.tell(Heartbeat(self.index, self._metrics(), self._world.memory.used_bytes))
        self._log.look_at_late(self._subtasks, self._world.clock.monotonic_ms(), is_last=is_last)

    def _metrics(self) -> dict[str, SubtaskMetrics]:
        return {
            str(each.id): SubtaskMetrics(
                each.counters.records_in,
                round(each.counters.snapshot_pause_ms, 3),
                each.counters.waited_ms,
                sum(operator.late_dropped for operator in each.operators),
            )
            for each in self._subtasks
        }

    def _fail(self, error: Exception) -> None:
        if self.ended:
            return
        self.ended = True
        self._log.failed(error)
        self._world.tell(failed(self.index, error))

    # Snapshots.

    def _take_frozen(self, subtask: Subtask, marker: Marker, pieces: Sequence[FrozenPiece]) -> None:
        """Write the frozen pieces in the background, then acknowledge."""
        stats = replace(subtask.counters.last, alarm_ms=subtask.alarm_ms())
        if not self._settings.writes_state:
            for piece in pieces:
                piece.frozen.release()
            self._world.tell(Acknowledge(subtask.id.vertex, subtask.id.subtask, marker.epoch, {}, stats))
            return
        assert self._assembly is not None
        writers = self._assembly.writers
        self._steps.begin()

        def write() -> tuple[dict[str, OperatorEntry], SubtaskStats]:
            started = time.perf_counter()
            with contextlib.nullcontext() if self._settings.writers_rest else without_rests():
                written = {
                    piece.operator: writers[piece.operator].write(
                        piece.frozen, epoch=marker.epoch, base=marker.base, full=marker.full
                    )
                    for piece in pieces
                }
            write_ms = round((time.perf_counter() - started) * 1000, 3)
            state_bytes = sum(file.bytes for entry in written.values() for each in entry.pieces for file in each.files)
            return written, replace(stats, write_ms=write_ms, state_bytes=state_bytes)

        self._assembly.written.begin(marker.epoch)
        self._writing[subtask.id, marker.epoch] = self._world.clock.monotonic_ms()
        self._world.background.submit(write, partial(self._pieces_written, subtask, marker.epoch, pieces))

    def _pieces_written(
        self,
        subtask: Subtask,
        epoch: int,
        pieces: Sequence[FrozenPiece],
        written: tuple[dict[str, OperatorEntry], SubtaskStats] | None,
        error: BaseException | None,
    ) -> None:
        if self.ended:
            return
        for piece in pieces:
            piece.frozen.release()
        self._writing.pop((subtask.id, epoch), None)
        longest_step_ms, quiet_step_ms = self._steps.end()
        vertex, index = subtask.id.vertex, subtask.id.subtask
        if written is not None:
            operators, stats = written
            stats = replace(stats, longest_step_ms=longest_step_ms, quiet_step_ms=quiet_step_ms)
            self._world.tell(Acknowledge(vertex, index, epoch, operators, stats))
        elif isinstance(error, StoreError) and not is_final(error):
            self._world.tell(Decline(vertex, index, epoch, f"{type(error).__name__}: {error}"))
        else:
            # A sink that couldn't pre-commit has lost track of its epoch, which only a rollback can repair.
            assert isinstance(error, Exception)
            self._fail(error)

    # Deployment.

    def _deploy(
        self, addresses: Sequence[tuple[str, int]], epoch: int | None, restore_from: str | None
    ) -> RestoreStats | None:
        """Build the subtasks, and return the bytes and the time that restoring the snapshot took, if there is one."""
        started = time.perf_counter()
        restored = None if epoch is None else self._restored(epoch, restore_from)
        self._assembly = Assembly(
            self.index,
            plan=self._plan,
            settings=self._settings,
            attempt=self._attempt,
            world=self._world,
            addresses=addresses,
            restored=restored,
            take_frozen=self._take_frozen,
        )
        self._subtasks = self._assembly.build()
        self._time_groups = TimeGroupMembers(
            self.index, self._subtasks, self._world.tell, repeat_ms=self._settings.tuning.heartbeat_ms
        )
        if restored is None:
            return None
        return RestoreStats(restored.progress.store.read_bytes, round((time.perf_counter() - started) * 1000, 3))

    def _restored(self, epoch: int, restore_from: str | None) -> RestoredSnapshot:
        store = self._world.store
        snapshot = (
            Snapshot(store, SnapshotCatalog(store).load(epoch)) if restore_from is None else find_snapshot(restore_from)
        )
        snapshot = replace(snapshot.still_to_commit(), scratch=self._settings.backend.folder)
        if restore_from is None and isinstance(store, LocalCopyStore):
            store.adopt(snapshot.manifest.files())
        report = partial(
            RestoreProgress,
            self.index,
            tell=self._world.tell,
            clock=self._world.clock,
            every_ms=self._settings.tuning.heartbeat_ms,
            look=self._world.memory.look,
        )
        return RestoredSnapshot.of(
            snapshot, self._plan, drop=self._settings.drop_state, is_own=restore_from is None, report=report
        )
