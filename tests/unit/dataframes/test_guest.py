"""Tasks in this process: what a process holds of a slot from one micro-batch to the next."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.dataframes.test_micro_batches import batches_in
from tidegate.connectors.handover import handed_schema
from tidegate.control.messages import Offer
from tidegate.control.settings import Tuning
from tidegate.dataframes import guest, transforming
from tidegate.dataframes.gathering import Gathering
from tidegate.dataframes.guest import Invitation, run_task
from tidegate.dataframes.micro_batches import MicroBatches
from tidegate.dataframes.transforming import Bounded
from tidegate.driver.attempts import Restore
from tidegate.store import opening

INPUT = handed_schema([pa.schema([("n", pa.int64())])])


class Process:
    """A driver with a transform of one slot, and the process in which all of the transform's tasks run."""

    def __init__(self, folder: Path) -> None:
        self.gathering = Gathering(Tuning().coordinator_listening)
        self.batches: MicroBatches = batches_in(folder, slots=1)
        self.gathering.add("t", 1, self.batches.conduct, patience_s=60.0)
        payload = self.batches._job.launch().packed()
        self._invitation = Invitation(payload, self.gathering.address, self.gathering.identity.secret)
        self._number = 0

    def run(self, batch: int | None, *, given: int | None = None) -> list[int]:
        self._number += 1
        records = pa.RecordBatch.from_pylist(
            [{"which": 0, "slot": 0, "0_0": batch if given is None else given}], schema=INPUT
        )
        offer = Offer("t", self._number, 0, self._number, None if batch is None else "q", batch)
        out = run_task(self._invitation, offer, iter([records]))
        return [n for handed in out for n in handed.column(2).to_pylist()]

    @property
    def held(self) -> object:
        return guest._held["t"].host


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.batches.move_out()
    process.gathering.close()
    guest._drop_others("no transform")


def test_a_slot_goes_on_with_the_next_batch(process: Process) -> None:
    assert process.run(0) == [0]
    held = process.held
    assert process.run(1) == [1] and process.held is held


def test_nothing_remains_of_a_slot_that_another_one_has_replaced(process: Process) -> None:
    """Whatever is held is frozen, and garbage that is frozen with it would never be collected: a function of `foreachBatch`
    with two actions replaces the slot in every batch."""
    assert process.run(0) == [0]
    replaced = weakref.ref(process.held)
    assert process.run(0) == [0], "the second action of the same batch"
    gc.collect()
    assert replaced() is None


def test_a_process_keeps_nothing_of_the_runs_over_bounded_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of `foreachBatch` may build a transform for each micro-batch, and Spark uses its processes again."""
    monkeypatch.setattr(transforming, "_clear", lambda address: None)  # the driver forgets in its own process
    process = Process(tmp_path)
    bounded = Bounded(job=process.batches._job, restore=Restore(), savepoint_to=None)
    process.gathering.add("t", 1, bounded.conduct, patience_s=60.0)
    try:
        before = set(opening._memory_stores)
        for number in range(3):
            assert process.run(None, given=number) == [number]
        assert set(opening._memory_stores) == before
    finally:
        process.gathering.close()
