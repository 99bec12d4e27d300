"""What p subtasks wrote, q subtasks take in: nothing is lost, nothing is there twice, each key is where its records go.

p and q are 1…8, pieces are chains of a base and deltas, and it is done twice over (p → q → r). docs/promises.md,
rows 11, 15 and 16.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tests import declaring as tg
from tidegate.dataflow.operators.sink import COMMITTABLES
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, owner_of
from tidegate.snapshots.manifest import Manifest, OperatorEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.writing import PieceWriter
from tidegate.state.heap import HeapBackend
from tidegate.state.operator_state import FrozenItems, FrozenTogether, OperatorStates
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.store.memory import MemoryStore

GROUPS = 16


def owner(key: int, parallelism: int) -> int:
    group = int(groups_of(hash_columns([pa.array([key])]), GROUPS)[0])
    return owner_of(group, parallelism=parallelism, key_group_count=GROUPS)


@dataclass
class Subtask:
    """An operator with every kind of state."""

    index: int
    parallelism: int
    attempt: int
    store: MemoryStore
    committables: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = HeapBackend(key_type=pa.int64(), key_group_count=GROUPS)
        self.total: Any = self.backend.table(tg.value("long", name="total"))
        self.timers = TimerQueue(TimeKind.EVENT, self.backend)
        self.operator_states = OperatorStates(attempt=self.attempt, subtask=self.index)
        self.split = self.operator_states.state(tg.operator_list("long", name="split"))
        self.union = self.operator_states.state(tg.operator_list("long", name="union", redistribute="union"))
        self.writer = PieceWriter(
            "op",
            store=self.store,
            attempt=self.attempt,
            subtask=self.index,
            parallelism=self.parallelism,
            key_group_count=GROUPS,
        )

    def load(self, manifest: Manifest) -> None:
        rows = Snapshot(self.store, manifest).rows("op", subtask=self.index, parallelism=self.parallelism)
        for state, batches in rows.items():
            for batch in batches:
                if state == "total":
                    self.backend.load(state, batch, known=False)
                elif state == "__event_timers":
                    self.timers.load([(batch.column("key").to_pylist(), batch)], known=False)
                elif state == COMMITTABLES.name:
                    self.committables += batch.column("value").to_pylist()
                else:
                    self.operator_states.load(state, batch)

    def set(self, key: int, value: int) -> None:
        self.backend.cursor.key = key
        self.total.set(value)
        self.timers.set(value)

    def clear(self, key: int) -> None:
        self.backend.cursor.key = key
        self.total.clear()

    def write(self, epoch: int, base: int) -> OperatorEntry:
        committables = FrozenItems()
        committables.put(COMMITTABLES, list(self.committables))
        frozen = FrozenTogether(self.backend.freeze(), self.operator_states.freeze(), committables)
        written = self.writer.write(frozen, epoch=epoch, base=base, full=False)
        frozen.release()
        self.backend.maintain(1)
        return written


def manifest_of(parts: list[OperatorEntry], epoch: int, attempt: int) -> Manifest:
    pieces = tuple(piece for part in parts for piece in part.pieces)
    entry = OperatorEntry(parallelism=len(parts), states=parts[0].states, pieces=pieces)
    return Manifest(
        job="job", epoch=epoch, attempt=attempt, created_ms=1, key_group_count=GROUPS, ending=None, operators={"op": entry}
    )


_parallelism = st.integers(1, 8)
_layer = st.dictionaries(st.integers(0, 200), st.none() | st.integers(0, 99), max_size=30)
_changes = st.lists(_layer, min_size=1, max_size=4)


@given(
    parallelisms=st.lists(_parallelism, min_size=2, max_size=4),
    changes=_changes,
    items=st.lists(st.integers(0, 9), max_size=12),
    committables=st.integers(0, 12),
)
def test_state_and_committables_are_conserved(
    parallelisms: list[int], changes: list[dict[int, int | None]], items: list[int], committables: int
) -> None:
    store = MemoryStore()
    held: dict[int, int] = {}
    timers: dict[int, set[int]] = {}
    epoch, manifest = 0, None
    prepared = [f"file-{number}" for number in range(committables)]
    for attempt, parallelism in enumerate(parallelisms, start=1):
        subtasks = [Subtask(index, parallelism, attempt, store) for index in range(parallelism)]
        if manifest is None:
            for number, item in enumerate(items):
                subtasks[number % parallelism].split.add(item)
                subtasks[number % parallelism].union.add(item)
            for number, committable in enumerate(prepared):
                subtasks[number % parallelism].committables.append(committable)
        else:
            for subtask in subtasks:
                subtask.load(manifest)
            check(subtasks, held, timers, items, prepared)
        base = 0
        for layer in changes:
            for key, value in layer.items():
                subtask = subtasks[owner(key, parallelism)]
                if value is None:
                    subtask.clear(key)
                    held.pop(key, None)
                else:
                    subtask.set(key, value)
                    held[key] = value
                    timers.setdefault(key, set()).add(value)
            epoch += 1
            manifest = manifest_of([subtask.write(epoch, base) for subtask in subtasks], epoch, attempt)
            base = epoch


def check(
    subtasks: list[Subtask], held: dict[int, int], timers: dict[int, set[int]], items: list[int], prepared: list[str]
) -> None:
    parallelism = len(subtasks)
    found = [(key, value) for subtask in subtasks for key, value in subtask.total.cells.held().items()]
    assert sorted(found) == sorted(held.items())
    for subtask in subtasks:
        assert all(owner(key, parallelism) == subtask.index for key in subtask.total.cells.held())
    due = []
    for subtask in subtasks:
        timed = subtask.backend.cells["__event_timers"]
        due += [(key, set(times)) for key, times in timed.held().items()]
    assert sorted(due, key=str) == sorted(timers.items(), key=str)
    assert Counter(item for subtask in subtasks for item in subtask.split.get()) == Counter(items)
    lengths = [len(subtask.split.get()) for subtask in subtasks]
    assert max(lengths) - min(lengths) <= 1, "dealt out evenly"
    assert all(sorted(subtask.union.get()) == sorted(items) for subtask in subtasks), "and no more of them at each restart"
    assert sorted(each for subtask in subtasks for each in subtask.committables) == sorted(prepared)
