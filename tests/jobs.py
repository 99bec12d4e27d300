"""Jobs that several tests run, the answers a sequential computation gives, and the checks after a run.

The ledger: numbered records of many keys, each key in one split of a generator, so that the order within a key is given.
The keyed process writes for each record the key, its running number within the key and a sum that depends on the order of
all records of the key before it. So the committed rows are equal to `ledger_of(…)` exactly if nothing was lost, doubled or
reordered within a key, and nothing of the state was.

No pytest in here: slots import this module.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tidegate as tg
from tidegate.connectors.generator import GeneratorSource
from tidegate.connectors.rows import split_id
from tidegate.dataflow.contracts import Offset, SourceContext, SourceReader
from tidegate.driver.job import Job
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store.layout import job_address
from tidegate.store.opening import open_store

SPLITS = 6
KEYS_PER_SPLIT = 50
RECORD = "key long, amount long"
LEDGER = "key long, number long, total long"
MODULUS = 1_000_003

PATIENCE_S = 60.0


def records(split: int, start: int, count: int) -> dict[str, np.ndarray]:
    i = np.arange(start, start + count, dtype=np.int64)
    return {"key": split + SPLITS * (i * 7919 % KEYS_PER_SPLIT), "amount": (i * 2_654_435_761 + split) % 1009}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSource(tg.Source):
    """A generator that keeps to its rate and never ends until the file `gate` is there."""

    generator: GeneratorSource
    gate: str

    @property
    def schema(self) -> pa.Schema:
        return self.generator.schema

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: SourceContext) -> SourceReader:
        return _GatedReader(self, context)


class _GatedReader(SourceReader):
    def __init__(self, source: GatedSource, context: SourceContext) -> None:
        self._source = source
        self._context = context
        self._open = False
        self._reader = source.generator.open(context)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._open and os.path.exists(self._source.gate):
            self._open = True
            generator = replace(self._source.generator, rate=None)
            everybodys = dict.fromkeys(map(split_id, range(generator.split_count)), 0)
            self._reader = generator.open(replace(self._context, restored=everybodys | dict(self._reader.offsets())))
        return self._reader.poll(max_rows if self._open else min(max_rows, 500))

    def offsets(self) -> Mapping[str, Offset]:
        return self._reader.offsets()

    @property
    def finished(self) -> bool:
        return self._open and self._reader.finished


class Ledger(tg.KeyedProcess):
    number = tg.value("long", default=0)
    total = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        number, total = self.number.get() + 1, (self.total.get() * 31 + record.amount) % MODULUS
        self.number.set(number)
        self.total.set(total)
        yield record.key, number, total


def build_ledger(
    job: Job, sink: tg.Sink, *, rows: int | None, rate: float | None = None, gate: Path | None = None, name: str = "out"
) -> Job:
    """`name` is the sink's. With a `gate` the job reads at its rate, and doesn't end, until that file is there; then as fast
    as it can."""
    source: tg.Source = tg.sources.generator(records, schema=RECORD, rows=rows, rate=rate, splits=SPLITS)
    if gate is not None:
        assert isinstance(source, GeneratorSource)
        source = GatedSource(generator=source, gate=str(gate))
    job.source("records", source).key_by("key").process("ledger", Ledger(), returns=LEDGER).to(name, sink)
    return job


def ledger_of(rows: int) -> list[tuple[int, int, int]]:
    """What the job has to write for the first `rows` records, by key and number."""
    out: list[tuple[int, int, int]] = []
    state: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for split in range(SPLITS):
        count = (rows - split + SPLITS - 1) // SPLITS
        made = records(split, 0, count)
        for key, amount in zip(made["key"].tolist(), made["amount"].tolist(), strict=True):
            number, total = state[key]
            state[key] = number, total = number + 1, (total * 31 + amount) % MODULUS
            out.append((key, number, total))
    return sorted(out)


def committed(folder: Path) -> list[tuple[Any, ...]]:
    """The rows of the committed files, in the order in which epochs made them visible."""
    parts = sorted(folder.glob("part-*.parquet"), key=lambda path: [int(n) for n in re.findall(r"-(\d+)(?=-)", path.name)])
    return [tuple(row.values()) for part in parts for row in pq.read_table(part, partitioning=None).to_pylist()]


def check_ledger(rows_written: list[tuple[Any, ...]], rows: int) -> None:
    """The rows are those of the sequential computation, each once and in order within each key."""
    check_order(rows_written)
    expected = ledger_of(rows)
    got = sorted(rows_written)
    if got != expected:
        missing, surplus = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
        raise AssertionError(
            f"{len(got)} rows of {len(expected)}; {len(got) - len(set(got))} doubled; "
            f"missing {len(missing)}: {missing[:5]}…; wrong {len(surplus)}: {surplus[:5]}…"
        )


def check_order(rows_written: list[tuple[Any, ...]]) -> None:
    seen: dict[int, int] = {}
    for key, number, _ in rows_written:
        assert number == seen.get(key, 0) + 1, f"key {key}: number {number} came after {seen.get(key, 0)}"
        seen[key] = number


def check_ledger_kept(rows_written: list[tuple[Any, ...]], rows: int) -> None:
    """At least once: each key's numbers go as far as it has records, or further."""
    expected, counted = Counter(key for key, _, _ in ledger_of(rows)), Counter[int]()
    for key, number, _ in rows_written:
        counted[key] = max(number, counted[key])
    assert expected - counted == Counter(), "records were lost"


def check_clean(snapshots: Path | str, job: str, out: Path | None = None) -> None:
    """Every snapshot is whole, the store holds nothing else, and no output is left pending."""
    store = open_store(job_address(str(snapshots), job))
    catalog = SnapshotCatalog(store)
    listed: set[str] = set()
    assert catalog.epochs(), "no snapshot at all"
    for epoch in catalog.epochs():
        catalog.verify(epoch)
        listed |= {file.name for file in catalog.load(epoch).files()}
    left = set(store.list("state")) - listed
    assert not left, f"files that no snapshot of {catalog.epochs()} lists: {sorted(left)}"
    if out is not None:
        left = {name for name in os.listdir(out / "_tidegate") if not name.endswith(".receipt")}
        assert not left, "pending output after a clean end"


def until(
    condition: Callable[..., Any], what: str, *, handle: tg.Handle | None = None, patience_s: float = PATIENCE_S
) -> Any:
    """Waits for something to be true (and gives it); not for a job that has ended meanwhile."""
    give_up_s = time.monotonic() + patience_s
    while True:
        over = handle is not None and handle.status.terminal
        found = condition()
        if found:
            return found
        told = "" if handle is None else f" ({handle.status}, {handle.failures})"
        assert not over, f"the job ended before {what}{told}"
        assert time.monotonic() < give_up_s, f"still waiting for {what} after {patience_s} s{told}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def completed(handle: tg.Handle) -> list[int]:
    return [report.epoch for report in handle.epochs if report.completed_ms is not None]
