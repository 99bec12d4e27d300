"""The cells of the heap backend, over its two kinds of tables (heap_layers.py), and faster versions of some shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.state.cells import ABSENT, GONE, Cells, Cursor, ListCells, MapCells
from tidegate.state.descriptors import Descriptor
from tidegate.state.expiring import ExpiringThings, Slices
from tidegate.state.heap_layers import DoubledTable, Layer, LayeredTable
from tidegate.state.shapes import Row, Value

_NOTHING: dict[Any, Any] = {}  # never written to


class HeapValues(LayeredTable, Cells):
    """Things that are replaced whole."""

    def get(self, key: Any) -> Any:
        thing = self.fresh.get(key, ABSENT)
        if thing is ABSENT:
            return self.below(key) if self.layers else self.main.get(key, GONE)
        return thing

    def set(self, key: Any, thing: Any) -> None:
        self.fresh[key] = thing

    write_back = set

    def owned(self, key: Any) -> bool:
        return False


class HeapTimers(HeapValues):
    """Lists of times. To move a timer is to delete it and to set it again, so the keys that are GONE are counted."""

    gone_count = 0

    def set(self, key: Any, thing: Any) -> None:
        if self.may_hold_gone and self.fresh.get(key) is GONE:
            self.gone_count -= 1
            self.may_hold_gone = self.gone_count > 0
        self.fresh[key] = thing

    write_back = set

    def delete(self, key: Any) -> None:
        super().delete(key)
        if self.fresh.get(key) is GONE:
            self.gone_count += 1

    def freeze(self) -> Layer:
        self.gone_count = 0
        return super().freeze()


class HeapThings(DoubledTable, Cells):
    """Things that are changed in place, or read whenever they are written."""

    def get(self, key: Any) -> Any:
        return self.main.get(key, GONE)

    def set(self, key: Any, thing: Any) -> None:
        self.main[key] = self.fresh[key] = thing

    write_back = set


class HeapItems(DoubledTable, ListCells):
    def items(self, key: Any) -> Sequence[Any]:
        return self.main.get(key, ())  # type: ignore[no-any-return]

    def extend(self, key: Any, items: Sequence[Any]) -> None:
        held = self.main.get(key)
        if held is None:
            held = []
        elif self.shared and key not in self.fresh:
            held = list(held)
        held.extend(items)
        self.main[key] = self.fresh[key] = held

    def replace(self, key: Any, items: Sequence[Any]) -> None:
        self.main[key] = self.fresh[key] = list(items)


class HeapEntries(DoubledTable, MapCells):
    def get(self, key: Any, item: Any) -> Any:
        return self.main.get(key, _NOTHING).get(item, ABSENT)

    def put(self, key: Any, item: Any, value: Any) -> None:
        held = self.main.get(key)
        if held is None:
            held = {}
        elif self.shared and key not in self.fresh:
            held = dict(held)
        held[item] = value
        self.main[key] = self.fresh[key] = held

    def remove(self, key: Any, item: Any) -> None:
        held = self.main.get(key, _NOTHING)
        if item in held:
            if len(held) == 1:
                self.delete(key)
                return
            if not self.owned(key):
                held = dict(held)
            del held[item]
            self.main[key] = self.fresh[key] = held

    def entries(self, key: Any) -> Mapping[Any, Any]:
        return self.main.get(key, _NOTHING)  # type: ignore[no-any-return]

    def count(self, key: Any) -> int:
        return len(self.main.get(key, _NOTHING))


# ------------------------------------------------------------------------------------------------------ fast shapes


class HeapValue(Value):
    """A value without calls to its cells: such a call takes 22 ns, and `get` and `set` without it 50."""

    cells: HeapValues

    def get(self) -> Any:
        key, cells = self.cursor.key, self.cells
        value = cells.fresh.get(key, ABSENT)
        if value is ABSENT:
            value = cells.below(key) if cells.layers else cells.main.get(key, GONE)
        return self.default if value is GONE else value

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.convert(value)
        self.cells.fresh[self.cursor.key] = value


class HeapRow(Row, HeapValue):
    """A `HeapValue` for a struct that is held as a tuple."""

    def set(self, value: Any) -> None:
        row = tuple(value)
        self.cells.fresh[self.cursor.key] = row if (*map(type, row),) == self.types else self.row_of(row)


class HeapExpiringThings(ExpiringThings):
    """Things with a ttl, without calls to the cells of the table."""

    cells: HeapThings
    index: Slices

    def get(self, key: Any) -> Any:
        if (now := self.now_ms()) != self.now:
            self.tick(now)
        pair = self.cells.main.get(key)
        if pair is None:
            return GONE
        return self.renewed(key, pair) if pair[1] <= now or self.by_reads else pair[0]

    def write_back(self, key: Any, thing: Any) -> None:
        cells = self.cells
        old = cells.main.get(key)
        if old is None:
            self.index.add(key, self.end)
        elif not self.start <= old[1] < self.stop:
            self.index.move(key, old[1], self.end)
        cells.main[key] = cells.fresh[key] = (thing, self.end)


class HeapExpiringValue(Value):
    """A value with a ttl that reads don't renew: a read is one access to a dictionary and one comparison."""

    cells: HeapExpiringThings

    def __init__(self, descriptor: Descriptor, cells: HeapExpiringThings, cursor: Cursor) -> None:
        super().__init__(descriptor, cells, cursor)
        self.table, self.now_ms = cells.cells, cells.now_ms

    def get(self) -> Any:
        pair = self.table.main.get(self.cursor.key)
        if pair is None:
            value = self.default
        elif pair[1] > self.now_ms():
            value = pair[0]
        else:
            return super().get()
        return value if self.copied is None else self.copied(value)

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.convert(value)
        key, cells, table = self.cursor.key, self.cells, self.table
        if (now := self.now_ms()) != cells.now:
            cells.tick(now)
        pair = table.main.get(key)
        if pair is not None and cells.start <= pair[1] < cells.stop:
            table.main[key] = table.fresh[key] = (value, cells.end)
        else:
            cells.write_back(key, value)
