from __future__ import annotations

import os
import pickle
import stat
import time
from pathlib import Path

import pytest

from tidegate.errors import StoreError
from tidegate.store.local import LocalStore
from tidegate.store.opening import open_store


def _modes(folder: Path) -> tuple[set[int], set[int]]:
    folders = {stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")] if path.is_dir()}
    files = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    return folders, files


def test_only_the_owner_can_look_into_what_it_makes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = LocalStore(tmp_path / "deep" / "er")
        store.write("state/a", [b"x"])
        store.create("manifests/a", b"x")
    finally:
        os.umask(before)
    assert _modes(tmp_path / "deep") == ({0o700}, {0o600})


def test_it_travels_by_pickle_and_by_address(tmp_path: Path) -> None:
    folder = tmp_path / "with space and % and ü"
    store = LocalStore(folder)
    store.write("state/a", [b"x"])
    assert pickle.loads(pickle.dumps(store)).read("state/a") == b"x"
    assert open_store(store.address).read("state/a") == b"x"


def test_a_create_that_lost_leaves_nothing_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("manifests/1", b"first")
    with pytest.raises(StoreError):
        store.create("manifests/1", b"second")
    assert os.listdir(tmp_path / "manifests") == ["1"]


def test_what_a_creator_left_when_it_died_is_hidden_and_goes_when_it_is_old(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("manifests/1", b"x")
    old, young = (tmp_path / "manifests" / f"2~{age}" for age in ("old", "young"))
    old.write_bytes(b"torn")
    young.write_bytes(b"torn")
    os.utime(old, times=(time.time() - 7200, time.time() - 7200))
    assert store.list("") == ["manifests/1"]
    store.create("manifests/3", b"x")
    assert sorted(os.listdir(tmp_path / "manifests")) == ["1", "2~young", "3"]


def test_a_write_that_failed_takes_no_room(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError):
        store.write("state/a", (b"x" * 1000 if i < 1000 else os.read(-1, 1) for i in range(1001)))
    assert os.listdir(tmp_path / "state") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_a_store_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "a").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left"):
        LocalStore(tmp_path).write("state/a", [b"x"])


def test_a_file_where_a_folder_should_be_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"")
    store = LocalStore(tmp_path)
    for operation in (
        lambda: store.write("state/a", [b"x"]),
        lambda: store.create("state/a", b"x"),
        lambda: store.read("state/a"),
        lambda: store.size("state/a"),
    ):
        with pytest.raises(StoreError):
            operation()
    store.delete("state/a")
