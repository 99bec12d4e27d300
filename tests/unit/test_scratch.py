"""Folders of files that a process needs: what of them is left, and what must not be touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate import scratch
from tidegate.scratch import ScratchFolder

HOLDS = """
import sys, time
from tidegate.scratch import ScratchFolder
folder = ScratchFolder("tidegate-test-", under=sys.argv[1])
(folder.path / "files").mkdir()
(folder.path / "files" / "big").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
time.sleep(60)
"""


def _make_old(above: Path) -> None:
    for path in (*above.iterdir(), *above.glob("*/lock")):
        os.utime(path, (0, 0))


@contextmanager
def _held(above: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(above)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        yield holder, Path(holder.stdout.readline().strip())
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    with _held(tmp_path) as (holder, folder):
        _make_old(tmp_path)
        with ScratchFolder("tidegate-test-", under=str(tmp_path)):
            assert (folder / "files" / "big").exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with ScratchFolder("tidegate-other-", under=str(tmp_path)):
            assert folder.exists(), "it is of another kind"
        with ScratchFolder("tidegate-test-", under=str(tmp_path)):
            assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_other_hosts_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a shared file system may be invisible to this host."""
    with _held(tmp_path) as (holder, folder):
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    _make_old(tmp_path)
    for here, is_left in [(("elsewhere", "another boot"), True), (("elsewhere", scratch._here()[1]), False)]:
        monkeypatch.setattr(scratch, "_here", lambda here=here: here)
        with ScratchFolder("tidegate-test-", under=str(tmp_path)):
            assert folder.exists() == is_left


def test_a_folder_whose_process_ended_before_it_was_locked_is_removed_if_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "tidegate-test-a").mkdir()
    (tmp_path / "tidegate-test-b").mkdir()
    (tmp_path / "tidegate-test-b" / "a users file").touch()
    _make_old(tmp_path)
    with ScratchFolder("tidegate-test-", under=str(tmp_path)):
        assert {path.name for path in tmp_path.glob("*-[ab]")} == {"tidegate-test-b"}


def test_the_lock_goes_last_so_that_the_rest_is_removed_although_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ScratchFolder("tidegate-test-", under=str(tmp_path))
    for number in range(30):
        (folder.path / f"{number}.sst").touch()
    (folder.path / "files").mkdir()
    (folder.path / "files" / "big").touch()
    removed: list[str] = []
    unlink = os.unlink

    def noted(path: str | os.PathLike[str], **options: int) -> None:
        removed.append(Path(path).name)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", noted)
    folder.remove()
    assert removed[-1] == "lock" and len(removed) == 32
    assert list(tmp_path.iterdir()) == []
