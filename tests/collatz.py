"""A loop that several tests run, the answer of a sequential computation, and the checks after a run.

Numbers go round by Collatz's rule until they are 1. Each carries its steps, and the keyed state counts how often it was
seen: the two are equal for every number exactly if no round was lost or made twice, and the state neither. Most need a
dozen rounds; 27 needs 111, so that snapshots find it under way.

No pytest in here: slots import this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tidegate as tg
from tests.jobs import GatedSource
from tidegate.connectors.generator import GeneratorSource
from tidegate.dataflow.stream import Stream
from tidegate.runtime.job import Job

NUMBER = "id long, n long, steps long"
DONE = "id long, steps long, seen long"
LARGEST = 30


def following(n: int) -> int:
    """Halve the even, triple the odd and add one."""
    return n // 2 if n % 2 == 0 else 3 * n + 1


def first(id: int) -> int:
    return id % LARGEST + 1


def steps_of(id: int) -> int:
    n, steps = first(id), 0
    while n != 1:
        n, steps = following(n), steps + 1
    return steps


class Step(tg.KeyedProcess):
    """One round of one number."""

    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        seen = self.seen.get()
        self.seen.set(seen + 1)
        if record.n == 1:
            ctx.side("done", (record.id, record.steps, seen))
        else:
            yield record.id, following(record.n), record.steps + 1


def numbers(count: int, *, rate: float | None = None, gate: Path | None = None) -> tg.Source:
    """With a `gate` they come at their rate, and don't end, until that file is there; then as fast as they can."""
    source = tg.sources.generator(make_row=lambda id: (id, first(id), 0), schema=NUMBER, rows=count, rate=rate, splits=2)
    if gate is None:
        return source
    assert isinstance(source, GeneratorSource)
    return GatedSource(generator=source, gate=str(gate))


def rounds(stream: Stream) -> tuple[Stream, Stream]:
    stepped = stream.key_by("id").process("step", Step(), returns=NUMBER, side_outputs={"done": DONE})
    return stepped, stepped.side_output("done")


def build_collatz(job: Job, source: tg.Source, sink: tg.Sink) -> Job:
    job.source("numbers", source).iterate("collatz", rounds).to("out", sink)
    return job


def check_collatz(rows_written: list[tuple[Any, ...]], count: int) -> None:
    """Every number came out once, after its own rounds and no others."""
    _same(Counter(rows_written), Counter((id, steps_of(id), steps_of(id)) for id in range(count)))


def check_collatz_kept(rows_written: list[tuple[Any, ...]], count: int) -> None:
    """At least once: every number came out, with its steps; it may have been seen more often."""
    _same(Counter({(id, steps) for id, steps, _ in rows_written}), Counter((id, steps_of(id)) for id in range(count)))
    forgotten = [(id, steps, seen) for id, steps, seen in rows_written if seen < steps]
    assert not forgotten, f"fewer rounds than steps: {forgotten[:5]}…"


def _same(got: Counter[tuple[Any, ...]], expected: Counter[tuple[Any, ...]]) -> None:
    missing, surplus = sorted(expected - got), sorted(got - expected)
    assert got == expected, f"missing {len(missing)}: {missing[:5]}…; doubled or wrong {len(surplus)}: {surplus[:5]}…"
