"""Crashes as data: each happens as often as it says, over all attempts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tidegate.dataflow.contracts import SourceContext, SourceReader
from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.testing.scripted import AwaitSnapshot, Crash, Pause, ScriptedCrash, ScriptedSource


class Clock:
    ms = 0

    def __call__(self) -> int:
        return self.ms


def _open(
    source: ScriptedSource,
    restored: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    subtask: int = 0,
    parallelism: int = 1,
) -> SourceReader:
    return source.open(SourceContext(subtask, parallelism, restored or {}, clock or Clock()))


def _read(reader: SourceReader, max_rows: int = 10) -> list[int]:
    batch = reader.poll(max_rows)
    return [] if batch is None else batch.column("n").to_pylist()


def test_a_crash_happens_once_behind_the_records_before_it(tmp_path: Path) -> None:
    source = ScriptedSource([(1,), (2,), Crash(), (3,)], schema="n long", memory=tmp_path)
    reader = _open(source)
    assert _read(reader) == [1, 2]
    offsets = reader.offsets()
    with pytest.raises(ScriptedCrash, match="item 2 of script-0"):
        reader.poll(10)
    assert reader.offsets() == offsets
    again = _open(source, offsets)
    assert _read(again) == [3]
    assert again.finished
    assert _read(_open(source)) == [1, 2], "read again from the start, the crash is passed by as well"


def test_a_crash_may_happen_several_times(tmp_path: Path) -> None:
    source = ScriptedSource([Crash(times=3), (1,)], schema="n long", memory=tmp_path)
    for _ in range(3):
        with pytest.raises(ScriptedCrash):
            _open(source).poll(10)
    assert _read(_open(source)) == [1]


def test_a_crash_at_the_end_comes_before_the_end(tmp_path: Path) -> None:
    reader = _open(ScriptedSource([(1,), Crash()], schema="n long", memory=tmp_path))
    assert _read(reader) == [1]
    assert not reader.finished
    with pytest.raises(ScriptedCrash):
        reader.poll(1)


def test_two_sources_dont_share_their_crashes() -> None:
    for _ in range(2):
        with pytest.raises(ScriptedCrash):
            _open(ScriptedSource([Crash()], schema="n long")).poll(1)


def test_a_kill_kills_the_process_once(tmp_path: Path) -> None:
    program = f"""
from tidegate.dataflow.contracts import SourceContext
from tidegate.testing.scripted import Kill, ScriptedSource
source = ScriptedSource([(1,), Kill(), (2,)], schema="n long", memory={str(tmp_path)!r})
reader = source.open(SourceContext(0, 1, {{}}, lambda: 0))
while not reader.finished:
    print(reader.poll(10).column("n").to_pylist(), flush=True)
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False) for _ in range(2)]
    assert [run.returncode for run in runs] == [-signal.SIGKILL, 0], runs[-1].stderr
    assert [run.stdout for run in runs] == ["[1]\n", "[1]\n[2]\n"]


def test_a_pause_holds_back_what_follows() -> None:
    clock = Clock()
    reader = _open(ScriptedSource([(1,), Pause("50 ms"), (2,)], schema="n long"), clock=clock)
    assert _read(reader) == [1]
    assert _read(reader) == []
    clock.ms += 49
    assert _read(reader) == []
    assert not reader.finished
    clock.ms += 1
    assert _read(reader) == [2]


def test_a_script_waits_for_snapshots() -> None:
    source = ScriptedSource([(1,), AwaitSnapshot(times=2), (2,), (3,)], schema="n long")
    reader = _open(source)
    reader.offsets()
    assert _read(reader) == [1]
    assert _read(reader) == []
    offsets = reader.offsets()
    assert _read(reader) == []
    reader.offsets()
    assert _read(reader) == [2, 3]
    assert _read(_open(source, offsets)) == [2, 3], "the snapshot that was restored is complete"


def test_scripts_are_splits_of_their_own() -> None:
    source = ScriptedSource([(1,), (2,)], [(3,)], [(4,)], schema="n long")
    first, second = _open(source, subtask=0, parallelism=2), _open(source, subtask=1, parallelism=2)
    assert [_read(first), _read(first), _read(first)] == [[1, 2], [4], []]
    assert _read(second) == [3]
    assert first.offsets() == {"script-0": 2, "script-2": 1}


def test_a_pause_in_one_script_doesnt_stop_another() -> None:
    reader = _open(ScriptedSource([Pause(1000), (1,)], [(2,)], schema="n long"))
    assert _read(reader) == [2]
    assert not reader.finished


def test_a_script_is_checked_when_it_is_built() -> None:
    with pytest.raises(SchemaError):
        ScriptedSource([(1,), Crash(), ("x",)], schema="n long")
    with pytest.raises(JobError):
        ScriptedSource([Pause("soon")], schema="n long")
    with pytest.raises(JobError):
        ScriptedSource(schema="n long")


def test_a_shorter_script_is_refused_at_a_restore() -> None:
    with pytest.raises(RestoreError, match="only 1"):
        _open(ScriptedSource([(1,)], schema="n long"), {"script-0": 2})
