"""The cells of the RocksDB backend that hold one thing for each key: a write-back cache of Python values over RocksDB.

Theory of operation. A table has two dictionaries. What is read or written goes into `cache`. When the slot's share of memory
is used up, `cache` becomes `older`, and entries of the old `older` that were not used since are forgotten. So what is used
stays, and the usual look-up is one look-up in one dictionary. Keys that are known to hold nothing are GONE.

What RocksDB doesn't have yet is in `dirty` as well, with its value. If there is too much of it, the oldest part is written,
in one sorted write-batch. At a freeze `dirty` becomes `frozen`, and a thread writes it (rocks_settling.py) and removes
entries from `frozen` when RocksDB has them.

As long as nothing was ever forgotten and nothing was restored, the cache holds all of the state (`complete`), and RocksDB
isn't read.

Invariants:
- the first of `cache`, `older`, `dirty`, `frozen` and RocksDB that has a key is right;
- what is in `frozen` never changes. Only accumulators are changed in place, and they are copied first;
- nothing is forgotten or written between a look-up here and the use of what it found: `host.missed()`, which may do both, is
  called before what was read is put into the cache.

Lists and dictionaries of a key are in rocks_collections.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.cells import ABSENT, GONE, AnyCells, Cells
from tidegate.state.columns import held_list
from tidegate.state.rocks_keys import Spelled, as_list, in_order
from tidegate.state.rocks_values import ValueSpelling, value_spelling
from tidegate.state.sections import StateInfo
from tidegate.state.shapes import Value
from tidegate.types import ddl_of

if TYPE_CHECKING:
    from tidegate.state.rocksdb import RocksBackend

# About the memory of a key and its place in a dictionary, and of its place in another dictionary.
ENTRY_BYTES, PLACE_BYTES = 220, 100
# Once in `PROBE_EVERY` batches a table is not prefetched, to measure how much of it is read. Prefetching is worth it if more
# than one in `WORTH` of the keys that could be prefetched are read.
PROBE_EVERY, WORTH, MANY_MISSES = 64, 4, 8


class RocksTable(AnyCells):
    """The cache of one state, whose keys in RocksDB begin with `prefix`."""

    prefetched: ClassVar[bool] = True

    def __init__(
        self, info: StateInfo, host: RocksBackend, prefix: bytes, *, complete: bool, as_tuples: bool = False
    ) -> None:
        self.info = info
        self.host = host
        self.prefix = prefix
        self.complete = complete
        self.as_tuples = as_tuples
        self.cache: dict[Any, Any] = {}
        self.older: dict[Any, Any] = {}
        self.waste: dict[Any, Any] = {}  # forgotten, and freed in small steps
        self.dirty: dict[Any, Any] = {}
        self.frozen: dict[Any, Any] = {}  # what was dirty at the last freeze and isn't written yet
        self.spelling: ValueSpelling = value_spelling(self.stored_type, as_tuples=as_tuples)
        # The mean length of values, a guess until some are measured. If it is too high, writes come too early; if it is too
        # low, values take too much memory.
        self.spelled_bytes = 8.0 if pa.types.is_primitive(self.stored_type) else 1024.0
        self.wanted = info.shape != "timers"  # timers are not prefetched until there are misses
        self.turn = self.misses = self.probed = 0
        self.changes = 0  # about how many items of lists and maps were added, put or removed and aren't written

    @property
    def stored_type(self) -> pa.DataType:
        """The type of what RocksDB holds for a key."""
        return self.info.schema.field("value").type

    # What the subclasses call.

    def fetch(self, key: Any) -> Any:
        """Return what the state holds for a key that isn't in the cache, or GONE."""
        value = self.older.get(key, ABSENT)
        if value is ABSENT:
            if self.complete:
                return GONE
            self.misses += 1
            self.host.missed()
            value = self.dirty.get(key, ABSENT)
            if value is ABSENT:
                value = self.frozen.get(key, ABSENT)
            if value is ABSENT:
                spelled = self.host.db.get(self.prefix + self.host.spelled_one(key))
                value = GONE if spelled is None else self.spelling.value(spelled)
        self.cache[key] = value
        return value

    def delete(self, key: Any) -> None:
        if self.complete and key not in self.older and self.cache.get(key, GONE) is GONE and key not in self.dirty:
            return
        self.cache[key] = self.dirty[key] = GONE

    def keys_from(self, place: bytes, count: int) -> tuple[Sequence[Any], bytes]:
        return self.host.keys_from(self.prefix, place, count)

    # What the backend calls.

    def to_prefetch(self, keys: set[Any]) -> set[Any]:
        """Return those of a batch's keys that are to be fetched before it."""
        self.turn += 1
        if self.complete or not (self.wanted or self.misses >= MANY_MISSES):
            self.misses = 0
            return set()
        missing = keys.difference(self.cache)
        for elsewhere in (self.older, self.dirty, self.frozen):
            if missing and elsewhere:
                # A view iterates over `missing`, but set.intersection would iterate over the whole dictionary. Keys that the
                # thread writes meanwhile leave `frozen`.
                found = {
                    key: value for key in elsewhere.keys() & missing if (value := elsewhere.get(key, ABSENT)) is not ABSENT
                }
                self.cache.update(found)
                missing.difference_update(found)
        self.misses = 0
        if self.wanted and self.turn % PROBE_EVERY:
            return missing
        self.probed = len(missing)
        return set()

    def take_in(self, keys: Iterable[Any], spelled: list[bytes | None]) -> None:
        """Put what was fetched into the cache."""
        if None not in spelled:
            self.cache.update(zip(keys, self.spelling.values(spelled), strict=True))  # type: ignore[arg-type]
            return
        values = iter(self.spelling.values([each for each in spelled if each is not None]))
        self.cache.update((key, GONE if each is None else next(values)) for key, each in zip(keys, spelled, strict=True))

    def end_batch(self) -> None:
        if self.probed:
            self.wanted = self.misses * WORTH >= self.probed
            self.probed = 0

    def flush(self, batch: Any, share: float) -> None:
        """Put a share of what is dirty into a write-batch: what has been dirty for the longest time."""
        entries = list(islice(self.dirty.items(), math.ceil(len(self.dirty) * share)))
        deleted, places, values = self.spelled_entries(entries)
        delete_all(batch, deleted)
        put_all(batch, places, values)
        for key, _ in entries:
            del self.dirty[key]

    def hand_over(self) -> None:
        """Hand over what is dirty to the thread that writes it, at a freeze."""
        assert not self.frozen
        self.frozen, self.dirty = self.dirty, {}

    def spelled_entries(self, entries: Sequence[tuple[Any, Any]]) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return keys to be deleted; keys to be put, sorted, and their values. The writing thread calls this, too."""
        gone = [key for key, value in entries if value is GONE]
        deleted = as_list(self.host.spelled(gone, self.prefix)) if gone else []
        if gone:
            entries = [entry for entry in entries if entry[1] is not GONE]
        if not entries:
            return deleted, [], []
        keys, values = zip(*entries, strict=True)
        spelled = self.spell(values)
        self.measure(spelled)
        places, order = in_order(self.host.spelled(keys, self.prefix))
        return deleted, places, list(map(spelled.__getitem__, order))

    def load(self, keys: Spelled, values: pa.Array, batch: Any) -> None:
        """Put rows of a snapshot into a write-batch, by their spelled keys."""
        from_arrow = self.spell(held_list(values, as_tuples=self.as_tuples))
        places, order = in_order(keys)
        put_all(batch, places, list(map(from_arrow.__getitem__, order)))
        self.complete = False

    def forget_older(self) -> None:
        """Make `cache` the new `older`, and forget what was in `older`."""
        if self.older:
            self.complete = False
            self.waste = self.older
        self.older, self.cache = self.cache, {}

    def throw_away(self, budget: int) -> None:
        """Free some of what was forgotten: to free all of it at once would be one long step."""
        waste = self.waste
        for _ in range(min(len(waste), budget + len(waste) // 64)):
            waste.popitem()

    def spell(self, values: Sequence[Any]) -> list[bytes]:
        try:
            return self.spelling.spelled(values)
        except SchemaError as error:
            kind = self.info.schema.field("value").type
            raise SchemaError(
                f"state {self.info.name!r} is declared as {ddl_of(kind)}, and holds something else: "
                f"{error}. Change the function or the declaration."
            ) from error

    def measure(self, spelled: Sequence[bytes]) -> None:
        """Update the mean length of values: at once if they are longer now, slowly if they are shorter."""
        mean = sum(map(len, spelled)) / len(spelled)
        self.spelled_bytes = max(mean, self.spelled_bytes + (mean - self.spelled_bytes) / 4)

    def young_bytes(self) -> float:
        return len(self.cache) * self.entry_bytes()

    def held_bytes(self) -> float:
        unwritten_bytes = (len(self.dirty) + len(self.frozen)) * PLACE_BYTES
        return (len(self.cache) + len(self.older) + len(self.waste)) * self.entry_bytes() + unwritten_bytes

    def dirty_bytes(self) -> float:
        return len(self.dirty) * self.entry_bytes()

    def entry_bytes(self) -> float:
        return ENTRY_BYTES + self.spelling.held_bytes(self.spelled_bytes)


class RocksThings(RocksTable, Cells):
    """One thing for each key. Things in `frozen` aren't changed in place, since the writing thread reads them."""

    def get(self, key: Any) -> Any:
        thing = self.cache.get(key, ABSENT)
        return self.fetch(key) if thing is ABSENT else thing

    def set(self, key: Any, thing: Any) -> None:
        self.cache[key] = self.dirty[key] = thing

    write_back = set

    def owned(self, key: Any) -> bool:
        return not self.frozen or key in self.dirty


class RocksValue(Value):
    """A value without calls to its cells: such a call takes 22 ns, and `get` and `set` without it 50."""

    cells: RocksThings

    def get(self) -> Any:
        key, cells = self.cursor.key, self.cells
        value = cells.cache.get(key, ABSENT)
        if value is ABSENT:
            value = cells.fetch(key)
        return self.default if value is GONE else value

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.convert(value)
        key, cells = self.cursor.key, self.cells
        cells.cache[key] = cells.dirty[key] = value


def put_all(batch: Any, keys: Iterable[bytes], values: Iterable[bytes]) -> None:
    deque(map(batch.__setitem__, keys, values), maxlen=0)  # the fastest way to call it for each


def delete_all(batch: Any, keys: Iterable[bytes]) -> None:
    deque(map(batch.__delitem__, keys), maxlen=0)
