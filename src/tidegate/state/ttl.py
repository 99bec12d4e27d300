"""Time to live: its declaration, and the rows of such state in a snapshot.

State with a ttl (time to live) forgets what wasn't written for that long, or neither written nor read
(`ttl_refresh="read"`). Time is the slot's clock, in milliseconds since 1970. Each value, list item or map entry has its own
end: it is there as long as `now < expires` and never after.

In a snapshot such a state has a third column `expires`, beside `key` and `value`: a number for a value, and for lists and
maps a list of numbers, one for each item in order. So a snapshot shows what has expired, whatever is declared when it is
loaded:

- rows without the column, or with null in it, are from a time when the state had no ttl: their time to live begins when they
  are loaded;
- if the state has no ttl any more, the column is dropped. What had expired before stays forgotten;
- a changed ttl applies to what is written from then on.

A backend doesn't have that column. It holds `struct<value, expires>`, as a tuple, for a value, an item or an entry
(`stored_info`), and the functions here convert its rows.

Not here: the live state (expiring.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate import arguments
from tidegate.arguments import Duration
from tidegate.errors import JobError
from tidegate.state.columns import NestedParts, nested_parts
from tidegate.state.sections import StateInfo

EXPIRES = "expires"
COLLECTIONS = ("list", "map")  # the shapes of which each item has an end


@dataclass(frozen=True, slots=True)
class Ttl:
    """A declared time to live, and whether reads renew it as well as writes."""

    ms: int
    by_reads: bool = False


def declared_ttl(ttl: Duration | None, refresh: str) -> Ttl | None:
    """Return what `ttl=` and `ttl_refresh=` declare. Raise `JobError` if they make no sense."""
    if refresh not in ("write", "read"):
        raise JobError(f"ttl_refresh={refresh!r}: give 'write' to renew state when it is written, or 'read' for reads, too")
    if ttl is None:
        if refresh == "read":
            raise JobError("ttl_refresh='read' without ttl=: give the time that the state lives, such as ttl='1 day'")
        return None
    ttl_ms = arguments.duration_ms("state", "ttl", ttl)
    if ttl_ms <= 0:
        raise JobError(
            f"ttl={ttl!r}: such state would expire at once; give a millisecond or more, or omit ttl= to keep the state "
            f"forever"
        )
    return Ttl(ttl_ms, refresh == "read")


def expires_field(shape: str) -> pa.Field:
    """The third column of a state with a ttl."""
    return pa.field(EXPIRES, pa.list_(pa.int64()) if shape in COLLECTIONS else pa.int64())


# ------------------------------------------------------------------------------------------------------------- rows


def stored_info(info: StateInfo) -> StateInfo:
    """Return a state's info as the backend holds it; the same if the state has no ttl."""
    if EXPIRES not in info.schema.names:
        return info
    kind = info.schema.field("value").type
    if info.shape == "map":
        kind = pa.map_(kind.key_type, _with_end(kind.item_type))
    else:
        kind = pa.list_(_with_end(kind.value_type)) if info.shape == "list" else _with_end(kind)
    shape = info.shape if info.shape in COLLECTIONS else "value"
    return StateInfo(info.name, info.kind, shape, pa.schema([info.schema.field("key"), pa.field("value", kind)]))


def taken_apart(rows: pa.RecordBatch, info: StateInfo) -> pa.RecordBatch:
    """Convert the backend's rows to a snapshot's. `info` is the state's; without a ttl nothing is changed."""
    if EXPIRES not in info.schema.names:
        return rows
    held, kinds = rows.column("value"), info.schema
    if info.shape not in COLLECTIONS:
        value, ends = held.flatten()
    else:
        parts = nested_parts(held)
        items, ends = parts.items.flatten()
        value = parts._replace(items=items).joined(kinds.field("value").type)
        ends = parts._replace(keys=None, items=ends).joined(kinds.field(EXPIRES).type)
    return pa.RecordBatch.from_arrays([rows.column("key"), value, ends], schema=info.schema)


def put_together(rows: pa.RecordBatch, info: StateInfo) -> pa.RecordBatch:
    """Convert a snapshot's rows to the backend's: the inverse of `taken_apart`."""
    schema = stored_info(info).schema
    kind, value, ends = schema.field("value").type, rows.column("value"), rows.column(EXPIRES)
    if info.shape not in COLLECTIONS:
        held = pa.StructArray.from_arrays([value, ends], fields=list(kind))
    else:
        parts = nested_parts(value)
        fields = list(kind.item_type if info.shape == "map" else kind.value_type)
        pairs = pa.StructArray.from_arrays([parts.items, nested_parts(ends).items], fields=fields)
        held = parts._replace(items=pairs).joined(kind)
    return pa.RecordBatch.from_arrays([rows.column("key"), held], schema=schema)


def with_ends(rows: pa.RecordBatch, info: StateInfo, *, otherwise: int) -> pa.RecordBatch:
    """Return rows of a snapshot with an end for everything: `otherwise` for what has none yet."""
    value, field = rows.column("value"), expires_field(info.shape)
    known = rows.column(EXPIRES) if EXPIRES in rows.schema.names else pa.nulls(rows.num_rows, field.type)
    if info.shape not in COLLECTIONS:
        ends = pc.fill_null(known, otherwise)
    else:
        lengths = nested_parts(value).lengths
        flat = np.full(int(lengths.sum()), otherwise)
        flat[np.repeat(np.asarray(known.is_valid()), lengths)] = np.asarray(known.flatten())
        ends = NestedParts(lengths, None, pa.array(flat)).joined(field.type)
    fields = [rows.schema.field("key"), rows.schema.field("value"), field]
    return pa.RecordBatch.from_arrays([rows.column("key"), value, ends], schema=pa.schema(fields))


def split_by_end(rows: pa.RecordBatch, info: StateInfo, now_ms: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return what is left of rows with ends, and the rows of which nothing is left, unchanged."""
    value, ends = rows.column("value"), rows.column(EXPIRES)
    if info.shape not in COLLECTIONS:
        is_left = np.asarray(ends) > now_ms
        left = rows
    else:
        parts, all_ends = nested_parts(value), nested_parts(ends).items
        alive = np.asarray(all_ends) > now_ms
        before = np.concatenate(([0], np.cumsum(alive)))
        stops = np.cumsum(parts.lengths)
        lengths = before[stops] - before[stops - parts.lengths]
        is_left = lengths > 0
        if alive.all():
            left = rows
        else:
            stays = pa.array(alive)
            keys = None if parts.keys is None else parts.keys.filter(stays)
            value = NestedParts(lengths, keys, parts.items.filter(stays)).joined(value.type)
            ends = NestedParts(lengths, None, all_ends.filter(stays)).joined(ends.type)
            left = pa.RecordBatch.from_arrays([rows.column("key"), value, ends], schema=rows.schema)
    if is_left.all():
        return left, rows.slice(0, 0)
    return left.filter(pa.array(is_left)), rows.filter(pa.array(~is_left))


def soonest_ends(rows: pa.RecordBatch, info: StateInfo) -> list[int]:
    """Return the first end of each row. Each row has one."""
    ends: Any = rows.column(EXPIRES)
    if info.shape in COLLECTIONS:
        parts = nested_parts(ends)
        starts = np.cumsum(parts.lengths) - parts.lengths
        ends = np.minimum.reduceat(np.asarray(parts.items), starts) if len(starts) else starts
    found: list[int] = np.asarray(ends).tolist()
    return found


def _with_end(item: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field("value", item), pa.field(EXPIRES, pa.int64())])
