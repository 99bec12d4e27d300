"""Assemble a slot's subtasks: chain and open operators, connect channels, restore state and records in flight.

An assembly is made once for each attempt, from the plan and the restored snapshot. How subtasks run is in subtask.py; what
becomes of each state of a snapshot is in snapshots/plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from tidegate.channels.feedback import FeedbackChannel
from tidegate.channels.memory import MemoryChannel
from tidegate.channels.ports import Inlet, Outlet
from tidegate.control.messages import (
    Delivered,
    InputEnded,
    Noticed,
)
from tidegate.control.no_event_time import operators_without_event_time, warning_of_timer
from tidegate.control.settings import JobSettings
from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.fusing import fused_runs
from tidegate.dataflow.graph import Node, Partitioning
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.operators.columns import ColumnsOperator
from tidegate.dataflow.operators.source import follow_splits
from tidegate.dataflow.places import Place, places_of
from tidegate.dataflow.plan import Plan, PlanEdge, Vertex
from tidegate.protocol.alignment import AlignmentMode
from tidegate.protocol.ids import ChannelId
from tidegate.slot.batch_size import BatchSize
from tidegate.slot.exchange import EdgeWriter
from tidegate.slot.in_flight import Replay, own_records, waits_in
from tidegate.slot.inner import InnerSubtask, Input
from tidegate.slot.laps import Laps
from tidegate.slot.progress import RestoreProgress, WriteProgress
from tidegate.slot.subtask import SourceSubtask, Subtask, TakeFrozen
from tidegate.slot.world import Network, SlotWorld
from tidegate.snapshots.manifest import FileEntry
from tidegate.snapshots.native import download, download_folder
from tidegate.snapshots.plan import RestorePlan
from tidegate.snapshots.row_files import Chain
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.writing import PieceWriter, chain_to_continue
from tidegate.state.sections import StateKind
from tidegate.store.base import Store
from tidegate.store.layout import shown


@dataclass(frozen=True, slots=True)
class RestoredSnapshot:
    """The snapshot that a slot restores, and the restore plan. `is_own`: it is one of the job's own snapshots,
    which the next one may build on."""

    snapshot: Snapshot
    plan: RestorePlan
    is_own: bool
    progress: RestoreProgress

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        plan: Plan,
        *,
        drop: Collection[str],
        is_own: bool,
        report: Callable[[Store], RestoreProgress],
    ) -> RestoredSnapshot:
        planned = snapshot.plan(declared_operators(plan), key_group_count=plan.key_group_count, drop=drop)
        progress = report(snapshot.store)
        return cls(replace(snapshot, store=progress.store), planned, is_own, progress)


class Assembly:
    """The subtasks of a slot. `writers` has the snapshot writer of each operator once the subtasks are built. They write to
    the store of `written`."""

    def __init__(
        self,
        index: int,
        *,
        plan: Plan,
        settings: JobSettings,
        attempt: int,
        world: SlotWorld,
        addresses: Sequence[tuple[str, int]],
        restored: RestoredSnapshot | None,
        take_frozen: TakeFrozen,
    ) -> None:
        self.index = index
        self.writers: dict[str, PieceWriter] = {}
        self.written = WriteProgress(index, world.store, tell=world.tell)
        self._plan = plan
        self._settings = settings
        self._attempt = attempt
        self._world = world
        self._restored = restored
        self._take_frozen = take_frozen
        self._channels = _Channels(
            plan, index, world.network, addresses, loop_memory_bytes=settings.tuning.loop_memory_bytes
        )
        self._with_event_time = _vertices_with_event_time(plan)
        self._without_event_time = operators_without_event_time(plan, micro_batches=world.batch_time is not None)

    def build(self) -> list[Subtask]:
        """Return the subtasks in the order in which the loop serves them, downstream first."""
        return [self._build(vertex) for vertex in self._plan.subtasks_in(self.index)][::-1]

    def close(self) -> None:
        """Close the channels. Close the subtasks first."""
        self._channels.close()

    def _build(self, vertex: Vertex) -> Subtask:
        operators = {node.id: node.spec.create(node) for node in vertex.nodes}
        for run in fused_runs(self._plan, vertex):
            operators |= dict.fromkeys((node.id for node in run), ColumnsOperator(run))
        for node in vertex.nodes[1:]:
            (edge,) = node.inputs
            if operators[edge.source] is not operators[node.id]:
                _attach(operators[edge.source], edge.tag, operators[node.id])
        writers = self._edge_writers(vertex, operators)
        follow_splits(list(dict.fromkeys(operators.values())))
        logs = self._logs_in_flight(vertex)
        places = {(place.operator, place.info.name): place for place in self._places(vertex, of_first=logs)}
        tuning, clock = self._settings.tuning, self._world.clock
        max_batch_rows = tuning.max_grown_rows if self._grows(vertex) else tuning.max_batch_rows
        budget = Budget(clock.monotonic_ms) if self._world.make_budget is None else self._world.make_budget()
        rest: dict[str, Any] = dict(
            vertex=vertex,
            index=self.index,
            operators=list(dict.fromkeys(operators.values())),
            writers=writers,
            replay=self._opened(vertex, operators, places.values(), budget),
            budget=budget,
            places=list(places.values()),
            take_frozen=self._take_frozen,
            max_batch_rows=max_batch_rows,
            monotonic_ms=clock.monotonic_ms,
            on_done=lambda done: self._world.tell(InputEnded(done.id.vertex, done.id.subtask)),
        )
        if vertex.first.source is not None:
            return SourceSubtask(
                linger_ms=tuning.linger_ms,
                halts=self._settings.snapshots.halts_sources,
                batch_size=BatchSize(tuning.max_batch_rows, max_batch_rows),
                **rest,
            )
        inputs = [
            Input(
                self._channels.inlet(edge, channel),
                edge.port,
                edge.source_vertex in self._with_event_time and not edge.feedback,
                places.get((vertex.first.name, waits_in(edge))),
            )
            for edge in self._plan.inputs_of(vertex)
            for channel in self._plan.origins(edge, self.index)
        ]
        mode = self._settings.snapshots.alignment_mode
        return InnerSubtask(
            inputs=inputs,
            laps=Laps.of(self._plan, vertex, self.index),
            hurries=logs,
            time_by_epoch=any(node.assigns_time_by_epoch for node in self._plan.nodes),
            mode=AlignmentMode.EXACTLY_ONCE if mode is AlignmentMode.LOGGING and not logs else mode,
            **rest,
        )

    def _edge_writers(self, vertex: Vertex, operators: Mapping[int, Operator]) -> list[EdgeWriter]:
        writers = []
        for out in self._plan.outputs_of(vertex):
            writer = EdgeWriter(
                [self._channels.outlet(out, channel) for channel in self._plan.targets(out, self.index)],
                partitioning=out.partitioning,
                key=out.key,
                key_group_count=self._plan.key_group_count,
                first=self.index,
                loops=frozenset(loop.id for loop in self._plan.loops if self._plan.edge_inside(loop, out)),
                refuses_nulls_for=self._plan.vertices[out.target_vertex].first.name if out.refuses_nulls else None,
            )
            writers.append(writer)
            _attach(operators[out.source_node], out.tag, writer)
        return writers

    def _opened(
        self, vertex: Vertex, operators: Mapping[int, Operator], places: Collection[Place], budget: Budget
    ) -> Replay:
        """Open the operators with their state, and return the records that were in flight to them."""
        replay = Replay()
        for node in vertex.nodes:
            context = self._context(vertex, node)
            waiting = {place.info.name: place for place in places if place.operator == node.name}
            states = {state: rows for state, rows in context.restored.items() if state not in waiting}
            operators[node.id].open(replace(context, restored=states, budget=budget))
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
        return replay

    def _grows(self, vertex: Vertex) -> bool:
        """Return whether batches may grow under load: neither the vertex nor any below it handles records one by one."""
        reached = (vertex.id, *self._plan.below(vertex))
        return all(node.in_columns for each in reached for node in self._plan.vertices[each].nodes)

    def _logs_in_flight(self, vertex: Vertex) -> bool:
        """Return whether snapshots may hold records in flight to the vertex.

        They may not if records are broadcast or passed on from subtask to subtask: at another parallelism it isn't known
        which subtask they belong to. Nor may they above such a vertex: it would block the channel of a marker that has
        overtaken, and so its sender, while it waits for markers that are still queued behind records."""
        return self._settings.snapshots.logs_in_flight and all(
            edge.feedback or edge.partitioning in (Partitioning.HASH, Partitioning.REBALANCE)
            for each in (vertex.id, *self._plan.below(vertex))
            for edge in self._plan.inputs_of(self._plan.vertices[each])
        )

    def _places(self, vertex: Vertex, *, of_first: bool) -> Iterator[Place]:
        """Yield the places whose records every snapshot of this vertex logs: those of its first node if `of_first`, its
        feedback, and those that the restored snapshot has records of."""
        for node in vertex.nodes:
            planned = None if self._restored is None else self._restored.plan.of(node.name)
            held = () if planned is None else [state.name for state in planned.states if state.taken_in]
            for place in places_of(node):
                if place.is_feedback or place.info.name in held or (of_first and node is vertex.first):
                    yield place

    def _context(self, vertex: Vertex, node: Node) -> OperatorContext:
        restored, chain = self._restored, self._own_chain(vertex, node)
        rows: Mapping[str, Iterable[pa.RecordBatch]] = {}
        if restored is not None:
            rows = restored.snapshot.rows(node.name, subtask=self.index, parallelism=vertex.parallelism, plan=restored.plan)
            rows = {state: restored.progress.rows(batches) for state, batches in rows.items()}
        files = [file for file in chain or () if file.form == self._settings.backend.native]
        if files:
            # The backend reads its own files, so no rows of its states are read.
            keyed = {info.name for info in node.spec.states(node) if info.kind is StateKind.KEYED}
            rows = {state: batches for state, batches in rows.items() if state not in keyed}
        self.writers[node.name] = PieceWriter(
            node.name,
            store=self.written.store,
            attempt=self._attempt,
            subtask=self.index,
            parallelism=vertex.parallelism,
            key_group_count=self._plan.key_group_count,
            restored=None if restored is None or chain is None else (restored.snapshot.manifest.epoch, chain),
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
            make_backend=partial(self._make_backend, files),
            restored=rows,
            is_restored=restored is not None,
            goes_on=chain is not None,
            is_native=bool(files),
            on_timer_without_event_time=partial(self._world.tell, Noticed(self.index, warning_of_timer(node)))
            if node.name in self._without_event_time
            else None,
            snapshots=shown(self._world.store.address),
        )

    def _own_chain(self, vertex: Vertex, node: Node) -> Chain | None:
        """Return the files that this subtask wrote before, if the next snapshot may build on them."""
        restored = self._restored
        if restored is None or not restored.is_own:
            return None
        planned = restored.plan.of(node.name)
        if planned is None or not planned.unchanged:
            return None
        return chain_to_continue(
            restored.snapshot.manifest,
            node.name,
            node.spec.states(node),
            subtask=self.index,
            parallelism=vertex.parallelism,
            native=self._settings.backend.native,
        )

    def _make_backend(self, files: Sequence[FileEntry], key_type: pa.DataType) -> KeyedBackend:
        backend = self._settings.backend
        rest: dict[str, Any] = dict(
            key_type=key_type,
            key_group_count=self._plan.key_group_count,
            now_ms=(self._world.batch_time or self._world.clock).now_ms,
        )
        if self._restored is None or not files:
            return backend.create(**rest)
        with download_folder(backend.folder) as folder:
            native = folder.path / "files"
            download(self._restored.snapshot.store, files, native)
            return backend.create(**rest, native=native)


class _Channels:
    """The channel ends of one slot: in memory if both ends are in the slot, over the network otherwise."""

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
                else MemoryChannel(channel)
            )
        return self._local[channel]


def edge_schema(plan: Plan, edge: PlanEdge) -> pa.Schema:
    """Return the schema of the records on an edge."""
    if edge.feedback:
        return plan.vertices[edge.target_vertex].first.schema
    node = next(node for node in plan.vertices[edge.source_vertex].nodes if node.id == edge.source_node)
    return node.schema if edge.tag is None else node.side_schemas[edge.tag]


def _attach(producer: Operator, tag: str | None, consumer: Any) -> None:
    (producer.consumers if tag is None else producer.side_consumers[tag]).append(consumer)


def _vertices_with_event_time(plan: Plan) -> set[int]:
    """Return the vertices that send watermarks: they or vertices above them assign event time."""
    with_event_time: set[int] = set()
    for vertex in plan.vertices:
        if any(node.assigns_time for node in vertex.nodes) or any(
            edge.source_vertex in with_event_time and not edge.feedback for edge in plan.inputs_of(vertex)
        ):
            with_event_time.add(vertex.id)
    return with_event_time
