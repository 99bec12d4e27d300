"""A slot: subtask i of every vertex, in one single-threaded loop.

The slot does no I/O of its own and reads no clock: it is given a network, a store, a clock, a background and a way to
speak to the coordinator, so that the very same code runs in a Spark task and in the simulation. Whoever drives it calls
`on_message` for what the coordinator says and `step` as long as that makes progress. When the slot has `ended`, it is to be
dropped; a failure has been reported by then.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from tidegate.channels.elements import Marker
from tidegate.channels.feedback import FeedbackChannel
from tidegate.channels.memory import MemoryChannel
from tidegate.channels.ports import Inlet, Outlet
from tidegate.control.background import Background
from tidegate.control.clock import BatchTime, Clock
from tidegate.control.failing import failed, is_final
from tidegate.control.messages import (
    Abort,
    Acknowledge,
    Committed,
    Complete,
    Decline,
    Delivered,
    Deploy,
    Done,
    EndInput,
    Heartbeat,
    InputEnded,
    Message,
    MoveTime,
    Noticed,
    Ready,
    Shutdown,
    Start,
    Traffic,
    Trigger,
)
from tidegate.control.settings import JobSettings
from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.graph import Node, Partitioning
from tidegate.dataflow.in_flight import Place, places_of
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.source import SourceOperator, WatermarkSpec, follow_splits
from tidegate.dataflow.plan import Plan, PlanEdge, Vertex
from tidegate.errors import ProtocolError, StoreError
from tidegate.protocol.alignment import AlignmentMode
from tidegate.protocol.epoch_coordinator import Ending
from tidegate.protocol.ids import ChannelId
from tidegate.slot.exchange import EdgeWriter
from tidegate.slot.in_flight import Replay, own_records, waits_in
from tidegate.slot.laps import Laps
from tidegate.slot.subtask import InnerSubtask, Input, Part, SourceSubtask, Subtask
from tidegate.slot.untimed import untimed_operators, warning_of
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.committed import still_to_commit
from tidegate.snapshots.manifest import FileEntry, Manifest
from tidegate.snapshots.native import download
from tidegate.snapshots.plan import RestorePlan, plan_restore
from tidegate.snapshots.reading import restored_rows
from tidegate.snapshots.savepoints import load_savepoint
from tidegate.snapshots.writing import Chain, PartWriter, chain_to_go_on_from
from tidegate.state.cutting import without_rests
from tidegate.state.sections import StateKind
from tidegate.store.base import CountedReads, Readable, Store
from tidegate.store.layout import shown
from tidegate.store.local_copy import LocalCopyStore

CHANNEL_LOST_PATIENCE_MS = 5_000
QUIET_STEPS = 8192


class Network(Protocol):
    """Channels to other slots."""

    def connect(
        self, *, outgoing: Mapping[ChannelId, tuple[tuple[str, int], pa.Schema]], incoming: Mapping[ChannelId, pa.Schema]
    ) -> None: ...

    def outlet(self, channel: ChannelId) -> Outlet: ...

    def inlet(self, channel: ChannelId) -> Inlet: ...


@dataclass(frozen=True, slots=True)
class SlotWorld:
    """Everything outside that a slot may touch."""

    network: Network
    store: Store
    clock: Clock
    background: Background
    tell: Callable[[Message], None]
    batch_time: BatchTime | None = None  # what users' functions see in place of the clock, in a micro-batch


class StepTimes:
    """What a snapshot costs the hot loop: the longest step while one is being written, and the longest in just as long
    a time before it, which is what the machine does to the loop anyway."""

    def __init__(self) -> None:
        self._writing = 0
        self._began_s = 0.0
        self._longest_ms = 0.0
        self._quiet: deque[tuple[float, float]] = deque(maxlen=QUIET_STEPS)  # when a step ended, and what it took

    def took(self, now_s: float, step_ms: float) -> None:
        if self._writing:
            self._longest_ms = max(self._longest_ms, step_ms)
        else:
            self._quiet.append((now_s, step_ms))

    def begin(self) -> None:
        if not self._writing:
            self._longest_ms, self._began_s = 0.0, time.perf_counter()
        self._writing += 1

    def end(self) -> dict[str, float]:
        self._writing -= 1
        since_s = 2 * self._began_s - time.perf_counter()
        quiet_ms = max((step_ms for ended_s, step_ms in self._quiet if ended_s >= since_s), default=0.0)
        return {"longest_step_ms": round(self._longest_ms, 3), "quiet_step_ms": round(quiet_ms, 3)}


class Slot:
    def __init__(self, index: int, *, plan: Plan, settings: JobSettings, attempt: int, world: SlotWorld) -> None:
        self.index = index
        self.ended = False
        self._plan = plan
        self._settings = settings
        self._attempt = attempt
        self._world = world
        self._subtasks: list[Subtask] = []
        self._running = False
        self._next_heartbeat_ms = 0
        self._steps = StepTimes()
        self._writers: dict[str, PartWriter] = {}
        self._channels: _Channels | None = None
        self._untimed = frozenset[str]()  # operators at which event time never moves
        self._lost: tuple[str, int] | None = None  # a channel that is gone, and until when we wait to hear why

    # What the driver of the loop calls.

    def on_message(self, message: Message) -> None:
        try:
            self._handle(message)
        except Exception as error:  # noqa: BLE001  (whatever it is, the coordinator decides what follows)
            self._fail(error)

    def step(self) -> bool:
        """A unit of work for every subtask, downstream first; whether anything was done."""
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
                subtask.on_time(now_ms)
                if subtask.step():
                    progress = True
                    subtask.maintain()
            if progress:
                ended = time.perf_counter()
                self._steps.took(ended, (ended - started) * 1000)
            return progress
        except Exception as error:  # noqa: BLE001
            self._fail(error)
            return False

    def on_channel_lost(self, reason: str) -> None:
        """The slot at the other end is gone, as a rule. It knows why, so the coordinator shall hear it from there first;
        only if nothing comes of that do we report the channel."""
        if self._lost is None:
            self._running = False
            self._lost = reason, self._world.clock.monotonic_ms() + CHANNEL_LOST_PATIENCE_MS

    def wait_ms(self) -> int:
        """How long the loop may wait for something to arrive before it steps again."""
        clock = self._world.clock
        monotonic_ms, now_ms = clock.monotonic_ms(), clock.now_ms()
        waits = [self._next_heartbeat_ms - monotonic_ms] if self._running else [self._settings.tuning.heartbeat_ms]
        for subtask in self._subtasks if self._running else ():
            if (until_ms := subtask.wait_until_ms()) is not None:
                waits.append(until_ms - monotonic_ms)
            if (deadline_ms := subtask.deadline_ms()) is not None:
                waits.append(deadline_ms - now_ms)
        return max(0, min(waits))

    def traffic(self) -> Traffic:
        """On all channels of its subtasks."""
        return sum((subtask.traffic() for subtask in self._subtasks), Traffic())

    def move_time(self, order: MoveTime) -> None:
        """Between two steps, when no record is under way."""
        try:
            for subtask in self._subtasks:
                subtask.move_time(order)
        except Exception as error:  # noqa: BLE001  (timers call users' functions)
            self._fail(error)

    def close(self) -> None:
        self.ended = True
        for subtask in self._subtasks:
            subtask.close()
        self._subtasks = []
        if self._channels is not None:
            self._channels.close()

    # Messages.

    def _handle(self, message: Message) -> None:
        match message:
            case Deploy(addresses, epoch, restore_from):
                started = time.perf_counter()
                point = self._restore_point(epoch, restore_from)
                self._deploy([(host, port) for host, port in addresses], point)
                restored = (
                    {}
                    if point is None
                    else {"bytes": point.store.bytes, "ms": round((time.perf_counter() - started) * 1000, 3)}
                )
                self._world.tell(Ready(self.index, restored))
            case Start():
                self._running = True
            case Trigger(epoch, ending, full, base):
                self._trigger(Marker(epoch, base=base, full=full), None if ending is None else Ending(ending))
            case EndInput():
                for subtask in self._subtasks:
                    if isinstance(subtask, SourceSubtask):
                        subtask.end_input()
            case Complete(epoch, ending):
                for subtask in self._subtasks:
                    subtask.complete(epoch)
                self._world.tell(Committed(self.index, epoch) if ending is None else Done(self.index))
            case Abort(epoch):
                for subtask in self._subtasks:
                    subtask.abort(epoch)
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
                # A full snapshot is aligned, so that whoever changes the job finds no records under way in it.
                subtask.expect(marker.epoch, hurry_after_ms=hurry_after_ms)

    def _heartbeat(self) -> None:
        monotonic_ms = self._world.clock.monotonic_ms()
        if monotonic_ms >= self._next_heartbeat_ms:
            self._next_heartbeat_ms = monotonic_ms + self._settings.tuning.heartbeat_ms
            self._world.tell(Heartbeat(self.index, self._metrics()))
            for subtask in self._subtasks:
                subtask.maintain()  # also where nothing arrives: state may expire

    def _metrics(self) -> dict[str, Any]:
        return {
            str(subtask.id): {
                "records_in": subtask.counters.records_in,
                "pause_ms": round(subtask.counters.snapshot_pause_ms, 3),
            }
            for subtask in self._subtasks
        }

    def _fail(self, error: Exception) -> None:
        if self.ended:
            return
        self.ended = True
        self._world.tell(failed(self.index, error))

    # Snapshots.

    def _take_parts(self, subtask: Subtask, marker: Marker, parts: Sequence[Part]) -> None:
        """Writes the frozen parts in the background, then acknowledges."""
        stats = dict(subtask.counters.last)
        if (wake_ms := subtask.wake_ms()) is not None:
            stats["wake_ms"] = wake_ms
        if not self._settings.keeps_state:
            for part in parts:
                part.frozen.release()
            self._world.tell(Acknowledge(subtask.id.vertex, subtask.id.subtask, marker.epoch, {}, stats))
            return
        self._steps.begin()

        def write() -> dict[str, Any]:
            started = time.perf_counter()
            with contextlib.nullcontext() if self._settings.writers_rest else without_rests():
                written = {
                    part.operator: self._writers[part.operator].write(
                        part.frozen, epoch=marker.epoch, base=marker.base, full=marker.full
                    )
                    for part in parts
                }
            stats["write_ms"] = round((time.perf_counter() - started) * 1000, 3)
            stats["state_bytes"] = sum(file["bytes"] for part in written.values() for file in part["piece"]["files"])
            return written

        self._world.background.submit(write, partial(self._parts_written, subtask, marker.epoch, parts, stats))

    def _parts_written(
        self,
        subtask: Subtask,
        epoch: int,
        parts: Sequence[Part],
        stats: dict[str, Any],
        written: dict[str, Any] | None,
        error: BaseException | None,
    ) -> None:
        if self.ended:
            return
        for part in parts:
            part.frozen.release()
        stats |= self._steps.end()
        vertex, index = subtask.id.vertex, subtask.id.subtask
        if written is not None:
            self._world.tell(Acknowledge(vertex, index, epoch, written, stats))
        elif isinstance(error, StoreError) and not is_final(error):
            self._world.tell(Decline(vertex, index, epoch, f"{type(error).__name__}: {error}"))
        else:
            # A sink that couldn't pre-commit has lost track of its epoch: only a rollback puts that right.
            assert isinstance(error, Exception)
            self._fail(error)

    # Deployment.

    def _restore_point(self, epoch: int | None, restore_from: str | None) -> _RestorePoint | None:
        if epoch is None:
            return None
        if restore_from is None:
            store = self._world.store
            manifest = still_to_commit(store, SnapshotCatalog(store).load(epoch))
            if isinstance(store, LocalCopyStore):
                store.adopt(manifest.files())
        else:
            store, manifest = load_savepoint(restore_from)
            manifest = still_to_commit(store, manifest)
        plan = plan_restore(
            manifest,
            operators=declared_operators(self._plan),
            key_group_count=self._plan.key_group_count,
            drop=self._settings.drop_state,
        )
        return _RestorePoint(CountedReads(store), manifest, plan, is_own=restore_from is None)

    def _deploy(self, addresses: Sequence[tuple[str, int]], point: _RestorePoint | None) -> None:
        channels = self._channels = _Channels(
            self._plan, self.index, self._world.network, addresses, loop_memory_bytes=self._settings.tuning.loop_memory_bytes
        )
        timed = _timed_vertices(self._plan)
        self._untimed = untimed_operators(self._plan, micro_batches=self._world.batch_time is not None)
        built = [self._build(vertex, channels, timed, point) for vertex in self._plan.subtasks_in(self.index)]
        self._subtasks = built[::-1]

    def _build(self, vertex: Vertex, channels: _Channels, timed: set[int], point: _RestorePoint | None) -> Subtask:
        operators = {node.id: node.spec.create(node) for node in vertex.nodes}
        writers = []
        for node in vertex.nodes[1:]:
            (edge,) = node.inputs
            _attach(operators[edge.source], edge.tag, operators[node.id])
        for out in self._plan.outputs_of(vertex):
            writer = EdgeWriter(
                [channels.outlet(out, channel) for channel in self._plan.targets(out, self.index)],
                partitioning=out.partitioning,
                key=out.key,
                key_group_count=self._plan.key_group_count,
                first=self.index,
                loops=frozenset(loop.id for loop in self._plan.loops if self._plan.edge_inside(loop, out)),
                refuses_nulls_for=self._plan.vertices[out.target_vertex].head.name if out.refuses_nulls else None,
            )
            writers.append(writer)
            _attach(operators[out.source_node], out.tag, writer)
        follow_splits(list(operators.values()))
        keeps = self._keeps_in_flight(vertex)
        places = {(place.operator, place.info.name): place for place in self._places(vertex, point, of_head=keeps)}
        replay = Replay()
        for node in vertex.nodes:
            context = self._context(vertex, node, point)
            waiting = {place.info.name: place for place in places.values() if place.operator == node.name}
            states = {state: rows for state, rows in context.restored.items() if state not in waiting}
            operators[node.id].open(replace(context, restored=states))
            for place in waiting.values():
                replay.add(
                    place,
                    operators[node.id],
                    own_records(
                        place,
                        node,
                        context.rows(place.info.name),
                        subtask=self.index,
                        parallelism=vertex.parallelism,
                        key_group_count=self._plan.key_group_count,
                    ),
                )
        tuning, clock = self._settings.tuning, self._world.clock
        rest: dict[str, Any] = dict(
            vertex=vertex,
            index=self.index,
            operators=list(operators.values()),
            writers=writers,
            replay=replay,
            places=list(places.values()),
            take_parts=self._take_parts,
            max_batch_rows=tuning.max_batch_rows,
            monotonic_ms=clock.monotonic_ms,
            on_done=lambda done: self._world.tell(InputEnded(done.id.vertex, done.id.subtask)),
        )
        if isinstance(operators[vertex.head.id], SourceOperator):
            return SourceSubtask(linger_ms=tuning.linger_ms, halts=self._settings.snapshots.halts_sources, **rest)
        inputs = [
            Input(
                channels.inlet(edge, channel),
                edge.port,
                edge.source_vertex in timed and not edge.feedback,
                places.get((vertex.head.name, waits_in(edge))),
            )
            for edge in self._plan.inputs_of(vertex)
            for channel in self._plan.origins(edge, self.index)
        ]
        mode = self._settings.snapshots.alignment_mode
        return InnerSubtask(
            inputs=inputs,
            laps=Laps.of(self._plan, vertex, self.index),
            hurries=keeps,
            time_by_epoch=any(isinstance(node.spec, WatermarkSpec) and node.spec.by_epoch for node in self._plan.nodes),
            mode=AlignmentMode.EXACTLY_ONCE if mode is AlignmentMode.LOGGING and not keeps else mode,
            **rest,
        )

    def _keeps_in_flight(self, vertex: Vertex) -> bool:
        """Whether records under way to the vertex may be part of snapshots. Not where they were broadcast or passed on
        from subtask to subtask: nobody could say to whom they belong at another parallelism. Nor above such a vertex: it
        would block the channel of a marker that has overtaken, and with it whoever sent it, and wait for others behind."""
        return self._settings.snapshots.keeps_in_flight and all(
            edge.feedback or edge.partitioning in (Partitioning.HASH, Partitioning.REBALANCE)
            for each in (vertex.id, *self._plan.below(vertex))
            for edge in self._plan.inputs_of(self._plan.vertices[each])
        )

    def _places(self, vertex: Vertex, point: _RestorePoint | None, *, of_head: bool) -> Iterator[Place]:
        """Those that every snapshot of this vertex has a log of: its head's if so, and those of what it began with."""
        for node in vertex.nodes:
            planned = None if point is None else point.plan.of(node.name)
            held = () if planned is None else [state.name for state in planned.states if state.taken_in]
            for place in places_of(node):
                if place.is_feedback or place.info.name in held or (of_head and node is vertex.head):
                    yield place

    def _context(self, vertex: Vertex, node: Node, point: _RestorePoint | None) -> OperatorContext:
        chain: Chain | None = None
        restored: Mapping[str, Iterable[pa.RecordBatch]] = {}
        if point is not None:
            restored = restored_rows(
                point.manifest,
                node.name,
                store=point.store,
                plan=point.plan,
                subtask=self.index,
                parallelism=vertex.parallelism,
            )
            planned = point.plan.of(node.name)
            if point.is_own and planned is not None and planned.unchanged:
                chain = chain_to_go_on_from(
                    point.manifest,
                    node.name,
                    node.spec.states(node),
                    subtask=self.index,
                    parallelism=vertex.parallelism,
                    native=self._settings.backend.native,
                )
        files = [file for file in chain or () if file.form == self._settings.backend.native]
        if files:
            # The backend takes its files as they are; there is no row to be read of its states.
            keyed = {info.name for info in node.spec.states(node) if info.kind is StateKind.KEYED}
            restored = {state: rows for state, rows in restored.items() if state not in keyed}
        self._writers[node.name] = PartWriter(
            node.name,
            store=self._world.store,
            attempt=self._attempt,
            subtask=self.index,
            parallelism=vertex.parallelism,
            key_group_count=self._plan.key_group_count,
            restored=None if point is None or chain is None else (point.manifest.epoch, chain),
        )
        batch_time = self._world.batch_time
        return OperatorContext(
            job=self._settings.name,
            subtask=self.index,
            parallelism=vertex.parallelism,
            attempt=self._attempt,
            key_group_count=self._plan.key_group_count,
            now_ms=self._world.clock.now_ms,
            batch_now_ms=None if batch_time is None else batch_time.now_ms,
            batch_watermark_ms=None if batch_time is None else batch_time.watermark_ms,
            deliver=lambda sink, committable: self._world.tell(Delivered(sink, committable)),
            make_backend=partial(self._make_backend, None if point is None else point.store, files),
            restored=restored,
            is_restored=point is not None,
            goes_on=chain is not None,
            is_native=bool(files),
            on_untimed=partial(self._notice, warning_of(node.name)) if node.name in self._untimed else None,
            snapshots=shown(self._world.store.address),
        )

    def _notice(self, text: str) -> None:
        self._world.tell(Noticed(self.index, text))

    def _make_backend(self, store: Readable | None, files: Sequence[FileEntry], key_type: pa.DataType) -> KeyedBackend:
        backend = self._settings.backend
        rest: dict[str, Any] = dict(
            key_type=key_type,
            key_group_count=self._plan.key_group_count,
            now_ms=(self._world.batch_time or self._world.clock).now_ms,
        )
        if store is None or not files:
            return backend.create(**rest)
        with tempfile.TemporaryDirectory(prefix="tidegate-native-", dir=backend.folder) as folder:
            download(store, files, Path(folder))
            return backend.create(**rest, native=Path(folder))


@dataclass(frozen=True, slots=True)
class _RestorePoint:
    """What a slot begins with. `is_own`: it is one of the job's own snapshots, which the next one may build on."""

    store: CountedReads
    manifest: Manifest
    plan: RestorePlan
    is_own: bool


class _Channels:
    """The channel ends of one slot: in memory where both ends are here, over the network otherwise."""

    def __init__(
        self, plan: Plan, slot: int, network: Network, addresses: Sequence[tuple[str, int]], *, loop_memory_bytes: int
    ) -> None:
        self._plan = plan
        self._network = network
        self._loop_memory_bytes = loop_memory_bytes
        self._local: dict[ChannelId, MemoryChannel | FeedbackChannel] = {}
        outgoing: dict[ChannelId, tuple[tuple[str, int], pa.Schema]] = {}
        incoming: dict[ChannelId, pa.Schema] = {}
        for edge in plan.edges:
            schema = edge_schema(plan, edge)
            if slot < plan.vertices[edge.source_vertex].parallelism:
                outgoing |= {
                    channel: (addresses[channel.downstream], schema)
                    for channel in plan.targets(edge, slot)
                    if channel.downstream != slot
                }
            if slot < plan.vertices[edge.target_vertex].parallelism:
                incoming |= {channel: schema for channel in plan.origins(edge, slot) if channel.upstream != slot}
        network.connect(outgoing=outgoing, incoming=incoming)

    def outlet(self, edge: PlanEdge, channel: ChannelId) -> Outlet:
        return self._own(edge, channel) if channel.upstream == channel.downstream else self._network.outlet(channel)

    def inlet(self, edge: PlanEdge, channel: ChannelId) -> Inlet:
        return self._own(edge, channel) if channel.upstream == channel.downstream else self._network.inlet(channel)

    def close(self) -> None:
        for channel in self._local.values():
            channel.close()

    def _own(self, edge: PlanEdge, channel: ChannelId) -> MemoryChannel | FeedbackChannel:
        if channel not in self._local:
            self._local[channel] = (
                FeedbackChannel(channel, edge_schema(self._plan, edge), memory_bytes=self._loop_memory_bytes)
                if edge.feedback
                else (MemoryChannel(channel))
            )
        return self._local[channel]


def edge_schema(plan: Plan, edge: PlanEdge) -> pa.Schema:
    """What travels on an edge."""
    if edge.feedback:
        return plan.vertices[edge.target_vertex].head.schema
    node = next(node for node in plan.vertices[edge.source_vertex].nodes if node.id == edge.source_node)
    return node.schema if edge.tag is None else node.side_schemas[edge.tag]


def _attach(producer: Operator, tag: str | None, consumer: Any) -> None:
    (producer.consumers if tag is None else producer.side_consumers[tag]).append(consumer)


def _timed_vertices(plan: Plan) -> set[int]:
    """The vertices whose output carries watermarks: they assign them, or something above them does."""
    timed: set[int] = set()
    for vertex in plan.vertices:
        if any(isinstance(node.spec, WatermarkSpec) for node in vertex.nodes) or any(
            edge.source_vertex in timed and not edge.feedback for edge in plan.inputs_of(vertex)
        ):
            timed.add(vertex.id)
    return timed
