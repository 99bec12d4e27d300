"""`tg.transform` with Spark's own Kafka source and sink, and a real broker on this machine.

The session has jars that the shared one doesn't, so it is in a process of its own. Functions that take a session first run
there. Without the jars (a machine that can't get them) the tests are skipped and say so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.jobs import until
from tests.servers.jars import SPARK_KAFKA, JarsMissing, jars_of
from tests.servers.kafka import KafkaBroker
from tests.servers.spark_process import SparkProcess
from tests.spark.test_transform import Count, DiesOnce, check_counts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.xdist_group("connectors")

EVENT, COUNTS = "id long, key long", "id long, key long, n long"
A_BATCH = 200
ENDS_WITHIN_S = 120


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    try:
        broker = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    except JarsMissing as missing:
        pytest.skip(str(missing))
    with broker:
        yield broker


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkProcess]:
    try:
        jars = jars_of(SPARK_KAFKA)
    except JarsMissing as missing:
        pytest.skip(str(missing))
    with SparkProcess(tmp_path_factory.mktemp("spark"), jars=jars) as process:
        yield process


# --- what runs in the process of the session ---------------------------------------------------------------------------


def send(spark: SparkSession, *, address: str, topic: str, first: int, stop: int) -> None:
    """Events, keyed: those of one key are in one partition of the topic, in their order."""
    (
        spark.range(first, stop, 1, 1)
        .selectExpr("cast(id % 7 as string) as key", "to_json(struct(id, id % 7 as key)) as value")
        .write.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("topic", topic)
        .save()
    )


def decoded(record: Any) -> tuple[int, int]:
    event = json.loads(record.value)
    assert record.key == str(event["key"]).encode()
    return event["id"], event["key"]


def from_kafka(spark: SparkSession, address: str, topic: str) -> DataFrame:
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", A_BATCH)
        .load()
    )


def counts_of(records: DataFrame, folder: str, *, slots: int, dies_at: int | None) -> DataFrame:
    function = Count() if dies_at is None else DiesOnce(f"{folder}/died-{dies_at}", dies_at)

    def pipeline(stream: Any) -> Any:
        events = stream.map(decoded, EVENT, name="decode")
        return events.key_by("key").process("count", function, returns=COUNTS)

    counts: DataFrame = tg.transform(
        records, pipeline, name="counts", slots=slots, snapshots=tg.Snapshots(to=f"{folder}/snapshots")
    )
    return counts


def start(frame: DataFrame, folder: str, format: str, options: dict[str, str], **trigger: Any) -> StreamingQuery:
    return (
        frame.writeStream.format(format)
        .option("checkpointLocation", f"{folder}/query")
        .options(**options)
        .trigger(**trigger)
        .start()
    )


def run(frame: DataFrame, folder: str, format: str, options: dict[str, str]) -> int:
    """All that is there. Gives the number of the last micro-batch."""
    query = start(frame, folder, format, options, availableNow=True)
    try:
        assert query.awaitTermination(ENDS_WITHIN_S), "it doesn't end"
        assert query.lastProgress is not None
        return int(query.lastProgress.batchId)
    finally:
        query.stop()


def kafka_to_files(
    spark: SparkSession, *, address: str, topic: str, folder: str, slots: int, dies_at: int | None = None
) -> int:
    counts = counts_of(from_kafka(spark, address, topic), folder, slots=slots, dies_at=dies_at)
    return run(counts, folder, "parquet", {"path": f"{folder}/out"})


def begin_kafka_to_files(spark: SparkSession, *, address: str, topic: str, folder: str) -> None:
    """It goes on until `end_query`."""
    counts = counts_of(from_kafka(spark, address, topic), folder, slots=2, dies_at=None)
    start(counts, folder, "parquet", {"path": f"{folder}/out"}, processingTime="0 seconds")


def end_query(spark: SparkSession) -> None:
    """When it has done all that is there."""
    (query,) = spark.streams.active
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def kafka_to_kafka(spark: SparkSession, *, address: str, topic: str, to: str, folder: str, fails: bool) -> int:
    counts = counts_of(from_kafka(spark, address, topic), folder, slots=2, dies_at=None)
    if fails:
        # In one of two tasks of the stage that writes: what the other one writes is in the topic all the same.
        counts = counts.selectExpr("if(id = 250, raise_error('the sink fails'), id) as id", "key", "n")
    values = counts.selectExpr("cast(key as string) as key", "to_json(struct(*)) as value")
    return run(values, folder, "kafka", {"kafka.bootstrap.servers": address, "topic": to})


def rows_in(spark: SparkSession, *, format: str, path: str) -> list[dict[str, int]]:
    return [row.asDict() for row in spark.read.format(format).load(path).collect()]


def values_in(spark: SparkSession, *, address: str, topic: str) -> list[str]:
    found = spark.read.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", topic).load()
    return [row.value for row in found.selectExpr("cast(value as string) as value").collect()]


# --- Kafka -------------------------------------------------------------------------------------------------------------


def check_exactly_once(rows: list[dict[str, int]], ids: range) -> None:
    """Also in the order of each key."""
    check_counts([SimpleNamespace(**row) for row in rows], ids)
    for key in range(7):
        numbered = {row["n"]: row["id"] for row in rows if row["key"] == key}
        assert [numbered[n] for n in sorted(numbered)] == sorted(numbered.values())


def test_kafka_into_files_is_exactly_once_over_a_killed_slot_and_a_restart(
    broker: KafkaBroker, process: SparkProcess, tmp_path: Path
) -> None:
    topic = {"address": broker.address, "topic": "events"}
    query = {**topic, "folder": str(tmp_path)}
    process.call(send, **topic, first=0, stop=600)
    assert process.call(kafka_to_files, **query, slots=2, dies_at=350) >= 2
    assert (tmp_path / "died-350").exists()
    process.call(send, **topic, first=600, stop=900)
    process.call(kafka_to_files, **query, slots=3)
    check_exactly_once(process.call(rows_in, format="parquet", path=f"{tmp_path}/out"), range(900))


@pytest.mark.long
def test_into_kafka_is_at_least_once(broker: KafkaBroker, process: SparkProcess, tmp_path: Path) -> None:
    """As Spark's own Kafka sink is: what a batch wrote before it failed stays, and is written again."""
    topic = {"address": broker.address, "topic": "more-events"}
    query = {**topic, "to": "counts", "folder": str(tmp_path)}
    process.call(send, **topic, first=0, stop=400)
    with pytest.raises(AssertionError, match="the sink fails"):
        process.call(kafka_to_kafka, **query, fails=True)
    process.call(kafka_to_kafka, **query, fails=False)
    values = process.call(values_in, address=broker.address, topic="counts")
    rows = [dict(row) for row in {tuple(json.loads(value).items()) for value in values}]
    check_exactly_once(rows, range(400))
    assert max(Counter(values).values()) <= 2


@pytest.mark.long
def test_a_broker_that_is_killed_and_comes_back_loses_nothing(
    broker: KafkaBroker, process: SparkProcess, tmp_path: Path
) -> None:
    topic = {"address": broker.address, "topic": "long-events"}
    process.call(send, **topic, first=0, stop=400)
    process.call(begin_kafka_to_files, **topic, folder=str(tmp_path))
    until(lambda: list(tmp_path.glob("query/commits/0")), "the first micro-batch")
    broker.kill()
    broker.start()
    process.call(send, **topic, first=400, stop=700)
    process.call(end_query)
    check_exactly_once(process.call(rows_in, format="parquet", path=f"{tmp_path}/out"), range(700))
