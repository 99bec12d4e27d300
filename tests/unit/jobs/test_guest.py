"""A process that keeps its slot from one micro-batch to the next: what a task makes there goes with the task.

The processes are real ones, and collect garbage after every task as PySpark's do. Spark isn't there.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import selectors
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.connectors.handover import handed_schema
from tidegate.control.messages import Offer
from tidegate.control.settings import Tuning
from tidegate.dataframes.gathering import Gathering, Run, RunEnd
from tidegate.dataframes.guest import Invitation, _Driver, run_task
from tidegate.dataframes.micro_batches import MicroBatches
from tidegate.dataframes.queries import BatchTimes, StoreHolders
from tidegate.dataframes.transforming import TransformJob
from tidegate.driver.attempts import Restore
from tidegate.errors import TidegateError
from tidegate.slot import step_times
from tidegate.snapshots.manifest import MicroBatch

SCHEMA = pa.schema([("n", pa.int64())])
HELD_LISTS = 50_000


class Queries:
    """Those of a driver with one query."""

    def batch_times(self, batch: MicroBatch) -> BatchTimes:
        return BatchTimes(1000 + batch.number, 0)

    def transforms_of(self, query: str, observed_as: str) -> set[str]:
        return set()

    def run_of(self, query: str) -> str | None:
        return "r"


class Counts(tg.KeyedProcess):
    n = tg.value("long", default=0)

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int]]:
        self.n.set(self.n.get() + 1)
        yield row.n, self.n.get()


class LeavesCycles(tg.KeyedProcess):
    """Leaves an object that refers to itself, with every record, and says how many there are."""

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int]]:
        yield row.n, len(_Cycle.alive)
        _Cycle()


class HoldsMuch(Counts):
    """Makes many objects at the beginning, and holds them."""

    def open(self, ctx: Any) -> None:
        self.held = [[number] for number in range(HELD_LISTS)]


class _Cycle:
    alive: weakref.WeakSet[_Cycle] = weakref.WeakSet()

    def __init__(self) -> None:
        self.itself = self
        _Cycle.alive.add(self)


@dataclass
class Seen:
    """Of a process that has run a number of micro-batches: what it had after each of them."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    traced_bytes: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)
    walked: list[int] = field(default_factory=list)  # objects, by the largest collection of the batch


def run_batches(process: tg.KeyedProcess, batches: int, folder: Path, *, trace: bool = False) -> Seen:
    """Return what a process saw whose slot was held from each batch to the next."""
    job = TransformJob(
        "t", {"input": SCHEMA}, slots=1, writes_state=True, snapshots=tg.Snapshots(to=str(folder), every=None)
    )
    job.take_outputs(job.inputs["input"].key_by("n").process("count", process, returns="n long, m long"))
    conductor = MicroBatches(
        job,
        transform="t",
        store=folder.as_uri(),
        restore=Restore(),
        queries=Queries(),
        holders=StoreHolders(),
        observed_as="o",
    )
    gathering = Gathering(Tuning().coordinator_listening)
    ends: list[RunEnd] = []
    held: list[bool] = []

    def conduct(run: Run) -> RunEnd:
        ends.append(conductor.conduct(run))
        held.append(conductor.is_settled)
        return ends[-1]

    gathering.add("t", 1, conduct, patience_s=60)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    invitation = Invitation(job.launch().packed(), gathering.address, gathering.identity.secret)
    worker = context.Process(target=_work, args=(there, invitation, batches, trace))
    worker.start()
    there.close()
    try:
        seen: Seen = here.recv()
    finally:
        worker.join(60)
        conductor.move_out()
        gathering.close()
    assert all(end == RunEnd() for end in ends) and held == [False, *[True] * (batches - 1)]
    assert len(seen.rows) == batches
    return seen


def _work(there: Any, invitation: Invitation, batches: int, trace: bool) -> None:
    given = pa.record_batch(
        [pa.array([0], pa.int32()), pa.array([0], pa.int32()), pa.array([7])], schema=handed_schema([SCHEMA])
    )
    step_times.QUIET_STEPS = 8  # which it remembers: thousands would take long to come together
    seen = Seen()
    for number in range(batches):
        walked: list[int] = [0]
        gc.callbacks.append(look := _noting(walked))
        for out in run_task(invitation, Offer("t", number, 0, number, "q", number), iter([given])):
            seen.rows += zip(out.column(2).to_pylist(), out.column(3).to_pylist(), strict=True)
        gc.callbacks.remove(look)
        gc.collect()  # as PySpark's daemon
        seen.walked.append(max(walked))
        seen.traced_bytes.append(tracemalloc.get_traced_memory()[0])
        seen.open_files.append(len(os.listdir("/proc/self/fd")))
        if trace and number == 10:
            tracemalloc.start()
    there.send(seen)


def _noting(walked: list[int]) -> Callable[[str, dict[str, int]], None]:
    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            walked.append(len(gc.get_objects()))  # without what is frozen

    return look


def test_a_process_grows_by_nothing_with_each_micro_batch(tmp_path: Path) -> None:
    """A slot remembers some of what it did last: after 100 batches it has all that it keeps."""
    seen = run_batches(Counts(), 200, tmp_path, trace=True)
    grown = (seen.traced_bytes[-1] - seen.traced_bytes[99]) / 100
    assert grown < 500, f"{grown:.0f} bytes with each micro-batch"
    assert seen.open_files[-1] <= seen.open_files[99]


def test_cycles_that_users_functions_leave_are_collected(tmp_path: Path) -> None:
    assert [alive for _, alive in run_batches(LeavesCycles(), 5, tmp_path).rows] == [0] * 5


def test_what_a_slot_holds_is_not_walked_with_each_micro_batch(tmp_path: Path) -> None:
    walked = run_batches(HoldsMuch(), 5, tmp_path).walked
    assert max(walked[1:]) < HELD_LISTS / 2, walked


def test_a_task_whose_link_is_lost_while_its_slot_is_busy_with_it_does_not_wait_forever() -> None:
    """The loss then ends the loop that connects channels, and no callback follows."""
    gathering = Gathering(Tuning().coordinator_listening)
    invitation = Invitation(b"", gathering.address, gathering.identity.secret)
    with selectors.DefaultSelector() as selector, contextlib.closing(_Driver(invitation, selector)) as driver:
        driver.link.close()
        with pytest.raises(TidegateError, match="the driver is gone: the link to it was lost"):
            driver.wait()
    gathering.close()
