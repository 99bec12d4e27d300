"""The lists and dictionaries of a key in the RocksDB backend, which are never written whole for one item.

Each consists of several entries of RocksDB, whose keys begin with the state's key:

- a **list** is a sequence of chunks with ascending numbers. What was added since the last write becomes one more chunk. So
  adding reads nothing and rewrites nothing. A short list of many chunks is joined when it is written again;
- a **map** has one entry for each item. Its value begins with a number, by which items are in the order in which they were
  added: a Python dictionary keeps that order, so a map does too, here and after a restore. An item that is put without
  being read may be in RocksDB already, with a number. That number is looked up when the item is written, for all such items
  of all keys at once.

The cache holds the known part of a list or map. It is known whole if it was read whole, made here, or cleared; then it
behaves in every detail like the list or dictionary that the heap would hold.

What is dirty is always in `cache`, and an entry there changes in place. So a freeze writes all of it while the loop waits,
and hands nothing over; `MAX_CHANGES` of the backend keeps that short.

Not here: prefetching. Which items a function will read isn't known before, and adding reads none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.cells import ABSENT, ListCells, MapCells
from tidegate.state.columns import held_list
from tidegate.state.rocks_cells import ENTRY_BYTES, RocksTable, delete_all, put_all
from tidegate.state.rocks_keys import Spelled, as_list, in_order, read_column, spelled_column
from tidegate.state.sections import StateInfo
from tidegate.state.values import form_of
from tidegate.types import from_list, to_list

if TYPE_CHECKING:
    from tidegate.state.rocksdb import RocksBackend

NUMBER_BYTES = 8
# A list of at most `SHORT_LIST` items in more than `MANY_CHUNKS` chunks is rewritten when something is added to it.
SHORT_LIST, MANY_CHUNKS = 4096, 32
OBJECT_BYTES = 400  # of a `ListEntry` or `MapEntry`


class RocksCollection(RocksTable):
    """The common part of both: entries that know which of their parts are to be written."""

    prefetched: ClassVar[bool] = False
    item_count = 0  # about how many are in `cache`
    older_bytes = 0.0

    def entry(self, key: Any) -> Any:
        """Return what the cache has for the key, or None."""
        entry = self.cache.get(key)
        if entry is None:
            entry = self.older.get(key)
            if entry is not None:
                self.cache[key] = entry
        return entry

    def scan(self, key: Any) -> list[tuple[bytes, bytes]]:
        """Return the key's entries in RocksDB: what follows the key in each, and the value."""
        self.misses += 1
        start = self.prefix + self.host.spelled_one(key)
        return [(spelled[len(start) :], value) for spelled, value in self.host.scan(start)]

    def flush(self, batch: Any, share: float) -> None:
        """Put all that is dirty into a write-batch, whatever the share: one write of an entry is shorter than two."""
        if self.dirty:
            self.write_down(batch)
        self.dirty, self.changes = {}, 0

    @abstractmethod
    def write_down(self, batch: Any) -> None:
        """Put what is dirty into a write-batch."""

    def hand_over(self) -> None:
        assert not self.dirty, "a freeze flushes lists and maps first"

    def forget_older(self) -> None:
        self.older_bytes = self.young_bytes()
        self.item_count = 0
        super().forget_older()
        self.cache = {key: self.older.pop(key) for key in self.dirty}

    def dirty_bytes(self) -> float:
        return 0  # they are written after a number of changes

    def young_bytes(self) -> float:
        return len(self.cache) * (ENTRY_BYTES + OBJECT_BYTES) + self.item_count * (
            16 + self.spelling.held_bytes(self.spelled_bytes)
        )

    def held_bytes(self) -> float:
        return self.young_bytes() + self.older_bytes


class ListEntry:
    """A list. `chunks`: the numbers of its chunks in RocksDB, in order; None if they aren't known. Then `items` are only the
    ones that were added, unless all chunks are `doomed`: to be deleted. The first `written` items are in RocksDB."""

    __slots__ = ("chunks", "doomed", "items", "written")

    def __init__(self, items: list[Any], chunks: list[bytes] | None) -> None:
        self.items = items
        self.chunks = chunks
        self.written = len(items)
        self.doomed = False

    @property
    def whole(self) -> bool:
        return self.chunks is not None or self.doomed


class RocksItems(RocksCollection, ListCells):
    def items(self, key: Any) -> Sequence[Any]:
        return self._whole(key).items

    def extend(self, key: Any, items: Sequence[Any]) -> None:
        self._own(key).items.extend(items)
        self.item_count += len(items)
        self.changes += len(items)

    def delete(self, key: Any) -> None:
        entry = self._own(key)
        entry.items = []
        entry.written = 0
        entry.doomed = entry.chunks != []
        self.changes += 1

    def write_down(self, batch: Any) -> None:
        keys = list(self.dirty)
        added: list[list[Any]] = []
        places: list[bytes] = []
        for key, start in zip(keys, as_list(self.host.spelled(keys, self.prefix)), strict=True):
            entry: ListEntry = self.cache[key]
            if entry.chunks is not None and len(entry.chunks) > MANY_CHUNKS and len(entry.items) <= SHORT_LIST:
                entry.doomed, entry.written = True, 0
            if entry.doomed:
                chunks = [number for number, _ in self.scan(key)] if entry.chunks is None else entry.chunks
                delete_all(batch, [start + number for number in chunks])
                entry.chunks, entry.doomed = [], False
            new = entry.items[entry.written :] if entry.written else entry.items
            if new:
                number = self.host.next_number().to_bytes(NUMBER_BYTES)
                places.append(start + number)
                added.append(new)
                if entry.chunks is not None:
                    entry.chunks.append(number)
                    entry.written = len(entry.items)
        self.put(batch, places, added)
        for key in keys:
            entry = self.cache[key]
            if entry.chunks is None or not entry.items:
                del self.cache[key]  # nothing of it is known any more, or it is empty

    def load(self, keys: Spelled, values: pa.Array, batch: Any) -> None:
        places, order = in_order(keys)
        lists = held_list(values, as_tuples=self.as_tuples)
        self.put(
            batch,
            [place + self.host.next_number().to_bytes(NUMBER_BYTES) for place in places],
            list(map(lists.__getitem__, order)),
        )
        self.complete = False

    def put(self, batch: Any, places: list[bytes], added: list[list[Any]]) -> None:
        if added:
            spelled = self.spell(added)
            self.spelled_bytes = sum(map(len, spelled)) / sum(map(len, added))
            put_all(batch, places, spelled)

    def _own(self, key: Any) -> ListEntry:
        """The key's entry, to be changed."""
        entry = self.entry(key)
        if entry is None:
            entry = self.cache[key] = ListEntry([], [] if self.complete else None)
        self.dirty[key] = None
        return entry  # type: ignore[no-any-return]

    def _whole(self, key: Any) -> ListEntry:
        entry = self.entry(key)
        if entry is None and self.complete:
            return ListEntry([], [])
        if entry is not None and entry.whole:
            return entry  # type: ignore[no-any-return]
        self.host.missed()
        found = self.scan(key)
        items = list(chain.from_iterable(self.spelling.values([value for _, value in found])))
        whole = ListEntry(items, [number for number, _ in found])
        self.item_count += len(items)
        entry = self.entry(key)  # again: what was added may have been written since
        if entry is not None:
            items.extend(entry.items)
        self.cache[key] = whole
        return whole


class MapEntry:
    """A map. `whole`: `values` are all of its items, in their order. If not, they are the known items; an item that is dirty
    and not among them was removed. `numbers` has each item's number in the order of adding: complemented (~) if RocksDB may
    have a number for it. `doomed`: all that RocksDB has is to be deleted."""

    __slots__ = ("dirty", "doomed", "numbers", "values", "whole")

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.doomed = False
        self.values: dict[Any, Any] = {}
        self.numbers: dict[Any, int] = {}
        self.dirty: set[Any] = set()


class RocksEntries(RocksCollection, MapCells):
    def __init__(
        self, info: StateInfo, host: RocksBackend, prefix: bytes, *, complete: bool, as_tuples: bool = False
    ) -> None:
        super().__init__(info, host, prefix, complete=complete, as_tuples=as_tuples)
        self.key_kind = info.schema.field("value").type.key_type
        self.plain_key = form_of(self.key_kind).plain

    @property
    def stored_type(self) -> pa.DataType:
        return self.info.schema.field("value").type.item_type

    def get(self, key: Any, item: Any) -> Any:
        entry = self.entry(key)
        if entry is None:
            if self.complete:
                hash(item)  # as a dictionary would
                return ABSENT
        else:
            value = entry.values.get(item, ABSENT)
            if value is not ABSENT or entry.whole or item in entry.dirty:
                return value
        if type(item) is not self.plain_key:
            return self._whole(key).values.get(item, ABSENT)
        return self._sought(key, item)

    def put(self, key: Any, item: Any, value: Any) -> None:
        entry = self._own(key)
        if item not in entry.values:
            number = self.host.next_number()
            entry.numbers[item] = number if entry.whole or item in entry.dirty else ~number
            self.item_count += 1
        entry.values[item] = value
        entry.dirty.add(item)
        self.dirty[key] = None
        self.changes += 1

    def remove(self, key: Any, item: Any) -> None:
        if type(item) is not self.plain_key:
            # Whatever is equal to it, as in a dictionary.
            values = self._whole(key).values
            if item not in values:
                return
            item = next(each for each in values if each is item or each == item)
        entry = self._own(key)
        if entry.values.pop(item, ABSENT) is not ABSENT:
            del entry.numbers[item]
        elif entry.whole:
            return
        entry.dirty.add(item)
        self.dirty[key] = None
        self.changes += 1

    def entries(self, key: Any) -> Mapping[Any, Any]:
        return self._whole(key).values

    def delete(self, key: Any) -> None:
        entry = self._own(key)
        if entry.whole:
            entry.dirty.update(entry.values)
            self.changes += len(entry.values)
        else:
            entry.doomed = entry.whole = True
            entry.dirty.clear()
        entry.values.clear()
        entry.numbers.clear()
        self.dirty[key] = None
        self.changes += 1

    # Writing.

    def write_down(self, batch: Any) -> None:
        keys = list(self.dirty)
        removed: list[Any] = []
        behind: list[bytes] = []  # the key of each of them
        written: list[tuple[MapEntry, Any]] = []
        places: list[bytes] = []
        for key, start in zip(keys, as_list(self.host.spelled(keys, self.prefix)), strict=True):
            entry: MapEntry = self.cache[key]
            if entry.doomed:
                delete_all(batch, [start + rest for rest, _ in self.scan(key)])
                entry.doomed = False
            for item in entry.dirty:
                if item in entry.values:
                    written.append((entry, item))
                    places.append(start)
                else:
                    removed.append(item)
                    behind.append(start)
            entry.dirty = set()
        delete_all(batch, self._behind(behind, removed))
        self._put(batch, written, places)

    def _put(self, batch: Any, written: list[tuple[MapEntry, Any]], places: list[bytes]) -> None:
        if not written:
            return
        places = self._behind(places, [item for _, item in written])
        blind = [index for index, (entry, item) in enumerate(written) if entry.numbers[item] < 0]
        if blind:
            there = self.host.db.get([places[index] for index in blind])
            for index, value in zip(blind, there, strict=True):
                entry, item = written[index]
                entry.numbers[item] = ~entry.numbers[item] if value is None else int.from_bytes(value[:NUMBER_BYTES])
        spelled = self.spell([entry.values[item] for entry, item in written])
        self.measure(spelled)
        put_all(
            batch,
            places,
            [
                entry.numbers[item].to_bytes(NUMBER_BYTES) + value
                for (entry, item), value in zip(written, spelled, strict=True)
            ],
        )

    def load(self, keys: Spelled, values: pa.Array, batch: Any) -> None:
        maps = held_list(values, as_tuples=self.as_tuples)
        places = [place for place, one in zip(as_list(keys), maps, strict=True) for _ in one]
        items = [item for one in maps for item in one]
        spelled = self.spell([value for one in maps for value in one.values()])
        put_all(
            batch, self._behind(places, items), [self.host.next_number().to_bytes(NUMBER_BYTES) + value for value in spelled]
        )
        self.complete = False

    def _behind(self, places: Sequence[bytes], items: Sequence[Any]) -> list[bytes]:
        """Return the places of items: each after its key."""
        if not items:
            return []
        try:
            spelled = spelled_column(from_list(items, self.key_kind))
        except SchemaError as error:
            raise SchemaError(
                f"state {self.info.name!r} is declared with other keys: {error}. Change the function or the declaration."
            ) from error
        return [place + item for place, item in zip(places, spelled, strict=True)]

    # Reading.

    def _sought(self, key: Any, item: Any) -> Any:
        try:
            spelled = spelled_column(from_list([item], self.key_kind))[0]
        except SchemaError:
            return ABSENT  # a number too large for the type is no key
        self.host.missed()
        self.misses += 1
        found = self.host.db.get(self.prefix + self.host.spelled_one(key) + spelled)
        if found is None:
            return ABSENT
        entry = self.entry(key)
        if entry is None:
            entry = self.cache[key] = MapEntry(whole=False)
        entry.numbers[item] = int.from_bytes(found[:NUMBER_BYTES])
        value = entry.values[item] = self.spelling.value(found[NUMBER_BYTES:])
        self.item_count += 1
        return value

    def _own(self, key: Any) -> MapEntry:
        """The key's entry, to be changed."""
        entry = self.entry(key)
        if entry is None:
            entry = self.cache[key] = MapEntry(whole=self.complete)
        return entry  # type: ignore[no-any-return]

    def _whole(self, key: Any) -> MapEntry:
        """Return the key's entry with all of its items."""
        entry = self.entry(key)
        if entry is not None and entry.whole:
            return entry  # type: ignore[no-any-return]
        if entry is None and self.complete:
            return MapEntry(whole=True)
        self.host.missed()
        found = self.scan(key)
        entry = self.entry(key)  # again: it may have been written since
        if entry is None:
            entry = MapEntry(whole=False)
        self.cache[key] = entry
        items = to_list(read_column([rest for rest, _ in found], [0] * len(found), self.key_kind)[0])
        values = self.spelling.values([value[NUMBER_BYTES:] for _, value in found])
        for item, value, (_, spelled) in zip(items, values, found, strict=True):
            if item in entry.values or item not in entry.dirty:
                if entry.numbers.get(item, -1) < 0:
                    entry.numbers[item] = int.from_bytes(spelled[:NUMBER_BYTES])
                entry.values.setdefault(item, value)
        for item, number in entry.numbers.items():
            if number < 0:
                entry.numbers[item] = ~number
        entry.values = dict(sorted(entry.values.items(), key=lambda each: entry.numbers[each[0]]))
        entry.whole = True
        self.item_count += len(found)
        return entry  # type: ignore[no-any-return]
