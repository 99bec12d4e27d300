"""Manifests as tables: the snapshots of a folder, and an inventory of one snapshot.

`snapshots` has a row for each complete snapshot of a job's folder. The other tables are about one snapshot: `operators`,
`states` and `sizes` (a row for each file). Only manifests are read, and the indexes of files for the row counts of `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from tidegate.errors import JobError, StoreError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import ROWS, Manifest, OperatorEntry, StateEntry
from tidegate.snapshots.row_files import row_reader
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_tables import MOMENT, GroupRanges, UncutTable
from tidegate.state.ttl import EXPIRES
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.types import ddl_of, parse_schema

Row = tuple[Any, ...]


class SnapshotTable(UncutTable):
    """One of `TABLES`."""

    def __init__(self, snapshot: Snapshot, name: str, *, path: str) -> None:
        if name not in TABLES:
            raise JobError(
                f"the option 'table' is {name!r}: there are {', '.join(map(repr, TABLES))}; a state is read with "
                f"the option 'state'"
            )
        ddl, self._rows = TABLES[name]
        self.schema = parse_schema(ddl)
        self._snapshot = snapshot
        self._path = path

    def read(self, part: GroupRanges) -> Iterator[pa.RecordBatch]:
        columns = list(zip(*self._rows(self._snapshot, self._path), strict=True))
        if columns:
            yield pa.RecordBatch.from_arrays(
                [_column(values, field.type) for values, field in zip(columns, self.schema, strict=True)], schema=self.schema
            )


def _column(values: tuple[Any, ...], kind: pa.DataType) -> pa.Array:
    """Return the column. Timestamps are given in milliseconds."""
    if kind == MOMENT:
        return pa.array(values, pa.int64()).cast(pa.timestamp("ms", tz="UTC")).cast(kind)
    return pa.array(values, kind)


def _snapshots(snapshot: Snapshot, path: str) -> Iterator[Row]:
    before: set[str] = set()
    for found in _all(snapshot, path):
        manifest = found.manifest
        files = {file.name: file.bytes for file in manifest.files()}
        yield (
            manifest.job,
            manifest.epoch,
            manifest.attempt,
            manifest.created_ms,
            manifest.ending,
            found.is_savepoint,
            manifest.key_group_count,
            len(manifest.operators),
            len(files),
            sum(files.values()),
            sum(size for name, size in files.items() if name not in before),
            layout.shown(found.address),
        )
        before = set(files)


def _all(snapshot: Snapshot, path: str) -> Iterator[Snapshot]:
    """Return all snapshots if the path is a job's folder, otherwise the one snapshot that it names."""
    if snapshot.is_savepoint or layout.split_manifest_address(path)[1] is not None:
        yield snapshot
        return
    for epoch in SnapshotCatalog(snapshot.store).epochs():
        yield find_snapshot(path, epoch=epoch)


def _operators(snapshot: Snapshot, path: str) -> Iterator[Row]:
    sizes = snapshot.manifest.operator_bytes()
    for name, entry in snapshot.manifest.operators.items():
        files = {file.name: file for piece in entry.pieces for file in piece.files}
        yield (
            snapshot.manifest.epoch,
            name,
            entry.parallelism,
            len(entry.states),
            len(files),
            sizes[name],
            sorted({file.form for file in files.values()}),
        )


def _states(snapshot: Snapshot, path: str) -> Iterator[Row]:
    for name, entry in snapshot.manifest.operators.items():
        for state in entry.states:
            schema = state.arrow_schema()
            yield (
                snapshot.manifest.epoch,
                name,
                state.name,
                state.kind,
                state.shape,
                ddl_of(schema.field("key").type) if state.kind == "keyed" else None,
                ddl_of(schema.field("value").type),
                EXPIRES in schema.names,
                known_rows(entry, state, snapshot.store),
            )


def _sizes(snapshot: Snapshot, path: str) -> Iterator[Row]:
    manifest = snapshot.manifest
    for name, entry in manifest.operators.items():
        for piece in entry.pieces:
            for position, file in enumerate(piece.files):
                yield (
                    manifest.epoch,
                    name,
                    piece.subtask,
                    *piece.key_groups,
                    position,
                    file.name,
                    file.form,
                    file.bytes,
                    _written_in(file.name, manifest),
                )


def _written_in(name: str, manifest: Manifest) -> int:
    parsed = layout.parse_state_file_name(name)
    return manifest.epoch if parsed is None else parsed.epoch


def known_rows(entry: OperatorEntry, state: StateEntry, store: Store) -> int | None:
    """Return the number of rows of a state; None if all rows would have to be read: for chains of several files, since a
    later file may replace or delete rows of an earlier one, and for native files."""
    if state.kind != "keyed":
        return sum(piece.item_counts.get(state.name, 0) for piece in entry.pieces)
    files = [file for piece in entry.pieces for file in piece.files]
    if any(file.form != ROWS for file in files) or any(len(piece.files) > 1 for piece in entry.pieces):
        return None
    try:
        return sum(row_reader(store, file).row_count(state.name) for file in files)
    except StoreError:
        return None


TABLES: dict[str, tuple[str, Callable[[Snapshot, str], Iterator[Row]]]] = {
    "snapshots": (
        "job string, epoch long, attempt long, created timestamp, ending string, savepoint boolean, "
        "key_group_count int, operators int, files int, bytes long, new_bytes long, path string",
        _snapshots,
    ),
    "operators": (
        "epoch long, operator string, parallelism int, states int, files int, bytes long, forms array<string>",
        _operators,
    ),
    "states": (
        "epoch long, operator string, state string, kind string, shape string, key_type string, value_type string, "
        "ttl boolean, rows long",
        _states,
    ),
    "sizes": (
        "epoch long, operator string, subtask int, first_key_group int, end_key_group int, position int, file string, "
        "form string, bytes long, written_in_epoch long",
        _sizes,
    ),
}
