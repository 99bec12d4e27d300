"""The life of a job on plain processes: it runs to the end, is stopped, cancelled, started again, rescaled, fenced off."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import (
    KEYS_PER_SPLIT,
    SPLITS,
    build_ledger,
    check_clean,
    check_ledger,
    check_order,
    committed,
    completed,
    ledger_of,
    until,
)
from tests.unit.jobs.conftest import Bench
from tidegate.errors import JobError, JobFailed
from tidegate.testing.processes import ProcessJob


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_bounded_job_finishes_with_the_output_of_a_sequential_computation(bench: Bench, slots: int) -> None:
    handle = bench.ledger(rows=30_000, slots=slots)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), 30_000)
    check_clean(bench.snapshots, "job", bench.out)
    assert handle.failures == []
    (attempt,) = handle.attempts
    assert attempt.restored_epoch is None and sorted(attempt.slots) == list(range(slots))
    assert handle.epochs[-1].ending == "input-ended"
    assert [report.epoch for report in handle.epochs] == list(range(1, len(handle.epochs) + 1))


def test_output_becomes_visible_while_the_job_runs(bench: Bench) -> None:
    handle = bench.ledger(rows=None, rate=5_000)
    until(lambda: len(completed(handle)) >= 2, "two snapshots", handle=handle)
    first = until(lambda: committed(bench.out), "committed rows", handle=handle)
    check_order(first)
    until(lambda: len(committed(bench.out)) > len(first), "more committed rows", handle=handle)
    assert handle.status is tg.Status.RUNNING
    assert handle.stop(drain=True) is tg.Status.STOPPED
    check_ledger_prefix(bench)


def check_ledger_prefix(bench: Bench) -> None:
    """Rows of an unbounded run: each key's are those of the sequential computation, as far as they go."""
    rows = committed(bench.out)
    check_order(rows)
    longest = max(number for _, number, _ in rows)
    assert set(rows) <= set(ledger_of((longest + 1) * KEYS_PER_SPLIT * SPLITS))


def test_a_stopped_job_goes_on_exactly_where_it_was(bench: Bench) -> None:
    rows = 20_000
    handle = bench.ledger(rows=rows, rate=5_000, gated=True)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    assert handle.stop() is tg.Status.STOPPED
    assert handle.epochs[-1].ending == "stop"
    before = committed(bench.out)
    check_order(before)
    assert 0 < len(before) < rows
    check_clean(bench.snapshots, "job", bench.out)

    bench.open_gate()
    again = bench.ledger(rows=rows, gated=True)
    assert again.wait("1 minute") is tg.Status.FINISHED
    assert again.attempts[0].restored_epoch == handle.epochs[-1].epoch
    assert again.attempts[0].attempt > handle.attempts[-1].attempt
    assert again.epochs[0].epoch > handle.epochs[-1].epoch
    after = committed(bench.out)
    assert after[: len(before)] == before
    check_ledger(after, rows)
    check_clean(bench.snapshots, "job", bench.out)


def test_a_cancelled_job_goes_on_from_its_last_snapshot(bench: Bench) -> None:
    rows = 20_000
    handle = bench.ledger(rows=rows, rate=5_000, gated=True)
    until(lambda: len(completed(handle)) >= 2, "two snapshots", handle=handle)
    assert handle.cancel() is tg.Status.CANCELLED
    bench.open_gate()
    again = bench.ledger(rows=rows, gated=True)
    assert again.wait("1 minute") is tg.Status.FINISHED
    assert (again.attempts[0].restored_epoch or 0) >= completed(handle)[-1]
    check_ledger(committed(bench.out), rows)
    check_clean(bench.snapshots, "job", bench.out)


def test_a_job_goes_on_at_any_number_of_slots(bench: Bench) -> None:
    rows = 20_000
    for slots, end in ((2, tg.Handle.stop), (3, tg.Handle.cancel), (1, tg.Handle.stop)):
        handle = bench.ledger(rows=rows, rate=5_000, slots=slots, gated=True)
        until(lambda handle=handle: completed(handle), f"a snapshot on {slots} slots", handle=handle)
        end(handle)
        assert handle.failures == []
    bench.open_gate()
    last = bench.ledger(rows=rows, slots=3, gated=True)
    assert last.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), rows)
    check_clean(bench.snapshots, "job", bench.out)


class Remind(tg.KeyedProcess):
    """Keeps what it gets until event time has passed the record's by an hour."""

    waiting = tg.list("long")

    def process(self, record: Any, ctx: Any) -> None:
        self.waiting.add(record.n)
        ctx.timers.event_time(record.at + 3_600_000)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[int, int, list[int]]]:
        yield ctx.key, at, list(self.waiting.get())


def reminders(bench: Bench, source: tg.Source, **rest: Any) -> tg.Handle:
    job = bench.job(**rest)
    stream = job.source("in", source).with_watermark("at", "0 s").key_by("key")
    stream.process("remind", Remind(), returns="key long, at long, seen array<long>").to("out", tg.sinks.parquet(bench.out))
    return bench.start(job)


def test_draining_fires_the_timers_and_stopping_keeps_them(bench: Bench) -> None:
    def row(i: int) -> tuple[int, int, int]:
        return i % 3, i, 1_000 * (i // 30)

    source = tg.sources.generator(make_row=row, schema="key long, n long, at long", rate=300, splits=1)
    handle = reminders(bench, source)
    until(lambda: completed(handle), "a snapshot", handle=handle)
    assert handle.stop() is tg.Status.STOPPED
    assert committed(bench.out) == []

    again = reminders(bench, source, slots=3)
    until(lambda: completed(again), "a snapshot", handle=again)
    assert again.stop(drain=True) is tg.Status.STOPPED
    assert again.epochs[-1].ending == "drain"
    fired = committed(bench.out)
    seen = {key: numbers for key, _, numbers in fired}
    assert set(seen) == {0, 1, 2}
    count = sum(map(len, seen.values()))
    assert seen == {key: [i for i in range(count) if i % 3 == key] for key in range(3)}
    assert sorted((key, at) for key, at, _ in fired) == sorted(
        {(i % 3, 3_600_000 + 1_000 * (i // 30)) for i in range(count)}
    )


def test_a_snapshot_can_be_asked_for(bench: Bench) -> None:
    handle = bench.ledger(rows=None, rate=5_000, every=None)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run")
    first, second = handle.snapshot(), handle.snapshot()
    assert first.epoch < second.epoch
    assert second.duration_ms is not None and second.bytes > 0 and second.aborted is None
    assert [report.epoch for report in handle.epochs] == [first.epoch, second.epoch]


def test_a_job_that_has_ended_takes_no_snapshot_and_says_so_at_once(bench: Bench) -> None:
    handle = bench.ledger(rows=1_000)
    handle.wait("1 minute")
    with pytest.raises(tg.JobError, match="is finished, so there is nothing to take a snapshot of"):
        handle.snapshot()


def test_run_blocks_until_the_end(bench: Bench) -> None:
    job = build_ledger(bench.job(), tg.sinks.parquet(bench.out), rows=1_000)
    assert job.run() is tg.Status.FINISHED
    check_ledger(committed(bench.out), 1_000)


def test_a_finished_job_that_is_started_again_finishes_again_and_adds_nothing(bench: Bench) -> None:
    open_files = []
    for _ in range(2):
        handle = bench.ledger(rows=1_000)
        assert handle.wait("1 minute") is tg.Status.FINISHED
        check_ledger(committed(bench.out), 1_000)
        open_files.append(len(os.listdir("/proc/self/fd")))
    until(
        lambda: len(os.listdir("/proc/self/fd")) <= open_files[0],
        "no more open files than after the first job",
        patience_s=10,
    )
    assert handle.stop() is tg.Status.FINISHED
    assert handle.cancel() is tg.Status.FINISHED


def test_a_job_can_be_cancelled_and_stopped_before_it_runs(bench: Bench) -> None:
    cancelled, stopped = bench.ledger(rows=None, name="a"), bench.ledger(rows=None, name="b", rate=1_000)
    assert cancelled.cancel() is tg.Status.CANCELLED
    assert stopped.stop() is tg.Status.STOPPED
    assert cancelled.failures == stopped.failures == []


def test_who_starts_a_job_a_second_time_fences_off_the_first(bench: Bench) -> None:
    rows = 20_000
    first = bench.ledger(rows=rows, rate=5_000, gated=True)
    until(lambda: completed(first), "a snapshot", handle=first)
    second = bench.ledger(rows=rows, rate=5_000, gated=True)
    with pytest.raises(
        JobFailed,
        match=r"FencedOff: attempt 1 is over: job 'job' was taken over by another program of the "
        r"same name and folder: this same process started it again, at .*Z "
        r"\(attempt 2 in file://.*\). Give each its own name or folder, or stop one",
    ):
        first.wait("1 minute")
    bench.open_gate()
    assert second.wait("1 minute") is tg.Status.FINISHED
    assert second.failures == []
    check_ledger(committed(bench.out), rows)


SECOND = """
import sys
from pathlib import Path
from tests.unit.jobs.conftest import Bench

if __name__ == "__main__":
    bench = Bench(Path(sys.argv[1]))
    bench.ledger(rows=20_000, rate=5_000, gated=True).wait("1 minute")
"""


def test_who_is_fenced_off_is_told_by_which_process_and_who_takes_over_that_the_other_is_there(bench: Bench) -> None:
    first = bench.ledger(rows=20_000, rate=5_000, gated=True)
    until(lambda: completed(first), "a snapshot", handle=first)
    second = subprocess.Popen([sys.executable, "-c", SECOND, str(bench.folder)], stderr=subprocess.PIPE, text=True)
    try:
        with pytest.raises(JobFailed) as caught:
            first.wait("1 minute")
        bench.open_gate()
        _, log = second.communicate(timeout=60)
    finally:
        second.kill()
    assert f"host {socket.gethostname()}, process {second.pid}, user {getpass.getuser()}, at 20" in str(caught.value)
    assert second.returncode == 0, log
    assert f"takes over from a program that is still running: host {socket.gethostname()}, process {os.getpid()}" in log


@pytest.mark.parametrize("below", ["a file", "proc"])
def test_a_folder_that_cant_be_written_is_an_error_at_the_start(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "snapshots" if below == "a file" else Path("/proc/snapshots")
    job = ProcessJob("job", slots=1, snapshots=tg.Snapshots(to=str(folder)))
    job.source("in", tg.sources.rows([(1,)], "n long")).to("out", tg.sinks.collect())
    with pytest.raises(
        JobError,
        match=rf"snapshots can't be kept in file://{folder}/job: user {getpass.getuser()} on host "
        rf".* can't write there .*Snapshots\(to=…\)",
    ):
        job.start()


def test_a_job_that_no_longer_fits_its_snapshots_says_so_and_deploys_nothing(bench: Bench) -> None:
    assert bench.ledger(rows=500).wait("1 minute") is tg.Status.FINISHED
    changed = bench.ledger(rows=500, tuning=tg.Tuning(key_group_count=64))
    with pytest.raises(JobFailed, match="128 key-groups and the job 64"):
        changed.wait("1 minute")
    assert changed.attempts == []


def test_a_function_that_cant_travel_is_refused_at_the_start_and_named(bench: Bench) -> None:
    lock = threading.Lock()

    def locked(record: Any) -> tuple[Any, ...]:
        with lock:
            return (record.key,)

    job = bench.job()
    stream = job.source("in", tg.sources.rows([(1,)], "key long"))
    stream.map(locked, returns="key long", name="count words").to("out", tg.sinks.collect())
    with pytest.raises(JobError, match=r"can't be sent to its slots.*look at \['count words'\].*`open`"):
        job.start()


def test_heartbeats_bring_the_counters_of_every_subtask(bench: Bench) -> None:
    handle = bench.ledger(rows=None, rate=2_000, slots=2, tuning=tg.Tuning(heartbeat="50 ms"))

    def read() -> int:
        return sum(values["records_in"] for values in handle.metrics.values())

    seen = until(read, "counters", handle=handle)
    until(lambda: read() > seen, "counters that grow", handle=handle)
    assert len(handle.metrics) == 4


@pytest.mark.parametrize("slots", [1, 2])
def test_a_job_that_is_shorter_than_a_heartbeat_has_exact_counters_at_its_end(bench: Bench, slots: int) -> None:
    times = [100_000, 200_000, 5, 7, 300_000, 200_005]  # the last of them and two more are late

    def build(job: ProcessJob) -> None:
        source = job.source("in", tg.sources.rows([("a", at) for at in times], "key string, at long"), parallelism=1)
        counts = source.with_watermark("at", 0).key_by("key").window(tg.tumbling("at", 10)).aggregate("w", n=tg.count())
        counts.as_append().to("out", tg.sinks.collect())

    tuning = tg.Tuning(max_batch_rows=1, combine=None, heartbeat="10 s")
    handle = bench.finish(build, slots=slots, tuning=tuning, every="1 minute")
    assert sum(of["late_dropped"] for of in handle.metrics.values()) == 3
    assert sum(of["records_in"] for subtask, of in handle.metrics.items() if subtask.startswith("v0[")) == len(times)
    assert [row[-1] for row in handle.results("out")] == [1, 1, 1]


def test_a_job_that_is_stopped_has_exact_counters_at_its_end(bench: Bench) -> None:
    handle = bench.ledger(rows=None, rate=2_000, slots=2, tuning=tg.Tuning(heartbeat="10 s"))
    until(lambda: bench.out.exists() and len(committed(bench.out)) > 100, "output", handle=handle)
    handle.stop()
    read = sum(of["records_in"] for subtask, of in handle.metrics.items() if subtask.startswith("v0["))
    assert read == len(committed(bench.out))


def test_a_job_that_runs_is_not_started_a_second_time(bench: Bench) -> None:
    job = bench.job()
    source = tg.sources.generator(make_row=lambda number: (number,), schema="n long", rate=100)
    job.source("in", source).to("out", tg.sinks.parquet(bench.out))
    handle = bench.start(job)
    with pytest.raises(JobError, match="runs already: this program has started it"):
        job.start()
    assert handle.stop() is tg.Status.STOPPED
    again = job.start()
    assert again.stop() is tg.Status.STOPPED and len(handle.attempts) == 1
