"""Snapshots in HDFS, by `hdfs-native`: a client in Rust that needs neither Java nor Hadoop's libraries.

- `create` fills a file under a temporary name and renames it without overwriting, which the name node does atomically and
  exclusively. If an answer is lost, and the temporary file is gone, the rename has succeeded if the name has the content.
  Otherwise a process whose clock is wrong has taken the file for a leftover: StoreError. Temporary names contain a `~`,
  which no store name can, so `list` never returns one.
- `write` syncs the file on every data node that has a replica before it closes it.
- A file that a killed process was writing stays under its name, as on a local disk, and is swept like one.

Folders are 0700 and files 0600. The name node, name services and Kerberos are configured by `HADOOP_CONF_DIR`; the user is
`HADOOP_USER_NAME` or the one of the process.
"""

from __future__ import annotations

import builtins
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.store.layout import check_name, shown

try:
    import hdfs_native
except ImportError as error:
    raise StoreError(
        "hdfs:// needs hdfs-native on the driver and on every host with slots: pip install 'tidegate[hdfs]'"
    ) from error

_ERRORS = (OSError, RuntimeError, ValueError)
_LEFTOVER_AFTER_S = 3600.0
_MOST_LOOKS = 64  # for the sizes of more names, their folders are listed


class HdfsStore:
    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.address = address
        self._root = "/" + unquote(parts.path).strip("/")
        if self._root == "/" or parts.query:
            raise StoreError(f"{shown(address)}: give a folder and no options, as in hdfs://host:port/folder")
        try:
            self._client = hdfs_native.Client(f"hdfs://{parts.netloc}" if parts.netloc else None)
        except _ERRORS as error:
            raise StoreError(f"can't open {shown(address)} as a snapshot store: {error}") from error
        self._made: set[str] = set()

    def __repr__(self) -> str:
        return f"HdfsStore({shown(self.address)!r})"

    def __reduce__(self) -> tuple[type[HdfsStore], tuple[str]]:
        return HdfsStore, (self.address,)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = self._path(name)
        with self._errors("write", name):
            self._make_folder(path)
            return self._fill(path, chunks)

    def create(self, name: str, content: bytes) -> None:
        path = self._path(name)
        temporary = f"{path}~{uuid.uuid4().hex}"
        with self._errors("create", name):
            self._make_folder(path)
            self._fill(temporary, [content])
            try:
                self._client.rename(temporary, path)
            except _ERRORS as error:
                if self._info(temporary) is None:
                    if self._holds(name, content):
                        return  # it was renamed, and the answer was lost
                    raise StoreError(f"create {name} in {shown(self.address)}: its temporary file was deleted") from error
                with suppress(*_ERRORS):
                    self._client.delete(temporary)
                if isinstance(error, FileExistsError):
                    raise AlreadyExists(f"{name} is already in {shown(self.address)}") from None
                raise

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or length >= 0)
        path = self._path(name)
        with self._errors("read", name):
            file = self._client.read(path)
            size_bytes = len(file)
            wanted = max(size_bytes - offset, 0) if length is None else length
            if offset + wanted > size_bytes:
                raise CorruptFile(f"{name} in {shown(self.address)} has {size_bytes} bytes, not {offset + wanted}")
            content = file.read_range(offset, wanted) if wanted else b""
        if len(content) != wanted:
            raise CorruptFile(f"{name} in {shown(self.address)} gave {len(content)} bytes of {wanted}")
        return content

    def list(self, folder: str) -> builtins.list[str]:
        top = self._path(folder) if folder else self._root
        with self._errors("list", folder):
            names = [file.path.removeprefix(f"{self._root}/") for file in self._files_in(top, recursive=True)]
        return sorted(name for name in names if "~" not in name)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._errors("delete", name), suppress(FileNotFoundError):
            self._client.delete(path)

    def size(self, name: str) -> int:
        with self._errors("size", name):
            found = self._info(self._path(name))
        if found is None or found.isdir:
            raise NotFound(f"{name} is not in {shown(self.address)}")
        return int(found.length)

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        paths = [self._path(name) for name in names]
        found: dict[str, int] = {}
        with self._errors("sizes", names[0] if names else ""):
            if len(paths) > _MOST_LOOKS:
                for folder in {path.rpartition("/")[0] for path in paths}:
                    found |= {file.path: file.length for file in self._files_in(folder, recursive=False)}
            else:
                infos = {path: self._info(path) for path in paths}
                found = {path: info.length for path, info in infos.items() if info is not None and not info.isdir}
        return [found.get(path) for path in paths]

    def _fill(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        written_bytes = 0
        options = hdfs_native.WriteOptions(permission=0o600, overwrite=True)
        try:
            with self._client.create(path, options) as file:
                for chunk in chunks:
                    written_bytes += file.write(chunk) if len(chunk) else 0
                if written_bytes:
                    file.hsync()
        except BaseException:
            with suppress(*_ERRORS):
                self._client.delete(path)
            raise
        return written_bytes

    def _holds(self, name: str, content: bytes) -> bool:
        with suppress(NotFound):
            return self.read(name) == content
        return False

    def _make_folder(self, path: str) -> None:
        """Create the folder of a file. Remove old temporary files there, of processes that died in `create`."""
        folder = path.rpartition("/")[0]
        if folder in self._made:
            return
        self._client.mkdirs(folder, 0o700, create_parent=True)
        oldest_ms = (time.time() - _LEFTOVER_AFTER_S) * 1000
        for file in self._files_in(folder, recursive=False):
            if "~" in file.path and file.modification_time < oldest_ms:
                with suppress(*_ERRORS):
                    self._client.delete(file.path)
        self._made.add(folder)

    def _files_in(self, folder: str, *, recursive: bool) -> builtins.list[Any]:
        with suppress(FileNotFoundError):
            return [file for file in self._client.list_status(folder, recursive) if not file.isdir]
        return []

    def _info(self, path: str) -> Any:
        with suppress(FileNotFoundError):
            return self._client.get_file_info(path)
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    @contextmanager
    def _errors(self, operation: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{name} is not in {shown(self.address)}") from error
        except _ERRORS as error:
            reason = str(error).partition("\n")[0]  # a trace of the name node's follows
            raise StoreError(f"{operation} {name} in {shown(self.address)}: {reason}") from error
