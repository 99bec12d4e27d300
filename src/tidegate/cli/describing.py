"""The content of a snapshot as plain data, for `snapshots list` and `snapshots show`.

Only manifests are read, and the indexes of files for the row counts of `show`. Not here: checking the files (verifying.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tidegate.cli.finding import SnapshotFolder
from tidegate.errors import TidegateError
from tidegate.snapshots.manifest import Manifest, OperatorEntry
from tidegate.snapshots.snapshot_tables import known_rows
from tidegate.store.base import Store
from tidegate.types.json_form import to_json

Json = dict[str, Any]


def listing(folder: SnapshotFolder) -> list[Json]:
    """Return a row for each snapshot, ascending by epoch. If a manifest can't be read, its row has `problem` instead."""
    rows: list[Json] = []
    before: dict[str, int] = {}
    for epoch in folder.manifests:
        try:
            manifest = folder.load(epoch)
        except TidegateError as error:
            rows.append({"folder": folder.shown, "epoch": epoch, "problem": str(error)})
            continue
        files = file_sizes(manifest)
        total = sum(files.values())
        shared = sum(size for name, size in files.items() if name in before)
        rows.append(
            {
                "folder": folder.shown,
                "job": manifest.job,
                "epoch": epoch,
                "attempt": manifest.attempt,
                "created": moment(manifest.created_ms),
                "created_ms": manifest.created_ms,
                "bytes": total,
                "files": len(files),
                "shared_bytes": shared,
                "new_bytes": total - shared,
                "ending": manifest.ending,
                "savepoint": manifest.savepoint is not None,
            }
        )
        before = files
    return rows


def description(folder: SnapshotFolder, manifest: Manifest) -> Json:
    """Return the content of the manifest, and the number of rows of each state if indexes are enough to know it."""
    files = file_sizes(manifest)
    return {
        "folder": folder.shown,
        "job": manifest.job,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "created": moment(manifest.created_ms),
        "created_ms": manifest.created_ms,
        "key_group_count": manifest.key_group_count,
        "ending": manifest.ending,
        "bytes": sum(files.values()),
        "files": len(files),
        "stats": to_json(manifest.stats),
        "restored_from": to_json(manifest.restored_from),
        "savepoint": to_json(manifest.savepoint),
        "operators": {name: _operator(entry, folder.store) for name, entry in manifest.operators.items()},
    }


def file_sizes(manifest: Manifest) -> dict[str, int]:
    """Return the size of each file of a snapshot."""
    return {file.name: file.bytes for file in manifest.files()}


def moment(created_ms: int) -> str:
    try:
        return datetime.fromtimestamp(created_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{created_ms} ms"


def _operator(entry: OperatorEntry, store: Store) -> Json:
    pieces = [
        {
            "subtask": piece.subtask,
            "key_groups": list(piece.key_groups),
            "item_counts": dict(piece.item_counts),
            "files": [{"name": file.name, "bytes": file.bytes, "form": file.form} for file in piece.files],
        }
        for piece in entry.pieces
    ]
    states = [
        {
            "name": state.name,
            "kind": state.kind,
            "shape": state.shape,
            "type": state.type,
            "rows": known_rows(entry, state, store),
        }
        for state in entry.states
    ]
    return {"parallelism": entry.parallelism, "states": states, "pieces": pieces}
