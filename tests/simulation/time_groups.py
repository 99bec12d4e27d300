"""Two sources of very different speed whose event times are kept together, and a watch over how far they get apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from tests.simulation.expected import expect_rows
from tests.simulation.rows import keys_of_splits, rows_source
from tidegate.dataflow.functions import KeyedProcess
from tidegate.dataflow.operators.source import WatermarkOperator
from tidegate.dataflow.pipeline import Pipeline
from tidegate.state import declaring as state
from tidegate.testing.simulation.faults import Trip
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf

SPAN_MS = 1_200
WINDOW_MS = 50
RECORD = "key long, ts long, n long"


class _Sums(KeyedProcess):
    """Sums per window. A record that is late is told under the window's end with a minus."""

    sums = state.map_("long", "long")

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def process(self, record: Any, ctx: Any) -> Iterable[Row]:
        self._trip.at(record)
        end = record.ts - record.ts % WINDOW_MS + WINDOW_MS
        if end <= ctx.watermark_ms:
            yield record.key, -end, record.n
        else:
            self.sums.put(end, self.sums.get(end, 0) + record.n)
            ctx.timers.event_time(end)

    def on_timer(self, at: int, ctx: Any) -> Iterable[Row]:
        yield ctx.key, at, self.sums.get(at)
        self.sums.remove(at)


class TimeGroup(SimulatedJob):
    """A fast source, which needs few polls for all its time, and a slow one that has many records for the same time. In some
    runs a third is in no group, or has no record at all."""

    name = "time group"
    can_drain = False

    def __init__(self, rng: Random) -> None:
        self._max_ahead_ms = rng.choice((0, 20, 100, 400))
        self._streams = {
            "fast": self._rows(rng, rng.randint(10, 40)),
            "slow": self._rows(rng, rng.randint(60, 150)),
            "empty": [],
            "free": self._rows(rng, rng.randint(10, 60)),
        }
        self._splits = {name: rng.choice((1, 1, 2, 3)) for name in self._streams}
        for name in ("empty", "free"):
            if rng.random() < 0.5:
                del self._streams[name]
        self._idle_after = rng.choice((None, None, "30 ms"))

    @staticmethod
    def _rows(rng: Random, count: int) -> list[Row]:
        keys = keys_of_splits(rng, count, splits=1, keys=rng.randint(1, 8))
        return [(key, 1 + number * SPAN_MS // count, number) for number, key in enumerate(keys)]

    def build(self, pipeline: Pipeline, site: Site) -> None:
        streams = []
        for name, rows in self._streams.items():
            source = site.source(rows_source(rows, RECORD, self._splits[name]))
            streams.append(
                pipeline.source(name, source, parallelism=site.parallelism(name)).with_watermark(
                    "ts", 0, max_ahead=None if name == "free" else self._max_ahead_ms, idle_after=self._idle_after
                )
            )
        (
            streams[0]
            .union(*streams[1:])
            .key_by("key")
            .process("sums", _Sums(site.trip), returns="key long, at long, n long", parallelism=site.parallelism("sums"))
            .to("out", site.sink(), parallelism=site.parallelism("out"))
        )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        out = rows("out")
        windows: Counter[tuple[int, int]] = Counter()
        for key, ts, n in (row for rows in self._streams.values() for row in rows):
            windows[key, ts - ts % WINDOW_MS + WINDOW_MS] += n
        found: Counter[tuple[int, int]] = Counter()
        for key, at, total in out:
            found[key, abs(at)] += total
        if exact:
            expect_rows("window sums", found.items(), windows.items())
            late = [row for row in out if row[1] < 0]
            assert not late or self._idle_after is not None, f"nothing is late, but {late} are"
            fired = [row[:2] for row in out if row[1] > 0]
            assert len(fired) == len(set(fired)), "a window that was closed has opened again"
        else:
            expect_rows("windows", found, windows, exact=False)
        assert not state_of("sums", "sums"), "all windows are closed"


@contextmanager
def nobody_reads_ahead() -> Iterator[list[int]]:
    """Watch all watermark operators: a batch is read only while its source is at most `max_ahead` ahead of the least of its
    group. So with the batch it is at most that and the batch ahead. Yield how far ahead each batch found its source."""
    members: defaultdict[int, list[WatermarkOperator]] = defaultdict(list)  # by attempt
    attempts: dict[int, int] = {}
    distances: list[int] = []
    opened, took = WatermarkOperator.open, WatermarkOperator.on_batch

    def open(self: WatermarkOperator, context: Any) -> None:
        opened(self, context)
        if self.group is not None:
            members[context.attempt].append(self)
            attempts[id(self)] = context.attempt

    def on_batch(self: WatermarkOperator, batch: Any, port: int) -> None:
        if self.group is not None:
            reached = [at_ms for each in members[attempts[id(self)]] if (at_ms := each.reached_ms()) is not None]
            read = self.watermark_ms(self._splits.current) if self._splits is not None else self.reached_ms()
            if reached and read is not None:
                distances.append(read - min(reached))
                assert read <= min(reached) + self.max_ahead_ms, f"{self.name} reads at {read}, and {reached} were reached"
        took(self, batch, port)

    WatermarkOperator.open, WatermarkOperator.on_batch = open, on_batch  # type: ignore[method-assign]
    try:
        yield distances
    finally:
        WatermarkOperator.open, WatermarkOperator.on_batch = opened, took  # type: ignore[method-assign]
