"""The manifest: what a complete snapshot consists of, as JSON with a checksum.

A manifest is one line, `{"crc32":"…8 hex digits…","manifest":{…}}`, where the CRC is over the exact bytes of the inner
object. The form of the envelope is fixed (spaces, order, case), so any flipped bit and any truncation is detected.

Invariants, which every entry checks when it is built, and so when it is parsed: in a manifest every subtask of an operator
has exactly one piece (an empty piece lists no files), pieces are in the order of their subtasks, every count and checksum
is in its range, and stores accept every file name. Unknown and missing keys are errors, except in `stats`; a later format
raises `FORMAT_VERSION`.

A savepoint's manifest has an additional `savepoint` entry, for people. If a job began with a snapshot that is not its own,
every manifest of the job names that snapshot (`restored_from`).

Entries also come from slots over the control link, in the same JSON form (types/json_form.py). This module does no I/O and
knows nothing of what is inside the files.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.errors import CorruptFile, RestoreError, StoreError
from tidegate.snapshots.stats import EpochStats
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.layout import check_name
from tidegate.types.json_form import OPTIONAL, from_json, to_json

FORMAT_VERSION = 2
ROWS = "rows"

_SAVEPOINT_ID = re.compile(r"[0-9a-f]{32}")
_ENVELOPE = re.compile(rb'\{"crc32":"([0-9a-f]{8})","manifest":(\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the store. `checksum` is the CRC-32 of all of it, `index_checksum` that of its index.

    `form` is "rows" (state/format.py), or the name of the backend whose native file it is. `local` is the backend's name
    for a native file, which has no index.
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
        _require(
            0 <= self.index_bytes <= self.bytes,
            f"{self.name}: an index of {self.index_bytes} bytes in a file of {self.bytes}",
        )
        _require(0 <= self.checksum < 2**32 and 0 <= self.index_checksum < 2**32, f"{self.name}: not a CRC-32")


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One state of an operator. `type` is its Arrow schema for people, `schema` the same for programs (IPC, base64)."""

    name: str
    kind: str
    shape: str
    type: str
    schema: str

    @classmethod
    def of(cls, info: StateInfo) -> StateEntry:
        readable = ", ".join(f"{column.name} {column.type}" for column in info.schema)
        exact = base64.b64encode(info.schema.serialize()).decode("ascii")
        return cls(info.name, info.kind.value, info.shape, readable, exact)

    @property
    def info(self) -> StateInfo:
        """Return the state as a job declares it."""
        return StateInfo(self.name, StateKind(self.kind), self.shape, self.arrow_schema())

    def arrow_schema(self) -> pa.Schema:
        """Return exactly the schema that the entry was made from."""
        try:
            return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema, validate=True)))
        except (ValueError, OSError, pa.ArrowException) as error:
            raise CorruptFile(f"state {self.name!r}: its schema can't be read: {error}") from error


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """What one subtask contributed. `key_groups` is (start, stop), half-open. `files` is a chain, or native files; empty if
    the subtask has no state. `item_counts` is the number of rows of each state that is not keyed."""

    subtask: int
    key_groups: tuple[int, int]
    files: tuple[FileEntry, ...]
    item_counts: Mapping[str, int]

    def __post_init__(self) -> None:
        start, stop = self.key_groups
        _require(self.subtask >= 0, f"subtask {self.subtask} is negative")
        _require(0 <= start <= stop, f"subtask {self.subtask}: key-groups {start}…{stop} are not a range")
        _require(min(self.item_counts.values(), default=0) >= 0, f"subtask {self.subtask}: a negative count")


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator's states and pieces. In an acknowledgement it has one piece; a manifest requires all of them."""

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


@dataclass(frozen=True, slots=True)
class SavepointEntry:
    """A savepoint's description. `graph` is the job as `explain()` showed it, `versions` has those of tidegate, python and,
    on Spark, spark; `operator_bytes` is the size of each operator's files."""

    id: str
    created_ms: int
    graph: str
    versions: Mapping[str, str]
    operator_bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        _require(bool(_SAVEPOINT_ID.fullmatch(self.id)), f"{self.id!r:.80} is not the id of a savepoint")


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """The snapshot, not one of its own, that a job began with. `id` is a savepoint's id, otherwise the path. `path` is
    where the snapshot was found, without secrets."""

    id: str
    path: str


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a Structured Streaming query, by the id that the query keeps in its own folder."""

    query: str
    number: int

    def __post_init__(self) -> None:
        _require(self.number >= 0, f"micro-batch {self.number} is negative")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete snapshot. `ending` is why it is the last one of its job, if it is. `micro_batch` is the micro-batch that it
    ends, if any."""

    job: str
    epoch: int
    attempt: int
    created_ms: int
    key_group_count: int
    ending: str | None
    operators: Mapping[str, OperatorEntry]
    stats: EpochStats = field(default_factory=EpochStats)
    restored_from: RestoredFrom | None = None
    savepoint: SavepointEntry | None = None
    micro_batch: MicroBatch | None = field(default=None, metadata=OPTIONAL)

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
        """Return the size of each operator's files. A file that several pieces list counts once."""
        return {
            name: sum({file.name: file.bytes for piece in operator.pieces for file in piece.files}.values())
            for name, operator in self.operators.items()
        }

    def files(self) -> Iterator[FileEntry]:
        """Return every file that the snapshot needs. A file that two pieces list comes twice."""
        for operator in self.operators.values():
            for piece in operator.pieces:
                yield from piece.files

    def to_bytes(self) -> bytes:
        body = json.dumps(
            {"format": FORMAT_VERSION} | to_json(self),
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        ).encode("ascii")
        return b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body)

    @classmethod
    def from_bytes(cls, content: bytes, *, name: str) -> Manifest:
        """Parse a manifest. `name` is the name of its file, for messages."""
        match = _ENVELOPE.fullmatch(content)
        if match is None:
            raise CorruptFile(f"{name} is not a whole manifest ({len(content)} bytes)")
        if zlib.crc32(match[2]) != int(match[1], 16):
            raise CorruptFile(f"{name}: the checksum doesn't match its content")
        try:
            body = json.loads(match[2])
            version = body.pop("format", None)
            if version != FORMAT_VERSION:
                raise RestoreError(
                    f"{name} has manifest format {version!r}, and this Tidegate reads format {FORMAT_VERSION}: it was "
                    f"written by another version. Use that version or a newer one"
                )
            return from_json(cls, body, "manifest")
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{name}: {error}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
