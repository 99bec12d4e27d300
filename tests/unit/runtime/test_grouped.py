"""A grouped operator in a job: its epochs are those of the snapshots, and none of its records is in two or in none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

import tidegate as tg
from tests.jobs import LEDGER, MODULUS, RECORD, SPLITS, check_ledger, committed, completed, records, until
from tests.unit.runtime.conftest import Bench
from tidegate.dataflow.grouping import process_groups
from tidegate.dataflow.operators.grouped import GroupedSpec, GroupFunction, Groups, Times
from tidegate.state.descriptors import Descriptor
from tidegate.state.timers import TimerQueue
from tidegate.testing.processes import ProcessJob
from tidegate.types import batch_of, parse_schema, to_list

ROWS = 30_000


class LedgerOfGroups(GroupFunction):
    """What the function `Ledger` of tests/jobs.py does, a key's records at a time."""

    @property
    def states(self) -> Sequence[Descriptor]:
        return [tg.value("struct<number: long, total: long>", name="last")]

    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        self.last, self.cursor = tables["last"], cursor

    def take_initial(self, groups: Groups, times: Times) -> None:
        raise AssertionError("there is none")

    def take_records(self, groups: Groups, times: Times) -> Iterator[pa.RecordBatch]:
        amounts = iter(to_list(groups.rows.column("amount")))
        out = []
        for self.cursor.key, size in zip(groups.keys, groups.sizes, strict=True):
            last = self.last.get() or {"number": 0, "total": 0}
            number, total = last["number"], last["total"]
            for _ in range(size):
                number, total = number + 1, (total * 31 + next(amounts)) % MODULUS
                out.append((self.cursor.key, number, total))
            self.last.set((number, total))
        yield batch_of(out, parse_schema(LEDGER))

    def take_expired(self, expired: Iterator[int], times: Times) -> Iterator[pa.RecordBatch]:
        raise AssertionError("there are no timers")

    def close(self) -> None:
        pass


def build(job: ProcessJob, bench: Bench, rate: float | None) -> ProcessJob:
    source = tg.sources.generator(records, schema=RECORD, rows=ROWS, rate=rate, splits=SPLITS)
    keyed = job.source("records", source).key_by("key")
    process_groups(keyed, "ledger", GroupedSpec(LedgerOfGroups(), ("key",)), parse_schema(LEDGER)).to(
        "out", tg.sinks.parquet(bench.out)
    )
    return job


def test_with_no_snapshot_but_the_last_the_output_comes_at_the_end_of_the_input(bench: Bench) -> None:
    handle = bench.start(build(bench.job(every=None), bench, None))
    assert handle.wait("1 minute") is tg.Status.FINISHED
    check_ledger(committed(bench.out), ROWS)


def test_a_killed_slot_changes_nothing(bench: Bench) -> None:
    handle = bench.start(build(bench.job(every="50 ms"), bench, 10_000))
    until(lambda: completed(handle), "a snapshot", handle=handle)
    os.kill(handle.attempts[-1].slots[1], signal.SIGKILL)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    assert len(handle.failures) == 1
    check_ledger(committed(bench.out), ROWS)
