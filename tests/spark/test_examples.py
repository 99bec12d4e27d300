"""The small examples: the first as a reader runs it; those with a loop on a shared Spark, also while slots are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import cloudpickle
import pytest

import tidegate as tg
from tests.conftest import ROOT
from tests.jobs import GatedSource, completed, until
from tests.modes import EXACT, MODES
from tidegate.connectors.generator import GeneratorSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = ROOT / "examples"
FIRST_JOB = EXAMPLES / "first_job.py"
LINES_AT_MOST = 20
KILLS = 3

sys.path.append(str(EXAMPLES))

import connected_components  # noqa: E402
import transaction_retry  # noqa: E402


def test_the_first_job_counts_words() -> None:
    done = subprocess.run([sys.executable, str(FIRST_JOB)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    counted = [line for line in done.stdout.splitlines() if line.startswith("counts> ")]
    assert sorted(counted) == sorted(
        f"counts> word={word!r}, n={n}"
        for word, n in [("the", 1), ("the", 2), ("tide", 1), ("tide", 2), ("comes", 1), ("in", 1), ("goes", 1), ("out", 1)]
    )
    for word in ("the", "tide"):
        assert counted.index(f"counts> word={word!r}, n=1") < counted.index(f"counts> word={word!r}, n=2")


def test_the_first_job_is_as_short_as_the_readme_says() -> None:
    assert len(FIRST_JOB.read_text("utf-8").splitlines()) <= LINES_AT_MOST


# --- loops ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def examples_travel_by_value() -> Iterator[None]:
    """As they do when they are run themselves, as `__main__`."""
    modules: list[ModuleType] = [connected_components, transaction_retry]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


def test_the_components_are_those_of_union_find(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    connected_components.main()
    assert "1,887 nodes to 387 components, as union-find does" in capsys.readouterr().out


def test_every_transfer_is_decided_and_the_money_stays(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    transaction_retry.main()
    assert "100 accounts hold 10,000 in sum, as ever" in capsys.readouterr().out


def run_under_kills(
    spark: SparkSession, folder: Path, build: Callable[[tg.Job, tg.Source], tg.Job], source: tg.Source
) -> tg.Handle:
    """`kill -9` of a slot in every attempt that has a snapshot, while records come in at a rate and go round; then the rest
    comes at once. In any mode that promises exactly once."""
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    mode = chance.choice(EXACT)
    print(f"seed {seed}, {mode}")
    job = tg.Job(
        "example",
        spark,
        slots=2,
        restart=tg.FixedDelay(attempts=KILLS, delay_ms=0),
        snapshots=tg.Snapshots(to=str(folder / "snapshots"), every="100 ms", **MODES[mode]),
        tuning=tg.Tuning(heartbeat_ms=50),
    )
    assert isinstance(source, GeneratorSource)
    handle = build(job, GatedSource(generator=source, gate=str(folder / "gate"))).start()
    try:
        for attempt in range(1, KILLS + 1):
            until(
                lambda attempt=attempt: any(
                    report.attempt == attempt and report.completed_ms is not None for report in handle.epochs
                ),
                "a snapshot of the attempt",
                handle=handle,
            )
            time.sleep(chance.uniform(0, 0.2))
            os.kill(handle.attempts[-1].slots[chance.randrange(2)], signal.SIGKILL)
            until(lambda attempt=attempt: len(handle.failures) == attempt, "the loss to be noticed", handle=handle)
        (folder / "gate").touch()
        assert handle.wait(120) is tg.Status.FINISHED
    finally:
        if not handle.status.terminal:
            handle.cancel()
    assert len(handle.attempts) == KILLS + 1 and len(completed(handle)) > KILLS
    return handle


def test_kills_dont_change_the_components(spark: SparkSession, tmp_path: Path) -> None:
    handle = run_under_kills(spark, tmp_path, connected_components.build, connected_components.edges(rate=500))
    assert connected_components.labels_of(handle.results("labels")) == connected_components.in_sequence()


def test_kills_lose_no_money_and_decide_every_transfer_once(spark: SparkSession, tmp_path: Path) -> None:
    handle = run_under_kills(spark, tmp_path, transaction_retry.build, transaction_retry.transfers(rate=500))
    transaction_retry.prove(handle.results("decided"), handle.results("bookings"))
