"""Writing rows as keyed state of a new savepoint: the checks before anything is written, and the writing of one piece.

A savepoint is new, or a copy of another snapshot (`base`) in which one state is replaced or added. The writer of a piece
gets its rows sorted by key-group and then by key, and writes them as they arrive. It checks that they are in order by our
own hash, and that each key comes once. The operator's other states in that piece are written beside them.

Invariants: the base is not changed. The file of a piece has a new name at every try, so that two tries at the same time
(Spark may retry or speculate) don't overwrite each other; the manifest lists one of the files.

Not here: how rows are distributed by key-group (spark/state_writer.py), and when the manifest is created.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tidegate.errors import JobError, NotFound, SchemaError, StoreError
from tidegate.keygroups import MAX_KEY_GROUP_COUNT, key_groups_of
from tidegate.snapshots.committed import holds_more
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.row_files import write_rows
from tidegate.snapshots.savepoints import copy_file, is_canonical
from tidegate.snapshots.snapshot import Snapshot, in_order
from tidegate.snapshots.state_tables import listed
from tidegate.state.descriptors import Descriptor
from tidegate.state.evolution import described
from tidegate.state.merging import key_codes
from tidegate.state.sections import Section, StateInfo, StateKind, deleted_schema, row_identity
from tidegate.state.timers import TimeKind, timers_descriptor
from tidegate.state.ttl import expires_field
from tidegate.store.layout import state_file_name
from tidegate.store.opening import open_store
from tidegate.types import ddl_of

DEFAULT_KEY_GROUPS = 128
SHAPES = ("value", "list", "map", "reducing", "aggregating")


@dataclass(frozen=True, slots=True)
class StateWriting:
    """All that a task needs to write pieces. `states` are the operator's, with the written one, in the order of files."""

    target: str
    base: str | None
    operator: str
    state: str
    states: tuple[StateEntry, ...]
    pieces: tuple[PieceEntry, ...]  # of the operator, without files
    job: str
    epoch: int
    attempt: int
    key_group_count: int

    @property
    def info(self) -> StateInfo:
        return next(entry.info for entry in self.states if entry.name == self.state)

    def write_piece(self, subtask: int, rows: Iterable[pa.RecordBatch]) -> PieceEntry:
        """Write the operator's piece of this subtask, with these rows as the state. They have the state's schema."""
        base = None if self.base is None else _base(self.base)
        piece = self.pieces[subtask]
        states = [state.info for state in self.states]
        sections = (section for info in states for section in self._sections(info, piece, rows, base))
        name = state_file_name(
            attempt=self.attempt, operator=self.operator, subtask=subtask, epoch=self.epoch, local=f"tgs-{uuid.uuid4().hex}"
        )
        files = write_rows(open_store(self.target), name, states, sections, key_group_count=self.key_group_count)
        return replace(piece, files=files)

    def copy_piece(self, operator: str, subtask: int) -> PieceEntry:
        """Copy a piece of another operator of the base."""
        assert self.base is not None
        base, target = _base(self.base), open_store(self.target)
        piece = base.manifest.operators[operator].pieces[subtask]
        if not is_canonical(piece) or holds_more(piece, base.manifest.operators[operator]):
            return base.rewrite(operator, piece, target)
        for file in piece.files:
            copy_file(base.store, file, target)
        return piece

    def manifest(self, pieces: Iterable[tuple[str, PieceEntry]], *, created_ms: int) -> Manifest:
        """Return the manifest of all pieces that were written."""
        found: dict[str, dict[int, PieceEntry]] = {}
        for operator, piece in pieces:
            found.setdefault(operator, {})[piece.subtask] = piece
        base = None if self.base is None else _base(self.base).manifest
        entries = {} if base is None else dict(base.operators)
        entries[self.operator] = OperatorEntry(len(self.pieces), self.states, self.pieces)
        operators = {
            name: replace(entry, pieces=tuple(found[name][subtask] for subtask in range(entry.parallelism)))
            for name, entry in entries.items()
        }
        if base is not None:
            return replace(base, operators=operators, created_ms=created_ms, savepoint=None)
        return Manifest(
            job=self.job,
            epoch=self.epoch,
            attempt=self.attempt,
            created_ms=created_ms,
            key_group_count=self.key_group_count,
            ending=None,
            operators=operators,
        )

    def _sections(
        self, info: StateInfo, piece: PieceEntry, rows: Iterable[pa.RecordBatch], base: Snapshot | None
    ) -> Iterator[Section]:
        if info.name == self.state:
            yield from in_order(info.name, _checked(info, rows), self.key_group_count)
        elif base is not None and self.operator in base.manifest.operators:
            before = base.manifest.operators[self.operator].pieces[piece.subtask]
            yield from base.piece(self.operator, before).sections(info)


def _base(path: str) -> Snapshot:
    """Return the base, without committables that are known to be committed."""
    return find_snapshot(path).still_to_commit()


def _checked(info: StateInfo, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows; `JobError` if a key comes twice."""
    last: pa.Array | None = None
    for rows in batches:
        # Rows come in the order of their keys, and of the windows of a key.
        identity = deleted_schema(info.schema).names
        keys = rows.column("key") if len(identity) == 1 else pa.StructArray.from_arrays(map(rows.column, identity), identity)
        beside = keys if last is None else pa.concat_arrays([last, keys])
        codes = key_codes(beside) if len(beside) else np.zeros(0, np.int64)
        twice = np.flatnonzero(codes[1:] == codes[:-1])
        if len(twice):
            raise JobError(
                f"the key {beside[int(twice[0])].as_py()!r} comes more than once, and state {info.name!r} has "
                f"one row for each key: group the rows by the key first"
            )
        if len(keys):
            last = keys.slice(len(keys) - 1, 1)
        yield rows


# What is to be written.


def planned_writing(
    *,
    target: str,
    base: Snapshot | None,
    operator: str,
    info: StateInfo,
    add: bool,
    job: str | None,
    key_group_count: int | None,
    parallelism: int,
) -> StateWriting:
    """Return what is to be written, after all checks."""
    if base is None:
        groups = key_group_count or DEFAULT_KEY_GROUPS
        if not 1 <= groups <= MAX_KEY_GROUP_COUNT:
            raise JobError(f"key_group_count={groups}: choose 1 to {MAX_KEY_GROUP_COUNT}")
        pieces = _pieces(min(parallelism, groups), groups)
        return StateWriting(target, None, operator, info.name, (StateEntry.of(info),), pieces, job or operator, 1, 1, groups)
    manifest = base.manifest
    if key_group_count not in (None, manifest.key_group_count):
        raise JobError(
            f"key_group_count={key_group_count}, and the base has {manifest.key_group_count}: the number is "
            f"fixed for the life of a job's state"
        )
    entry = manifest.operators.get(operator)
    known = {} if entry is None else {state.name: state for state in entry.states}
    if info.name not in known and not add:
        raise NotFound(
            f"the base has no state {info.name!r} in operator {operator!r}: to add it, give add=True. {listed(manifest)}"
        )
    _check_key(operator, info, entry)
    states = tuple((known | {info.name: StateEntry.of(info)}).values())
    groups = manifest.key_group_count
    pieces = (
        _pieces(min(parallelism, groups), groups)
        if entry is None
        else tuple(replace(piece, files=(), key_groups=_groups_of(piece, entry, groups)) for piece in entry.pieces)
    )
    return StateWriting(
        target,
        base.address,
        operator,
        info.name,
        states,
        pieces,
        job or manifest.job,
        manifest.epoch,
        manifest.attempt,
        groups,
    )


def declared_info(
    base: Snapshot | None,
    operator: str,
    state: str | Descriptor,
    *,
    key: pa.DataType,
    value: pa.DataType,
    shape: str | None,
    expiring: bool,
) -> StateInfo:
    """Return the state as the program declares it, otherwise as the base has it, otherwise as the rows are."""
    if isinstance(state, Descriptor):
        if state.kind is not StateKind.KEYED:
            raise JobError(f"state {state.name!r} is {state.kind.value} state: only keyed state can be written")
        return state.info(key)
    known = _known(base, operator, state)
    if known is not None:
        if known.kind is not StateKind.KEYED:
            raise JobError(
                f"state {state!r} of operator {operator!r} is {known.kind.value} state: only keyed state can be written"
            )
        if shape not in (None, known.shape):
            raise JobError(f"shape={shape!r}, and state {state!r} of the base is a {known.shape}")
        return known
    timers = {timers_descriptor(kind).name: timers_descriptor(kind) for kind in TimeKind}
    if state in timers:
        return timers[state].info(key)
    if state.startswith("__"):
        raise JobError(f"state {state!r}: names that begin with '__' are Tidegate's own")
    if shape not in (None, *SHAPES):
        raise JobError(f"shape={shape!r}: there are {', '.join(map(repr, SHAPES))}")
    shape = shape or "value"
    fields = [pa.field("key", key), pa.field("value", value), *([expires_field(shape)] if expiring else [])]
    return StateInfo(state, StateKind.KEYED, shape, pa.schema(fields))


def check_rows(info: StateInfo, *, key: pa.DataType, value: pa.DataType) -> None:
    """Raise `SchemaError`, with both types, if the rows don't have the types of the state."""
    wanted = [nullable(info.schema.field(name).type) for name in ("key", "value")]
    given = [nullable(key), nullable(value)]
    if given != wanted:
        raise SchemaError(
            f"state {info.name!r} is a {described(info.kind.value, info.shape, info.schema)}:\n"
            f"  its rows are   (key {ddl_of(wanted[0])}, value {ddl_of(wanted[1])})\n"
            f"  and these are  (key {ddl_of(given[0])}, value {ddl_of(given[1])})\n"
            f"Cast or rename the columns, so that they are the same"
        )


def nullable(kind: pa.DataType) -> pa.DataType:
    """Return the same type with all fields nullable, as in state."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, nullable(each.type)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(nullable(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(nullable(kind.key_type), nullable(kind.item_type))
    return kind


def _known(base: Snapshot | None, operator: str, state: str) -> StateInfo | None:
    entry = None if base is None else base.manifest.operators.get(operator)
    return None if entry is None else next((each.info for each in entry.states if each.name == state), None)


def columns_beside_key(base: Snapshot | None, operator: str, state: str) -> list[str]:
    """Return which columns rows need beside the key to be identified: `window` and `position`, as the base has the state."""
    known = _known(base, operator, state)
    return [] if known is None else row_identity(known.schema)


def _check_key(operator: str, info: StateInfo, entry: OperatorEntry | None) -> None:
    """Check that the state has the same key type as the operator's other keyed states."""
    key = info.schema.field("key").type
    for state in entry.states if entry is not None else ():
        if state.kind == "keyed" and nullable(state.arrow_schema().field("key").type) != nullable(key):
            raise SchemaError(
                f"operator {operator!r} has keys of ({ddl_of(state.arrow_schema().field('key').type)}), and "
                f"state {info.name!r} would have keys of ({ddl_of(key)})"
            )


def _groups_of(piece: PieceEntry, entry: OperatorEntry, key_group_count: int) -> tuple[int, int]:
    """Return the key-groups of a piece. A piece of an operator without keyed state has none yet."""
    if any(range(*each.key_groups) for each in entry.pieces):
        return piece.key_groups
    if entry.parallelism > key_group_count:
        raise StoreError(f"{entry.parallelism} subtasks can't share {key_group_count} key-groups")
    groups = key_groups_of(piece.subtask, parallelism=entry.parallelism, key_group_count=key_group_count)
    return groups.start, groups.stop


def _pieces(parallelism: int, key_group_count: int) -> tuple[PieceEntry, ...]:
    ranges = [
        key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count) for subtask in range(parallelism)
    ]
    return tuple(PieceEntry(subtask, (groups.start, groups.stop), (), {}) for subtask, groups in enumerate(ranges))
