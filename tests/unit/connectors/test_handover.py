"""Records between a Spark task and its slot, without either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import cloudpickle
import pyarrow as pa

from tidegate.connectors.handover import SLOT, TICK, WHICH, HandedSink, HandedSource, Handover, columns_of, handed_schema

BIDS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("at", pa.timestamp("us", tz="UTC"))])
RULES = pa.schema([pa.field("name", pa.string())])


def handed(*rows: tuple[int, Mapping[str, object]], zone: str = "UTC") -> pa.RecordBatch:
    """As Spark gives them: in the session's time zone."""

    def column(of: int, name: str, kind: pa.DataType) -> pa.Array:
        return pa.array([row.get(name) if which == of else None for which, row in rows], kind)

    return pa.RecordBatch.from_arrays(
        [
            pa.array([which for which, _ in rows], pa.int32()),
            pa.array([0] * len(rows), pa.int32()),
            column(0, "id", pa.int64()),
            column(0, "at", pa.timestamp("us", tz=zone)),
            column(1, "name", pa.string()),
        ],
        names=[WHICH, SLOT, *columns_of(0, 2), *columns_of(1, 1)],
    )


def ids(batch: pa.RecordBatch | None) -> list[int] | None:
    return None if batch is None else batch.column("id").to_pylist()


def test_the_rows_of_each_input_come_out_under_its_schema_in_their_order() -> None:
    handover = Handover([BIDS, RULES])
    assert handover.read
    handover.begin(
        iter(
            [
                handed(
                    (0, {"id": 1, "at": 7}), (1, {"name": "a"}), (TICK, {}), (0, {"id": 2, "at": None}), zone="Europe/Vienna"
                ),
                handed((0, {"id": 3, "at": None})),
            ]
        )
    )
    assert not handover.read
    first = handover.poll(0, 100)
    assert first is not None and first.schema.equals(BIDS) and ids(first) == [1, 2]
    assert ids(handover.poll(0, 100)) == [3]
    assert handover.poll(0, 100) is None and not handover.read, "a rule waits"
    rules = handover.poll(1, 100)
    assert rules is not None and rules.schema.equals(RULES) and rules.to_pylist() == [{"name": "a"}]
    assert handover.read


def test_no_more_rows_are_given_than_asked_for() -> None:
    handover = Handover([BIDS, RULES])
    handover.begin(iter([handed(*((0, {"id": number, "at": None}) for number in range(5)))]))
    assert [ids(handover.poll(0, 2)) for _ in range(4)] == [[0, 1], [2, 3], [4], None]


def test_nothing_is_pulled_while_much_waits_for_another_input() -> None:
    handover = Handover([BIDS, RULES])
    pulled = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(10):
            pulled.append(number)
            yield handed(*((0, {"id": number, "at": None}) for _ in range(10_000)))

    handover.begin(batches())
    for _ in range(10):
        assert handover.poll(1, 100) is None
    assert pulled == [0, 1]


def test_several_outputs_go_out_as_one() -> None:
    handover = Handover([BIDS], [RULES, pa.schema([pa.field("n", pa.dictionary(pa.int32(), pa.string()))])])
    handover.write(0, 3, pa.RecordBatch.from_pylist([{"name": "a"}], schema=RULES))
    handover.write(1, 3, pa.RecordBatch.from_arrays([pa.array(["x"]).dictionary_encode()], names=["n"]))
    batches = handover.take()
    assert handover.take() == []
    assert all(batch.schema.equals(handed_schema([RULES, pa.schema([("n", pa.string())])])) for batch in batches)
    assert [batch.to_pylist() for batch in batches] == [
        [{WHICH: 0, SLOT: 3, "0_0": "a", "1_0": None}],
        [{WHICH: 1, SLOT: 3, "0_0": None, "1_0": "x"}],
    ]
    assert handover.output_columns == [["name"], ["n"]]


def test_what_is_written_after_the_marker_waits_for_the_next_task() -> None:
    handover = Handover([BIDS], [RULES])

    def write(name: str) -> None:
        handover.write(0, 0, pa.RecordBatch.from_pylist([{"name": name}], schema=RULES))

    def taken() -> list[str]:
        return [row["0_0"] for batch in handover.take() for row in batch.to_pylist()]

    write("a")
    handover.seal(0)
    write("b")
    assert taken() == ["a"]
    handover.seal(0)  # the epoch was aborted, this is the marker of the next
    write("c")
    assert taken() == ["b"]
    handover.begin(iter(()))
    write("d")
    assert taken() == ["c", "d"]


def test_sources_and_sinks_refer_to_one_handover_after_their_journey() -> None:
    handover = Handover([BIDS], [RULES])
    source, sink = cloudpickle.loads(cloudpickle.dumps((HandedSource(handover, 0, BIDS), HandedSink(handover, 0))))
    assert source.handover is sink.handover
