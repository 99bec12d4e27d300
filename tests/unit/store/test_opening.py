from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyarrow import fs as pafs

from tidegate.errors import StoreError
from tidegate.store.arrow import ArrowStore
from tidegate.store.layout import job_address
from tidegate.store.local import LocalStore
from tidegate.store.opening import open_store
from tidegate.store.s3 import S3Store


def test_a_plain_path_and_file_uris_are_one_folder(tmp_path: Path) -> None:
    LocalStore(tmp_path).write("state/a", [b"x"])
    for address in (str(tmp_path), f"file://{tmp_path}", f"file:{tmp_path}", f"file://localhost{tmp_path}"):
        store = open_store(address)
        assert isinstance(store, LocalStore)
        assert store.read("state/a") == b"x"


def test_a_relative_path_means_the_same_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("snapshots")
    monkeypatch.chdir("/")
    assert store.address == (tmp_path / "snapshots").as_uri()


def test_a_memory_store_is_one_per_name_and_process() -> None:
    open_store("memory://opening/one").write("a", [b"x"])
    assert open_store("memory://opening/one/").read("a") == b"x"
    assert open_store("memory://opening/two").list("") == []
    assert open_store(open_store("memory://opening/one").address).list("") == ["a"]


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_an_object_store_keeps_the_address_that_the_user_gave(scheme: str) -> None:
    address = f"{scheme}://access:secret@bucket/folder?region=eu-west-1&endpoint_override=127.0.0.1:1"
    store = open_store(job_address(address, "my job"))
    assert isinstance(store, S3Store)
    assert store.address == job_address(address, "my job")
    assert pickle.loads(pickle.dumps(store)).address == store.address


def test_a_message_holds_no_secret(tmp_path: Path) -> None:
    secret = "s3://access:hunter2@bucket/folder?region=eu-west-1&endpoint_override=127.0.0.1:1"
    for store in (open_store(secret), ArrowStore(pafs.LocalFileSystem(), str(tmp_path), address=secret)):
        assert "s3://bucket/folder" in repr(store)
        assert "hunter2" not in repr(store)
    with pytest.raises(StoreError, match="s3://bucket/folder") as missing:
        store.read("state/a")
    assert "hunter2" not in str(missing.value)
    with pytest.raises(StoreError) as unknown:
        open_store("nosuch://access:hunter2@bucket/folder")
    assert "hunter2" not in str(unknown.value)


@pytest.mark.parametrize(
    "address",
    ["", "memory://", "file://host/x", "file:relative", "nosuch://x/y", "s3://", "s3://bucket", "s3://b/f?regoin=x"],
)
def test_an_address_that_leads_nowhere_is_a_store_error(address: str) -> None:
    with pytest.raises(StoreError):
        open_store(address)


def test_an_arrow_store_on_a_local_file_system_travels(tmp_path: Path) -> None:
    subtree = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    store = ArrowStore(subtree, "job")
    store.write("state/a", [b"x"])
    assert pickle.loads(pickle.dumps(store)).read("state/a") == b"x"
    assert open_store(store.address).read("state/a") == b"x"
