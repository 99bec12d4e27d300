"""What a user sets is checked when it is said, and the complaint says what to change."""

from __future__ import annotations

import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tidegate.errors import JobError, SchemaError
from tidegate.protocol.alignment import AlignmentMode
from tidegate.testing import ExperimentalSnapshots, ProcessJob


def test_durations_may_be_text_numbers_or_timedeltas() -> None:
    settings = tg.Snapshots(to="x", every=timedelta(seconds=2), min_pause="5 ms", timeout="3 s").coordinator_settings()
    assert (settings.interval_ms, settings.min_pause_ms, settings.timeout_ms) == (2_000, 5, 3_000)


def test_no_interval_means_only_final_snapshots_and_those_asked_for() -> None:
    assert tg.Snapshots(to="x", every=None).coordinator_settings().interval_ms is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (dict(retain=0), "at least one snapshot must be kept"),
        (dict(every="soon"), "soon"),
        (dict(every="0 s"), "every"),
        (dict(timeout=0), "timeout"),
        (dict(every=-5), "-5"),
        (dict(tolerable_failures=-1), "tolerable_failures"),
    ],
)
def test_snapshots_that_cant_be_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises((JobError, SchemaError), match=told):
        tg.Snapshots(to="x", **wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (dict(key_group_count=0), "key_group_count=0"),
        (dict(key_group_count=40_000), "give a whole number from 1 to 32768"),
        (dict(max_batch_rows=0), "max_batch_rows"),
        (dict(linger=-1), "linger"),
        (dict(heartbeat="1 s", heartbeat_timeout="2 s"), "more than twice"),
        (dict(heartbeat=0), "at least 1"),
        (dict(deploy_timeout=0), "deploy_timeout=0"),
    ],
)
def test_tuning_that_cant_be_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        tg.Tuning(**wrong)


@pytest.mark.parametrize(("name", "slots", "told"), [("", 1, "needs a name"), ("job", 0, "slots=0")])
def test_a_job_needs_a_name_and_a_slot(name: str, slots: int, told: str) -> None:
    with pytest.raises(JobError, match=told):
        ProcessJob(name, slots=slots)


def test_the_mode_of_snapshots() -> None:
    aligned = tg.Snapshots(to="x")
    assert aligned.alignment_mode is AlignmentMode.EXACTLY_ONCE
    assert aligned.hurry_after_ms is None and not aligned.logs_in_flight
    assert tg.Snapshots(to="x", mode="unaligned").hurry_after_ms == 0
    assert tg.Snapshots(to="x", alignment_timeout="200 ms").hurry_after_ms == 200
    assert tg.Snapshots(to="x", mode="at_least_once").alignment_mode is AlignmentMode.AT_LEAST_ONCE
    assert ExperimentalSnapshots(to="x", protocol="chandy_lamport").logs_in_flight
    assert ExperimentalSnapshots(to="x", protocol="stop_the_world").halts_sources


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "exactly-once"}, "give 'exactly_once', 'at_least_once' or 'unaligned'"),
        ({"protocol": "naiad"}, "give 'chandy_lamport' or 'stop_the_world'"),
        ({"mode": "unaligned", "alignment_timeout": "1 s"}, "only exactly-once snapshots are aligned"),
        ({"mode": "unaligned", "protocol": "stop_the_world"}, "omit mode and alignment_timeout"),
    ],
)
def test_modes_that_contradict_each_other_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        (ExperimentalSnapshots if "protocol" in wrong else tg.Snapshots)(to="x", **wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"backend": "rocksdb"}, "backend='rocksdb': give tg.Heap() or tg.RocksDB()"),
        ({"backend": tg.RocksDB}, "backend=<class "),
        ({"restart": 3}, "restart=3: give tg.NoRestart()"),
        ({"snapshots": "folder"}, "snapshots='folder': give tg.Snapshots(to="),
        ({"tuning": 8192}, "tuning=8192: give tg.Tuning("),
        ({"slots": "2"}, "slots='2': give a number"),
        ({"slots": True}, "slots=True: give a number"),
    ],
)
def test_what_isnt_of_its_class_is_refused_when_a_job_is_built(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=re.escape(told)):
        ProcessJob("j", **({"slots": 1} | wrong))


@pytest.mark.parametrize("given", [False, True])
def test_a_job_without_snapshots_says_where_its_state_lives(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = ProcessJob("job", slots=1, snapshots=tg.Snapshots(to=str(tmp_path / "own")) if given else None)
    job.source("numbers", tg.sources.rows([(1,)], "n long")).to("out", tg.sinks.collect())
    assert job.run() is tg.Status.FINISHED
    said = [record.getMessage() for record in caplog.records if "temporary folder" in record.getMessage()]
    assert len(said) == (0 if given else 1)
    assert all(
        f"Job 'job' has no snapshots=, so its state lives in the temporary folder {tmp_path}" in line for line in said
    )
