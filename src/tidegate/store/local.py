"""Snapshots in a folder of a POSIX file system.

Invariants: folders are 0700 and files 0600 (docs/promises.md, security default 7). `write` writes to the final name and
syncs the file, then its folder. `create` fills a temporary file, syncs it, and gives it its name with `link`, which the
kernel makes atomic and exclusive. Temporary names contain a `~`, which no store name can, so `list` never returns one.
`delete` syncs the folder, so that deletions reach the disk in order: a manifest is never there without its files.

The file system must have hard links; nothing is locked. An NFS export works if its `link` is atomic.
"""

from __future__ import annotations

import builtins
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.store.layout import check_name

_BUFFER_BYTES = 256 * 1024
_LEFTOVER_AFTER_S = 3600.0


class LocalStore:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path).expanduser().absolute()
        self.address = self._root.as_uri()

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = self._path(name)
        written_bytes = 0
        with self._errors("write", name):
            _make_folders(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES) as file:
                    for chunk in chunks:
                        written_bytes += file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                _sync_folder(path.parent)
            except BaseException:
                # On a full disk the torn file would take the space that the next try needs.
                with suppress(OSError):
                    path.unlink()
                raise
        return written_bytes

    def create(self, name: str, content: bytes) -> None:
        path = self._path(name)
        with self._errors("create", name):
            _make_folders(path.parent)
            temporary = path.with_name(f"{path.name[:200]}~{uuid.uuid4().hex}")
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    raise AlreadyExists(f"{name} is already in {self.address}") from None
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()
            _sync_folder(path.parent)
            _remove_leftovers(path.parent)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or length >= 0)
        path = self._path(name)
        with self._errors("read", name):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size_bytes = os.fstat(descriptor).st_size
                wanted = max(size_bytes - offset, 0) if length is None else length
                # Checked before anything is allocated: the length may come from a damaged file.
                if offset + wanted > size_bytes:
                    raise CorruptFile(f"{name} in {self.address} has {size_bytes} bytes, not {offset + wanted}")
                return read_exactly(descriptor, offset=offset, length=wanted, name=name)
            finally:
                os.close(descriptor)

    def list(self, folder: str) -> builtins.list[str]:
        top = self._path(folder) if folder else self._root
        with self._errors("list", folder):
            names = (path.relative_to(self._root).as_posix() for path in _files_under(top))
            return sorted(name for name in names if "~" not in name)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._errors("delete", name):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            _sync_folder(path.parent)

    def size(self, name: str) -> int:
        path = self._path(name)
        with self._errors("size", name):
            return path.stat().st_size

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        return [self._size_of(name) for name in names]

    def _size_of(self, name: str) -> int | None:
        try:
            return self.size(name)
        except NotFound:
            return None

    def try_writing(self) -> None:
        """Create the folder, and a file in it that is deleted at once. OSError if that fails."""
        _make_folders(self._root)
        trial = self._root / f"~{uuid.uuid4().hex}"
        try:
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        finally:
            with suppress(OSError):
                trial.unlink()

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    @contextmanager
    def _errors(self, operation: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{name} is not in {self.address}") from error
        except OSError as error:
            raise StoreError(f"{operation} {name} in {self.address}: {error}") from error


def read_exactly(descriptor: int, *, offset: int, length: int, name: str) -> bytes:
    parts: builtins.list[bytes] = []
    while length:
        part = os.pread(descriptor, length, offset)
        if not part:
            raise CorruptFile(f"{name} became shorter while it was read")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _files_under(folder: Path) -> Iterator[Path]:
    try:
        entries = builtins.list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_under(Path(entry.path))
        else:
            yield Path(entry.path)


def _make_folders(folder: Path) -> None:
    """Create folders like `makedirs`, each 0700 and durable."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove old temporary files, of processes that died in `create`. Young ones may be in use."""
    oldest_s = time.time() - _LEFTOVER_AFTER_S
    for entry in builtins.list(os.scandir(folder)):
        with suppress(OSError):
            if "~" in entry.name and entry.stat().st_mtime < oldest_s:
                os.unlink(entry.path)
