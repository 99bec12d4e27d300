"""Snapshots made by hand, so that a test knows what must be in them, and can make them wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from click.testing import CliRunner, Result

from tidegate.cli.main import main
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, key_groups_of
from tidegate.snapshots.manifest import FileEntry, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.state.cutting import cut_by_group
from tidegate.state.format import StateFileEncoder
from tidegate.state.sections import Section, StateInfo, StateKind, deleted_schema
from tidegate.store import layout
from tidegate.store.local import LocalStore
from tidegate.types import from_list

GROUPS = 16
COUNTS = StateInfo("count", StateKind.KEYED, "value", pa.schema([("key", pa.string()), ("value", pa.int64())]))
SCORES = StateInfo(
    "scores", StateKind.KEYED, "map", pa.schema([("key", pa.string()), ("value", pa.map_(pa.string(), pa.float64()))])
)
OFFSETS = StateInfo("offsets", StateKind.SPLIT, "list", pa.schema([("value", pa.int64())]))
STATES = (COUNTS, SCORES, OFFSETS)

GONE = object()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def group_of(key: Any, kind: pa.DataType | None = None) -> int:
    return int(groups_of(hash_columns([pa.array([key], kind or pa.string())]), GROUPS)[0])


@dataclass
class Made:
    """A job's folder. `write` adds a snapshot; by each, a chain of layers per operator: keys set, or GONE."""

    folder: Path
    job: str = "job"
    attempt: int = 1
    manifests: dict[int, Manifest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = LocalStore(self.folder / self.job)

    @property
    def path(self) -> Path:
        return self.folder / self.job

    def manifest_path(self, epoch: int) -> Path:
        return self.path / layout.manifest_name(epoch=epoch, attempt=self.attempt)

    def write(
        self,
        epoch: int,
        layer: Mapping[str, Mapping[Any, Any]],
        *,
        on: int | None = None,
        parallelism: int = 2,
        items: Sequence[int] = (),
        states: Sequence[StateInfo] = STATES,
        operator: str = "counting",
        ending: str | None = None,
    ) -> Manifest:
        """`layer` maps states to what is set or deleted in them; `on` is the epoch whose chain it extends."""
        pieces = []
        for subtask in range(parallelism):
            before = () if on is None else self.manifests[on].operators[operator].pieces[subtask].files
            mine = items[subtask::parallelism]
            groups = key_groups_of(subtask, parallelism=parallelism, key_group_count=GROUPS)
            sections = list(_sections(states, layer, groups, mine))
            file = self.write_file(epoch, subtask, states, sections, operator=operator) if sections else ()
            pieces.append(
                PieceEntry(
                    subtask=subtask,
                    key_groups=(groups.start, groups.stop),
                    files=before + file,
                    item_counts={"offsets": len(mine)} if mine else {},
                )
            )
        entries = tuple(StateEntry.of(info) for info in states)
        return self.commit(
            Manifest(
                job=self.job,
                epoch=epoch,
                attempt=self.attempt,
                created_ms=1_700_000_000_000 + epoch,
                key_group_count=GROUPS,
                ending=ending,
                operators={operator: OperatorEntry(parallelism, entries, tuple(pieces))},
            )
        )

    def write_file(
        self,
        epoch: int,
        subtask: int,
        states: Sequence[StateInfo],
        sections: Iterable[Section],
        *,
        operator: str = "counting",
    ) -> tuple[FileEntry]:
        name = layout.state_file_name(attempt=self.attempt, operator=operator, subtask=subtask, epoch=epoch)
        encoder = StateFileEncoder(key_group_count=GROUPS)
        self.store.write(name, encoder.chunks(states, sections))
        summary = encoder.summary
        return (
            FileEntry(
                name=name,
                bytes=summary.bytes,
                checksum=summary.checksum,
                index_bytes=summary.index_bytes,
                index_checksum=summary.index_checksum,
            ),
        )

    def commit(self, manifest: Manifest) -> Manifest:
        """Also over one that is there, for a test that makes it wrong."""
        self.manifests[manifest.epoch] = manifest
        name = layout.manifest_name(epoch=manifest.epoch, attempt=self.attempt)
        self.store.delete(name)
        self.store.create(name, manifest.to_bytes())
        return manifest

    def change_pieces(self, epoch: int, *pieces: PieceEntry, operator: str = "counting") -> None:
        manifest = self.manifests[epoch]
        entry = manifest.operators[operator]
        self.commit(replace(manifest, operators={operator: replace(entry, pieces=pieces, parallelism=len(pieces))}))


def _sections(
    states: Sequence[StateInfo], layer: Mapping[str, Mapping[Any, Any]], groups: range, items: Sequence[int]
) -> Iterable[Section]:
    for info in states:
        if info.kind is not StateKind.KEYED:
            if items:
                yield Section(info.name, None, pa.record_batch([pa.array(items, pa.int64())], schema=info.schema))
            continue
        kind = info.schema.field("key").type
        mine = {key: value for key, value in layer.get(info.name, {}).items() if group_of(key, kind) in groups}
        live = {key: value for key, value in mine.items() if value is not GONE}
        gone = [key for key, value in mine.items() if value is GONE]
        if live:
            values = from_list(list(live.values()), info.schema.field("value").type)
            rows = pa.record_batch([from_list(list(live), kind), values], schema=info.schema)
            yield from cut_by_group(info.name, [rows], GROUPS)
        if gone:
            rows = pa.record_batch([from_list(gone, kind)], schema=deleted_schema(info.schema))
            yield from cut_by_group(info.name, [rows], GROUPS, deleted=True)
