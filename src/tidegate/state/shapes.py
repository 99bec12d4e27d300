"""The shapes of keyed state: what the user's function calls. Each is written once, over the cells of any backend (cells.py).

A shape works on the current key, which is the cursor's. It converts values that come in to the form in which state holds
them, and copies values that go out if they could be changed in place (values.py). Shapes know nothing of a time to live:
to them, cells that expire are like any others (expiring.py).

The methods are those of the protocols in handles.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tidegate.state.cells import ABSENT, GONE, Cells, Cursor, ListCells, MapCells
from tidegate.state.descriptors import Descriptor
from tidegate.state.values import NoSuchValue, detached, form_of


class Shape:
    """The common part of all shapes."""

    def __init__(self, descriptor: Descriptor, cells: Any, cursor: Cursor) -> None:
        self.cells = cells
        self.cursor = cursor
        self.convert = descriptor.converter()
        self.plain = descriptor.form.plain
        self.copied = descriptor.form.copied

    def clear(self) -> None:
        self.cells.delete(self.cursor.key)


class Value(Shape):
    cells: Cells

    def __init__(self, descriptor: Descriptor, cells: Any, cursor: Cursor) -> None:
        super().__init__(descriptor, cells, cursor)
        self.default = descriptor.default

    def get(self) -> Any:
        value = self.cells.get(self.cursor.key)
        if value is GONE:
            value = self.default
        return value if self.copied is None else self.copied(value)

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.convert(value)
        self.cells.set(self.cursor.key, value)


class Row(Value):
    """A struct of plain fields, given and held as a tuple. It takes a third of a dict's memory and needs no copies."""

    def __init__(self, descriptor: Descriptor, cells: Any, cursor: Cursor) -> None:
        super().__init__(descriptor, cells, cursor)
        self.types = tuple(form_of(field.type).plain for field in descriptor.item)
        self.copied = None

    def set(self, value: Any) -> None:
        self.cells.set(self.cursor.key, self.row_of(value))

    def row_of(self, value: Any) -> tuple[Any, ...]:
        row = tuple(value)
        return row if (*map(type, row),) == self.types else tuple(self.convert(row).values())


class Reducing(Shape):
    cells: Cells

    def __init__(self, descriptor: Descriptor, cells: Any, cursor: Cursor) -> None:
        super().__init__(descriptor, cells, cursor)
        assert descriptor.add is not None
        self.function, self.result = descriptor.add, descriptor.result

    def get(self) -> Any:
        merged = self.cells.get(self.cursor.key)
        if merged is GONE:
            return None
        if self.copied is not None:
            merged = self.copied(merged)
        return merged if self.result is None else self.result(merged)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        merged = self.cells.get(key)
        if merged is not GONE:
            item = self.function(merged if self.copied is None else self.copied(merged), item)
        if type(item) is not self.plain:
            item = self.convert(item)
        self.cells.write_back(key, item)


class Aggregating(Reducing):
    """`add` may change an accumulator in place, unless a reader can see it: then it gets a copy."""

    def __init__(self, descriptor: Descriptor, cells: Any, cursor: Cursor) -> None:
        super().__init__(descriptor, cells, cursor)
        assert descriptor.create is not None
        self.create = descriptor.create
        # What functions put into a list or dictionary in memory is checked when it becomes rows. Cells that are not in
        # memory write bytes, which have to be of the declared type: there it is checked now.
        self.long = descriptor.form.long if cells.in_memory else NoSuchValue

    def add(self, item: Any) -> None:
        key = self.cursor.key
        accumulator = self.cells.get(key)
        if accumulator is GONE:
            accumulator = self.convert(self.create())
        elif self.copied is not None and not self.cells.owned(key):
            accumulator = self.copied(accumulator)
        accumulator = self.function(accumulator, item if self.copied is None else detached(item))
        kind = type(accumulator)
        if kind is not self.plain and kind is not self.long:
            accumulator = self.convert(accumulator)
        self.cells.write_back(key, accumulator)


class List(Shape):
    cells: ListCells

    def get(self) -> tuple[Any, ...]:
        items = self.cells.items(self.cursor.key)
        return tuple(items) if self.copied is None else tuple(map(self.copied, items))

    def add(self, item: Any) -> None:
        if type(item) is not self.plain:
            item = self.convert(item)
        self.cells.extend(self.cursor.key, (item,))

    def extend(self, items: Iterable[Any]) -> None:
        converted = list(map(self.convert, items))
        if converted:
            self.cells.extend(self.cursor.key, converted)

    def replace(self, items: Iterable[Any]) -> None:
        converted = list(map(self.convert, items))
        if converted:
            self.cells.replace(self.cursor.key, converted)
        else:
            self.clear()


class Map(Shape):
    cells: MapCells

    def __init__(self, descriptor: Descriptor, cells: Any, cursor: Cursor) -> None:
        super().__init__(descriptor, cells, cursor)
        self.convert_key = descriptor.key_converter()
        self.plain_key = descriptor.key_form.plain

    def get(self, item: Any, default: Any = None) -> Any:
        value = self.cells.get(self.cursor.key, item)
        if value is ABSENT:
            return default
        return value if self.copied is None else self.copied(value)

    def put(self, item: Any, value: Any) -> None:
        if type(item) is not self.plain_key:
            item = self.convert_key(item)
        if type(value) is not self.plain:
            value = self.convert(value)
        self.cells.put(self.cursor.key, item, value)

    def remove(self, item: Any) -> None:
        self.cells.remove(self.cursor.key, item)

    def items(self) -> tuple[tuple[Any, Any], ...]:
        entries = self.cells.entries(self.cursor.key)
        if self.copied is None:
            return tuple(entries.items())
        return tuple(zip(entries, map(self.copied, entries.values()), strict=True))

    def keys(self) -> tuple[Any, ...]:
        return tuple(self.cells.entries(self.cursor.key))

    def values(self) -> tuple[Any, ...]:
        values = self.cells.entries(self.cursor.key).values()
        return tuple(values) if self.copied is None else tuple(map(self.copied, values))

    def __contains__(self, item: Any) -> bool:
        return self.cells.get(self.cursor.key, item) is not ABSENT

    def __len__(self) -> int:
        return self.cells.count(self.cursor.key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())


SHAPES: dict[str, type[Shape]] = {
    "value": Value,
    "list": List,
    "map": Map,
    "reducing": Reducing,
    "aggregating": Aggregating,
    "timers": Shape,  # timers.py uses the cells
}
