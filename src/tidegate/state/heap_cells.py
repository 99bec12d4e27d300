"""The cells of the heap backend, over its two kinds of tables (heap_layers.py), and the shapes that get a faster way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.state.cells import ABSENT, GONE, Cells, ListCells, MapCells
from tidegate.state.expiring import ExpiringThings, Slices
from tidegate.state.heap_layers import DoubledTable, HeapTable, Layer, LayeredTable
from tidegate.state.sections import StateInfo
from tidegate.state.shapes import Row, Shape, Value

_NOTHING: dict[Any, Any] = {}  # never written to


class HeapValues(LayeredTable, Cells):
    """Things that are replaced whole."""

    __slots__ = ()

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
    """Lists of times. To move a timer is to delete it and to set it again, so it is counted how many keys are gone."""

    __slots__ = ("gone_count",)

    def __init__(self, info: StateInfo, *, as_tuples: bool = False) -> None:
        super().__init__(info, as_tuples=as_tuples)
        self.gone_count = 0

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

    __slots__ = ()

    def get(self, key: Any) -> Any:
        return self.main.get(key, GONE)

    def set(self, key: Any, thing: Any) -> None:
        self.main[key] = self.fresh[key] = thing

    write_back = set


class HeapItems(DoubledTable, ListCells):
    __slots__ = ()

    def items(self, key: Any) -> Sequence[Any]:
        items: Sequence[Any] = self.main.get(key, ())
        return items

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
    __slots__ = ()

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
        entries: Mapping[Any, Any] = self.main.get(key, _NOTHING)
        return entries

    def count(self, key: Any) -> int:
        return len(self.main.get(key, _NOTHING))


def make_heap_cells(info: StateInfo, *, as_tuples: bool, in_place: bool) -> HeapTable:
    kinds: dict[str, type[HeapTable]] = {"list": HeapItems, "map": HeapEntries, "timers": HeapTimers}
    return kinds.get(info.shape, HeapThings if in_place else HeapValues)(info, as_tuples=as_tuples)


# ------------------------------------------------------------------------------------------------------ fast shapes


class HeapValue(Value):
    """A value without the calls to its cells, each of which takes 22 ns, and `get` and `set` without them 50."""

    __slots__ = ()
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
    """The same for a struct as a tuple."""

    __slots__ = ()

    def set(self, value: Any) -> None:
        row = tuple(value)
        self.cells.fresh[self.cursor.key] = row if (*map(type, row),) == self.types else self.row_of(row)


class HeapExpiringThings(ExpiringThings):
    """Things with a ttl, in the same way."""

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


FAST_SHAPES: dict[type[Shape], type[Shape]] = {Value: HeapValue, Row: HeapRow}
