"""Loops in micro-batches with timers on both clocks: what time puts into a loop goes round in the batch whose time it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tidegate.control.settings import Backend

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOPS, LONGER_MS = 5, 2_000
HOP, DONE = "id long, at long, hops long", "id long, at long"
A_DAY_IN_2020_MS = 1_600_000_000_000
BACKENDS: dict[str, Backend] = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="16 MB")}
# By batch. Some are late when they come, some wait for a later batch, and the third batch moves no time.
TIMES = [[0, 900, 2_500, 6_000], [100, 3_000, 5_500, 7_900], [50, 4_000], [8_000, 12_000], [20_000]]

Hop = tuple[int, int, int]


class Hops(tg.KeyedProcess):
    """A record goes round as often as it has hops. It waits for event time before each odd one, and for a timer of the clock
    that is due at once before each even one. Before the third it waits longer."""

    waiting = tg.list("struct<at: long, hops: long>")

    def process(self, record: Any, ctx: Any) -> None:
        if not record.hops:
            ctx.side("done", (record.id, record.at))
            return
        at = waits_until(record.at, record.hops)
        self.waiting.add({"at": at, "hops": record.hops})
        if record.hops % 2:
            ctx.timers.event_time(at)
        else:
            ctx.timers.processing_time(ctx.now_ms())

    def on_timer(self, at: int, ctx: Any) -> Iterator[Hop]:
        waiting = self.waiting.get()
        due = [each for each in waiting if (each["at"] == at if each["hops"] % 2 else at > A_DAY_IN_2020_MS)]
        self.waiting.replace([each for each in waiting if each not in due])
        for each in due:
            yield ctx.key, each["at"], each["hops"] - 1


def waits_until(at: int, hops: int) -> int:
    return at + LONGER_MS if hops == 3 else at


def hopping(stream: Any) -> Any:
    def body(records: Any) -> Any:
        hopped = records.key_by("id").process("hops", Hops(), returns=HOP, side_outputs={"done": DONE})
        return hopped, hopped.side_output("done")

    return stream.with_watermark("at", "0 s").iterate("round", body)


def one_after_the_other(times: list[list[int]]) -> list[list[tuple[int, int]]]:
    """What must come out in each batch: records of a batch one by one, then time."""
    waiting: list[Hop] = []
    out: list[list[tuple[int, int]]] = []
    watermark = -1
    for number, batch in enumerate(times):
        waiting += [(100 * number + position, at, HOPS) for position, at in enumerate(batch)]
        watermark = max(watermark, *(at - 1 for at in batch))
        waiting, moving = [], waiting
        out.append([])
        for id, at, hops in moving:
            while hops and (hops % 2 == 0 or waits_until(at, hops) <= watermark):
                at, hops = waits_until(at, hops), hops - 1
            if hops:
                waiting.append((id, at, hops))
            else:
                out[-1].append((id, at))
    return out


def add(folder: Path, number: int) -> None:
    """Spark takes them in the order of their times."""
    rows = [(100 * number + position, at, HOPS) for position, at in enumerate(TIMES[number])]
    path = folder / f"{number}.parquet"
    pq.write_table(pa.table([list(column) for column in zip(*rows, strict=True)], names=["id", "at", "hops"]), path)
    os.utime(path, (1e9 + number, 1e9 + number))


@pytest.mark.parametrize("backend", [pytest.param("heap", marks=pytest.mark.long), "rocksdb"])
def test_what_timers_put_into_a_loop_goes_round_in_the_same_batch(spark: SparkSession, tmp_path: Path, backend: str) -> None:
    (tmp_path / "in").mkdir()
    found: dict[int, list[tuple[int, int]]] = {}

    def take(batch: Any, number: int) -> None:
        found[number] = sorted(map(tuple, batch.collect()))

    for numbers, slots in (((0, 1, 2), 2), ((3, 4), 3)):
        for number in numbers:
            add(tmp_path / "in", number)
        stream = spark.readStream.schema(HOP).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        frame = tg.transform(
            stream,
            hopping,
            name="hops",
            slots=slots,
            backend=BACKENDS[backend],
            snapshots=tg.Snapshots(to=str(tmp_path / "state")),
        )
        query = (
            frame.writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "query"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()
    expected = one_after_the_other(TIMES)
    assert [len(each) for each in expected] == [3, 3, 2, 3, 1]
    assert [found[number] for number in range(len(TIMES))] == [sorted(each) for each in expected]
