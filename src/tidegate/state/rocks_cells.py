"""The cells of the RocksDB backend that hold one thing for each key: a write-back cache of Python values over RocksDB.

Theory of operation. A table has two dictionaries. What is read or written goes into `cache`; when the slot's share of
memory is used up, `cache` becomes `older`, and what was in `older` and wasn't touched since is forgotten. So what is used
stays, and a look-up in the usual case is one look-up in one dictionary. Keys that are known to hold nothing are GONE.

What RocksDB doesn't know about yet is in `dirty` as well, with its value. When there is too much of it, the oldest part is
written, in one write-batch, sorted. At a freeze `dirty` becomes `frozen`, and a thread writes that (rocks_settling.py); it
takes out of `frozen` what RocksDB has.

As long as nothing was ever forgotten and nothing was restored, the cache is all there is (`complete`): RocksDB isn't asked.

Invariants:
- the first of `cache`, `older`, `dirty`, `frozen` and RocksDB that has a key is right, and so is every later one that it
  was forgotten from;
- what is in `frozen` never changes. Only accumulators are changed in place, and they are copied first;
- nothing is forgotten, and nothing written, between a look-up here and the use of what it found: `host.missed()`, which
  may do both, comes before what is looked for is put into the cache.

Lists and dictionaries of a key are in rocks_collections.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.cells import ABSENT, GONE, AnyCells, Cells
from tidegate.state.columns import held_list
from tidegate.state.rocks_keys import Spelled, as_list, in_order
from tidegate.state.rocks_values import ValueSpelling, value_spelling
from tidegate.state.sections import StateInfo
from tidegate.state.shapes import Value
from tidegate.types import ddl_of

# A key and its place in a dictionary, about; and one more place in another one.
ENTRY_BYTES, PLACE_BYTES = 220, 100
# Every so many batches a table is not prefetched, to see whether it is read at all; and it isn't worth it if less than
# a quarter of what could be prefetched is read.
PROBE_EVERY, WORTH, MANY_MISSES = 64, 4, 8


class TableHost(Protocol):
    """What a table needs of its backend."""

    db: Any

    def spelled(self, keys: Sequence[Any], prefix: bytes) -> Spelled:
        """Keys as bytes, behind `prefix`."""

    def spelled_one(self, key: Any) -> bytes:
        """One key, without a prefix. Those of a batch are spelled together."""

    def scan(self, start: bytes) -> Iterable[tuple[bytes, bytes]]:
        """What RocksDB has under keys that begin like this, in order."""

    def keys_from(self, prefix: bytes, place: bytes, count: int) -> tuple[Sequence[Any], bytes]:
        """As in cells.py, of what RocksDB has behind a prefix."""

    def missed(self) -> None:
        """Called before something is read that wasn't in a cache. Makes room now and then."""

    def next_number(self) -> int:
        """Larger than all before, also those of earlier lives of this state."""


class RocksTable(AnyCells):
    """The cache of one state. `prefix` is what its keys in RocksDB begin with."""

    __slots__ = (
        "as_tuples",
        "cache",
        "changes",
        "complete",
        "dirty",
        "misses",
        "frozen",
        "prefix",
        "host",
        "info",
        "older",
        "probed",
        "spelled_bytes",
        "spelling",
        "turn",
        "wanted",
        "waste",
    )
    prefetched: ClassVar[bool] = True

    def __init__(self, info: StateInfo, host: TableHost, prefix: bytes, *, complete: bool, as_tuples: bool = False) -> None:
        self.info = info
        self.host = host
        self.prefix = prefix
        self.complete = complete
        self.as_tuples = as_tuples
        self.cache: dict[Any, Any] = {}
        self.older: dict[Any, Any] = {}
        self.waste: dict[Any, Any] = {}  # forgotten, and freed bit by bit
        self.dirty: dict[Any, Any] = {}
        self.frozen: dict[Any, Any] = {}  # what was dirty at the last freeze and isn't written yet
        self.spelling: ValueSpelling = value_spelling(self.stored_type, as_tuples=as_tuples)
        # As long as nothing is known. A guess that is too high costs a write too early, one too low memory.
        self.spelled_bytes = 8.0 if pa.types.is_primitive(self.stored_type) else 1024.0
        self.wanted = info.shape != "timers"  # until it is seen that there are timers
        self.turn = self.misses = self.probed = 0
        self.changes = 0  # of lists and maps: items that were added, put or removed and aren't written, about

    @property
    def stored_type(self) -> pa.DataType:
        """The type of what RocksDB holds for a key."""
        return self.info.schema.field("value").type

    # What the subclasses' methods are made of.

    def fetch(self, key: Any) -> Any:
        """What the state holds for a key that isn't in the cache, or GONE."""
        value = self.older.get(key, ABSENT)
        if value is ABSENT:
            if self.complete:
                return GONE
            self.misses += 1
            self.host.missed()
            value = self.unwritten(key)
            if value is ABSENT:
                spelled = self.host.db.get(self.prefix + self.host.spelled_one(key))
                value = GONE if spelled is None else self.spelling.value(spelled)
        self.cache[key] = value
        return value

    def unwritten(self, key: Any) -> Any:
        """What the key holds and RocksDB may not know yet, or ABSENT."""
        value = self.dirty.get(key, ABSENT)
        return self.frozen.get(key, ABSENT) if value is ABSENT else value

    def delete(self, key: Any) -> None:
        if self.complete and key not in self.older and self.cache.get(key, GONE) is GONE and key not in self.dirty:
            return
        self.cache[key] = self.dirty[key] = GONE

    def keys_from(self, place: bytes, count: int) -> tuple[Sequence[Any], bytes]:
        """Of what is on disk."""
        return self.host.keys_from(self.prefix, place, count)

    # What the backend calls.

    def to_prefetch(self, keys: set[Any]) -> set[Any]:
        """Those of the keys that are to be fetched before a batch."""
        self.turn += 1
        if self.complete or not (self.wanted or self.misses >= MANY_MISSES):
            self.misses = 0
            return set()
        missing = keys.difference(self.cache)
        for elsewhere in (self.older, self.dirty, self.frozen):
            if missing and elsewhere:
                # The view goes through `missing`, where set.intersection would go through the whole dictionary; and what is
                # written meanwhile isn't in `frozen` any more.
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
        """What was fetched."""
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
        """Puts a part of what is dirty into a write-batch: what has been so for the longest time."""
        count = math.ceil(len(self.dirty) * share)
        entries = list(islice(self.dirty.items(), count))
        deleted, places, values = self.spelled_entries(entries)
        delete_all(batch, deleted)
        put_all(batch, places, values)
        for key, _ in entries:
            del self.dirty[key]

    def hand_over(self) -> None:
        """At a freeze, for the thread that writes it."""
        assert not self.frozen
        self.frozen, self.dirty = self.dirty, {}

    def spelled_entries(self, entries: Sequence[tuple[Any, Any]]) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Keys to be deleted; keys to be put, sorted, and their values. Called by that thread, too."""
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
        """Rows of a snapshot, by their spelled keys."""
        from_arrow = self.spell(held_list(values, as_tuples=self.as_tuples))
        places, order = in_order(keys)
        put_all(batch, places, list(map(from_arrow.__getitem__, order)))
        self.complete = False

    def forget_older(self) -> None:
        """`cache` becomes `older`."""
        if self.older:
            self.complete = False
            self.waste = self.older
        self.older, self.cache = self.cache, {}

    def throw_away(self, budget: int) -> None:
        """Frees some of what was forgotten: to drop it at once would be one long step."""
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
        """Learns how long values are: at once that they are longer, and slowly that they are not."""
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
    """One thing for each key. `frozen` is read by the thread that writes it, so what is in there isn't changed in place."""

    __slots__ = ()

    def get(self, key: Any) -> Any:
        thing = self.cache.get(key, ABSENT)
        return self.fetch(key) if thing is ABSENT else thing

    def set(self, key: Any, thing: Any) -> None:
        self.cache[key] = self.dirty[key] = thing

    write_back = set

    def owned(self, key: Any) -> bool:
        return not self.frozen or key in self.dirty


class RocksValue(Value):
    """A value without the calls to its cells, each of which takes 22 ns, and `get` and `set` without them 50."""

    __slots__ = ()
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
    deque(map(batch.__setitem__, keys, values), maxlen=0)  # the quickest way to call it for each


def delete_all(batch: Any, keys: Iterable[bytes]) -> None:
    deque(map(batch.__delitem__, keys), maxlen=0)
