"""A store with copies of its state files on the local disk, so that a slot that comes back on a host need not download.

Theory of operation. A state file is written to the store and, in the same pass, to a file under `folder`; a file that is
read whole is also copied there. Reads use the copy if there is one. The store remains the authority: listings, sizes,
creates and deletes go to it, an error of the local disk only drops the copy, and copies are verified:

- A copy that this process wrote is used. A copy that was there before is a leftover. It is used only after `adopt` was
  given the manifest's entry for it, with the same length and CRC-32: names are unique within a store, but a user may empty
  the store and start again, and then the same names mean other bytes.
- A copy holds a CRC-32 for each block. Every block that a read touches is checked before any of it is returned. At the
  first wrong block the copy is dropped, and the read goes to the store.

A copy is `content | CRC-32 of each block | length, CRC-32 of the content, CRC-32 of what follows the content, magic`,
written under a temporary name and renamed when the store has the file. Nothing is synced: checksums detect a copy that a
power failure tore.

All slots on a host share the folder. In it each store has its own folder, 0700, with files 0600. When all copies together
take more than `limit_bytes`, those written or adopted longest ago are removed. Every process checks on its own, so each may
exceed the limit by an eighth. Only names under `state/` are copied, since other names can be reused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import threading
import time
import uuid
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import CorruptFile
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.checked import Listed
from tidegate.store.local import read_exactly

BLOCK_BYTES = 256 * 1024

_MAGIC = b"TGCOPY\x00\x01"
_TRAILER = struct.Struct("<QII8s")
_CRC_BYTES = 4
_LEFTOVER_AFTER_S = 3600.0
_FOLDER_PREFIX = "copies-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy, with the checksums that verify its reads."""

    path: Path
    size_bytes: int
    checksum: int
    block_checksums: array[int]

    def read(self, offset: int, length: int) -> bytes:
        """Return verified bytes; CorruptFile or OSError if the copy can't be used."""
        assert offset + length <= self.size_bytes
        if not length:
            return b""
        first, last = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.size_bytes)
        with open(self.path, "rb", buffering=0) as file:
            content = memoryview(read_exactly(file.fileno(), offset=start, length=stop - start, name=self.path.name))
        for block in range(first, last):
            begin = block * BLOCK_BYTES - start
            if zlib.crc32(content[begin : begin + BLOCK_BYTES]) != self.block_checksums[block]:
                raise CorruptFile(f"block {block} doesn't match its checksum")
        if (start, stop) == (offset, offset + length):
            assert isinstance(content.obj, bytes)
            return content.obj
        return bytes(content[offset - start : offset - start + length])


class LocalCopyStore:
    """`store` with local copies under `folder` of at most `limit_bytes`. Safe to use from several threads."""

    def __init__(self, store: Store, folder: str | os.PathLike[str], *, limit_bytes: int) -> None:
        assert limit_bytes >= 0
        self.address, self.list, self.size, self.sizes = store.address, store.list, store.size, store.sizes
        self._store = store
        self._top = Path(folder).expanduser().absolute()
        self._folder = self._top / f"{_FOLDER_PREFIX}{hashlib.sha256(store.address.encode()).hexdigest()[:16]}"
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._copies: dict[str, _Copy] = {}
        self._listed_bytes: dict[str, int] = {}
        self._unseen_bytes = 0
        self._usable = self._open_folder()

    def __repr__(self) -> str:
        return f"LocalCopyStore({self._store!r}, {str(self._top)!r})"

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        self._drop(name)
        copy = self._begin(name)
        if copy is None:
            return self._store.write(name, chunks)
        try:
            written_bytes = self._store.write(name, copy.tee(chunks))
        except BaseException:
            copy.discard()
            raise
        self._keep(name, copy, written_bytes)
        return written_bytes

    def create(self, name: str, content: bytes) -> None:
        self._drop(name)
        self._store.create(name, content)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        found = self._read_copy(name, offset, length)
        if found is not None:
            return found
        content = self._store.read(name, offset, length)
        if _is_copied(name) and offset == 0 and length in (None, self._listed_bytes.get(name)):
            self._copy_whole(name, content)
        return content

    def delete(self, name: str) -> None:
        self._drop(name)
        self._store.delete(name)

    def adopt(self, files: Iterable[Listed]) -> int:
        """Use the copies that earlier processes on this host left of these files, and remove all other copies of this store.
        Call it before a restore, with all files of the manifest. Return the number of bytes adopted."""
        listed = {file.name: file for file in files if _is_copied(file.name)}
        self._listed_bytes = {name: file.bytes for name, file in listed.items()}
        self.retain(listed)
        for name, file in listed.items():
            with self._lock:
                if name in self._copies:
                    continue
            copy = _open_copy(self._path(name)) if self._usable else None
            if copy is not None and (copy.size_bytes, copy.checksum) == (file.bytes, file.checksum):
                with suppress(OSError):
                    os.utime(copy.path)
                with self._lock:
                    self._copies[name] = copy
            else:
                self._drop(name)
        with self._lock:
            return sum(self._copies[name].size_bytes for name in listed if name in self._copies)

    def retain(self, names: Collection[str]) -> None:
        """Remove the copies of all other files of this store. `names` must include the files of other slots on this host,
        which share the copies."""
        for entry in _entries(self._folder):
            name = entry.name.replace("~", "/")
            if name in names or (_is_temporary(entry.name) and not _is_old(entry)):
                continue
            with self._lock:
                self._copies.pop(name, None)
            _unlink(Path(entry.path))

    def _open_folder(self) -> bool:
        """Create the folder. Return whether it can be used: it is ours, and only we may write to it."""
        try:
            self._top.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            found = self._folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError(f"{self._folder} is not a folder of this user")
            if stat.S_IMODE(found.st_mode) != 0o700:
                self._folder.chmod(0o700)
        except OSError as error:
            _log.warning("No local copies of state are kept: %s", error)
            return False
        self._make_room()
        return True

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "~")

    def _begin(self, name: str) -> _CopyWriter | None:
        if not self._usable or not _is_copied(name):
            return None
        return _CopyWriter(self._path(name), limit_bytes=self._limit_bytes)

    def _keep(self, name: str, writer: _CopyWriter, written_bytes: int) -> None:
        copy = writer.finish(written_bytes)
        if copy is None:
            return
        with self._lock:
            self._copies[name] = copy
            self._unseen_bytes += copy.size_bytes
            is_due = self._unseen_bytes > self._limit_bytes // 8
        if is_due:
            self._make_room()

    def _copy_whole(self, name: str, content: bytes) -> None:
        copy = self._begin(name)
        if copy is not None:
            for _ in copy.tee((content,)):
                pass
            self._keep(name, copy, len(content))

    def _read_copy(self, name: str, offset: int, length: int | None) -> bytes | None:
        with self._lock:
            copy = self._copies.get(name)
        if copy is None:
            return None
        assert offset >= 0 and (length is None or length >= 0)
        wanted = max(copy.size_bytes - offset, 0) if length is None else length
        if offset + wanted > copy.size_bytes:
            return None  # the store raises the error
        try:
            return copy.read(offset, wanted)
        except FileNotFoundError:
            self._drop(name)  # another process removed it to make room
        except (OSError, CorruptFile) as error:
            _log.warning("The local copy of %s is not used: %s", name, error)
            self._drop(name)
        return None

    def _drop(self, name: str) -> None:
        with self._lock:
            self._copies.pop(name, None)
        if self._usable and _is_copied(layout.check_name(name)):
            _unlink(self._path(name))

    def _make_room(self) -> None:
        """Remove the oldest copies of all stores until the rest fits."""
        found: list[tuple[float, int, Path]] = []
        for folder in _entries(self._top):
            if folder.name.startswith(_FOLDER_PREFIX):
                for entry in _entries(Path(folder.path)):
                    with suppress(OSError):
                        about = entry.stat(follow_symlinks=False)
                        found.append((about.st_mtime, about.st_size, Path(entry.path)))
        total_bytes = sum(size_bytes for _, size_bytes, _ in found)
        kept = {path for _, _, path in found}
        for _, size_bytes, path in sorted(found):
            if total_bytes <= self._limit_bytes:
                break
            _unlink(path)
            kept.discard(path)
            total_bytes -= size_bytes
        with self._lock:
            self._unseen_bytes = 0
            # Another thread may have finished a copy meanwhile, which stays.
            for name, copy in list(self._copies.items()):
                if copy.path not in kept and not copy.path.exists():
                    del self._copies[name]


class _CopyWriter:
    """Writes one copy during the store's write. It never raises: an error of the local disk only ends the copy."""

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._temporary = path.with_name(f"{path.name}~~{uuid.uuid4().hex}")
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._checksum = 0
        self._block_checksums = array("I")
        self._block_checksum = 0
        self._whole = False
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def tee(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            if self._file is not None:
                self._take(memoryview(chunk).cast("B"))
            yield chunk
        self._whole = True

    def finish(self, written_bytes: int) -> _Copy | None:
        """Rename the copy to its final name and return it, None if it failed. `written_bytes` is what the store wrote."""
        if self._file is None or not self._whole or self._bytes != written_bytes:
            self.discard()
            return None
        if self._bytes % BLOCK_BYTES:
            self._block_checksums.append(self._block_checksum)
        try:
            _write_all(self._file, memoryview(_tail(self._bytes, self._checksum, self._block_checksums)))
            self._close()
            os.rename(self._temporary, self._path)
        except OSError:
            self.discard()
            return None
        return _Copy(self._path, self._bytes, self._checksum, self._block_checksums)

    def discard(self) -> None:
        with suppress(OSError):
            self._close()
        _unlink(self._temporary)

    def _take(self, chunk: memoryview) -> None:
        assert self._file is not None
        if self._bytes + len(chunk) > self._limit_bytes:
            self.discard()
            return
        try:
            _write_all(self._file, chunk)
        except OSError:
            self.discard()
            return
        self._checksum = zlib.crc32(chunk, self._checksum)
        while chunk:
            room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part, chunk = chunk[:room], chunk[room:]
            self._block_checksum = zlib.crc32(part, self._block_checksum)
            self._bytes += len(part)
            if len(part) == room:
                self._block_checksums.append(self._block_checksum)
                self._block_checksum = 0

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _is_copied(name: str) -> bool:
    return name.startswith(f"{layout.STATE}/")


def _is_temporary(file_name: str) -> bool:
    return "~~" in file_name


def _is_old(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_mtime < time.time() - _LEFTOVER_AFTER_S
    except OSError:
        return False


def _tail(size_bytes: int, checksum: int, block_checksums: array[int]) -> bytes:
    table = block_checksums.tobytes()
    own = zlib.crc32(struct.pack("<QI", size_bytes, checksum), zlib.crc32(table))
    return table + _TRAILER.pack(size_bytes, checksum, own, _MAGIC)


def _open_copy(path: Path) -> _Copy | None:
    """Open a copy and check its length and its tail. Return None if they are wrong."""
    try:
        with open(path, "rb", buffering=0) as file:
            found_bytes = os.fstat(file.fileno()).st_size
            trailer = read_exactly(
                file.fileno(), offset=max(found_bytes - _TRAILER.size, 0), length=_TRAILER.size, name=path.name
            )
            size_bytes, checksum, _, magic = _TRAILER.unpack(trailer)
            table_bytes = -(-size_bytes // BLOCK_BYTES) * _CRC_BYTES
            if magic != _MAGIC or found_bytes != size_bytes + table_bytes + _TRAILER.size:
                return None
            block_checksums = array("I", read_exactly(file.fileno(), offset=size_bytes, length=table_bytes, name=path.name))
    except (OSError, CorruptFile):
        return None
    if _tail(size_bytes, checksum, block_checksums)[-_TRAILER.size :] != trailer:
        return None
    return _Copy(path, size_bytes, checksum, block_checksums)


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
