"""A driver process that the fault tests talk to: `python -m tests.faults.driver`, JSON lines in and out.

It holds a Spark session on the tests' cluster and runs one job after the other, as a request says:

    {"job": "a", "graph": "ledger", "mode": "unaligned", "folder": "/…", "rows": 1000, "rate": 100, "seed": 1,
     "kills": [["slot", "idle"], ["executor", "marker"]]}

The job is a ledger (tests/modes.py) or a loop (tests/collatz.py) under a gate: until all kills were made it reads at a rate
and can't end, then it reads the rest as fast as it can. A kill is made at the moment when the epoch is seen to be in the
phase asked for; the windows are widened by a sink and a manifest that take their time. While it runs, events are told as
they happen; the last one is {"event": "ended", …}. A job without kills waits until somebody else opens the gate.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tidegate as tg
from tests.collatz import build_collatz, numbers
from tests.faults.cluster import executor_of
from tests.modes import MODES, build_slow_ledger, snapshots_of
from tidegate.connectors.parquet_sink import OutputFolder, ParquetSink, ParquetSinkWriter
from tidegate.dataflow.contracts import Committable, SinkContext, SinkWriter
from tidegate.driver.reports import EpochReport
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import Manifest

DAWDLE_S = 0.06
LEDGER_LOAD = 0.6  # so much of its time the ledger would need for what comes in, if it only slept: records queue up
PATIENCE_S = 120.0
PHASES = ("idle", "marker", "writing", "prepared", "committing")


# --- the job ---------------------------------------------------------------------------------------------------------


class DawdlingSink(ParquetSink):
    """Parquet files whose writing and renaming takes a moment, in which a process can be killed."""

    def open(self, context: SinkContext) -> SinkWriter:
        return _DawdlingWriter(self, OutputFolder(self.address), context)


class _DawdlingWriter(ParquetSinkWriter):
    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        finish = super().pre_commit(epoch)

        def slowly() -> Sequence[Committable]:
            time.sleep(DAWDLE_S / 2 * (1 + self._context.subtask))
            committables = finish()
            time.sleep(DAWDLE_S / 2)
            return committables

        return slowly

    def commit(self, committables: Sequence[Committable]) -> None:
        time.sleep(DAWDLE_S / 2)
        super().commit(committables)
        time.sleep(DAWDLE_S / 2)


class DawdlingCatalog(SnapshotCatalog):
    """Between the last acknowledgement and the manifest some time passes."""

    def commit(self, manifest: Manifest) -> None:
        time.sleep(DAWDLE_S)
        super().commit(manifest)
        time.sleep(DAWDLE_S / 2)


def build(session: Any, request: dict[str, Any]) -> tg.Job:
    folder = Path(request["folder"])
    job = tg.Job(
        request["job"],
        session,
        slots=request.get("slots", 2),
        restart=tg.FixedDelay(attempts=len(request["kills"]) + 5, delay=0),
        tuning=tg.Tuning(log_format="json"),
        # The pause makes room for the phase "idle", where records queue up and epochs take long.
        snapshots=snapshots_of(to=str(folder / "snapshots"), every="500 ms", min_pause="200 ms", **MODES[request["mode"]]),
    )
    sink = DawdlingSink(address=str(folder / "out"), row_group_rows=65_536, compression="zstd")
    rows, rate, gate = request["rows"], request["rate"], folder / "gate"
    if request["graph"] == "loop":
        build_collatz(job, numbers(rows, rate=rate, gate=gate), sink)
    else:
        build_slow_ledger(job, sink, rows=rows, rate=rate, gate=gate, pause_s=LEDGER_LOAD * job.slots / rate)
    return job


# --- kills -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Killer:
    """Makes the kills of one job, one after the other, each in an attempt that has begun an epoch."""

    handle: tg.Handle
    chance: random.Random
    subtasks: int
    struck_ms: list[float] = field(default_factory=list)

    def kill(self, victim: str, phase: str) -> None:
        attempt = self._running_attempt()
        slot, pid = self.chance.choice(sorted(attempt.slots.items()))
        target = pid if victim == "slot" else executor_of(pid)
        seen = self._await_phase(phase, attempt.attempt)
        os.kill(target, signal.SIGKILL)
        self.struck_ms.append(time.time() * 1000)
        tell(
            "killed",
            victim=victim,
            phase=phase,
            slot=slot,
            pid=target,
            attempt=attempt.attempt,
            epoch=seen.epoch,
            acknowledged=len(seen.subtasks),
            completed=seen.completed_ms is not None,
        )
        self._await(
            lambda: any(failure.attempt == attempt.attempt for failure in self.handle.failures) or None,
            "the loss to be noticed",
        )

    def kill_at_the_end(self) -> None:
        try:
            self.kill("slot", "final")
        except AssertionError as error:
            tell("the final epoch was quicker", why=str(error))

    def _running_attempt(self) -> Any:
        def running() -> Any:
            attempts = self.handle.attempts
            attempt = attempts[-1] if attempts else None
            failed = {failure.attempt for failure in self.handle.failures}
            if attempt is None or attempt.attempt in failed:
                return None
            began = any(report.attempt == attempt.attempt for report in self.handle.epochs)
            return attempt if began else None

        return self._await(running, "an attempt that runs")

    def _await_phase(self, phase: str, attempt: int) -> EpochReport:
        """The newest epoch, as soon as it is in that phase."""
        last = self.handle.epochs[-1].epoch

        def seen() -> EpochReport | None:
            report = self.handle.epochs[-1]
            if report.attempt != attempt:
                return None
            is_in_phase = {
                "idle": report.completed_ms is not None and time.time() > report.completed_ms / 1000 + 2 * DAWDLE_S,
                "marker": report.epoch > last and not report.subtasks,
                "writing": report.epoch > last and 0 < len(report.subtasks) < self.subtasks,
                "prepared": len(report.subtasks) == self.subtasks and report.completed_ms is None,
                "committing": report.epoch > last and report.completed_ms is not None,
                "final": report.ending is not None,
            }[phase]
            return report if is_in_phase else None

        report: EpochReport = self._await(seen, f"an epoch in phase {phase}")
        if phase in ("marker", "committing", "final"):
            time.sleep(self.chance.uniform(0, DAWDLE_S))
        return report

    def _await(self, condition: Callable[[], Any], what: str) -> Any:
        give_up_s = time.monotonic() + PATIENCE_S
        while (found := condition()) is None:
            if self.handle.status.terminal or time.monotonic() > give_up_s:
                raise AssertionError(f"{self.handle.status} while waiting for {what}: {self.handle.failures}")
            time.sleep(0.001)
        return found


def run(session: Any, request: dict[str, Any]) -> None:
    job = build(session, request)
    handle = job.start()
    watch(handle)
    chance = random.Random(request["seed"])
    killer = Killer(handle, chance, subtasks=job.plan().subtask_count())
    gate = Path(request["folder"]) / "gate"
    trouble = None
    try:
        for victim, phase in request["kills"]:
            killer.kill(victim, phase)
        if request["kills"]:
            gate.touch()
            if request["at_the_end"]:
                killer.kill_at_the_end()
        status = handle.wait(f"{PATIENCE_S} s")
    except Exception as error:  # noqa: BLE001  (the test shall see it)
        trouble = f"{type(error).__name__}: {error}"
        status = handle.status
        if not status.terminal:
            handle.cancel()
    tell(
        "ended",
        status=status.value,
        trouble=trouble,
        recoveries=recoveries(killer.struck_ms, handle),
        epochs=[[report.attempt, report.epoch, report.completed_ms is not None] for report in handle.epochs],
        attempts=[[attempt.attempt, attempt.restored_epoch] for attempt in handle.attempts],
        failures=[failure.message for failure in handle.failures],
        in_flight_bytes=most(handle, "in_flight_bytes"),
        feedback_bytes=most(handle, "feedback_bytes"),
    )


def most(handle: tg.Handle, of: str) -> int:
    """The largest of that measurement in any subtask's part of a complete snapshot."""
    return max(
        (subtask[of] for report in handle.epochs if report.completed_ms is not None for subtask in report.subtasks.values()),
        default=0,
    )


def recoveries(struck_ms: list[float], handle: tg.Handle) -> list[dict[str, Any]]:
    """For each kill, after how many milliseconds it was noticed and the job ran again."""
    found = []
    for struck, failure in zip(struck_ms, handle.failures, strict=False):
        again = [a.running_ms for a in handle.attempts if a.attempt > failure.attempt and a.running_ms is not None]
        found.append(
            {"noticed_ms": round(failure.at_ms - struck), "running_ms": round(min(again) - struck) if again else None}
        )
    return found


def watch(handle: tg.Handle) -> None:
    """Tells of attempts and completed epochs, so that the test can follow."""

    def follow() -> None:
        running, completed, failed = 0, 0, 0
        while not handle.status.terminal:
            for failure in handle.failures[failed:]:
                failed += 1
                tell("failed", attempt=failure.attempt, why=failure.message)
            for attempt in handle.attempts:
                if attempt.running_ms is not None and attempt.attempt > running:
                    running = attempt.attempt
                    tell("running", attempt=running, restored=attempt.restored_epoch, slots=list(attempt.slots.values()))
            for report in handle.epochs:
                if report.completed_ms is not None and report.epoch > completed:
                    completed = report.epoch
                    tell("completed", epoch=completed)
            time.sleep(0.01)

    threading.Thread(target=follow, daemon=True).start()


_telling = threading.Lock()


def tell(event: str, **about: Any) -> None:
    with _telling:
        print(json.dumps({"event": event, "at": round(time.time(), 3)} | about), flush=True)


def main() -> None:
    from pyspark.sql import SparkSession

    url, java_options, log4j_app = sys.argv[1:4]
    from tidegate.driver import hosting

    setattr(hosting, "SnapshotCatalog", DawdlingCatalog)  # noqa: B010
    builder = SparkSession.builder.master(url).appName(log4j_app)
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": java_options,
        "spark.executor.extraJavaOptions": java_options,
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
    }.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    tell("up", pid=os.getpid())
    for line in sys.stdin:
        run(session, json.loads(line))
    session.stop()


if __name__ == "__main__":
    # As a module of its own name, so that what travels to slots isn't pickled as part of __main__.
    from tests.faults import driver

    driver.main()
