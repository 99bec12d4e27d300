"""Which snapshot a micro-batch goes on from, and what is said where there is no such thing."""

from __future__ import annotations

import pytest

from tidegate.errors import RestoreError
from tidegate.runtime.attempts import batch_before
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.manifest import Manifest, MicroBatch
from tidegate.store.memory import MemoryStore


def manifest(epoch: int, attempt: int, batch: int | None, query: str = "q") -> Manifest:
    return Manifest(job="j", epoch=epoch, attempt=attempt, created_ms=0, key_group_count=8, ending=None, operators={},
                    micro_batch=None if batch is None else MicroBatch(query, batch))


def before(number: int, *manifests: Manifest) -> int | None:
    found = batch_before(MicroBatch("q", number), manifests, store="memory://s")
    return None if found is None else found.epoch


def test_a_batch_goes_on_from_the_one_before_it() -> None:
    assert before(0) is None
    assert before(1, manifest(4, 1, 0)) == 4
    assert before(7, manifest(4, 1, 5), manifest(5, 1, 6)) == 5


def test_a_batch_that_runs_again_passes_its_own_snapshot_over() -> None:
    assert before(0, manifest(1, 1, 0)) is None
    assert before(6, manifest(4, 1, 5), manifest(5, 1, 6)) == 4


def test_whatever_else_is_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RestoreError, match=r"goes on from the snapshot of micro-batch 4, and memory://s holds none"):
        before(5)
    with pytest.raises(RestoreError, match=r"has those of the micro-batches \[1, 2\]: state and stream would drift apart"):
        before(5, manifest(1, 1, 1), manifest(2, 1, 2))
    with pytest.raises(RestoreError, match=r"are of the query other\. .* start_from='memory://s'"):
        before(1, manifest(1, 1, 0, query="other"))
    with pytest.raises(RestoreError, match=r"are of a job that is no query"):
        before(0, manifest(1, 1, None))
    with pytest.raises(RestoreError, match=r"is at micro-batch 0, and its snapshots in memory://s are at 3"):
        before(0, manifest(1, 1, 2), manifest(2, 1, 3))


def test_what_an_attempt_passed_over_is_dead() -> None:
    store = MemoryStore()
    first = SnapshotCatalog(store)
    attempt = first.claim_attempt()
    for number in range(3):
        first.commit(manifest(number + 1, attempt, number))

    again = SnapshotCatalog(store)
    second = again.claim_attempt(choose=lambda found: batch_before(MicroBatch("q", 2), found, store="memory://s"))
    assert again.epochs() == [1, 2], "the snapshot of the batch that runs again doesn't count"
    again.sweep(second)
    assert len(store.list("manifests")) == 2
    again.commit(manifest(4, second, 2))
    assert [each.micro_batch for each in SnapshotCatalog(store).manifests()] == [MicroBatch("q", n) for n in range(3)]

    third = SnapshotCatalog(store)
    third.claim_attempt(choose=lambda found: None)
    assert third.epochs() == []


def test_a_manifest_tells_its_micro_batch_and_one_without_looks_as_ever() -> None:
    of_batch = manifest(3, 1, 7)
    assert Manifest.from_bytes(of_batch.to_bytes(), name="m") == of_batch
    assert b"micro_batch" not in manifest(3, 1, None).to_bytes()
