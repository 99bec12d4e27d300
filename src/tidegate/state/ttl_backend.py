"""State with a ttl over a backend that knows nothing of it (RocksDB). ttl.py says what a ttl is.

`TimedBackend` stands before another backend. State without a ttl is that backend's own, and isn't touched. Of state with
one the backend holds, for every value, list item or map entry, a struct of it and its end: `struct<value, expires>`. The
tables here put them together and take them apart, and leave out, and take out, what has expired. Rows are taken apart
likewise, so that a snapshot has the columns `key`, `value` and `expires`, as it has from the heap.

What nobody looks at is swept: `maintain` goes through the keys, some at a time, where the backend can tell them
(`keys_from`). It goes round once in a quarter of the ttl at most.

Only for backends whose frozen versions are complete: what is left out of one is gone from the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import FrozenState, Section, StateInfo, StateKind
from tidegate.state.ttl import COLLECTIONS, EXPIRES, Ttl, alive, expires_list, loaded
from tidegate.state.values import detached
from tidegate.types import from_list, to_list

SWEPT_KEYS = 64  # in one step, at most


class Backend(Protocol):
    """What is needed of the backend behind (`KeyedBackend` of dataflow/operators/base.py). It may have
    `keys_from(state, place, count)`: up to `count` keys from a place on, and the place behind them, b"" at both ends."""

    cursor: Any

    def table(self, descriptor: Descriptor) -> Any: ...
    def load(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None: ...
    def begin_batch(self, keys: Sequence[Any]) -> None: ...
    def end_batch(self) -> None: ...
    def maintain(self, budget: int) -> None: ...
    def rows(self, state: str) -> Iterable[pa.RecordBatch]: ...
    def close(self) -> None: ...
    def freeze(self) -> FrozenState: ...


# ------------------------------------------------------------------------------------------- what the backend holds


def stored_descriptor(descriptor: Descriptor) -> Descriptor:
    """What the backend is told."""
    shape = descriptor.shape if descriptor.shape in COLLECTIONS else "value"
    return Descriptor(
        kind=StateKind.KEYED, shape=shape, item=_with_end(descriptor.item), map_key=descriptor.map_key, name=descriptor.name
    )


def stored_info(info: StateInfo) -> StateInfo:
    """The same of what a manifest says about a state; itself where it has no ttl."""
    if EXPIRES not in info.schema.names:
        return info
    kind = info.schema.field("value").type
    if info.shape == "map":
        kind = pa.map_(kind.key_type, _with_end(kind.item_type))
    else:
        kind = pa.list_(_with_end(kind.value_type)) if info.shape == "list" else _with_end(kind)
    return StateInfo(
        info.name,
        info.kind,
        info.shape if info.shape in COLLECTIONS else "value",
        pa.schema([info.schema.field("key"), pa.field("value", kind)]),
    )


def taken_apart(rows: pa.RecordBatch, info: StateInfo, *, now_ms: int | None = None) -> pa.RecordBatch:
    """Rows of the backend as a snapshot has them, without what expired before `now_ms`."""
    if EXPIRES not in info.schema.names:
        return rows
    keys: list[int] = []
    values: list[Any] = []
    ends: list[Any] = []
    for index, held in enumerate(to_list(rows.column("value"))):
        value, end = _apart(held, info.shape)
        left = (value, end) if now_ms is None else alive(value, end, shape=info.shape, now_ms=now_ms)
        if left is not None:
            keys.append(index)
            values.append(left[0])
            ends.append(left[1])
    return pa.RecordBatch.from_arrays(
        [
            rows.column("key").take(pa.array(keys, pa.int64())),
            from_list(values, info.schema.field("value").type),
            from_list(ends, info.schema.field(EXPIRES).type),
        ],
        schema=info.schema,
    )


def put_together(rows: pa.RecordBatch, info: StateInfo, *, ttl: Ttl | None, now_ms: int) -> pa.RecordBatch:
    """Rows of a snapshot as the backend takes them in, without what has expired. `ttl` is None where the state has none
    any more."""
    left, _ = loaded(
        range(rows.num_rows), to_list(rows.column("value")), expires_list(rows), shape=info.shape, ttl=ttl, now_ms=now_ms
    )
    schema = (info if ttl is None else stored_info(info)).schema
    keys = rows.column("key").take(pa.array([index for index, _, _ in left], pa.int64()))
    held = [value if ttl is None else _together(value, end, info.shape) for _, value, end in left]
    return pa.RecordBatch.from_arrays([keys, from_list(held, schema.field("value").type)], schema=schema)


def _with_end(item: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field("value", item), pa.field(EXPIRES, pa.int64())])


def _apart(held: Any, shape: str) -> tuple[Any, Any]:
    if shape == "list":
        return [each["value"] for each in held], [each[EXPIRES] for each in held]
    if shape == "map":
        return {item: each["value"] for item, each in held.items()}, [each[EXPIRES] for each in held.values()]
    return held["value"], held[EXPIRES]


def _together(value: Any, end: Any, shape: str) -> Any:
    if shape == "list":
        return [_pair(item, at) for item, at in zip(value, end, strict=True)]
    if shape == "map":
        return {item: _pair(of_it, at) for (item, of_it), at in zip(value.items(), end, strict=True)}
    return _pair(value, end)


def _pair(value: Any, end: int) -> dict[str, Any]:
    return {"value": value, EXPIRES: end}


# ---------------------------------------------------------------------------------------------------------- backend


class TimedBackend:
    """A backend and, before it, the tables with a ttl."""

    def __init__(self, backend: Backend, *, now_ms: Callable[[], int]) -> None:
        self.cursor = backend.cursor
        self.begin_batch = backend.begin_batch
        self.end_batch = backend.end_batch
        self.close = backend.close
        self._backend = backend
        self._now_ms = now_ms
        self._infos: dict[str, StateInfo] = {}  # of all states, as a manifest has them
        self._tables: dict[str, TimedOver] = {}

    def table(self, descriptor: Descriptor) -> Any:
        if descriptor.ttl is None:
            table = self._backend.table(descriptor)
            self._infos[table.info.name] = table.info
            return table
        inner = self._backend.table(stored_descriptor(descriptor))
        info = self._infos[inner.info.name] = descriptor.info(inner.info.schema.field("key").type)
        timed = self._tables[info.name] = _TABLES[descriptor.shape](descriptor, inner, self._now_ms)
        return timed

    def load(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        timed = self._tables.get(state)
        if timed is not None or EXPIRES in rows.schema.names:
            rows = put_together(rows, self._infos[state], ttl=None if timed is None else timed.ttl, now_ms=self._now_ms())
        self._backend.load(state, rows, known=known)

    def rows(self, state: str) -> Iterator[pa.RecordBatch]:
        return (taken_apart(rows, self._infos[state]) for rows in self._backend.rows(state))

    def maintain(self, budget: int) -> None:
        keys_from = getattr(self._backend, "keys_from", None)
        if self._tables and keys_from is not None:
            at_key, now_ms = self.cursor.key, self._now_ms()
            for state, timed in self._tables.items():
                if timed.place or not 0 <= now_ms - timed.began_ms < timed.ttl_ms // 4:
                    timed.began_ms = timed.began_ms if timed.place else now_ms
                    keys, timed.place = keys_from(state, timed.place, min(budget, SWEPT_KEYS))
                    for self.cursor.key in keys:
                        timed.prune()
            self.cursor.key = at_key
        self._backend.maintain(budget)

    def freeze(self) -> FrozenState:
        frozen = self._backend.freeze()
        return FrozenTimed(frozen, self._infos, self._now_ms()) if self._tables else frozen


class FrozenTimed:
    """A frozen version of the backend behind, whose rows are taken apart. Its files, if it has any, stay as they are."""

    def __init__(self, frozen: Any, infos: dict[str, StateInfo], now_ms: int) -> None:
        self.states = tuple(infos[info.name] for info in frozen.states)
        self.release = frozen.release
        self._frozen = frozen
        self._infos = dict(infos)
        self._now_ms = now_ms
        if hasattr(frozen, "files"):
            self.native = frozen.native
            self.files = frozen.files

    @property
    def complete(self) -> bool:
        return bool(self._frozen.complete)

    def sections(self) -> Iterator[Section]:
        for section in self._frozen.sections():
            assert not section.deleted
            rows = taken_apart(section.rows, self._infos[section.state], now_ms=self._now_ms)
            if rows.num_rows:
                yield Section(section.state, section.groups, rows)


# ----------------------------------------------------------------------------------------------------------- tables


class TimedOver:
    """A table with a ttl over one that holds pairs of value and end. `place` and `began_ms` are the sweep's."""

    def __init__(self, descriptor: Descriptor, inner: Any, now_ms: Callable[[], int]) -> None:
        assert descriptor.ttl is not None
        self.ttl = descriptor.ttl
        self.ttl_ms = descriptor.ttl.ms
        self.by_reads = descriptor.ttl.by_reads
        self.inner = inner
        self.now_ms = now_ms
        self.keep = descriptor.keeper()
        self.place = b""
        self.began_ms = now_ms()
        self._copied = descriptor.form.copied

    def clear(self) -> None:
        self.inner.clear()

    def copied(self, value: Any) -> Any:
        return value if self._copied is None else self._copied(value)

    def prune(self) -> None:
        """Takes out what the current key has that expired. That isn't reading."""
        raise AssertionError("of the subclass")


class SingleOver(TimedOver):
    def prune(self) -> None:
        self.held(self.now_ms())

    def held(self, now_ms: int) -> dict[str, Any] | None:
        pair: dict[str, Any] | None = self.inner.get()
        if pair is not None and pair[EXPIRES] <= now_ms:
            self.inner.clear()
            return None
        return pair

    def read(self) -> dict[str, Any] | None:
        now_ms = self.now_ms()
        pair = self.held(now_ms)
        if pair is not None and self.by_reads:
            self.put(pair["value"], now_ms)
        return pair

    def put(self, held: Any, now_ms: int) -> None:
        self.inner.set(_pair(held, now_ms + self.ttl_ms))


class ValueOver(SingleOver):
    def __init__(self, descriptor: Descriptor, inner: Any, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, inner, now_ms)
        self._default = descriptor.default

    def get(self) -> Any:
        pair = self.read()
        return self.copied(self._default if pair is None else pair["value"])

    def set(self, value: Any) -> None:
        self.put(self.keep(value), self.now_ms())


class ReducingOver(SingleOver):
    def __init__(self, descriptor: Descriptor, inner: Any, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, inner, now_ms)
        assert descriptor.add is not None
        self._function = descriptor.add

    def get(self) -> Any:
        pair = self.read()
        return None if pair is None or pair["value"] is None else self.copied(pair["value"])

    def add(self, item: Any) -> None:
        now_ms = self.now_ms()
        pair = self.held(now_ms)
        self.put(self.keep(item if pair is None else self._function(self.copied(pair["value"]), item)), now_ms)


class AggregatingOver(SingleOver):
    def __init__(self, descriptor: Descriptor, inner: Any, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, inner, now_ms)
        assert descriptor.add is not None and descriptor.create is not None
        self._create, self._function, self._result = descriptor.create, descriptor.add, descriptor.result

    def get(self) -> Any:
        pair = self.read()
        if pair is None:
            return None
        accumulator = self.copied(pair["value"])
        return accumulator if self._result is None else self._result(accumulator)

    def add(self, item: Any) -> None:
        now_ms = self.now_ms()
        pair = self.held(now_ms)
        accumulator = self.keep(self._create()) if pair is None else self.copied(pair["value"])
        self.put(self.keep(self._function(accumulator, item if self._copied is None else detached(item))), now_ms)


class ListOver(TimedOver):
    def get(self) -> tuple[Any, ...]:
        now_ms = self.now_ms()
        left = self._left(now_ms)
        if left and self.by_reads:
            self.inner.replace([_pair(each["value"], now_ms + self.ttl_ms) for each in left])
        return tuple([self.copied(each["value"]) for each in left])

    def add(self, item: Any) -> None:
        self.inner.add(_pair(self.keep(item), self.now_ms() + self.ttl_ms))

    def extend(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        end = self.now_ms() + self.ttl_ms
        self.inner.extend([_pair(item, end) for item in kept])

    def replace(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        end = self.now_ms() + self.ttl_ms
        self.inner.replace([_pair(item, end) for item in kept])

    def prune(self) -> None:
        self._left(self.now_ms())

    def _left(self, now_ms: int) -> Sequence[Any]:
        pairs = self.inner.get()
        left = [each for each in pairs if each[EXPIRES] > now_ms]
        if len(left) < len(pairs):
            self.inner.replace(left)
        return left


class MapOver(TimedOver):
    def __init__(self, descriptor: Descriptor, inner: Any, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, inner, now_ms)
        self._keep_key = descriptor.key_keeper()

    def get(self, item: Any, default: Any = None) -> Any:
        pair = self._read(item)
        return default if pair is None else self.copied(pair["value"])

    def put(self, item: Any, value: Any) -> None:
        item, value = self._keep_key(item), self.keep(value)
        now_ms = self.now_ms()
        self._found(item, now_ms)  # what is put after its end is new, and comes last
        self.inner.put(item, _pair(value, now_ms + self.ttl_ms))

    def remove(self, item: Any) -> None:
        self.inner.remove(item)

    def items(self) -> Iterable[tuple[Any, Any]]:
        return tuple([(item, self.copied(pair["value"])) for item, pair in self._all()])

    def keys(self) -> Iterable[Any]:
        return tuple([item for item, _ in self._all()])

    def values(self) -> Iterable[Any]:
        return tuple([self.copied(pair["value"]) for _, pair in self._all()])

    def __contains__(self, item: Any) -> bool:
        return self._read(item) is not None

    def __len__(self) -> int:
        return len(self._left(self.now_ms()))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def prune(self) -> None:
        self._left(self.now_ms())

    def _found(self, item: Any, now_ms: int) -> dict[str, Any] | None:
        pair: dict[str, Any] | None = self.inner.get(item)
        if pair is not None and pair[EXPIRES] <= now_ms:
            self.inner.remove(item)
            return None
        return pair

    def _read(self, item: Any) -> dict[str, Any] | None:
        now_ms = self.now_ms()
        pair = self._found(item, now_ms)
        if pair is not None and self.by_reads:
            self.inner.put(self._keep_key(item), _pair(pair["value"], now_ms + self.ttl_ms))
        return pair

    def _left(self, now_ms: int) -> list[tuple[Any, dict[str, Any]]]:
        left = []
        for item, pair in self.inner.items():
            if pair[EXPIRES] > now_ms:
                left.append((item, pair))
            else:
                self.inner.remove(item)
        return left

    def _all(self) -> list[tuple[Any, dict[str, Any]]]:
        """All that the key has. That is reading it."""
        now_ms = self.now_ms()
        left = self._left(now_ms)
        if self.by_reads:
            for item, pair in left:
                self.inner.put(item, _pair(pair["value"], now_ms + self.ttl_ms))
        return left


_TABLES: dict[str, type[TimedOver]] = {
    "value": ValueOver,
    "list": ListOver,
    "map": MapOver,
    "reducing": ReducingOver,
    "aggregating": AggregatingOver,
}
