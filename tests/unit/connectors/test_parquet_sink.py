"""The Parquet sink: names, what a reader sees, commits that can't be done, leftovers, row groups."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as arrow_fs
import pyarrow.parquet as pq
import pytest

from tidegate import sinks
from tidegate.connectors import parquet_sink, receipts
from tidegate.dataflow.contracts import SinkContext, SinkWriter
from tidegate.errors import CommitError, JobError, SchemaError

SCHEMA = pa.schema([("n", pa.int64())])


def _open(
    folder: Path | str,
    *,
    job: str = "job",
    sink: str = "out",
    subtask: int = 0,
    attempt: int = 1,
    snapshots: str = "file:///snapshots/job",
    **options: Any,
) -> SinkWriter:
    return sinks.parquet(folder, **options).open(
        SinkContext(
            job=job,
            sink=sink,
            subtask=subtask,
            parallelism=4,
            attempt=attempt,
            schema=SCHEMA,
            deliver=lambda _: None,
            snapshots=snapshots,
        )
    )


def _batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, pa.int64())], SCHEMA)


def _prepared(writer: SinkWriter, epoch: int, *numbers: int) -> str:
    writer.write(_batch(*numbers))
    (committable,) = writer.pre_commit(epoch)()
    return committable


def _visible(folder: Path) -> list[int]:
    numbers: list[int] = pq.read_table(folder).column("n").to_pylist()
    return sorted(numbers)


def _pending(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "_tidegate").iterdir() if path.suffix == ".parquet")


def _receipts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "_tidegate").iterdir() if path.suffix == ".receipt")


def test_a_folder_is_readable_before_the_first_commit(tmp_path: Path) -> None:
    for subtask in (1, 0):
        _open(tmp_path / "out", subtask=subtask)
    (file,) = (tmp_path / "out").glob("*.parquet")
    assert pq.read_table(tmp_path / "out").schema.equals(SCHEMA)
    assert _visible(tmp_path / "out") == []
    assert _pending(tmp_path / "out") == []
    _open(tmp_path / "out", attempt=2)
    assert list((tmp_path / "out").glob("*.parquet")) == [file], "once is enough"


def test_names_tell_sink_epoch_subtask_and_attempt(tmp_path: Path) -> None:
    writer = _open(tmp_path, sink="my out/put", subtask=3, attempt=7)
    writer.commit([_prepared(writer, 12, 1)])
    (file,) = tmp_path.glob("*.parquet")
    assert file.name.startswith("part-my_out_put-12-3-7-")


def test_epochs_without_records_make_no_file(tmp_path: Path) -> None:
    writer = _open(tmp_path, subtask=1)
    for epoch in range(5):
        writer.commit(writer.pre_commit(epoch)())
    assert list(tmp_path.glob("*.parquet")) == []
    assert _pending(tmp_path) == []


def test_a_pending_file_that_is_gone_is_no_success(tmp_path: Path) -> None:
    writer = _open(tmp_path)
    committable = _prepared(writer, 1, 1)
    for path in (tmp_path / "_tidegate").iterdir():
        path.unlink()
    with pytest.raises(CommitError, match=r"can't commit part-out-1-0-1-.* gone, and nothing shows that it was") as caught:
        writer.commit([committable])
    assert caught.value.final, "no restart brings it back"


def test_a_torn_pending_file_is_no_success(tmp_path: Path) -> None:
    writer = _open(tmp_path)
    committable = _prepared(writer, 1, 1)
    (path,) = (tmp_path / "_tidegate").iterdir()
    os.truncate(path, 50)
    with pytest.raises(CommitError, match="50 bytes long instead of"):
        writer.commit([committable])
    assert _visible(tmp_path) == []


@pytest.mark.parametrize(
    "consume",
    [
        Path.unlink,
        lambda path: path.rename(path.parent.parent / path.name),
        lambda path: path.write_bytes(b"something else"),
    ],
    ids=["delete", "move", "change"],
)
def test_what_consumers_do_with_committed_files_breaks_no_repeated_commit(tmp_path: Path, consume: Any) -> None:
    folder = tmp_path / "out"
    writer = _open(folder)
    committables = [_prepared(writer, epoch, epoch) for epoch in (1, 2, 3)]
    writer.commit(committables)
    for committable in committables:
        consume(folder / json.loads(committable)["final"])
    before = sorted(path.name for path in folder.iterdir())
    _open(folder, attempt=2, subtask=1).commit(committables)
    writer.commit(committables[1:])
    assert sorted(path.name for path in folder.iterdir()) == before
    assert len(_receipts(folder)) == 1, "one stands for all before it"


def test_a_file_of_another_size_in_its_place_is_no_success_without_a_receipt(tmp_path: Path) -> None:
    writer = _open(tmp_path)
    committable = _prepared(writer, 1, 1)
    writer.commit([committable])
    (tmp_path / "_tidegate" / _receipts(tmp_path)[0]).unlink()
    writer.commit([committable])
    (tmp_path / json.loads(committable)["final"]).write_bytes(b"something else")
    with pytest.raises(CommitError):
        writer.commit([committable])


def test_a_receipt_says_nothing_of_later_files_or_of_other_writers(tmp_path: Path) -> None:
    writer, other = _open(tmp_path), _open(tmp_path)
    committed, lost, others = _prepared(writer, 1, 1), _prepared(writer, 2, 2), _prepared(other, 1, 3)
    writer.commit([committed])
    for committable in (lost, others):
        (tmp_path / json.loads(committable)["pending"]).unlink()
        with pytest.raises(CommitError, match="gone"):
            writer.commit([committed, committable])
    assert _visible(tmp_path) == [1]


def test_nothing_is_committed_of_output_of_which_a_part_is_lost(tmp_path: Path) -> None:
    writer = _open(tmp_path)
    committables = [_prepared(writer, epoch, epoch) for epoch in (1, 2, 3)]
    (tmp_path / json.loads(committables[1])["pending"]).unlink()
    with pytest.raises(CommitError, match="gone"):
        writer.commit(committables)
    assert _visible(tmp_path) == [] and _receipts(tmp_path) == []


def test_output_is_committed_where_it_was_written_whatever_folder_the_sink_has(tmp_path: Path) -> None:
    writer = _open(tmp_path / "old")
    committed, pending = _prepared(writer, 1, 1), _prepared(writer, 2, 2)
    writer.commit([committed])
    again = _open(tmp_path / "new", attempt=2)
    again.commit([committed, pending, _prepared(again, 3, 3)])
    again.discard_leftovers()
    assert _visible(tmp_path / "old") == [1, 2] and _visible(tmp_path / "new") == [3]
    (tmp_path / "old").rename(tmp_path / "away")
    with pytest.raises(CommitError, match=f"{tmp_path}/old.*is on another machine") as caught:
        again.commit([pending])
    assert caught.value.final
    assert not (tmp_path / "old").exists()


def test_a_committable_of_a_snapshot_that_names_no_folder_is_of_the_sinks_own(tmp_path: Path) -> None:
    writer = _open(tmp_path)
    older = {name: value for name, value in json.loads(_prepared(writer, 1, 1)).items() if name != "folder"}
    writer.commit([json.dumps(older)])
    assert _visible(tmp_path) == [1]


def test_no_secret_of_the_address_goes_into_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    asked: list[str] = []

    def locate(address: str) -> Any:
        asked.append(address)
        return elsewhere, address.partition("bucket/")[2].partition("?")[0]

    monkeypatch.setattr(parquet_sink, "locate", locate)
    old = _open("s3://me:secret@bucket/old?endpoint_override=localhost")
    committable = _prepared(old, 1, 1)
    assert json.loads(committable)["folder"] == "s3://bucket/old"
    _open("s3://you:hidden@bucket/new?region=here", attempt=2).commit([committable])
    assert asked[-1] == "s3://you:hidden@bucket/old?region=here"
    assert _visible(tmp_path / "old") == [1]
    assert parquet_sink.with_secrets_of("s3://you:hidden@bucket/new", "s3://other/old") == "s3://other/old"
    assert parquet_sink.with_secrets_of("/local/new", "s3://bucket/old") == "s3://bucket/old"


def test_receipts_grow_neither_with_epochs_nor_without_bound_with_attempts(tmp_path: Path) -> None:
    for attempt in range(1, 2 * receipts.KEPT_ATTEMPTS, 10):
        writer = _open(tmp_path, attempt=attempt)
        for epoch in (1, 2, 3):
            writer.commit([_prepared(writer, 10 * attempt + epoch, 1)])
            writer.discard_leftovers()
    assert len(_receipts(tmp_path)) == receipts.KEPT_ATTEMPTS // 10
    _open(tmp_path, job="another", attempt=10_000).discard_leftovers()
    assert len(_receipts(tmp_path)) == receipts.KEPT_ATTEMPTS // 10


def test_pending_output_whose_commit_was_begun_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receipt would say that it was committed, to whoever goes back to the snapshot that lists it."""
    writer = _open(tmp_path)
    committable, never_promised = _prepared(writer, 1, 1), _prepared(writer, 2, 2)

    def killed(folder: Any, promise: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parquet_sink.OutputFolder, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.commit([committable])
    _open(tmp_path, attempt=2).discard_leftovers()
    assert _pending(tmp_path) == [Path(json.loads(committable)["pending"]).name]
    _open(tmp_path, attempt=3).commit([committable])
    assert _visible(tmp_path) == [1]
    with pytest.raises(CommitError):
        _open(tmp_path, attempt=3).commit([never_promised])


def test_a_rename_that_fails_is_no_success(tmp_path: Path) -> None:
    writer = _open(tmp_path)
    committable = _prepared(writer, 1, 1)
    (tmp_path / json.loads(committable)["final"]).mkdir()
    with pytest.raises(CommitError, match="can't rename"):
        writer.commit([committable])


def test_another_process_may_commit_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, zombie = _open(tmp_path, attempt=2), _open(tmp_path, attempt=1)
    committable = _prepared(zombie, 1, 1)
    rename = os.replace

    def race(source: str, target: str) -> None:
        rename(source, target)
        rename(source, target)  # too late, it is gone

    monkeypatch.setattr(os, "replace", race)
    writer.commit([committable])
    assert _visible(tmp_path) == [1]


def test_a_job_that_starts_over_leaves_old_output_alone(tmp_path: Path) -> None:
    """Without its snapshots a job counts attempts and epochs from one again."""
    for numbers in ([1, 2], [3, 4]):
        writer = _open(tmp_path)
        writer.commit([_prepared(writer, 1, *numbers)])
    assert _visible(tmp_path) == [1, 2, 3, 4]


def test_two_jobs_may_write_into_one_folder(tmp_path: Path) -> None:
    writers = [
        _open(tmp_path, job=job, sink=sink, attempt=attempt)
        for attempt, (job, sink) in enumerate([("a", "out"), ("b", "out"), ("a", "out2")], start=1)
    ]
    committables = [_prepared(writer, 1, index) for index, writer in enumerate(writers)]
    for writer in writers:
        writer.discard_leftovers()
    for writer, committable in zip(writers, committables, strict=True):
        writer.commit([committable])
    assert _visible(tmp_path) == [0, 1, 2]


def test_two_jobs_of_one_name_with_snapshots_of_their_own_leave_each_others_output_alone(tmp_path: Path) -> None:
    one = _open(tmp_path, snapshots="file:///one/job")
    promised = _prepared(one, 1, 1)
    begun = _prepared(one, 2, 2)
    other = _open(tmp_path, attempt=2, snapshots="file:///other/job")
    other.discard_leftovers()
    one.commit([promised, begun])
    other.discard_leftovers()
    one.commit([promised, begun])
    assert _visible(tmp_path) == [1, 2]
    left = _prepared(_open(tmp_path, attempt=3, snapshots="file:///one/job"), 3, 3)
    assert len(_pending(tmp_path)) == 1
    _open(tmp_path, attempt=4, snapshots="file:///one/job").discard_leftovers()
    assert _pending(tmp_path) == [], f"a former run of the same job has left {left}"


def test_leftovers_of_older_attempts_go_and_nothing_else(tmp_path: Path) -> None:
    old = [_open(tmp_path, subtask=subtask, attempt=1, row_group_rows=1) for subtask in range(4)]
    restored = [_prepared(writer, 1, index) for index, writer in enumerate(old)]
    for writer in old:
        writer.write(_batch(-1))
        writer.pre_commit(2)()
        writer.write(_batch(-2))  # a row group of a file that is never finished
    assert len(_pending(tmp_path)) == 12
    first, second = (_open(tmp_path, subtask=subtask, attempt=2, row_group_rows=1) for subtask in range(2))
    first.commit(restored[0::2])
    second.commit(restored[1::2])
    first.write(_batch(10))
    second.write(_batch(11))
    first.discard_leftovers()
    assert len(_pending(tmp_path)) == 2, "of the present attempt"
    assert _visible(tmp_path) == [0, 1, 2, 3]


def test_a_zombie_whose_file_was_discarded_gets_an_error(tmp_path: Path) -> None:
    zombie = _open(tmp_path, attempt=1, row_group_rows=1)
    zombie.write(_batch(1))
    writer = _open(tmp_path, attempt=2)
    writer.discard_leftovers()
    with pytest.raises((CommitError, FileNotFoundError)):
        zombie.pre_commit(1)()


def test_row_groups_have_the_size_asked_for(tmp_path: Path) -> None:
    writer = _open(tmp_path, row_group_rows=100, subtask=1)
    for start in range(0, 1000, 70):
        writer.write(_batch(*range(start, min(start + 70, 1000))))
    writer.write(_batch(*range(1000, 1250)))
    writer.commit(writer.pre_commit(1)())
    (file,) = tmp_path.glob("*.parquet")
    metadata = pq.ParquetFile(file).metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [100] * 12 + [50]
    assert pq.read_table(file).column("n").to_pylist() == list(range(1250)), "in the order they came"


def test_buffered_bytes_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_sink, "MAX_BUFFERED_BYTES", 800)
    writer = _open(tmp_path, subtask=1)
    for start in range(0, 1000, 10):
        writer.write(_batch(*range(start, start + 10)))
    assert len(_pending(tmp_path)) == 1, "written before the epoch ended"
    writer.commit(writer.pre_commit(1)())
    assert _visible(tmp_path) == list(range(1000))


def test_the_hot_loop_opens_no_file_when_an_epoch_ends(tmp_path: Path) -> None:
    writer = _open(tmp_path, subtask=1)
    writer.write(_batch(1))
    finish = writer.pre_commit(1)
    assert _pending(tmp_path) == []
    assert len(finish()) == 1
    assert len(_pending(tmp_path)) == 1


def test_files_are_durable_before_they_are_promised_and_after_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    writer = _open(tmp_path, subtask=1)
    monkeypatch.setattr(os, "fsync", record)
    committable = _prepared(writer, 1, 1)
    pending = tmp_path / json.loads(committable)["pending"]
    assert synced == [str(pending), str(pending.parent)]
    writer.commit([committable])
    assert synced[2:] == [str(pending.parent), str(tmp_path)], "the receipt before the rename"


def test_another_file_system_is_written_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    monkeypatch.setattr(parquet_sink, "locate", lambda address: (elsewhere, "out"))
    old = _open("s3://bucket/out")
    old.write(_batch(-1))
    old.pre_commit(1)()
    writer = _open("s3://bucket/out", attempt=2)
    assert _visible(tmp_path / "out") == []
    writer.discard_leftovers()
    committable = _prepared(writer, 2, 1, 2)
    for _ in range(2):
        writer.commit([committable])
    assert _visible(tmp_path / "out") == [1, 2]
    assert _pending(tmp_path / "out") == []
    (tmp_path / "out" / json.loads(committable)["final"]).unlink()
    writer.commit([committable])
    (receipt,) = _receipts(tmp_path / "out")
    (tmp_path / "out" / "_tidegate" / receipt).unlink()
    with pytest.raises(CommitError):
        writer.commit([committable])


@pytest.mark.parametrize("compression", ["zstd", "snappy"])
def test_the_compression_is_the_one_asked_for(tmp_path: Path, compression: str) -> None:
    writer = _open(tmp_path, subtask=1, compression=compression)
    writer.commit([_prepared(writer, 1, *range(1000))])
    (file,) = tmp_path.glob("*.parquet")
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == compression.upper()


def test_wrong_options_are_refused_when_the_sink_is_built(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="row_group_rows"):
        sinks.parquet(tmp_path, row_group_rows=0)
    for compression in ("nonsense", "bz2"):
        with pytest.raises(JobError, match="compression"):
            sinks.parquet(tmp_path, compression=compression)


def test_columns_that_parquet_cant_hold_are_refused_when_the_job_is_built(tmp_path: Path) -> None:
    sink = sinks.parquet(tmp_path)
    sink.check(pa.schema([("n", pa.int64()), ("m", pa.map_(pa.string(), pa.list_(pa.float64())))]))
    with pytest.raises(SchemaError, match="Parquet can't hold"):
        sink.check(pa.schema([("u", pa.dense_union([pa.field("a", pa.int64())]))]))
