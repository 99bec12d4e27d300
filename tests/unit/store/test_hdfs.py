"""What HDFS's creates conclude from lost answers, without a cluster. docs/promises.md, rows 9 and 13."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tidegate.errors import AlreadyExists, StoreError
from tidegate.store.hdfs import HdfsStore


@dataclass
class Status:
    path: str
    length: int
    isdir: bool = False
    modification_time: int = 1 << 50


class Opened:
    """A file that is written, or read."""

    def __init__(self, files: dict[str, bytes], path: str) -> None:
        self._files, self._path = files, path

    def __enter__(self) -> Opened:
        self._files[self._path] = b""
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __len__(self) -> int:
        return len(self._files[self._path])

    def write(self, chunk: bytes) -> int:
        self._files[self._path] += chunk
        return len(chunk)

    def hsync(self) -> None:
        pass

    def read_range(self, offset: int, length: int) -> bytes:
        return self._files[self._path][offset : offset + length]


class Client:
    """A name node in memory. `before` and `after` are called around each rename."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.before: Any = lambda temporary: None
        self.after: Any = lambda temporary: None

    def mkdirs(self, folder: str, permission: int, *, create_parent: bool) -> None:
        pass

    def list_status(self, folder: str, recursive: bool) -> list[Status]:
        return [Status(path, len(content)) for path, content in self.files.items() if path.startswith(f"{folder}/")]

    def create(self, path: str, options: object) -> Opened:
        return Opened(self.files, path)

    def read(self, path: str) -> Opened:
        if path not in self.files:
            raise FileNotFoundError(path)
        return Opened(self.files, path)

    def get_file_info(self, path: str) -> Status:
        if path not in self.files:
            raise FileNotFoundError(path)
        return Status(path, len(self.files[path]))

    def delete(self, path: str) -> None:
        self.files.pop(path, None)

    def rename(self, source: str, target: str) -> None:
        self.before(source)
        if source not in self.files:
            raise FileNotFoundError(source)
        if target in self.files:
            raise FileExistsError(target)
        self.files[target] = self.files.pop(source)
        self.after(source)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def store(client: Client, monkeypatch: pytest.MonkeyPatch) -> HdfsStore:
    store = HdfsStore("hdfs://127.0.0.1:1/folder")
    monkeypatch.setattr(store, "_client", client)
    return store


def _lost(temporary: str) -> None:
    raise OSError("the connection was lost")


def test_a_create_whose_answer_was_lost_has_succeeded(store: HdfsStore, client: Client) -> None:
    client.after = _lost
    store.create("manifests/1", b"mine")
    assert client.files == {"/folder/manifests/1": b"mine"}
    with pytest.raises(AlreadyExists):
        store.create("manifests/1", b"another")
    assert client.files == {"/folder/manifests/1": b"mine"}


@pytest.mark.parametrize("there", [None, b"another's"])
def test_a_create_whose_temporary_file_somebody_else_removed_has_not_succeeded(
    store: HdfsStore, client: Client, there: bytes | None
) -> None:
    """The clock of another process is wrong by an hour, so that it takes the file for a leftover of a dead one."""

    def intrude(temporary: str) -> None:
        client.delete(temporary)
        if there is not None:
            client.files["/folder/manifests/1"] = there

    client.before = intrude
    with pytest.raises(StoreError, match="its temporary file was deleted") as unknown:
        store.create("manifests/1", b"mine")
    assert type(unknown.value) is StoreError
    assert client.files == ({} if there is None else {"/folder/manifests/1": there})
