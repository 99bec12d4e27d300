"""Formats are a promise: what an earlier version wrote is read and restored, and a newer format is refused by its number."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import pytest

import tidegate as tg
from tests.formats.fixtures import BACKENDS, JOB_FOLDER, ROOT, SAVEPOINT, read_all, read_json, rows_of, unpack
from tests.formats.program import HALF, ROWS, every_shape, in_flight
from tests.jobs import until
from tests.unit.jobs.conftest import Bench
from tidegate.errors import CorruptFile, RestoreError
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.manifest import FORMAT_VERSION, Manifest
from tidegate.state.format import MAGIC, StateFileEncoder, StateFileReader

VERSIONS = sorted(each.name for each in ROOT.iterdir() if each.name.startswith("manifest-"))
FIXTURES = [
    f"{version}/{kind}-{backend}"
    for version in VERSIONS
    for kind in ("savepoint", "own", "in-flight")
    for backend in BACKENDS
]


def snapshot_in(folder: Path) -> str:
    """The path of what was unpacked."""
    return str(folder / SAVEPOINT if (folder / SAVEPOINT).exists() else next((folder / JOB_FOLDER).iterdir()))


def test_there_are_fixtures_of_the_present_format() -> None:
    assert f"manifest-{FORMAT_VERSION}" in VERSIONS, "write them: python -m tests.formats"


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_rows_of_every_state_are_read_as_they_were_written(fixture: str, tmp_path: Path) -> None:
    unpack(fixture, tmp_path)
    assert rows_of(find_snapshot(snapshot_in(tmp_path))) == read_json(fixture)


@pytest.mark.parametrize(
    ("kind", "backend", "slots"),
    [
        ("savepoint-heap", "rocksdb", 3),
        ("own-rocksdb", "rocksdb", 2),
        pytest.param("savepoint-rocksdb", "heap", 1, marks=pytest.mark.long),
        pytest.param("own-heap", "heap", 2, marks=pytest.mark.long),
        pytest.param("own-rocksdb", "heap", 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_goes_on_from_a_snapshot_of_every_shape(
    version: str, kind: str, backend: str, slots: int, bench: Bench
) -> None:
    unpack(f"{version}/{kind}", bench.folder)
    is_own = (bench.folder / JOB_FOLDER).exists()
    handle = bench.start(
        every_shape(
            str(bench.snapshots if is_own else bench.folder / "new"),
            backend=BACKENDS[backend](),
            rows=len(ROWS),
            slots=slots,
            restore_from=None if is_own else str(bench.folder / SAVEPOINT),
        )
    )
    read_all(handle, len(ROWS) - HALF)
    handle.stop(savepoint=str(bench.folder / "after"))
    found, expected = rows_of(find_snapshot(str(bench.folder / "after")), steady=True), read_json(f"{version}/after")
    assert {state: rows for state, rows in found.items() if rows != expected.get(state)} == {}
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("backend", ["heap", pytest.param("rocksdb", marks=pytest.mark.long)])
@pytest.mark.parametrize("version", VERSIONS)
def test_records_in_flight_are_processed_by_a_later_version(version: str, backend: str, bench: Bench) -> None:
    unpack(f"{version}/in-flight-{backend}", bench.folder)
    (bench.folder / "gate").touch()
    handle = bench.start(in_flight(str(bench.snapshots), backend=BACKENDS[backend](), gate=bench.folder / "gate"))
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)
    handle.stop(savepoint=str(bench.folder / "after"))
    after = find_snapshot(str(bench.folder / "after"))
    read = next(int(row["value"]["offset"]) for batch in after.rows("in")["__offsets"] for row in batch.to_pylist())
    totals: Counter[int] = Counter()
    for key, _, x, _ in ROWS[:read]:
        totals[key] += x
    rows = after.rows("slow")["total"]
    assert {row["key"]: row["value"] for batch in rows for row in batch.to_pylist()} == totals


# Newer formats.


def test_a_newer_manifest_is_refused_by_its_number(tmp_path: Path) -> None:
    unpack(FIXTURES[0], tmp_path)
    path = tmp_path / SAVEPOINT / "savepoint.json"
    content = path.read_bytes()
    body = content[content.index(b'"manifest":') + 11 : -2].replace(b'"format":2', b'"format":3')
    path.write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))
    with pytest.raises(RestoreError, match=r"manifest format 3, and this Tidegate reads format 2"):
        find_snapshot(str(tmp_path / SAVEPOINT))


def test_a_newer_state_file_is_refused_by_its_number_and_a_damaged_one_is_not_taken_for_it() -> None:
    encoder = StateFileEncoder(key_group_count=4)
    content = b"".join(encoder.chunks([], []))
    summary = encoder.summary

    def reader(content: bytes) -> StateFileReader:
        return StateFileReader(
            lambda offset, length: content[offset : offset + length],
            bytes=summary.bytes,
            index_bytes=summary.index_bytes,
            index_checksum=summary.index_checksum,
        )

    newer = MAGIC[:-1] + bytes([MAGIC[-1] + 1])
    with pytest.raises(RestoreError, match="state file format 3, and this Tidegate reads format 2"):
        _ = reader(content.replace(MAGIC, newer)).states
    with pytest.raises(CorruptFile):
        _ = reader(content[: -len(MAGIC)] + bytes(8)).states


def test_a_manifest_of_the_present_format_is_read_back() -> None:
    manifest = Manifest(job="j", epoch=1, attempt=1, created_ms=0, key_group_count=4, ending=None, operators={})
    assert Manifest.from_bytes(manifest.to_bytes(), name="m") == manifest
