"""A restore may take longer than the time-out of a deployment, as long as it advances. A rescaling that can't be deployed is
taken back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests.jobs import until
from tests.unit.jobs.conftest import Bench
from tidegate.control.launch import SlotLaunch
from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.driver.deployment import Deployer
from tidegate.state.heap import HeapBackend
from tidegate.testing.processes import ProcessDeployer, ProcessJob

OPERATORS = 8


class Count(tg.KeyedProcess):
    counts = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.counts.set(self.counts.get() + 1)
        yield record


class SlowLoading(HeapBackend):
    seconds: float

    def load(self, state: str, rows: Any, *, known: bool = False) -> None:
        time.sleep(self.seconds)
        super().load(state, rows, known=known)


@dataclass(frozen=True, slots=True)
class SlowHeap:
    """Takes this long to load one batch of rows."""

    seconds: float
    native: ClassVar[None] = None
    folder: ClassVar[None] = None

    def create(
        self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int], native: Path | None = None
    ) -> KeyedBackend:
        backend = SlowLoading(key_type=key_type, key_group_count=key_group_count, now_ms=now_ms)
        backend.seconds = self.seconds
        return backend


def counting(bench: Bench, *, backend: Any = None, restart: Any = None, make: type[ProcessJob] = ProcessJob) -> tg.Handle:
    job = make(
        "job",
        slots=1,
        restart=restart or tg.NoRestart(),
        backend=backend or tg.Heap(),
        tuning=tg.Tuning(heartbeat="50 ms", deploy_timeout="4 s"),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="100 ms"),
    )
    schema = "key long, amount long"
    stream = job.source("in", tg.sources.generator(made, schema=schema, rate=1_000))
    for number in range(OPERATORS):
        stream = stream.key_by("key").process(f"count {number}", Count(), returns=schema)
    stream.to("out", tg.sinks.parquet(bench.out))
    return bench.start(job)


def made(split: int, start: int, count: int) -> dict[str, Any]:
    numbers = np.arange(start, start + count, dtype=np.int64)
    return {"key": numbers % 100, "amount": numbers}


def with_state(bench: Bench) -> None:
    handle = counting(bench)
    until(lambda: len([each for each in handle.epochs if each.completed_ms]) > 3, "snapshots", handle=handle)
    handle.stop()


def test_a_restore_may_take_longer_than_a_deployment(bench: Bench) -> None:
    with_state(bench)
    handle = counting(bench, backend=SlowHeap(0.6))  # 4.8 s in all
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)
    (attempt,) = handle.attempts
    assert attempt.running_ms is not None and attempt.running_ms - attempt.claimed_ms > 4_800
    assert handle.failures == []


class FewSlots(ProcessJob):
    """A cluster that has no task slots for more than two."""

    def _deployer(self, launch: SlotLaunch, coordinator: tuple[str, int]) -> Deployer:
        return _Nothing() if launch.plan.slots > 2 else ProcessDeployer(launch, coordinator)


class _Nothing:
    def deploy(self, attempt: int) -> _Nothing:
        return self

    def ended(self) -> str:
        return "there are no task slots"

    def cancel(self) -> None:
        """Do nothing: there is nothing to cancel."""


def test_a_rescaling_to_more_slots_than_there_are_is_taken_back(bench: Bench) -> None:
    handle = counting(bench, make=FewSlots)
    until(lambda: handle.status is tg.Status.RUNNING, "the job to run", handle=handle)
    with pytest.raises(tg.RescaleFailed, match=r"couldn't run on 3 slots, and has gone back to 1: .* no task slots"):
        handle.rescale(slots=3)
    assert handle.status is tg.Status.RUNNING and sorted(handle.attempts[-1].slots) == [0]
