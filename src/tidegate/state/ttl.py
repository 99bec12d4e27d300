"""How long state is kept: what a declaration says of it, and what is common to all backends.

State with a ttl (time to live) forgets what wasn't written for that long, or neither written nor read
(`ttl_refresh="read"`). Time is the slot's clock, in milliseconds since 1970. A value, an item of a list, an entry of a map
each have their own end: it is there as long as `now < expires` and never after.

In a snapshot such a state has a third column `expires`, beside `key` and `value`: a number for a value, and for lists and
maps a list of numbers, one for each item in its order. So a snapshot says itself what is still of use, whatever is declared
when it is taken in:

- rows without the column, or with null in it, are of a time when the state had no ttl: they begin anew when they are
  loaded;
- rows with it whose state has no ttl any more lose it. What had expired before stays forgotten;
- a changed ttl holds for what is written from then on.

Not here: the tables (heap_ttl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate import arguments
from tidegate.arguments import Duration
from tidegate.errors import JobError
from tidegate.types import to_list

EXPIRES = "expires"
COLLECTIONS = ("list", "map")  # the shapes whose items have an end of their own


@dataclass(frozen=True, slots=True)
class Ttl:
    """What a declaration says: for how long, and whether reading counts as well as writing."""

    ms: int
    by_reads: bool = False


def declared_ttl(ttl: Duration | None, refresh: str) -> Ttl | None:
    """Of `ttl=` and `ttl_refresh=`. Raises `JobError` where they make no sense."""
    if refresh not in ("write", "read"):
        raise JobError(
            f"ttl_refresh={refresh!r}: state lives on when it is written ('write'), or when it is read, too ('read')"
        )
    if ttl is None:
        if refresh == "read":
            raise JobError("ttl_refresh='read' without ttl=: say how long the state lives, such as ttl='1 day'")
        return None
    ttl_ms = arguments.duration_ms("state", "ttl", ttl)
    if ttl_ms <= 0:
        raise JobError(
            f"ttl={ttl!r}: state that lives for no time would never be there; give it a millisecond or more, or "
            f"leave ttl= away to keep it for ever"
        )
    return Ttl(ttl_ms, refresh == "read")


def expires_field(shape: str) -> pa.Field:
    """The third column of a state with a ttl."""
    return pa.field(EXPIRES, pa.list_(pa.int64()) if shape in COLLECTIONS else pa.int64())


def expires_list(rows: pa.RecordBatch) -> list[Any] | None:
    """The column `expires`, None where there is none. None in it: not known."""
    return to_list(rows.column(EXPIRES)) if EXPIRES in rows.schema.names else None


def with_ends(values: Sequence[Any], expires: Sequence[Any] | None, *, shape: str, otherwise: int) -> list[Any]:
    """What each row expires at: a number, or a list of numbers. `otherwise` is for what has no end yet."""
    ends: list[Any] = list(expires) if expires is not None else [None] * len(values)
    if shape not in COLLECTIONS:
        return [otherwise if end is None else end for end in ends]
    made = [[otherwise] * len(value) if end is None else end for value, end in zip(values, ends, strict=True)]
    assert all(len(end) == len(value) for end, value in zip(made, values, strict=True)), "an end for each item"
    return made


def alive(value: Any, end: Any, *, shape: str, now_ms: int) -> tuple[Any, Any] | None:
    """What is left of a row, value and end; None where that is nothing."""
    if shape not in COLLECTIONS:
        return (value, end) if end > now_ms else None
    if not end or max(end) <= now_ms:
        return None
    if min(end) > now_ms:
        return value, end
    kept = [at > now_ms for at in end]
    ends = [at for at in end if at > now_ms]
    if shape == "map":
        return {item: of_it for (item, of_it), stays in zip(value.items(), kept, strict=True) if stays}, ends
    return [item for item, stays in zip(value, kept, strict=True) if stays], ends


def loaded(
    keys: Sequence[Any], values: Sequence[Any], expires: Sequence[Any] | None, *, shape: str, ttl: Ttl | None, now_ms: int
) -> tuple[list[tuple[Any, Any, Any]], list[Any]]:
    """Rows of a snapshot as they are taken in: (key, value, end) of those that are left, and the keys that are not.

    Without a ttl the ends mean nothing.
    """
    ends = with_ends(values, expires, shape=shape, otherwise=now_ms + (1 if ttl is None else ttl.ms))
    left: list[tuple[Any, Any, Any]] = []
    gone: list[Any] = []
    for key, value, end in zip(keys, values, ends, strict=True):
        found = alive(value, end, shape=shape, now_ms=now_ms)
        if found is None:
            gone.append(key)
        else:
            left.append((key, *found))
    return left, gone
