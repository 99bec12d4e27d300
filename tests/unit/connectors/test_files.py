"""Folders that grow: what is read when, what waits, and what must not change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as arrow_fs
import pytest

from tests.unit.connectors.conftest import Clock, Reading, append, jsons, write_parquet
from tests.unit.operators.harness import Bench, Restored
from tidegate import sources
from tidegate.connectors import folders
from tidegate.dataflow.contracts import SourceContext
from tidegate.dataflow.finished_splits import FINISHED, FinishedSplits
from tidegate.dataflow.operators.source import OFFSETS, SourceOperator, SourceSpec
from tidegate.errors import JobError, SourceError
from tidegate.hashing import hash_columns

# What grows.


def test_lines_are_read_as_they_are_finished(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    append(log, '{"n": 1}\n{"n": ')
    reading = Reading(jsons(tmp_path))
    assert reading.now() == [1]
    assert reading.offsets() == {"log.json": 9}
    assert reading.later() == []
    append(log, "2}")
    assert reading.later() == []
    append(log, '\n{"n": 3}\n')
    assert reading.now() == [], "a look at the folder is due every second only"
    assert reading.later() == [2, 3]
    assert reading.offsets() == {"log.json": ~27}
    assert not reading.reader.finished


def test_new_files_are_picked_up(tmp_path: Path) -> None:
    reading = Reading(jsons(tmp_path / "later", discover_every="5 s"))
    assert reading.now() == []
    (tmp_path / "later" / "deeper").mkdir(parents=True)
    append(tmp_path / "later" / "deeper" / "a.json", '{"n": 1}\n')
    reading.clock.ms += 4999
    assert reading.now() == []
    reading.clock.ms += 1
    assert reading.now() == [1]
    assert reading.offsets() == {"deeper/a.json": ~9}


def test_a_clock_that_was_set_back_doesnt_stop_discovery(tmp_path: Path) -> None:
    reading = Reading(jsons(tmp_path))
    append(tmp_path / "a.json", '{"n": 1}\n')
    reading.clock.ms -= 3_600_000
    assert reading.now() == [1]


def test_started_files_come_first_then_older_ones_then_by_name(tmp_path: Path) -> None:
    for name, n, mtime in [("z", 1, 10), ("b", 2, 20), ("a", 3, 20), ("started", 4, 99)]:
        append(tmp_path / f"{name}.json", f'{{"n": 0}}\n{{"n": {n}}}\n')
        os.utime(tmp_path / f"{name}.json", (mtime, mtime))
    assert Reading(jsons(tmp_path), {"started.json": 9}).now() == [4, 0, 1, 0, 3, 0, 2]


def test_a_file_that_grows_all_the_time_doesnt_hold_up_the_others(tmp_path: Path) -> None:
    append(tmp_path / "a.json", '{"n": 1}\n' * 3)
    append(tmp_path / "b.json", '{"n": 2}\n' * 3)
    os.utime(tmp_path / "a.json", (10, 10))
    reading = Reading(jsons(tmp_path))
    read = []
    for _ in range(6):
        reading.clock.ms += 1000
        batch = reading.reader.poll(2)
        assert batch is not None
        read += batch.column("n").to_pylist()
        append(tmp_path / "a.json", '{"n": 1}\n' * 2)
    assert read == [1, 1, 1, 2, 2, 2, 1, 1, 1, 1][: len(read)]
    assert 2 in read
    assert reading.offsets()["a.json"] >= 0, "more of it is known to be there"
    read += reading.later()
    assert sorted(read) == [1] * 15 + [2] * 3


def test_a_source_that_stops_at_the_end_reads_what_is_there_when_opened(tmp_path: Path) -> None:
    append(tmp_path / "a.json", '{"n": 1}\n{"n": 2}')
    reading = Reading(jsons(tmp_path, stop_at_end=True))
    assert not reading.reader.finished
    append(tmp_path / "a.json", '\n{"n": 3}\n')
    append(tmp_path / "b.json", '{"n": 4}\n')
    assert reading.later() == [1, 2], "the last line has no line break, but nothing more is waited for"
    assert reading.reader.finished
    again = Reading(jsons(tmp_path, stop_at_end=True), reading.offsets())
    assert again.now() == [3, 4]


def test_an_empty_folder_is_finished_at_once_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert Reading(jsons(tmp_path, stop_at_end=True)).reader.finished
    with pytest.raises(SourceError, match=r"there is no .*nowhere"):
        Reading(jsons(tmp_path / "nowhere", stop_at_end=True))


def test_a_single_file_is_a_source_too(tmp_path: Path) -> None:
    append(tmp_path / "_one.json", '{"n": 1}\n')
    append(tmp_path / "two.json", '{"n": 2}\n')
    reading = Reading(jsons(tmp_path / "_one.json"))
    assert reading.now() == [1]
    assert reading.offsets() == {"_one.json": ~9}
    append(tmp_path / "_one.json", '{"n": 3}\n')
    assert reading.later() == [3]


def test_a_single_file_may_come_later(tmp_path: Path) -> None:
    reading = Reading(jsons(tmp_path / "later.json"))
    assert reading.now() == []
    append(tmp_path / "later.json", '{"n": 1}\n')
    assert reading.later() == [1]


@pytest.mark.parametrize("name", ["_SUCCESS", ".a.json.crc", "a.json.tmp", "_tidegate/a.json", ".hidden/a.json"])
def test_names_for_unfinished_things_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    append(tmp_path / name, "not for us")
    assert Reading(jsons(tmp_path, stop_at_end=True)).now() == []


def test_the_owner_of_a_file_is_a_stable_function_of_its_name(tmp_path: Path) -> None:
    names = [f"part-{i}.json" for i in range(40)]
    for name in names:
        append(tmp_path / name, '{"n": 1}\n')
    for subtask in range(3):
        finished = FinishedSplits(subtask=subtask, parallelism=3, key_group_count=128)
        reader = jsons(tmp_path, stop_at_end=True).open(SourceContext(subtask, 3, {}, Clock(), finished=finished))
        while reader.poll(100) is not None:
            pass
        groups = {name: int(hash_columns([pa.array([name])])[0]) % 128 for name in names}
        assert set(finished.all()) == {name for name in names if groups[name] * 3 // 128 == subtask}
        assert 5 < len(finished.all()) < 25
        assert not reader.offsets()


def test_another_file_system_is_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    monkeypatch.setattr(folders, "locate", lambda address: (elsewhere, "in"))
    (tmp_path / "in" / "_hidden").mkdir(parents=True)
    (tmp_path / "in" / "deeper").mkdir()
    append(tmp_path / "in" / "deeper" / "a.json", '{"n": 1}\n')
    append(tmp_path / "in" / "_hidden" / "a.json", '{"n": 2}\n')
    reading = Reading(sources.json("s3://bucket/in", schema="n long"))
    assert reading.now() == [1]
    append(tmp_path / "in" / "deeper" / "a.json", '{"n": 3}\n')
    assert reading.later() == [3]
    assert reading.offsets() == {"deeper/a.json": ~18}


def test_an_address_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no file system"):
        Reading(jsons("nonsense://here"))  # type: ignore[arg-type]


# What must not change.


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n{"n": 2}\n')
    reading = Reading(jsons(tmp_path))
    assert reading.now() == [1, 2]
    offsets = reading.offsets()
    log.write_text('{"n": 1}\n')
    with pytest.raises(SourceError, match=r"log.json in .* has 9 bytes, but had 18 .*truncated or replaced"):
        reading.later()
    with pytest.raises(SourceError, match="truncated or replaced"):
        Reading(jsons(tmp_path), offsets)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n{"n": 2}\n')
    reading = Reading(jsons(tmp_path))
    os.truncate(log, 9)
    with pytest.raises(SourceError, match="truncated or replaced"):
        reading.now()


def test_a_file_that_was_replaced_by_a_longer_one_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n')
    reading = Reading(jsons(tmp_path))
    assert reading.now() == [1]
    log.write_text('{"n": 1000}\n{"n": 2000}\n')
    with pytest.raises(SourceError, match="isn't the start of a line: it was replaced"):
        reading.later()


def test_a_file_may_go_when_it_was_read_to_its_end_but_not_before(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"n": 1}\n{"n": 2}\n')
    reading = Reading(jsons(tmp_path))
    reading.reader.poll(1)
    half, _ = reading.offsets(), reading.now()
    log.unlink()
    assert reading.later() == []
    assert Reading(jsons(tmp_path), reading.offsets()).now() == []
    with pytest.raises(SourceError, match=r"log.json in .* is gone, and only 9 bytes"):
        Reading(jsons(tmp_path), half)


def test_a_file_that_goes_before_it_was_begun_was_never_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        append(tmp_path / f"{name}.json", '{"n": 1}\n')
    reading = Reading(jsons(tmp_path))
    (tmp_path / "a.json").unlink()
    assert reading.now() == [1]
    assert set(reading.offsets()) == {"b.json"}


def test_a_parquet_file_that_vanished_half_read_is_an_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [1, 2, 3])
    reading = Reading(sources.parquet(tmp_path))
    reading.reader.poll(1)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(SourceError, match="is gone, and only 1 "):
        reading.later()


def test_finished_parquet_files_may_go(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [1, 2, 3])
    reading = Reading(sources.parquet(tmp_path))
    assert reading.now() == [1, 2, 3]
    (tmp_path / "a.parquet").unlink()
    assert reading.later() == []
    assert Reading(sources.parquet(tmp_path, schema="n long"), reading.offsets()).now() == []


def test_the_state_is_one_small_number_for_each_file(tmp_path: Path) -> None:
    for i in range(100):
        write_parquet(tmp_path / f"part-{i:03}.parquet", [i])
    reading = Reading(sources.parquet(tmp_path))
    assert len(reading.now()) == 100
    assert len(json.dumps(reading.offsets())) < 100 * 30


def test_a_relative_path_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path / "a.json", '{"n": 1}\n')
    monkeypatch.chdir(tmp_path)
    source = jsons(Path())
    monkeypatch.chdir("/")
    assert Reading(source).now() == [1]


def test_finished_files_cost_next_to_nothing_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        write_parquet(tmp_path / f"{i}.parquet", [i])
    reading = Reading(sources.parquet(tmp_path))
    assert len(reading.now()) == 50
    asked: list[str] = []
    monkeypatch.setattr(folders, "Found", lambda name, *rest: asked.append(name))
    assert reading.later() == []
    assert asked == [], "only files that may have more are asked for their size"


# What is remembered of finished files.


def test_a_snapshot_holds_only_the_files_that_have_ended_since_the_last_one(tmp_path: Path) -> None:
    spec = SourceSpec(sources.json(tmp_path, schema="n long", stop_at_end=False))
    names = [f"{number:05}.json" for number in range(3_000)]
    for name in names:
        append(tmp_path / name, '{"n": 1}\n')
    bench = Bench(spec, returns="n long", name="lines")
    operator = bench.operator
    assert isinstance(operator, SourceOperator)

    def rows() -> dict[str, int]:
        frozen = operator.freeze(1)
        assert frozen is not None
        counts = dict.fromkeys((OFFSETS.name, FINISHED.name), 0)
        for section in frozen.sections():
            counts[section.state] += section.rows.num_rows
        frozen.release()
        operator.maintain(1_000_000)
        return counts

    while operator.poll(100):
        pass
    assert rows() == {OFFSETS.name: 0, FINISHED.name: 3_000}
    assert rows() == {OFFSETS.name: 0, FINISHED.name: 0}
    append(tmp_path / "00000-late.json", '{"n": 1}\n')
    append(tmp_path / names[7], '{"n": 1}\n{"n":')
    bench.clock.now_ms += 1_000
    assert operator.poll(100) + operator.poll(100) == 2, "what is late is read, whatever its name"
    assert rows() == {OFFSETS.name: 1, FINISHED.name: 2}, "one ended, and one of those that had ended has more"


def test_files_of_any_name_and_time_are_read_once_however_often_the_source_restarts(tmp_path: Path) -> None:
    written, read = 0, []
    restored: Restored | None = None
    for attempt in range(5):
        for number in range(4):
            name = f"{(7 * (4 * attempt + number)) % 23:02}.parquet"
            write_parquet(tmp_path / name, [written])
            os.utime(tmp_path / name, (1_000 - written, 1_000 - written))
            written += 1
        bench = Bench(SourceSpec(sources.parquet(tmp_path, schema="n long")), returns="n long", restored=restored)
        while isinstance(bench.operator, SourceOperator) and bench.operator.poll(100):
            pass
        read += [n for (n,) in bench.out.rows]
        restored = bench.freeze()
    assert sorted(read) == list(range(written))


def test_a_name_is_forgotten_when_its_file_has_been_gone_for_long(tmp_path: Path) -> None:
    reading = Reading(jsons(tmp_path, forget_removed="1 minute"))
    for name in ("a", "b"):
        append(tmp_path / f"{name}.json", '{"n": 1}\n')
    assert reading.later() == [1, 1]
    (tmp_path / "a.json").unlink()
    for _ in range(2):
        assert set(reading.offsets()) == {"a.json", "b.json"}
        reading.clock.ms += 60_000
        assert reading.now() == []
    assert set(reading.offsets()) == {"b.json"}
    append(tmp_path / "a.json", '{"n": 2}\n')
    assert reading.later() == [2]


def test_a_clock_that_was_set_back_makes_no_name_forgotten_early(tmp_path: Path) -> None:
    reading = Reading(jsons(tmp_path, forget_removed="1 minute"))
    for name in ("a", "b"):
        append(tmp_path / f"{name}.json", '{"n": 1}\n')
    assert reading.later() == [1, 1]
    (tmp_path / "a.json").rename(tmp_path / "_away")
    reading.clock.ms += 60_000
    assert reading.now() == []
    reading.clock.ms -= 3_600_000
    assert reading.now() == []
    (tmp_path / "_away").rename(tmp_path / "a.json")
    assert reading.later() == [], "it was gone for no time at all"


def test_nothing_is_forgotten_while_the_whole_folder_is_gone(tmp_path: Path) -> None:
    reading = Reading(jsons(tmp_path / "mounted", forget_removed="1 minute"))
    (tmp_path / "mounted").mkdir()
    append(tmp_path / "mounted" / "a.json", '{"n": 1}\n')
    assert reading.later() == [1]
    (tmp_path / "mounted").rename(tmp_path / "elsewhere")
    for _ in range(5):
        reading.clock.ms += 60_000
        assert reading.now() == []
    (tmp_path / "elsewhere").rename(tmp_path / "mounted")
    assert reading.later() == []


def test_a_folder_that_takes_long_to_list_is_listed_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(jsons(tmp_path))
    append(tmp_path / "a.json", '{"n": 1}\n')
    listed = folders.InputFolder.list

    def slowly(folder: folders.InputFolder, wanted: folders.Wanted) -> list[folders.Found]:
        reading.clock.ms += 2_000
        return listed(folder, wanted)

    monkeypatch.setattr(folders.InputFolder, "list", slowly)
    assert reading.later() == [1]
    append(tmp_path / "a.json", '{"n": 2}\n')
    reading.clock.ms += 17_000
    assert reading.now() == []
    assert reading.later() == [2]


# Files that stay incomplete.


def test_a_torn_parquet_file_is_logged_and_ends_the_job_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "a.parquet", [1])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:-5])
    reading = Reading(sources.parquet(tmp_path, schema="n long", incomplete_for="10 minutes"))
    assert reading.now() == [1]
    reading.clock.ms += 30_000
    assert reading.now() == []
    (tmp_path / "torn.parquet").write_bytes(whole[:-4])  # somebody is still writing it
    reading.clock.ms += 40_000
    assert reading.now() == []
    assert not caplog.records
    for _ in range(9):
        reading.clock.ms += 60_000
        assert reading.now() == []
    (record,) = caplog.records
    assert "torn.parquet" in record.getMessage() and "600 s" in record.getMessage()
    reading.clock.ms += 60_000
    with pytest.raises(SourceError, match=r"torn\.parquet .* is incomplete, and has not changed for 600 s"):
        reading.now()


def test_a_torn_parquet_file_that_is_completed_or_removed_is_forgotten(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [1])
    whole = (tmp_path / "a.parquet").read_bytes()
    for name in ("completed", "removed"):
        (tmp_path / f"{name}.parquet").write_bytes(whole[:-5])
    reading = Reading(sources.parquet(tmp_path, schema="n long", incomplete_for="1 minute"))
    assert reading.now() == [1]
    (tmp_path / "completed.parquet").write_bytes(whole)
    (tmp_path / "removed.parquet").unlink()
    assert reading.later() == [1]
    reading.clock.ms += 3_600_000
    assert reading.now() == []
