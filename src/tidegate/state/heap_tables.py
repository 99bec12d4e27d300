"""The heap backend's tables, one for each shape of state: the methods that the user's function calls.

How they are frozen is told in heap_layers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_layers import ABSENT, GONE, Cursor, DoubledTable, HeapTable, Layer, LayeredTable
from tidegate.state.sections import StateInfo
from tidegate.state.values import detached, form_of

__all__ = [
    "ABSENT",
    "GONE",
    "HeapAggregating",
    "HeapContainerValue",
    "HeapList",
    "HeapMap",
    "HeapReducing",
    "HeapRow",
    "HeapTimes",
    "HeapValue",
    "make_table",
]

_NO_ITEMS: dict[Any, Any] = {}  # never written to


class HeapValue(LayeredTable):
    __slots__ = ()

    def get(self) -> Any:
        key = self.cursor.key
        value = self.fresh.get(key, ABSENT)
        if value is ABSENT:
            value = self.below(key) if self.layers else self.main.get(key, GONE)
        return self.default if value is GONE else value

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.keep(value)
        self.fresh[self.cursor.key] = value


class HeapContainerValue(HeapValue):
    """A value that holds lists or dictionaries: what is handed out is a copy. What comes in is copied by `keep`."""

    __slots__ = ()

    def get(self) -> Any:
        assert self.copied is not None
        return self.copied(super().get())


class HeapRow(HeapValue):
    """A struct of plain fields that is given and held as a tuple, which takes a third of a dict's memory, and no copies."""

    __slots__ = ("types",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.types = tuple(form_of(field.type).plain for field in descriptor.item)

    def set(self, value: Any) -> None:
        row = tuple(value)
        if (*map(type, row),) != self.types:
            row = tuple(self.keep(row).values())
        self.fresh[self.cursor.key] = row


class HeapTimes(HeapValue):
    """A key's timers: lists of times, which only timers.py sets, and never changes in place. To move a timer is to delete it
    and to set it anew, so it is counted how many keys are gone."""

    __slots__ = ("gone_count",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.gone_count = 0

    def set(self, value: Any) -> None:
        key, fresh = self.cursor.key, self.fresh
        if self.may_hold_gone and fresh.get(key) is GONE:
            self.gone_count -= 1
            self.may_hold_gone = self.gone_count > 0
        fresh[key] = value

    def clear(self) -> None:
        super().clear()
        if self.fresh.get(self.cursor.key) is GONE:
            self.gone_count += 1

    def freeze(self) -> Layer:
        self.gone_count = 0
        return super().freeze()


class HeapReducing(LayeredTable):
    __slots__ = ("function",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        assert descriptor.add is not None
        self.function = descriptor.add

    def get(self) -> Any:
        merged = self._merged(self.cursor.key)
        if merged is GONE or merged is None:
            return None
        return merged if self.copied is None else self.copied(merged)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        merged = self._merged(key)
        if merged is not GONE:
            item = self.function(merged if self.copied is None else self.copied(merged), item)
        if type(item) is not self.plain:
            item = self.keep(item)
        self.fresh[key] = item

    def _merged(self, key: Any) -> Any:
        merged = self.fresh.get(key, ABSENT)
        return self.below(key) if merged is ABSENT else merged


class HeapAggregating(DoubledTable):
    """`add` may change an accumulator in place, unless a reader can see it: then it gets a copy."""

    __slots__ = ("create", "function", "long", "result")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        assert descriptor.add is not None and descriptor.create is not None
        self.create = descriptor.create
        self.function = descriptor.add
        self.result = descriptor.result
        self.long = descriptor.form.long

    def get(self) -> Any:
        accumulator = self.main.get(self.cursor.key, GONE)
        if accumulator is GONE:
            return None
        if self.copied is not None:
            accumulator = self.copied(accumulator)
        return accumulator if self.result is None else self.result(accumulator)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        accumulator = self.main.get(key, GONE)
        if accumulator is GONE:
            accumulator = self.keep(self.create())
        elif self.copied is not None and not self.owned(key):
            accumulator = self.copied(accumulator)
        accumulator = self.function(accumulator, item if self.copied is None else detached(item))
        kind = type(accumulator)
        if kind is not self.plain and kind is not self.long:
            accumulator = self.keep(accumulator)
        self.write(key, accumulator)


class HeapList(DoubledTable):
    __slots__ = ()

    def get(self) -> tuple[Any, ...]:
        items = self.main.get(self.cursor.key, ())
        return tuple(items) if self.copied is None else tuple(map(self.copied, items))

    def add(self, item: Any) -> None:
        if type(item) is not self.plain:
            item = self.keep(item)
        self._own().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        if kept:
            self._own().extend(kept)

    def replace(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        if kept:
            self.write(self.cursor.key, kept)
        else:
            self.clear()

    def _own(self) -> list[Any]:
        """The key's list, to be changed in place."""
        key = self.cursor.key
        items = self.main.get(key)
        if items is None:
            items = []
        elif not self.owned(key):
            items = list(items)
        self.main[key] = self.fresh[key] = items
        return items


class HeapMap(DoubledTable):
    __slots__ = ("keep_key", "plain_key")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.keep_key = descriptor.key_keeper()
        self.plain_key = descriptor.key_form.plain

    def get(self, item: Any, default: Any = None) -> Any:
        value = self._seen().get(item, ABSENT)
        if value is ABSENT:
            return default
        return value if self.copied is None else self.copied(value)

    def put(self, item: Any, value: Any) -> None:
        if type(item) is not self.plain_key:
            item = self.keep_key(item)
        if type(value) is not self.plain:
            value = self.keep(value)
        self._own()[item] = value

    def remove(self, item: Any) -> None:
        seen = self._seen()
        if item in seen:
            if len(seen) == 1:
                self.clear()
            else:
                del self._own()[item]

    def items(self) -> Iterable[tuple[Any, Any]]:
        return tuple(zip(self._seen(), self.values(), strict=True))

    def keys(self) -> Iterable[Any]:
        return tuple(self._seen())

    def values(self) -> Iterable[Any]:
        values = self._seen().values()
        return tuple(values) if self.copied is None else tuple(map(self.copied, values))

    def __contains__(self, item: Any) -> bool:
        return item in self._seen()

    def __len__(self) -> int:
        return len(self._seen())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def _seen(self) -> dict[Any, Any]:
        seen: dict[Any, Any] = self.main.get(self.cursor.key, _NO_ITEMS)
        return seen

    def _own(self) -> dict[Any, Any]:
        """The key's dictionary, to be changed in place."""
        key = self.cursor.key
        held = self.main.get(key)
        if held is None:
            held = {}
        elif not self.owned(key):
            held = dict(held)
        self.main[key] = self.fresh[key] = held
        return held


_TABLES: dict[str, type[HeapTable]] = {
    "value": HeapValue,
    "list": HeapList,
    "map": HeapMap,
    "reducing": HeapReducing,
    "aggregating": HeapAggregating,
    "timers": HeapTimes,
}


def make_table(descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> HeapTable:
    kind = _TABLES[descriptor.shape]
    if descriptor.as_tuples:
        kind = HeapRow
    elif kind is HeapValue and descriptor.form.copied is not None:
        kind = HeapContainerValue
    return kind(descriptor, info, cursor)
