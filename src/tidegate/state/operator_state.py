"""State that belongs to a subtask, not to a key: operator lists and broadcast dictionaries.

Both are small by nature (offsets, rules, buffers), so a freeze copies them. A broadcast dictionary is the same on every
subtask at a marker, because all of them have seen the same elements of the broadcast side; subtask 0 writes it for all.

Invariant: no list or dict in a state is held by the user as well (values.py), and none is changed in place; so the copy
that a freeze makes need not be deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tidegate.errors import JobError, SchemaError
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import FrozenState, Section, StateInfo, StateKind
from tidegate.types import from_list, to_list


class OperatorList:
    """Operator list state, as the user's function sees it."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.info = descriptor.info()
        self._convert = descriptor.converter()
        self._copied = descriptor.form.copied
        self._items: list[Any] = []

    def get(self) -> tuple[Any, ...]:
        return tuple(self._items) if self._copied is None else tuple(map(self._copied, self._items))

    def add(self, item: Any) -> None:
        self._items.append(self._convert(item))

    def extend(self, items: Iterable[Any]) -> None:
        self._items.extend(list(map(self._convert, items)))

    def replace(self, items: Iterable[Any]) -> None:
        self._items = list(map(self._convert, items))

    def clear(self) -> None:
        self._items = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        return len(self._items)

    def load(self, rows: pa.RecordBatch) -> None:
        self._items.extend(to_list(rows.column("value")))

    def freeze(self) -> list[Any]:
        return list(self._items)


class UnionList(OperatorList):
    """A list that everyone gets whole at a restore, and writes whole at the next snapshot. Each item carries an id from
    where it was added, by which the copies are known for one: however often a job restarts, the list doesn't grow
    (docs/promises.md, row 16)."""

    def __init__(self, descriptor: Descriptor, *, origin: str) -> None:
        super().__init__(descriptor)
        self._origin = origin
        self._added = 0
        self._ids: list[str] = []

    def add(self, item: Any) -> None:
        super().add(item)
        self._name_new()

    def extend(self, items: Iterable[Any]) -> None:
        super().extend(items)
        self._name_new()

    def replace(self, items: Iterable[Any]) -> None:
        super().replace(items)
        self._ids = []
        self._name_new()

    def clear(self) -> None:
        super().clear()
        self._ids = []

    def load(self, rows: pa.RecordBatch) -> None:
        known = set(self._ids)
        for row in to_list(rows.column("value")):
            if row["id"] not in known:
                known.add(row["id"])
                self._ids.append(row["id"])
                self._items.append(row["item"])

    def freeze(self) -> list[Any]:
        return [{"id": name, "item": item} for name, item in zip(self._ids, self._items, strict=True)]

    def _name_new(self) -> None:
        while len(self._ids) < len(self._items):
            self._ids.append(f"{self._origin}-{self._added}")
            self._added += 1


class BroadcastMap:
    """Broadcast state, as the user's function sees it. `writable` is True only while the broadcast side is processed."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.info = descriptor.info()
        self.writable = False
        self._convert = descriptor.converter()
        self._convert_key = descriptor.key_converter()
        self._copied = descriptor.form.copied
        self._items: dict[Any, Any] = {}

    def get(self, item: Any, default: Any = None) -> Any:
        if item not in self._items:
            return default
        value = self._items[item]
        return value if self._copied is None else self._copied(value)

    def put(self, item: Any, value: Any) -> None:
        self._check_writable()
        self._items[self._convert_key(item)] = self._convert(value)

    def remove(self, item: Any) -> None:
        self._check_writable()
        self._items.pop(item, None)

    def items(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(zip(self._items, self.values(), strict=True))

    def keys(self) -> tuple[Any, ...]:
        return tuple(self._items)

    def values(self) -> tuple[Any, ...]:
        values = self._items.values()
        return tuple(values) if self._copied is None else tuple(map(self._copied, values))

    def clear(self) -> None:
        self._check_writable()
        self._items.clear()

    def __contains__(self, item: Any) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._items)

    def load(self, rows: pa.RecordBatch) -> None:
        self._items.update((row["key"], row["value"]) for row in to_list(rows.column("value")))

    def freeze(self) -> list[Any]:
        return [{"key": item, "value": value} for item, value in self._items.items()]

    def _check_writable(self) -> None:
        if not self.writable:
            raise JobError(
                f"broadcast state {self.info.name!r} can be written in process_broadcast only: elsewhere "
                f"the subtasks would come to hold different things"
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
    """Copies of operator states; also the way in which sources and sinks hand in their offsets and committables."""

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
                    raise SchemaError(f"state {info.name!r} holds something that was not declared: {error}") from error
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
    """What it is made of; nothing where there is none."""
    if frozen is None:
        return ()
    return frozen.parts if isinstance(frozen, FrozenTogether) else (frozen,)
