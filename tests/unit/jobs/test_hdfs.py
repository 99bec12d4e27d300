"""Snapshots in HDFS: jobs that are killed, a cluster that is silent for a while, and renames whose answers are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_clean, check_ledger, committed, completed, until
from tests.servers.hdfs import HdfsCluster
from tests.servers.jars import JarsMissing
from tests.unit.jobs.conftest import Bench
from tidegate.errors import AlreadyExists, StoreError
from tidegate.store.hdfs import HdfsStore
from tidegate.testing.processes import ProcessJob

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("hdfs")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    try:
        running = HdfsCluster(tmp_path_factory.mktemp("hdfs"))
    except JarsMissing as missing:
        pytest.skip(f"Hadoop's mini-cluster can't be had here: {missing}")
    with running:
        yield running


def ledger(bench: Bench, address: str, *, rows: int) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=2,
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=address, every="100 ms", tolerable_failures=20),
    )
    return bench.start(build_ledger(job, tg.sinks.parquet(bench.out), rows=rows, rate=rows / 4, gate=bench.folder / "gate"))


def test_slots_that_are_killed_change_nothing(bench: Bench, cluster: HdfsCluster) -> None:
    rows, address = 8_000, cluster.address("killed")
    handle = ledger(bench, address, rows=rows)
    for kill in range(2):
        until(
            lambda kill=kill: any(each.attempt == kill + 1 and each.completed_ms for each in handle.epochs),
            "a snapshot of the new attempt",
            handle=handle,
        )
        os.kill(handle.attempts[-1].slots[kill], signal.SIGKILL)
        until(lambda kill=kill: len(handle.failures) == kill + 1, "the loss to be noticed", handle=handle)
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), rows)
    check_clean(address, "job", bench.out)


def test_a_job_outlasts_a_cluster_that_is_silent_for_a_while(bench: Bench, cluster: HdfsCluster) -> None:
    rows, address = 8_000, cluster.address("silent")
    handle = ledger(bench, address, rows=rows)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    cluster.pause()
    try:
        time.sleep(3)
    finally:
        cluster.resume()
    bench.open_gate()
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), rows)
    check_clean(address, "job", bench.out)


class Renaming:
    """A client whose renames fail: behind the name node's back, or before they reach it."""

    def __init__(self, client: Any, *, done: bool) -> None:
        self._client = client
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def rename(self, source: str, target: str) -> None:
        if self._done:
            self._client.rename(source, target)
        raise OSError("the connection was lost")


def test_a_create_whose_answer_was_lost_succeeds_only_if_its_file_was_renamed(
    cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, faulty = (HdfsStore(cluster.address("lost")) for _ in range(2))
    monkeypatch.setattr(faulty, "_client", Renaming(store._client, done=True))
    faulty.create("manifests/1", b"mine")
    assert store.read("manifests/1") == b"mine"
    with pytest.raises(AlreadyExists):
        faulty.create("manifests/1", b"mine")
    monkeypatch.setattr(faulty, "_client", Renaming(store._client, done=False))
    with pytest.raises(StoreError, match="the connection was lost") as unknown:
        faulty.create("manifests/2", b"mine")
    assert type(unknown.value) is StoreError
    assert store.list("") == ["manifests/1"]
    assert [file.path for file in store._client.list_status("/lost", True) if "~" in file.path] == []


def test_a_cluster_that_isnt_there_is_an_error_that_names_it_after_as_many_tries_as_are_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration/>")
    (tmp_path / "hdfs-site.xml").write_text(
        "<configuration><property><name>dfs.client.failover.max.attempts</name><value>1</value></property></configuration>"
    )
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    began_s = time.monotonic()
    with pytest.raises(StoreError, match=r"hdfs://127\.0\.0\.1:1/folder"):
        HdfsStore("hdfs://127.0.0.1:1/folder").create("a", b"x")
    assert time.monotonic() - began_s < 60
