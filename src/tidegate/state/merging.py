"""Merging layers of keyed state: reading what a chain of files holds, and joining its files.

A layer is what changed between two freezes: rows that were set and keys that were deleted, each key once. Of several layers
the last one that has a key counts. In columnar state with windows, "key" means key and window here. Arrow and numpy merge
some key-groups at a time, without Python per row. Memory is bounded by `BLOCK_ROWS`, or by the largest key-group if that
has more rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.state.cutting import cut_by_group
from tidegate.state.sections import Section, SectionReader, StateInfo, deleted_schema, within
from tidegate.types.limits import joined, joined_columns

BLOCK_ROWS = 1 << 14

# Rows that are set, and keys that are deleted, of some key-groups.
Block: TypeAlias = tuple[list[pa.RecordBatch], list[pa.RecordBatch]]


class LayerInMemory:
    """A layer that isn't in a file yet."""

    def __init__(self, sections: Iterable[Section], *, key_group_count: int) -> None:
        self._sections = sorted(sections, key=lambda section: section.deleted)
        self._key_group_count = key_group_count

    def read_sections(self, state: str, groups: range) -> Iterator[Section]:
        for section in self._sections:
            assert section.groups is not None
            if section.state == state and section.groups.start < groups.stop and groups.start < section.groups.stop:
                part = within(section, groups, key_group_count=self._key_group_count)
                if part.rows.num_rows:
                    yield part

    def row_count(self, state: str) -> int:
        return sum(section.rows.num_rows for section in self._sections if section.state == state)

    @property
    def bytes(self) -> int:
        return sum(section.rows.nbytes for section in self._sections)


def resolved_rows(state: str, layers: Sequence[SectionReader], groups: range) -> Iterator[pa.RecordBatch]:
    """Return the state's rows in these key-groups. The first layer is the oldest and is complete."""
    for rows, _ in _blocks(state, layers, groups):
        yield from rows


def merged_sections(
    info: StateInfo, layers: Sequence[SectionReader], *, key_group_count: int, with_deleted: bool
) -> Iterator[Section]:
    """Merge the layers into one, `with_deleted` keys if the result will be on top of other layers."""
    gone: list[pa.RecordBatch] = []
    groups = range(key_group_count)
    if len(layers) == 1:
        yield from (part for part in layers[0].read_sections(info.name, groups) if with_deleted or not part.deleted)
        return
    for rows, deleted in _blocks(info.name, layers, groups):
        yield from cut_by_group(info.name, rows, key_group_count)
        gone += deleted
    if with_deleted and gone:
        yield from cut_by_group(info.name, gone, key_group_count, deleted=True)


def _blocks(state: str, layers: Sequence[SectionReader], groups: range) -> Iterator[Block]:
    row_count = sum(layer.row_count(state) for layer in layers)
    step = max(1, len(groups) * BLOCK_ROWS // max(row_count, 1))
    for start in range(groups.start, groups.stop, step):
        block = range(start, min(start + step, groups.stop))
        found = [sections for layer in layers if (sections := list(layer.read_sections(state, block)))]
        if len(found) == 1:
            yield (
                [section.rows for section in found[0] if not section.deleted],
                [section.rows for section in found[0] if section.deleted],
            )
        elif found:
            yield _last_wins([section for sections in found for section in sections])


def _last_wins(sections: Sequence[Section]) -> Block:
    schema = deleted_schema(sections[0].rows.schema)
    # What identifies a row: the key, in columnar state with windows the window as well.
    identity = [joined_columns([section.rows.column(name) for section in sections]) for name in schema.names]
    codes = key_codes(identity[0] if len(identity) == 1 else pa.StructArray.from_arrays(identity, schema.names))
    last = np.zeros(int(codes.max()) + 1, dtype=np.int64)
    last[codes] = np.arange(len(codes))  # of a repeated index the last value stays
    stays = np.zeros(len(codes), dtype=bool)
    stays[last] = True
    live: list[pa.RecordBatch] = []
    gone: list[pa.RecordBatch] = []
    start = 0
    for section in sections:
        stop = start + section.rows.num_rows
        rows = section.rows.filter(pa.array(stays[start:stop]))
        if rows.num_rows:
            (gone if section.deleted else live).append(rows)
        start = stop
    return list(joined(live)), list(joined(gone))


def key_codes(keys: pa.Array) -> np.ndarray[Any, Any]:
    """Return a small number for each key, the same for equal keys."""
    kind = keys.type
    if pa.types.is_struct(kind):
        codes = np.zeros(len(keys), dtype=np.int64)
        for field in keys.flatten():
            more = key_codes(field)
            codes = _dense(pa.array(codes * (int(more.max()) + 1) + more))
        return codes
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        known: dict[Any, int] = {}
        items = keys.flatten()
        flat = iter(key_codes(items).tolist() if len(items) else ())
        lengths = pc.list_value_length(keys).to_pylist()
        lists = (None if length is None else tuple(islice(flat, length)) for length in lengths)
        return np.fromiter((known.setdefault(each, len(known)) for each in lists), np.int64, len(keys))
    return _dense(keys)


def _dense(values: pa.Array) -> np.ndarray[Any, Any]:
    encoded = values.dictionary_encode(null_encoding="encode")
    codes: np.ndarray[Any, Any] = encoded.indices.to_numpy().astype(np.int64)
    return codes
