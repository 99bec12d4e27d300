"""All names in a store are made and parsed here.

Each job has its own store, at `job_address(where_the_user_said, job_name)`. In it:

    attempts/0000000007                                       attempt 7 was claimed
    origins/0000000007-from-0000000012-a0000000005            attempt 7 resumes from epoch 12, which attempt 5 completed
    manifests/0000000013-a0000000007.json                     epoch 13 is complete, by attempt 7
    committed/0000000013-a0000000007                          what that snapshot and those before it list is committed
    state/a0000000007-e0000000013-s00002-count.tgs            state of operator "count", subtask 2, for that epoch
    requests/0123456789abcdef0123456789abcdef.json            a request to the running job for a savepoint
    requests/0123456789abcdef0123456789abcdef-answer.json     the job's answer
    initial/0123456789abcdef0123456789abcdef/….arrow          rows of the initial state of a stateful processor

Each savepoint is a store, which can be moved as a whole:

    savepoint.json                                            its manifest, created last: without it there is no savepoint
    state/…                                                   the files that it lists
    incomplete.json                                           it is being written, or its writer died
    claimed.json                                              it is being deleted, by the job that claimed it

Invariants: the name of a file that is not exclusively created contains its attempt, so two attempts never write the same
name (docs/promises.md, row 13). Each `parse_…` is the exact inverse of its maker and returns None for anything else, so that
Tidegate never uses or deletes a file that it did not name. User text enters a name only as a `slug`.

This module does no I/O.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tidegate.errors import StoreError

ATTEMPTS = "attempts"
ORIGINS = "origins"
MANIFESTS = "manifests"
COMMITTED = "committed"
STATE = "state"
REQUESTS = "requests"
INITIAL = "initial"

SAVEPOINT = "savepoint.json"
INCOMPLETE = "incomplete.json"
CLAIMED = "claimed.json"

_PART_MAX_CHARS = 255
_SLUG_MAX_CHARS = 64
_HASH_CHARS = 10

_NAME = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")
_SLUG = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOOKS_HASHED = re.compile(rf".*-[0-9a-f]{{{_HASH_CHARS}}}")

_ATTEMPT = re.compile(r"attempts/(\d{10,})")
_ORIGIN = re.compile(r"origins/(\d{10,})-from-(\d{10,})-a(\d{10,})")
_MANIFEST = re.compile(r"manifests/(\d{10,})-a(\d{10,})\.json")
_COMMITTED = re.compile(r"committed/(\d{10,})-a(\d{10,})")
_STATE_FILE = re.compile(r"state/a(\d{10,})-e(\d{10,})-s(\d{5,})-([A-Za-z0-9_-]{1,64})\.([A-Za-z0-9_-]{1,64}(?:\.sst)?)")
_REQUEST = re.compile(r"requests/([0-9a-f]{32})\.json")
_ANSWER = re.compile(r"requests/([0-9a-f]{32})-answer\.json")


@dataclass(frozen=True, slots=True)
class OriginName:
    """`attempt` resumed from epoch `parent_epoch` of `parent_attempt`. Both are 0 if it began without a snapshot."""

    attempt: int
    parent_attempt: int
    parent_epoch: int

    def __post_init__(self) -> None:
        assert 0 <= self.parent_attempt < self.attempt and self.parent_epoch >= 0


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """Epoch `epoch`, completed by `attempt`."""

    epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StateFileName:
    """`operator` is the operator's slug, not its name."""

    attempt: int
    epoch: int
    subtask: int
    operator: str


def check_name(name: str) -> str:
    """Return the name. StoreError if it could leave the store, or needs escaping on some file system."""
    parts = name.split("/")
    if not _NAME.fullmatch(name) or any(part in (".", "..") or len(part) > _PART_MAX_CHARS for part in parts):
        raise StoreError(f"{name!r} is not a name for a file in a store: relative, [A-Za-z0-9_.-] and slashes, no '..'")
    return name


def slug(text: str) -> str:
    """Return [A-Za-z0-9_-]{1,64} for any user text, and different slugs for different texts.

    A text that is a slug stays unchanged. Any other text gets a hash of the whole text at its end; so does a slug that
    happens to end like a hash, so that the two never collide.
    """
    if _SLUG.fullmatch(text) and not _LOOKS_HASHED.fullmatch(text):
        return text
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[: _SLUG_MAX_CHARS - _HASH_CHARS - 1] or "x"
    return f"{stem}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:_HASH_CHARS]}"


def job_address(where: str, job: str) -> str:
    """Return the URI of the job's own store under the URI that the user gave. The folder's name is the job's id in URLs."""
    return inside(where, slug(job))


def inside(address: str, name: str) -> str:
    """Return the URI of a file or folder at that address. A query (`?region=…`) stays at the end."""
    path, mark, query = address.partition("?") if "://" in address else (address, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def split_manifest_address(address: str) -> tuple[str, str | None]:
    """Return the store's address and the name in it if the address is that of a manifest, otherwise the address and None."""
    path, mark, query = address.partition("?") if "://" in address else (address, "", "")
    folder, _, name = path.rpartition("/")
    if name == SAVEPOINT:
        return (folder or "/") + mark + query, name
    folder, _, parent = folder.rpartition("/")
    if parent != MANIFESTS or parse_manifest_name(f"{parent}/{name}") is None:
        return address, None
    return (folder or "/") + mark + query, f"{parent}/{name}"


def shown(address: str) -> str:
    """Return the address without user, password and query, for messages and logs, which must not contain secrets."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def initial_state_name(folder: str, part: str) -> str:
    """Return the name of rows of initial state. Both arguments are unique, so no name is written twice."""
    return f"{INITIAL}/{folder}/{part}.arrow"


def attempt_name(attempt: int) -> str:
    assert attempt > 0
    return f"{ATTEMPTS}/{attempt:010d}"


def origin_name(origin: OriginName) -> str:
    return f"{ORIGINS}/{origin.attempt:010d}-from-{origin.parent_epoch:010d}-a{origin.parent_attempt:010d}"


def manifest_name(*, epoch: int, attempt: int) -> str:
    """Return the name, which sorts by epoch. The attempt tells manifests that a fenced coordinator created from others."""
    assert epoch > 0 and attempt > 0
    return f"{MANIFESTS}/{epoch:010d}-a{attempt:010d}.json"


def committed_name(manifest: ManifestName) -> str:
    return f"{COMMITTED}/{manifest.epoch:010d}-a{manifest.attempt:010d}"


def state_file_name(*, attempt: int, operator: str, subtask: int, epoch: int, local: str = "") -> str:
    """Return the name of a state file. `operator` is the user's name; `local` is a backend's name for a native file."""
    assert attempt > 0 and subtask >= 0 and epoch > 0
    return f"{STATE}/a{attempt:010d}-e{epoch:010d}-s{subtask:05d}-{slug(operator)}.{local or 'tgs'}"


def request_name(request: str) -> str:
    return f"{REQUESTS}/{request}.json"


def answer_name(request: str) -> str:
    return f"{REQUESTS}/{request}-answer.json"


def parse_request_name(name: str) -> str | None:
    match = _REQUEST.fullmatch(name)
    return match[1] if match else None


def parse_answer_name(name: str) -> str | None:
    match = _ANSWER.fullmatch(name)
    return match[1] if match else None


def parse_attempt_name(name: str) -> int | None:
    match = _ATTEMPT.fullmatch(name)
    attempt = int(match[1]) if match else 0
    return attempt if attempt and attempt_name(attempt) == name else None


def parse_origin_name(name: str) -> OriginName | None:
    match = _ORIGIN.fullmatch(name)
    if match is None:
        return None
    attempt, parent_epoch, parent_attempt = (int(digits) for digits in match.groups())
    if parent_attempt >= attempt:
        return None
    origin = OriginName(attempt=attempt, parent_attempt=parent_attempt, parent_epoch=parent_epoch)
    return origin if origin_name(origin) == name else None


def parse_manifest_name(name: str) -> ManifestName | None:
    match = _MANIFEST.fullmatch(name)
    if match is None:
        return None
    epoch, attempt = int(match[1]), int(match[2])
    if not (epoch and attempt) or manifest_name(epoch=epoch, attempt=attempt) != name:
        return None
    return ManifestName(epoch=epoch, attempt=attempt)


def parse_committed_name(name: str) -> ManifestName | None:
    match = _COMMITTED.fullmatch(name)
    if match is None:
        return None
    manifest = ManifestName(epoch=int(match[1]), attempt=int(match[2]))
    return manifest if manifest.epoch and manifest.attempt and committed_name(manifest) == name else None


def parse_state_file_name(name: str) -> StateFileName | None:
    match = _STATE_FILE.fullmatch(name)
    if match is None:
        return None
    attempt, epoch, subtask = int(match[1]), int(match[2]), int(match[3])
    exact = f"{STATE}/a{attempt:010d}-e{epoch:010d}-s{subtask:05d}-{match[4]}.{match[5]}"
    if not (attempt and epoch) or exact != name:
        return None
    return StateFileName(attempt=attempt, epoch=epoch, subtask=subtask, operator=match[4])
