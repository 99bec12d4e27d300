"""Snapshots on any other file system that `pyarrow.fs` supports: GCS, Azure. S3 and HDFS have stores of their own.

What `create` guarantees depends on the file system (pyarrow 26 offers no exclusive create on any of them):

- GCS, Azure: an object appears whole or not at all, so a create is atomic. It is not quite exclusive: it checks for
  the name first and reads the object back afterwards. If two callers check within one round trip, the later one replaces
  the earlier one's bytes, and the earlier one may not notice.
- Others (viewfs): atomic by a rename, which replaces; not quite exclusive, as above.
- A local file system (for tests; `open_store` takes `LocalStore`): atomic and exclusive, by `link`.

The catalog allows for this: only one attempt can write the name of a manifest, and a claimant reads its claim back before
every commit and delete, so it notices when the claim was replaced. Two drivers that start within milliseconds on such a
store can still write state files with the same attempt number; then a checksum stops the restore. Leader election prevents
this case.

`write` is as durable as closing the stream makes it: a completed upload on object stores. On a local file system nothing is
synced. The file system's own settings determine the permissions.
"""

from __future__ import annotations

import builtins
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.store.layout import check_name, shown

_OBJECT_STORES = frozenset({"gcs", "abfs"})


class ArrowStore:
    """`root` is a path on `filesystem`. `address` is what the user gave; the default is an address for messages."""

    def __init__(self, filesystem: pafs.FileSystem, root: str, *, address: str | None = None) -> None:
        while isinstance(filesystem, pafs.SubTreeFileSystem):
            root = f"{filesystem.base_path.rstrip('/')}/{root}"
            filesystem = filesystem.base_fs
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self.address = address or _address_of(filesystem.type_name, self._root)
        self._shown = shown(self.address)

    def __repr__(self) -> str:
        return f"ArrowStore({self._shown!r})"

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        path = self._path(name)
        written_bytes = 0
        with self._errors("write", name):
            self._make_folder(path)
            # By default, pyarrow would guess a compression from the name.
            with self._filesystem.open_output_stream(path, compression=None) as stream:
                for chunk in chunks:
                    stream.write(chunk)
                    written_bytes += memoryview(chunk).nbytes
        return written_bytes

    def create(self, name: str, content: bytes) -> None:
        path = self._path(name)
        with self._errors("create", name):
            self._make_folder(path)
            if self._filesystem.type_name == "local":
                self._create_by_link(path, content, name=name)
            else:
                self._create_after_check(path, content, name=name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or length >= 0)
        path = self._path(name)
        with self._errors("read", name), self._filesystem.open_input_file(path) as file:
            size_bytes = file.size()
            wanted = max(size_bytes - offset, 0) if length is None else length
            if offset + wanted > size_bytes:
                raise CorruptFile(f"{name} in {self._shown} has {size_bytes} bytes, not {offset + wanted}")
            content: bytes = file.read_at(wanted, offset) if wanted else b""
        if len(content) != wanted:
            raise CorruptFile(f"{name} in {self._shown} gave {len(content)} bytes of {wanted}")
        return content

    def list(self, folder: str) -> builtins.list[str]:
        top = self._path(folder) if folder else self._root
        with self._errors("list", folder):
            found = self._filesystem.get_file_info(pafs.FileSelector(top, allow_not_found=True, recursive=True))
        names = (self._name(info.path) for info in found if info.type == pafs.FileType.File)
        return sorted(name for name in names if "~" not in name)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._errors("delete", name), suppress(FileNotFoundError):
            if self._info(path).type != pafs.FileType.NotFound:
                self._filesystem.delete_file(path)

    def size(self, name: str) -> int:
        with self._errors("size", name):
            info = self._info(self._path(name))
        if info.type != pafs.FileType.File:
            raise NotFound(f"{name} is not in {self._shown}")
        return int(info.size)

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        with self._errors("sizes", names[0] if names else ""):
            infos = self._filesystem.get_file_info([self._path(name) for name in names])
        return [int(info.size) if info.type == pafs.FileType.File else None for info in infos]

    def _create_by_link(self, path: str, content: bytes, *, name: str) -> None:
        temporary = f"{path}~{uuid.uuid4().hex}"
        try:
            self._put(temporary, content)
            os.link(temporary, path)
        except FileExistsError:
            raise AlreadyExists(f"{name} is already in {self._shown}") from None
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _create_after_check(self, path: str, content: bytes, *, name: str) -> None:
        if self._info(path).type != pafs.FileType.NotFound:
            raise AlreadyExists(f"{name} is already in {self._shown}")
        if self._filesystem.type_name in _OBJECT_STORES:
            self._put(path, content)
        else:
            temporary = f"{path}~{uuid.uuid4().hex}"
            self._put(temporary, content)
            self._filesystem.move(temporary, path)
        if self.read(name) != content:
            raise AlreadyExists(f"{name} was created by another process at the same time in {self._shown}")

    def _put(self, path: str, content: bytes) -> None:
        with self._filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(content)

    def _make_folder(self, path: str) -> None:
        if self._filesystem.type_name not in _OBJECT_STORES:
            self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)

    def _info(self, path: str) -> Any:
        return self._filesystem.get_file_info(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _name(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    @contextmanager
    def _errors(self, operation: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{name} is not in {self._shown}") from error
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{operation} {name} in {self._shown}: {error}") from error


def _address_of(type_name: str, root: str) -> str:
    return Path(root).as_uri() if type_name == "local" else f"{type_name}://{root.lstrip('/')}"
