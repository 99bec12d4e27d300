"""The manifest: what a complete snapshot consists of, as JSON that knows its own checksum.

A manifest is one line, `{"crc32":"…8 hex digits…","manifest":{…}}`, where the CRC is over the exact bytes of the inner
object. The envelope has no freedom (no spaces, no order, no case), so any flipped bit and any truncation is seen.

Invariants, checked when an entry is built, so they hold for whatever was parsed as well: in a manifest every subtask of
an operator has exactly one piece (an empty one lists no files), pieces are in the order of their subtasks, every count
and checksum is in its range, and a file name is one that a store accepts. Unknown and missing keys are errors; a later
format raises `FORMAT_VERSION`.

A savepoint's manifest is one like any other, with a `savepoint` part that says what people want to know of it. What a
job went on from, where that was not a snapshot of its own, is handed down from manifest to manifest (`restored_from`).

Pieces and states come from slots over the control link: their `from_json` raises ProtocolError, where a whole manifest
raises CorruptFile. This module does no I/O and knows nothing of what is inside the files.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from tidegate.errors import CorruptFile, ProtocolError, RestoreError, StoreError
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.layout import check_name

FORMAT_VERSION = 2
ROWS = "rows"

Json: TypeAlias = dict[str, Any]
_Entry = TypeVar("_Entry")

_SAVEPOINT_ID = re.compile(r"[0-9a-f]{32}")
_ENVELOPE = re.compile(rb'\{"crc32":"([0-9a-f]{8})","manifest":(\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the store. `checksum` is the CRC-32 of all of it, `index_checksum` that of its index.

    `form` says what is in it: "rows" (state/format.py), or the name of a backend whose own file it is, which the backend
    knows under the name `local`. Those have no index.
    """

    name: str
    bytes: int
    checksum: int
    index_bytes: int = 0
    index_checksum: int = 0
    form: str = ROWS
    local: str = ""

    def __post_init__(self) -> None:
        try:
            check_name(self.name)
        except StoreError as error:
            raise ValueError(str(error)) from None
        if not 0 <= self.index_bytes <= self.bytes:
            raise ValueError(f"{self.name}: an index of {self.index_bytes} bytes in a file of {self.bytes}")
        if not (0 <= self.checksum < 2**32 and 0 <= self.index_checksum < 2**32):
            raise ValueError(f"{self.name}: no CRC-32")

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "checksum": self.checksum,
            "index_bytes": self.index_bytes,
            "index_checksum": self.index_checksum,
            "form": self.form,
            "local": self.local,
        }

    @classmethod
    def from_json(cls, value: object) -> FileEntry:
        return _received(_parse_file, value, "file")


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One state of an operator. `type` is its Arrow schema for people, `schema` the same for machines (IPC, base64)."""

    name: str
    kind: str
    shape: str
    type: str
    schema: str

    @classmethod
    def of(cls, *, name: str, kind: str, shape: str, schema: pa.Schema) -> StateEntry:
        readable = ", ".join(f"{column.name} {column.type}" for column in schema)
        return cls(name, kind, shape, readable, base64.b64encode(schema.serialize()).decode("ascii"))

    @property
    def info(self) -> StateInfo:
        """The state as the job's own declarations describe it."""
        return StateInfo(self.name, StateKind(self.kind), self.shape, self.arrow_schema())

    def arrow_schema(self) -> pa.Schema:
        """Exactly the schema that the entry was made of."""
        try:
            return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema, validate=True)))
        except (ValueError, OSError, pa.ArrowException) as error:
            raise CorruptFile(f"state {self.name!r}: its schema can't be read: {error}") from error

    def to_json(self) -> Json:
        return {"name": self.name, "kind": self.kind, "shape": self.shape, "type": self.type, "schema": self.schema}

    @classmethod
    def from_json(cls, value: object) -> StateEntry:
        return _received(_parse_state, value, "state")


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """What one subtask contributed. `key_groups` is (start, stop), half-open. `files` is a base and what changed since,
    in order; empty where the subtask has nothing. `item_counts` says how many rows each state has in this piece."""

    subtask: int
    key_groups: tuple[int, int]
    files: tuple[FileEntry, ...]
    item_counts: Mapping[str, int]

    def __post_init__(self) -> None:
        start, stop = self.key_groups
        if self.subtask < 0:
            raise ValueError(f"subtask {self.subtask} is negative")
        if not 0 <= start <= stop:
            raise ValueError(f"subtask {self.subtask}: key-groups {start}…{stop} are no range")
        if min(self.item_counts.values(), default=0) < 0:
            raise ValueError(f"subtask {self.subtask}: a negative count")

    def to_json(self) -> Json:
        return {
            "subtask": self.subtask,
            "key_groups": list(self.key_groups),
            "files": [file.to_json() for file in self.files],
            "item_counts": dict(self.item_counts),
        }

    @classmethod
    def from_json(cls, value: object) -> PieceEntry:
        return _received(_parse_piece, value, "piece")


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """While acknowledgements come in, pieces may be missing; a manifest takes it only with all of them."""

    parallelism: int
    states: tuple[StateEntry, ...]
    pieces: tuple[PieceEntry, ...]

    def __post_init__(self) -> None:
        _require(self.parallelism > 0, f"parallelism {self.parallelism}")
        names = [state.name for state in self.states]
        _require(len(set(names)) == len(names), f"a state is listed twice in {names}")
        subtasks = [piece.subtask for piece in self.pieces]
        _require(
            subtasks == sorted(set(subtasks)) and all(subtask < self.parallelism for subtask in subtasks),
            f"parallelism {self.parallelism} can't have pieces of the subtasks {subtasks}",
        )
        for piece in self.pieces:
            unknown = set(piece.item_counts) - set(names)
            _require(not unknown, f"subtask {piece.subtask} counts items of unknown states {sorted(unknown)}")

    def to_json(self) -> Json:
        return {
            "parallelism": self.parallelism,
            "states": [state.to_json() for state in self.states],
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, value: object) -> OperatorEntry:
        return _received(_parse_operator, value, "operator")


@dataclass(frozen=True, slots=True)
class SavepointEntry:
    """What a savepoint says of itself. `graph` is the job as `explain()` showed it, `versions` that of tidegate, python
    and, on Spark, spark; `operator_bytes` is the size of each operator's files."""

    id: str
    created_ms: int
    graph: str
    versions: Mapping[str, str]
    operator_bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        _require(bool(_SAVEPOINT_ID.fullmatch(self.id)), f"{self.id!r:.80} is not the id of a savepoint")

    def to_json(self) -> Json:
        return {
            "id": self.id,
            "created_ms": self.created_ms,
            "graph": self.graph,
            "versions": dict(self.versions),
            "operator_bytes": dict(self.operator_bytes),
        }


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """The snapshot, not the job's own, that a job once began with. `id` is a savepoint's id, and for anything else where
    it was; `path` is where it was found, without secrets."""

    id: str
    path: str

    def to_json(self) -> Json:
        return {"id": self.id, "path": self.path}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a Structured Streaming query, by the id that the query keeps in its own folder."""

    query: str
    number: int

    def __post_init__(self) -> None:
        _require(self.number >= 0, f"micro-batch {self.number} is negative")

    def to_json(self) -> Json:
        return {"query": self.query, "number": self.number}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete snapshot. `ending` says why it is the last one of its run, where it is. `stats` is free JSON. `micro_batch`
    is the one that the snapshot ends, where it ends one; a manifest without it has no such key."""

    job: str
    epoch: int
    attempt: int
    created_ms: int
    key_group_count: int
    ending: str | None
    operators: Mapping[str, OperatorEntry]
    stats: Mapping[str, Any] = field(default_factory=dict)
    restored_from: RestoredFrom | None = None
    savepoint: SavepointEntry | None = None
    micro_batch: MicroBatch | None = None

    def __post_init__(self) -> None:
        _require(self.epoch > 0 and self.attempt > 0, f"epoch {self.epoch} or attempt {self.attempt} isn't positive")
        _require(self.key_group_count > 0, f"{self.key_group_count} key-groups")
        for name, operator in self.operators.items():
            _require(
                len(operator.pieces) == operator.parallelism,
                f"operator {name!r}: {len(operator.pieces)} pieces of {operator.parallelism} subtasks",
            )
            beyond = [piece.key_groups for piece in operator.pieces if piece.key_groups[1] > self.key_group_count]
            _require(not beyond, f"operator {name!r}: key-groups {beyond} of {self.key_group_count}")
        if self.savepoint is not None:
            _require(self.savepoint.operator_bytes == self.operator_bytes(), "the savepoint's sizes aren't its files'")

    def operator_bytes(self) -> dict[str, int]:
        """How many bytes of files each operator has; one that several pieces share counts once."""
        return {
            name: sum({file.name: file.bytes for piece in operator.pieces for file in piece.files}.values())
            for name, operator in self.operators.items()
        }

    def files(self) -> Iterator[FileEntry]:
        """Every file that the snapshot needs. A file that two pieces share comes twice."""
        for operator in self.operators.values():
            for piece in operator.pieces:
                yield from piece.files

    def to_bytes(self) -> bytes:
        body = json.dumps(
            {
                "format": FORMAT_VERSION,
                "job": self.job,
                "epoch": self.epoch,
                "attempt": self.attempt,
                "created_ms": self.created_ms,
                "key_group_count": self.key_group_count,
                "ending": self.ending,
                "operators": {name: operator.to_json() for name, operator in self.operators.items()},
                "stats": dict(self.stats),
                "restored_from": None if self.restored_from is None else self.restored_from.to_json(),
                "savepoint": None if self.savepoint is None else self.savepoint.to_json(),
                **({} if self.micro_batch is None else {"micro_batch": self.micro_batch.to_json()}),
            },
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        ).encode("ascii")
        return b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body)

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str) -> Manifest:
        """`name` is the file's, for messages."""
        match = _ENVELOPE.fullmatch(content)
        if match is None:
            raise CorruptFile(f"{name} is not a whole manifest ({len(content)} bytes)")
        if zlib.crc32(match[2]) != int(match[1], 16):
            raise CorruptFile(f"{name}: the checksum doesn't match its content")
        try:
            body = json.loads(match[2])
            version = body.get("format")
            if version != FORMAT_VERSION:
                raise RestoreError(f"{name} has manifest format {version!r}; this Tidegate reads {FORMAT_VERSION}")
            return _parse_manifest(body)
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{name}: {error}") from error


def _parse_manifest(value: object) -> Manifest:
    of_batch = ("micro_batch",) if isinstance(value, dict) and "micro_batch" in value else ()
    fields = _object(
        value,
        "manifest",
        "format",
        "job",
        "epoch",
        "attempt",
        "created_ms",
        "key_group_count",
        "ending",
        "operators",
        "stats",
        "restored_from",
        "savepoint",
        *of_batch,
    )
    origin, savepoint, micro_batch = fields["restored_from"], fields["savepoint"], fields.get("micro_batch")
    operators = _mapping(fields["operators"], "operators")
    return Manifest(
        job=_text(fields["job"], "job"),
        epoch=_integer(fields["epoch"], "epoch"),
        attempt=_integer(fields["attempt"], "attempt"),
        created_ms=_integer(fields["created_ms"], "created_ms"),
        key_group_count=_integer(fields["key_group_count"], "key_group_count"),
        ending=None if fields["ending"] is None else _text(fields["ending"], "ending"),
        operators={name: _parse_operator(entry, f"operators[{name!r}]") for name, entry in operators.items()},
        stats=_mapping(fields["stats"], "stats"),
        restored_from=None if origin is None else _parse_restored_from(origin, "restored_from"),
        savepoint=None if savepoint is None else _parse_savepoint(savepoint, "savepoint"),
        micro_batch=None if micro_batch is None else _parse_micro_batch(micro_batch, "micro_batch"),
    )


def _parse_micro_batch(value: object, where: str) -> MicroBatch:
    fields = _object(value, where, "query", "number")
    return MicroBatch(_text(fields["query"], f"{where}.query"), _integer(fields["number"], f"{where}.number"))


def _parse_restored_from(value: object, where: str) -> RestoredFrom:
    fields = _object(value, where, "id", "path")
    return RestoredFrom(**{key: _text(text, f"{where}.{key}") for key, text in fields.items()})


def _parse_savepoint(value: object, where: str) -> SavepointEntry:
    fields = _object(value, where, "id", "created_ms", "graph", "versions", "operator_bytes")
    versions, sizes = (_mapping(fields[key], f"{where}.{key}") for key in ("versions", "operator_bytes"))
    return SavepointEntry(
        id=_text(fields["id"], f"{where}.id"),
        created_ms=_integer(fields["created_ms"], f"{where}.created_ms"),
        graph=_text(fields["graph"], f"{where}.graph"),
        versions={name: _text(version, f"{where}.versions[{name!r}]") for name, version in versions.items()},
        operator_bytes={name: _integer(size, f"{where}.operator_bytes[{name!r}]") for name, size in sizes.items()},
    )


def _parse_operator(value: object, where: str) -> OperatorEntry:
    fields = _object(value, where, "parallelism", "states", "pieces")
    states, pieces = (_sequence(fields[key], f"{where}.{key}") for key in ("states", "pieces"))
    return OperatorEntry(
        parallelism=_integer(fields["parallelism"], f"{where}.parallelism"),
        states=tuple(_parse_state(entry, f"{where}.states[{i}]") for i, entry in enumerate(states)),
        pieces=tuple(_parse_piece(entry, f"{where}.pieces[{i}]") for i, entry in enumerate(pieces)),
    )


def _parse_state(value: object, where: str) -> StateEntry:
    fields = _object(value, where, "name", "kind", "shape", "type", "schema")
    return StateEntry(**{key: _text(text, f"{where}.{key}") for key, text in fields.items()})


def _parse_piece(value: object, where: str) -> PieceEntry:
    fields = _object(value, where, "subtask", "key_groups", "files", "item_counts")
    bounds = _sequence(fields["key_groups"], f"{where}.key_groups")
    _require(len(bounds) == 2, f"{where}.key_groups: expected [start, stop], found {bounds!r:.80}")
    start, stop = (_integer(bound, f"{where}.key_groups") for bound in bounds)
    files = _sequence(fields["files"], f"{where}.files")
    counts = _mapping(fields["item_counts"], f"{where}.item_counts")
    return PieceEntry(
        subtask=_integer(fields["subtask"], f"{where}.subtask"),
        key_groups=(start, stop),
        files=tuple(_parse_file(entry, f"{where}.files[{i}]") for i, entry in enumerate(files)),
        item_counts={state: _integer(count, f"{where}.item_counts[{state!r}]") for state, count in counts.items()},
    )


def _parse_file(value: object, where: str) -> FileEntry:
    fields = _object(value, where, "name", "bytes", "checksum", "index_bytes", "index_checksum", "form", "local")
    size, checksum, index_bytes, index_checksum = (
        _integer(fields[key], f"{where}.{key}") for key in ("bytes", "checksum", "index_bytes", "index_checksum")
    )
    name, form, local = (_text(fields[key], f"{where}.{key}") for key in ("name", "form", "local"))
    return FileEntry(
        name=name,
        bytes=size,
        checksum=checksum,
        index_bytes=index_bytes,
        index_checksum=index_checksum,
        form=form,
        local=local,
    )


def _received(parse: Callable[[object, str], _Entry], value: object, what: str) -> _Entry:
    try:
        return parse(value, what)
    except ValueError as error:
        raise ProtocolError(f"not a {what} entry: {error}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _object(value: object, where: str, *keys: str) -> Json:
    fields = _mapping(value, where)
    if fields.keys() != set(keys):
        raise ValueError(f"{where}: expected the keys {sorted(keys)}, found {sorted(fields)}")
    return fields


def _mapping(value: object, where: str) -> Json:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise ValueError(f"{where}: expected an object, found {value!r:.80}")
    return value


def _sequence(value: object, where: str) -> Sequence[object]:
    if type(value) is not list:
        raise ValueError(f"{where}: expected a list, found {value!r:.80}")
    return value


def _text(value: object, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where}: expected text, found {value!r:.80}")
    return value


def _integer(value: object, where: str) -> int:
    if type(value) is not int:  # A JSON true is an int to Python, not to us.
        raise ValueError(f"{where}: expected an integer, found {value!r:.80}")
    return value
