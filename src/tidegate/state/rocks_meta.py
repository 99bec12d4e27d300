"""The first entry of a database of the RocksDB backend: what the database holds."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.errors import RestoreError
from tidegate.state.sections import StateInfo, StateKind

PREFIX_BYTES = 2
_KEY = bytes(PREFIX_BYTES)  # the first key; states begin with 1
_VERSION = 1


class Meta:
    """The types with which states are written, the first two bytes of their keys, and the largest number of a chunk or a
    map's item."""

    def __init__(self, key_type: pa.DataType, key_group_count: int) -> None:
        self.key = _spelled_schema(pa.schema([pa.field("key", key_type)]))
        self.key_group_count = key_group_count
        self.number = 0
        self.states: dict[str, tuple[int, str, str]] = {}  # the prefix, the shape, the schema

    @classmethod
    def read(cls, db: Any, *, key_type: pa.DataType, key_group_count: int, native: Path | None) -> Meta:
        meta = cls(key_type, key_group_count)
        spelled = db.get(_KEY)
        if spelled is None:
            if native is not None:
                raise RestoreError(f"{native} holds no state of a RocksDB backend")
            return meta
        found = json.loads(spelled)
        if found["version"] != _VERSION:
            raise RestoreError(
                f"{native} has RocksDB state of format {found['version']}, and this Tidegate reads format {_VERSION}: it "
                f"was written by another version. Use that version or a newer one, or restore the state from a savepoint"
            )
        if found["key_group_count"] != key_group_count or not _same_types(found["key"], meta.key):
            raise RestoreError(
                f"{native} holds state of {found['key_group_count']} key-groups under another key: restore "
                f"it from a savepoint"
            )
        meta.number = found["number"] + 1
        meta.states = {name: (prefix, shape, schema) for name, (prefix, shape, schema) in found["states"].items()}
        return meta

    def prefix(self, info: StateInfo) -> bytes:
        """Return what the keys of a state begin with."""
        assert info.kind is StateKind.KEYED
        schema = _spelled_schema(info.schema)
        known = self.states.get(info.name)
        if known is None:
            taken = {prefix for prefix, _, _ in self.states.values()}
            known = self.states[info.name] = (next(prefix for prefix in count(1) if prefix not in taken), info.shape, schema)
        elif known[1] != info.shape or not _same_types(known[2], schema):
            raise RestoreError(
                f"state {info.name!r} is declared as {info.shape} {info.schema}, and RocksDB's files hold "
                f"{known[1]} {_schema(known[2])}: restore it from a savepoint, which can be converted"
            )
        return known[0].to_bytes(PREFIX_BYTES)

    def write(self, batch: Any, tables: Iterable[str], *, number: int) -> None:
        """Put the entry into a write-batch, and delete the states that no table has."""
        for name in self.states.keys() - set(tables):
            prefix, _, _ = self.states.pop(name)
            batch.delete_range(prefix.to_bytes(PREFIX_BYTES), (prefix + 1).to_bytes(PREFIX_BYTES))
        batch[_KEY] = json.dumps(
            {
                "version": _VERSION,
                "key": self.key,
                "key_group_count": self.key_group_count,
                "number": number,
                "states": self.states,
            }
        ).encode()


def _spelled_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _schema(spelled: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(spelled)))


def _same_types(one: str, other: str) -> bool:
    return bool(one == other or _schema(one).equals(_schema(other)))
