"""State that belongs to a subtask, not to a key: operator lists and broadcast dictionaries.

Both are small (offsets, rules, buffers), so a freeze copies them. They are shapes of state (shapes.py) over cells of the
heap that have one key. A broadcast dictionary is the same on every subtask at a marker, because all subtasks have seen the
same elements of the broadcast side; subtask 0 writes it for all.

Invariant: the user holds no list or dict of a state (values.py), and none is changed in place. So the copy that a freeze
makes need not be deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import pyarrow as pa

from tidegate.errors import JobError, SchemaError
from tidegate.state.cells import ABSENT, Cursor
from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_cells import HeapEntries, HeapItems
from tidegate.state.sections import FrozenState, Section, StateInfo, StateKind
from tidegate.state.shapes import List, Map
from tidegate.types import from_list, to_list

_ONE_KEY = Cursor()
_ONE_KEY.key = None


class OperatorList(List):
    """Operator list state, as the user's function sees it."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.info = descriptor.info()
        super().__init__(descriptor, HeapItems(self.info), _ONE_KEY)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        return len(self.cells.items(None))

    def load(self, rows: pa.RecordBatch) -> None:
        self.cells.extend(None, to_list(rows.column("value")))

    def freeze(self) -> list[Any]:
        return list(self.cells.items(None))


class UnionList(OperatorList):
    """A list that every subtask gets whole at a restore, and writes whole at the next snapshot. Each item has an id from the
    subtask that added it, by which its copies are found to be one item: the list doesn't grow however often a job restarts
    (docs/promises.md, row 16)."""

    def __init__(self, descriptor: Descriptor, *, origin: str) -> None:
        super().__init__(descriptor)
        self._new_ids = map(f"{origin}-{{}}".format, count())
        self._ids: list[str] = []  # of the first items; a freeze gives the rest theirs

    def replace(self, items: Iterable[Any]) -> None:
        super().replace(items)
        self._ids = []

    def clear(self) -> None:
        super().clear()
        self._ids = []

    def load(self, rows: pa.RecordBatch) -> None:
        self._ids += islice(self._new_ids, len(self) - len(self._ids))
        known = set(self._ids)
        new = {row["id"]: row["item"] for row in to_list(rows.column("value")) if row["id"] not in known}
        self._ids += new
        self.cells.extend(None, list(new.values()))

    def freeze(self) -> list[Any]:
        self._ids += islice(self._new_ids, len(self) - len(self._ids))
        return [{"id": name, "item": item} for name, item in zip(self._ids, self.cells.items(None), strict=True)]


class BroadcastMap(Map):
    """Broadcast state, as the user's function sees it. `writable` is True only while the broadcast side is processed."""

    cells: HeapEntries

    def __init__(self, descriptor: Descriptor) -> None:
        self.info = descriptor.info()
        super().__init__(descriptor, HeapEntries(self.info), _ONE_KEY)
        self.writable = False

    def get(self, item: Any, default: Any = None) -> Any:
        # For every record, so without a call to the cells.
        value = self.cells.main.get(None, {}).get(item, ABSENT)
        if value is ABSENT:
            return default
        return value if self.copied is None else self.copied(value)

    def put(self, item: Any, value: Any) -> None:
        self._check_writable()
        super().put(item, value)

    def remove(self, item: Any) -> None:
        self._check_writable()
        super().remove(item)

    def clear(self) -> None:
        self._check_writable()
        super().clear()

    def load(self, rows: pa.RecordBatch) -> None:
        for row in to_list(rows.column("value")):
            self.cells.put(None, row["key"], row["value"])

    def freeze(self) -> list[Any]:
        return [{"key": item, "value": value} for item, value in self.cells.entries(None).items()]

    def _check_writable(self) -> None:
        if not self.writable:
            raise JobError(
                f"broadcast state {self.info.name!r} can be written in process_broadcast only: elsewhere "
                f"the subtasks would come to hold different values"
            )


class OperatorStates:
    """The operator and broadcast states of one operator in one subtask."""

    def __init__(self, *, attempt: int, subtask: int) -> None:
        self._attempt = attempt
        self._subtask = subtask
        self._states: dict[str, OperatorList | BroadcastMap] = {}

    def state(self, descriptor: Descriptor) -> Any:
        state: OperatorList | BroadcastMap
        if descriptor.kind is StateKind.BROADCAST:
            state = BroadcastMap(descriptor)
        elif descriptor.kind is StateKind.UNION:
            state = UnionList(descriptor, origin=f"{self._attempt}-{self._subtask}")
        else:
            state = OperatorList(descriptor)
        assert state.info.name not in self._states, f"state {state.info.name!r} is declared twice"
        self._states[state.info.name] = state
        return state

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def load(self, name: str, rows: pa.RecordBatch) -> None:
        self._states[name].load(rows)

    def set_writable(self, writable: bool) -> None:
        for state in self._states.values():
            if isinstance(state, BroadcastMap):
                state.writable = writable

    def freeze(self) -> FrozenItems:
        frozen = FrozenItems()
        for state in self._states.values():
            written_here = self._subtask == 0 or state.info.kind is not StateKind.BROADCAST
            frozen.put(state.info, state.freeze() if written_here else [])
        return frozen


class FrozenItems:
    """Copies of operator states. Sources and sinks hand over their offsets and committables in the same way."""

    complete = True

    def __init__(self) -> None:
        self._items: list[tuple[StateInfo, list[Any]]] = []

    def put(self, info: StateInfo, items: list[Any]) -> None:
        self._items.append((info, items))

    @property
    def states(self) -> tuple[StateInfo, ...]:
        return tuple(info for info, _ in self._items)

    def sections(self) -> Iterator[Section]:
        for info, items in self._items:
            if items:
                try:
                    column = from_list(items, info.schema.field("value").type)
                except SchemaError as error:
                    raise SchemaError(f"state {info.name!r} holds a value of another type than declared: {error}") from error
                yield Section(info.name, None, pa.RecordBatch.from_arrays([column], schema=info.schema))

    def release(self) -> None:
        """Nothing is shared with the live state."""


class FrozenTogether:
    """Several frozen states as one, in order."""

    def __init__(self, *parts: FrozenState) -> None:
        self.parts = parts

    @property
    def states(self) -> tuple[StateInfo, ...]:
        return tuple(info for part in self.parts for info in part.states)

    @property
    def complete(self) -> bool:
        return all(part.complete for part in self.parts)

    def sections(self) -> Iterator[Section]:
        for part in self.parts:
            yield from part.sections()

    def release(self) -> None:
        for part in self.parts:
            part.release()


def frozen_in(frozen: FrozenState | None) -> tuple[FrozenState, ...]:
    """Return the frozen states that it consists of; none for None."""
    if frozen is None:
        return ()
    return frozen.parts if isinstance(frozen, FrozenTogether) else (frozen,)
