"""The sink operator: two-phase commit driven by snapshots.

At a marker the writer pre-commits, and the resulting committables become part of the snapshot. They are committed when the
snapshot is complete. Output of an aborted epoch stays pending and is committed with the next complete epoch. After a restore
the restored committables are committed again before anything else happens; a writer's commits are idempotent. What older
attempts left behind is discarded when the first snapshot of this attempt is complete: by then every subtask has committed
what it restored.

A pre-commit that fails in the background fails the job, because its records are in no other epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from tidegate.dataflow.changelog import Changelog
from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.user_code import RAISED, blame, blaming
from tidegate.errors import CommitError
from tidegate.protocol.commit import PendingCommits
from tidegate.snapshots.committed import COMMITTABLES_SHAPE
from tidegate.state.operator_state import FrozenItems
from tidegate.state.sections import FrozenState, Section, StateInfo, StateKind

COMMITTABLES = StateInfo("__committables", StateKind.WHOLE, COMMITTABLES_SHAPE, pa.schema([pa.field("value", pa.string())]))


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A sink: it has no output."""

    sink: Sink
    key: tuple[str, ...] = ()  # of the records, if they are upserts, or changes with one row for each key
    kind: str = "sink"
    stateful: bool = True
    in_columns: ClassVar[bool] = True

    @property
    def changelogs(self) -> frozenset[Changelog]:
        return self.sink.changelogs

    def create(self, node: Node) -> Operator:
        return SinkOperator(node, self.sink, self.key)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (COMMITTABLES,)


class SinkOperator(Operator):
    def __init__(self, node: Node, sink: Sink, key: tuple[str, ...] = ()) -> None:
        super().__init__(node)
        self._key = key
        self._sink = sink
        self._writer: SinkWriter | None = None
        self._pending: PendingCommits[Committable] = PendingCommits()
        self._prepared: dict[int, _Prepared] = {}
        self._leftovers_due = False

    def open(self, context: OperatorContext) -> None:
        again = [item for rows in context.rows(COMMITTABLES.name) for item in rows.column("value").to_pylist()]
        with blaming(self.name):
            self._writer = writer = self._sink.open(
                SinkContext(
                    job=context.job,
                    sink=self.name,
                    subtask=context.subtask,
                    parallelism=context.parallelism,
                    attempt=context.attempt,
                    schema=self.node.input_schemas[0],
                    deliver=lambda committable: context.deliver(self.name, committable),
                    snapshots=context.snapshots,
                    key=self._key,
                )
            )
            if again:
                writer.commit(self._pending.restored(again))
        # Later, because other subtasks may not have committed what they restored. No epoch ends before all are open.
        self._leftovers_due = context.subtask == 0

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        assert self._writer is not None
        with blaming(self.name):
            self._writer.write(batch)

    def freeze(self, epoch: int) -> FrozenState:
        assert self._writer is not None
        self._take_finished()
        earlier = [prepared for _, prepared in sorted(self._prepared.items())]
        with blaming(self.name):
            finish = self._writer.pre_commit(epoch)
        prepared = self._prepared[epoch] = _Prepared(self.name, finish)
        return FrozenCommittables(self._pending.all(), [*earlier, prepared])

    def on_complete(self, epoch: int) -> None:
        assert self._writer is not None
        self._take_finished()
        committables = self._pending.complete(epoch)
        with blaming(self.name):
            if committables:
                self._writer.commit(committables)
            if self._leftovers_due:
                self._leftovers_due = False
                self._writer.discard_leftovers()

    def close(self) -> None:
        if self._writer is not None:
            with blaming(self.name):
                self._writer.close()

    def _take_finished(self) -> None:
        """Move what the background thread has prepared to the pending commits, in the order of epochs."""
        for epoch in sorted(self._prepared):
            if self._prepared[epoch].committables is None:
                break
            self._pending.prepared(epoch, self._prepared.pop(epoch).committables or ())


class _Prepared:
    """One epoch's pre-commit. A background thread finishes it once, whether it succeeds or fails."""

    def __init__(self, sink: str, finish: Callable[[], Sequence[Committable]]) -> None:
        self._sink = sink
        self._finish: Callable[[], Sequence[Committable]] | None = finish
        self.committables: tuple[Committable, ...] | None = None

    def result(self) -> tuple[Committable, ...]:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self.committables = tuple(finish())
            except RAISED as error:
                blame(self._sink, error)  # even a StoreError, which by itself would only abort the epoch
        if self.committables is None:
            raise CommitError(f"sink {self._sink!r} failed to pre-commit an epoch before this one")
        return self.committables


class FrozenCommittables:
    """The committables of a sink that are pending at a marker. Reading them finishes the pre-commits, in the background."""

    complete = True
    states = (COMMITTABLES,)

    def __init__(self, pending: Sequence[Committable], prepared: Sequence[_Prepared]) -> None:
        self._pending = pending
        self._prepared = prepared

    def sections(self) -> Iterator[Section]:
        items = FrozenItems()
        items.put(COMMITTABLES, [*self._pending, *(item for prepared in self._prepared for item in prepared.result())])
        yield from items.sections()

    def release(self) -> None:
        """Nothing is shared with the live state."""
