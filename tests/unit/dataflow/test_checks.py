"""Every mistake that can be seen while the job is written: the error names the operator and says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.dataflow.described import Nowhere, Records
from tidegate.dataflow.functions import BroadcastProcess, CoProcess, Function, KeyedProcess, Process
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.stream import Stream
from tidegate.errors import GraphError, JobError, SchemaError
from tidegate.state.declaring import broadcast_map, list_, operator_list, value
from tidegate.types import parse_schema

BIDS = "auction long, price double, at string, tags map<string,string>, ts timestamp"


class OnlyLongs(Nowhere):
    def check(self, schema: pa.Schema) -> None:
        for field in schema:
            if field.type != pa.int64():
                raise SchemaError(f"column {field.name!r} is no long; cast it with map")


class Keyed(KeyedProcess):
    def process(self, record: Any, ctx: Any) -> None: ...


class Plain(Process):
    def process(self, record: Any, ctx: Any) -> None: ...


class Two(CoProcess):
    def process_left(self, record: Any, ctx: Any) -> None: ...

    def process_right(self, record: Any, ctx: Any) -> None: ...


class Rules(BroadcastProcess):
    def process(self, record: Any, ctx: Any) -> None: ...

    def process_broadcast(self, record: Any, ctx: Any) -> None: ...


class PlainWithKeyedState(Plain):
    count = value("long")


class TwoWithKeyedState(Two):
    names = list_("string")


class RulesWithKeyedState(Rules):
    count = value("long")


class KeyedWithBroadcastState(Keyed):
    rules = broadcast_map("string", "double")


class TwoOfOneName(Keyed):
    one = value("long", name="same")
    other = list_("long", name="same")


class EnginesName(Keyed):
    timers = value("long", name="__event_timers")


class StateInInit(Keyed):
    def __init__(self) -> None:
        self.count = value("long")


class NoContext(KeyedProcess):
    def process(self, record: Any) -> None: ...  # type: ignore[override]


class TooManyInTimer(Keyed):
    def on_timer(self, at: int, key: Any, ctx: Any) -> None: ...  # type: ignore[override]


class Asynchronous(KeyedProcess):
    async def process(self, record: Any, ctx: Any) -> None: ...  # type: ignore[override]


class AsynchronousCall:
    async def __call__(self, record: Any) -> None: ...


async def coroutine(record: Any) -> Any: ...


def generator(record: Any) -> Iterable[Any]:
    yield record


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
def bids(pipeline: Pipeline) -> Stream:
    return pipeline.source("bids", Records(BIDS))


def complaint(kind: type[JobError], write: Callable[[], Any]) -> str:
    with pytest.raises(JobError) as raised:
        write()
    assert type(raised.value) is kind, raised.value
    return str(raised.value)


def says(message: str, *parts: str) -> bool:
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"
    return True


# ---------------------------------------------------------------------------------------------- names and numbers


@pytest.mark.parametrize(
    "again",
    [
        lambda s: s.to("bids", Nowhere()),
        lambda s: s.process("bids", Plain()),
        lambda s: s.map(lambda bid: bid, returns=BIDS, name="bids"),
        lambda s: s.with_watermark("ts", "1 s", name="bids"),
    ],
)
def test_a_name_is_given_once(bids: Stream, again: Callable[[Stream], Any]) -> None:
    assert says(complaint(GraphError, lambda: again(bids)), "'bids'", "already taken by a source", "choose another")


def test_a_generated_name_that_the_user_gives_later_is_explained(bids: Stream) -> None:
    bids.filter(bool)
    message = complaint(GraphError, lambda: bids.to("filter-1", Nowhere()))
    assert says(message, "sink 'filter-1'", "by a generated name", "choose another")


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\\b", "a\nb", ".hidden", "ends with space ", "x" * 65])
def test_a_name_must_fit_into_file_names(bids: Stream, name: str) -> None:
    assert says(complaint(GraphError, lambda: bids.to(name, Nowhere())), f"sink {name!r}", "begins with a letter")


@pytest.mark.parametrize("name", ["bid counts", "Zähler", "count-2", "a.b", "x" * 64])
def test_names_may_have_spaces_and_letters_of_any_language(bids: Stream, name: str) -> None:
    bids.to(name, Nowhere())


def test_a_name_is_text(pipeline: Pipeline) -> None:
    message = complaint(GraphError, lambda: pipeline.source(Records(BIDS), Records(BIDS)))  # type: ignore[arg-type]
    assert says(message, "source's name", "give a text")


@pytest.mark.parametrize("parallelism", [0, -1, 1.5, True, "2"])
def test_parallelism_is_a_whole_number_from_one_on(bids: Stream, parallelism: Any) -> None:
    message = complaint(GraphError, lambda: bids.filter(bool, name="dear", parallelism=parallelism))
    assert says(message, "operator 'dear'", f"parallelism={parallelism!r}", "whole number from 1 on")


# ------------------------------------------------------------------------------------------------ columns and types


def test_an_unknown_key_column_is_named_with_the_closest_one(bids: Stream) -> None:
    message = complaint(SchemaError, lambda: bids.key_by("acution"))
    assert says(message, "key_by after 'bids'", "no column 'acution'", "Did you mean 'auction'?", f"are: {BIDS}")


def test_an_unknown_column_like_none_that_is_there_gets_the_list_alone(bids: Stream) -> None:
    message = complaint(SchemaError, lambda: bids.key_by("zzz"))
    assert says(message, "no column 'zzz'", f"columns are: {BIDS}") and "Did you mean" not in message


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        ((), "at least one column, such as key_by('auction')"),
        (("auction", "auction"), "name each once"),
        ((["auction", "price"],), "key_by(*columns)"),
        ((lambda bid: bid.auction,), "compute the key into a column with map"),
        ((1,), "give the column's name"),
        (("auction % 2",), 'make it a column first: with_columns(key="auction % 2").key_by("key")'),
        (("tags",), "can't be a key; take the entries that matter into columns"),
    ],
)
def test_a_key_is_made_of_columns(bids: Stream, columns: tuple[Any, ...], advice: str) -> None:
    assert says(complaint(SchemaError, lambda: bids.key_by(*columns)), "key_by after 'bids'", advice)


def test_a_map_deep_within_a_column_is_no_key_either(pipeline: Pipeline) -> None:
    stream = pipeline.source("s", Records("a struct<b:array<map<string,long>>>"))
    assert says(complaint(SchemaError, lambda: stream.key_by("a")), "column 'a'", "can't be a key")


@pytest.mark.parametrize(
    "write",
    [
        lambda s, ddl: s.map(lambda bid: bid, returns=ddl, name="op"),
        lambda s, ddl: s.flat_map(lambda bid: bid, returns=ddl, name="op"),
        lambda s, ddl: s.map_batches(lambda batch: batch, returns=ddl, name="op"),
        lambda s, ddl: s.process("op", Plain(), returns=ddl),
        lambda s, ddl: s.key_by("auction").process("op", Keyed(), returns=ddl),
        lambda s, ddl: s.connect(s).process("op", Two(), returns=ddl),
    ],
)
def test_a_wrong_ddl_names_the_operator(bids: Stream, write: Callable[[Stream, str], Any]) -> None:
    message = complaint(SchemaError, lambda: write(bids, "auction lng"))
    assert says(message, "operator 'op', returns:", "did you mean 'long'?")


def test_a_wrong_ddl_of_a_side_output_names_its_tag(bids: Stream) -> None:
    message = complaint(SchemaError, lambda: bids.process("op", Plain(), side_outputs={"late": "a lng"}))
    assert says(message, "operator 'op', side_outputs['late']:", "did you mean 'long'?")


def test_something_that_is_no_schema_is_refused(bids: Stream) -> None:
    message = complaint(SchemaError, lambda: bids.map(lambda bid: bid, returns=["auction"]))
    assert says(message, "operator 'map-1', returns:", "give Spark DDL text such as")


def test_columns_of_an_arrow_schema_have_names_of_their_own(bids: Stream) -> None:
    schema = pa.schema([("a", pa.int64()), ("a", pa.string())])
    message = complaint(SchemaError, lambda: bids.map(lambda bid: bid, returns=schema))
    assert says(message, "operator 'map-1', returns:", "'a'", "twice")


def test_a_source_of_types_that_spark_lacks_is_refused(pipeline: Pipeline) -> None:
    source = Records(pa.schema([("a", pa.uint64())]))
    assert says(complaint(SchemaError, lambda: pipeline.source("bids", source)), "'bids'", "uint64", "cast it")


def test_keys_of_connected_streams_have_the_same_types(pipeline: Pipeline, bids: Stream) -> None:
    items = pipeline.source("items", Records("item int, name string"))
    message = complaint(SchemaError, lambda: bids.key_by("auction").connect(items.key_by("item")))
    assert says(
        message,
        "connect after 'bids'",
        "left key is (auction long)",
        "right one (item int)",
        "never meet",
        "bring one to the other's type before key_by, such as right.with_columns(item='CAST(item AS long)')",
    )


def test_keys_of_connected_streams_have_as_many_columns(pipeline: Pipeline, bids: Stream) -> None:
    items = pipeline.source("items", Records("item long, name string"))
    message = complaint(SchemaError, lambda: bids.key_by("auction").connect(items.key_by("item", "name")))
    assert says(message, "connect after 'bids'", "(item long, name string)", "as many columns")


def test_united_streams_have_one_schema(pipeline: Pipeline, bids: Stream) -> None:
    items = pipeline.source("items", Records("item long"))
    message = complaint(SchemaError, lambda: bids.union(items))
    assert says(message, "union after 'bids' with 'items'", BIDS, "(item long)", "bring them to one with map")


def test_united_streams_that_differ_for_arrow_alone_are_shown_in_its_terms(pipeline: Pipeline) -> None:
    one = pipeline.source("one", Records(pa.schema([("a", pa.string())])))
    two = pipeline.source("two", Records(pa.schema([("a", pa.large_string())])))
    assert says(complaint(SchemaError, lambda: one.union(two)), "(a string)", "(a large_string)")


def test_keys_that_hash_alike_may_meet(pipeline: Pipeline) -> None:
    one = pipeline.source("one", Records(pa.schema([("a", pa.string())])))
    two = pipeline.source("two", Records(pa.schema([("b", pa.large_string())])))
    one.key_by("a").connect(two.key_by("b")).process("join", Two())


@pytest.mark.parametrize("column", ["at", "price", "tags"])
def test_event_time_is_a_time(bids: Stream, column: str) -> None:
    message = complaint(SchemaError, lambda: bids.with_watermark(column, "1 s"))
    assert says(message, "operator 'watermark-1'", f"column {column!r} is of type", "a timestamp, a date or a long")
    assert f'with_columns({column}="CAST({column} AS ' in message


def test_event_time_is_a_column_that_is_there(bids: Stream) -> None:
    message = complaint(SchemaError, lambda: bids.with_watermark("tss", "1 s", name="event time"))
    assert says(message, "operator 'event time'", "Did you mean 'ts'?")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"delay": "five"}, ("delay", "5 seconds")),
        ({"delay": -1}, ("delay", "-1")),
        ({"delay": "1 s", "idle_after": "soon"}, ("idle_after", "5 seconds")),
        ({"delay": "1 s", "idle_after": 30}, ("idle_after=30: give the unit, too: '30 s' or '30 ms'",)),
        ({"delay": "1 s", "idle_after": 0}, ("idle_after", "such as '30 seconds'")),
        ({"delay": "1 s", "max_ahead": "far"}, ("max_ahead", "5 seconds")),
        ({"delay": "1 s", "group": "events"}, ("group='events' has no effect without max_ahead",)),
        ({"delay": "1 s", "max_ahead": 0, "group": 7}, ("group=7", "such as 'events'")),
        ({"delay": "1 s", "by": len}, ("a column and a delay, or by=function, not both",)),
        ({}, ("with_watermark('ts', '5 seconds')", "with '0 s' the column never goes back")),
    ],
)
def test_the_times_of_a_watermark_are_durations(bids: Stream, arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = complaint(GraphError, lambda: bids.with_watermark("ts", **arguments))
    assert says(message, "operator 'watermark-1'", *parts)


def test_a_watermark_by_a_function_takes_one_that_can_be_called_with_a_batch(bids: Stream) -> None:
    message = complaint(GraphError, lambda: bids.with_watermark(by="ts"))  # type: ignore[arg-type]
    assert says(message, "with_watermark(by=…) takes a function, not 'ts'")
    message = complaint(GraphError, lambda: bids.with_watermark(by=lambda: 1))  # type: ignore[arg-type, misc]
    assert says(message, "calls it with one argument, the batch")


def test_only_a_source_can_wait_for_others(pipeline: Pipeline, bids: Stream) -> None:
    united = bids.union(pipeline.source("more", Records(BIDS)))
    united.with_watermark("ts", "1 s", max_ahead="1 minute").to("out", Nowhere())
    message = complaint(GraphError, lambda: make_plan(pipeline.build(), slots=2, key_group_count=8))
    assert says(message, "operator 'watermark-1'", "follow one source directly", "Put with_watermark before the union")


def test_without_chaining_nothing_may_come_between_a_source_that_waits_and_its_watermark(pipeline: Pipeline) -> None:
    kept = pipeline.source("bids", Records(BIDS)).filter(lambda bid: bid.price > 1)
    kept.with_watermark("ts", "1 s", max_ahead="1 minute").to("out", Nowhere())
    make_plan(pipeline.build(), slots=2, key_group_count=8)
    message = complaint(GraphError, lambda: make_plan(pipeline.build(), slots=2, key_group_count=8, chaining=False))
    assert says(message, "operator 'watermark-1'", "the records come from 'filter-1'")


def test_a_source_waits_for_one_group(pipeline: Pipeline, bids: Stream) -> None:
    for group in ("one", "other"):
        bids.with_watermark("ts", "1 s", max_ahead="1 minute", group=group).to(group, Nowhere())
    message = complaint(GraphError, lambda: make_plan(pipeline.build(), slots=2, key_group_count=8))
    assert says(message, "operators 'watermark-1' and 'watermark-2'", "given twice for source 'bids'")


def test_between_dataframes_spark_reads() -> None:
    class Transform(Pipeline):
        time_by_epoch = True

    bids = Transform().source("bids", Records(BIDS))
    message = complaint(GraphError, lambda: bids.with_watermark("ts", "1 s", max_ahead="1 minute"))
    assert says(message, "max_ahead='1 minute' can't be used between Spark's DataFrames", "tg.Job and tg.sources")


# ------------------------------------------------------------------------------------------------ sources and sinks


def test_a_source_is_an_instance_of_source(pipeline: Pipeline) -> None:
    assert says(
        complaint(GraphError, lambda: pipeline.source("bids", Records)),  # type: ignore[arg-type]
        "source 'bids'",
        "Records is a class",
        "Records(…)",
    )
    assert says(
        complaint(GraphError, lambda: pipeline.source("bids", [1, 2])),  # type: ignore[arg-type]
        "source 'bids'",
        "[1, 2] is not a source",
        "tg.sources",
    )


def test_a_sink_is_an_instance_of_sink(bids: Stream) -> None:
    assert says(
        complaint(GraphError, lambda: bids.to("out", Nowhere)),  # type: ignore[arg-type]
        "sink 'out'",
        "Nowhere is a class",
        "Nowhere(…)",
    )
    assert says(
        complaint(GraphError, lambda: bids.to("out", "counts/")),  # type: ignore[arg-type]
        "sink 'out'",
        "'counts/' is not a sink",
        "tg.sinks",
    )


def test_a_sink_says_what_it_can_not_take(bids: Stream) -> None:
    message = complaint(SchemaError, lambda: bids.to("out", OnlyLongs()))
    assert says(message, "sink 'out'", "column 'price' is no long", "cast it with map")


# ------------------------------------------------------------------------------------------------- user's functions


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (lambda s: s.map("x", returns="a long"), ("operator 'map-1'", "takes a function, not 'x'")),
        (lambda s: s.map(Plain(), returns="a long"), ("operator 'map-1'", "process function", ".process(")),
        (lambda s: s.filter(Keyed), ("operator 'filter-1'", "Keyed is a process function", ".process(")),
        (lambda s: s.map(generator, returns="a long"), ("operator 'map-1'", "generator", "use flat_map")),
        (lambda s: s.filter(generator), ("operator 'filter-1'", "generator", "return True or False")),
        (lambda s: s.map(lambda: 1, returns="a long"), ("operator 'map-1'", "one argument, the record")),
        (lambda s: s.map_batches(lambda a, b: a, returns="a long"), ("operator 'map_batches-1'", "the batch")),
        (lambda s: s.flat_map(coroutine, returns="a long"), ("operator 'flat_map-1'", "asynchronous", "async def")),
        (lambda s: s.map(AsynchronousCall(), returns="a long"), ("operator 'map-1'", "asynchronous", "async def")),
    ],
)
def test_a_function_can_be_called_with_a_record(
    bids: Stream, write: Callable[[Stream], Any], parts: tuple[str, ...]
) -> None:
    assert says(complaint(GraphError, lambda: write(bids)), *parts)


def test_functions_that_do_not_tell_their_arguments_are_taken(bids: Stream) -> None:
    bids.map(int, returns="a long")
    bids.flat_map(generator, returns=BIDS)


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (lambda s: s.process("op", Keyed()), ("Keyed is a KeyedProcess", "belongs after key_by", ".key_by(…).process(…)")),
        (lambda s: s.key_by("at").process("op", Plain()), ("Plain is a Process", "without key", "keyed by at", "tg.Keyed")),
        (lambda s: s.process("op", Two()), ("Two is a CoProcess", "left.connect(right).process(…)")),
        (lambda s: s.key_by("at").process("op", Rules()), ("Rules is a BroadcastProcess", "connect(rules.broadcast())")),
        (lambda s: s.connect(s).process("op", Rules()), ("Rules is a BroadcastProcess", "two connected streams takes")),
        (lambda s: s.connect(s.broadcast()).process("op", Two()), ("Two is a CoProcess", "tg.BroadcastProcess")),
        (lambda s: s.process("op", Plain), ("Plain is a class", "pass an instance: Plain(…)")),
        (lambda s: s.process("op", generator), ("not generator", "tg.Process", "map, flat_map and filter")),
        (lambda s: s.process("op", None), ("not None", "tg.Process")),
        (lambda s: s.key_by("at").process("op", NoContext()), ("NoContext.process", "process(self, record, ctx)")),
        (lambda s: s.key_by("at").process("op", TooManyInTimer()), ("TooManyInTimer.on_timer", "on_timer(self, at, ctx)")),
        (lambda s: s.key_by("at").process("op", Asynchronous()), ("Asynchronous.process", "async def")),
    ],
)
def test_a_process_function_is_where_it_belongs(
    bids: Stream, write: Callable[[Stream], Any], parts: tuple[str, ...]
) -> None:
    assert says(complaint(GraphError, lambda: write(bids)), "operator 'op'", *parts)


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (
            lambda s: s.process("op", PlainWithKeyedState()),
            ("state 'count' (value)", "use key_by first and make PlainWithKeyedState a KeyedProcess", "tg.operator_list"),
        ),
        (lambda s: s.connect(s).process("op", TwoWithKeyedState()), ("state 'names' (list)", "key_by first on both")),
        (lambda s: s.connect(s.broadcast()).process("op", RulesWithKeyedState()), ("'count' (value)", "key_by first")),
        (
            lambda s: s.key_by("at").process("op", KeyedWithBroadcastState()),
            ("state 'rules'", "only a BroadcastProcess", "tg.map"),
        ),
        (lambda s: s.key_by("at").process("op", TwoOfOneName()), ("two states named ['same']", "another name=")),
        (lambda s: s.key_by("at").process("op", EnginesName()), ("'__event_timers'", "another name=")),
        (lambda s: s.key_by("at").process("op", StateInInit()), ("'count' is set on an instance", "in the class body")),
    ],
)
def test_state_is_declared_where_it_can_be_kept(
    bids: Stream, write: Callable[[Stream], Any], parts: tuple[str, ...]
) -> None:
    assert says(complaint(GraphError, lambda: write(bids)), "operator 'op'", *parts)


def test_state_that_is_declared_where_it_can_be_kept_is_taken(bids: Stream) -> None:
    class WithOperatorState(Keyed):
        seen = operator_list("long")
        count = value("long")

    class WithBroadcastState(RulesWithKeyedState):
        rules = broadcast_map("string", "double")

    keyed = bids.key_by("auction")
    keyed.process("a", WithOperatorState())
    keyed.connect(keyed).process("b", TwoWithKeyedState())
    keyed.connect(bids.broadcast()).process("c", WithBroadcastState())


def test_one_function_serves_one_operator(bids: Stream) -> None:
    function = Plain()
    bids.process("first", function)
    message = complaint(GraphError, lambda: bids.process("second", function))
    assert says(message, "operator 'second'", "already the function of 'first'", "make a second instance")


def test_what_was_refused_leaves_no_trace(bids: Stream, pipeline: Pipeline) -> None:
    function = Plain()
    complaint(SchemaError, lambda: bids.process("op", function, returns="a lng"))
    complaint(GraphError, lambda: bids.process("op", function, parallelism=0))
    complaint(GraphError, lambda: bids.process("op", function, side_outputs=["late"]))  # type: ignore[arg-type]
    bids.process("op", function)
    assert len(pipeline.build().nodes) == 2


def test_a_timer_without_on_timer_is_an_error_that_says_so() -> None:
    for function in (Keyed(), Two(), Rules()):
        with pytest.raises(JobError, match=rf"define on_timer\(self, at, ctx\) in {type(function).__name__}"):
            function.on_timer(0, None)  # type: ignore[arg-type]


def test_the_optional_methods_of_a_function_do_nothing() -> None:
    function: Function = Plain()
    function.open(None)
    function.on_snapshot_complete(1)
    function.close()


# ------------------------------------------------------------------------------------------------------- the graph


def test_an_empty_job_is_refused(pipeline: Pipeline) -> None:
    assert says(complaint(GraphError, pipeline.build), "empty", "job.source(name, source)")


def test_a_source_must_lead_somewhere(pipeline: Pipeline, bids: Stream) -> None:
    assert says(complaint(GraphError, pipeline.build), "source 'bids' goes nowhere", ".to(name, sink)")


def test_an_operator_must_lead_somewhere(pipeline: Pipeline, bids: Stream) -> None:
    bids.filter(bool)
    message = complaint(GraphError, pipeline.build)
    assert says(message, "filter 'filter-1' goes nowhere", ".to(name, sink)") and "returns" not in message


def test_a_declared_output_must_lead_somewhere(pipeline: Pipeline, bids: Stream) -> None:
    bids.process("op", Plain(), returns="a long")
    assert says(complaint(GraphError, pipeline.build), "process 'op' goes nowhere", "omit returns=")


@pytest.mark.parametrize(
    "use",
    [
        lambda s, other: s.to("out", Nowhere()),
        lambda s, other: s.map(lambda row: row, returns="a long"),
        lambda s, other: s.key_by("a"),
        lambda s, other: s.union(other),
        lambda s, other: other.union(s),
        lambda s, other: other.connect(s),
        lambda s, other: s.connect(other),
        lambda s, other: s.broadcast(),
        lambda s, other: s.with_watermark("a", 0),
    ],
)
def test_an_operator_without_output_can_not_be_read(bids: Stream, use: Callable[[Stream, Stream], Any]) -> None:
    silent = bids.process("op", Plain())
    assert says(complaint(GraphError, lambda: use(silent, bids)), "operator 'op' has no output", "returns='column type")


def test_streams_of_two_jobs_do_not_mix(bids: Stream) -> None:
    other = Pipeline().source("other", Records(BIDS))
    for write in (
        lambda: bids.union(other),
        lambda: bids.connect(other),
        lambda: bids.connect(other.broadcast()),
        lambda: bids.key_by("at").connect(other.key_by("at")),
    ):
        assert says(complaint(GraphError, write), "after 'bids'", "different jobs", "of one")


def test_connected_streams_are_both_keyed_or_neither(pipeline: Pipeline, bids: Stream) -> None:
    keyed: Any = bids.key_by("auction")
    unkeyed: Any = bids
    for write in (lambda: unkeyed.connect(keyed), lambda: keyed.connect(unkeyed)):
        assert says(complaint(GraphError, write), "connect after 'bids'", "keyed by auction", "key_by on both")


@pytest.mark.parametrize("other", [None, 1, "items"])
def test_connect_takes_a_stream(bids: Stream, other: Any) -> None:
    for stream in (bids, bids.key_by("at")):
        message = complaint(GraphError, partial(stream.connect, other))
        assert says(message, "connect after 'bids'", f"takes a stream, not {other!r}")


def test_union_comes_before_key_by_and_broadcast(bids: Stream) -> None:
    keyed: Any = bids.key_by("auction")
    broadcast: Any = bids.broadcast()
    assert says(complaint(GraphError, lambda: bids.union(keyed)), "after 'bids'", "a keyed stream", "unite", "first")
    assert says(complaint(GraphError, lambda: bids.union(broadcast)), "after 'bids'", "a broadcast stream", "first")


def test_an_undeclared_side_output_is_named_with_the_closest_one(bids: Stream) -> None:
    stream = bids.process("op", Plain(), returns="a long", side_outputs={"late": "a long", "broken": "a long"})
    message = complaint(GraphError, lambda: stream.side_output("lat"))
    assert says(
        message,
        "operator 'op' declares no side output 'lat'",
        "Did you mean 'late'?",
        "'late', 'broken'",
        "side_outputs={'lat':",
    )
    assert says(complaint(GraphError, lambda: bids.side_output("late")), "operator 'bids'", "It has none")


def test_an_undeclared_side_output_of_late_records_is_named_with_the_argument_that_declares_it(bids: Stream) -> None:
    keyed = bids.key_by("auction")
    windows = keyed.window(tg.tumbling("ts", "10 s"))
    others = bids.select("auction", "ts AS later").key_by("auction")
    for made, advice in (
        (windows.aggregate("a", n=tg.count()), ".window(…, late='late')"),
        (windows.apply("b", lambda window, records: None, returns="n long"), ".window(…, late='late')"),
        (windows.top("c", 3, by="ts"), ".window(…, late='late')"),
        (keyed.window(tg.sessions("ts", "1 s")).apply("d", lambda window, records: None, returns="n long"), ".window("),
        (keyed.join("e", others, between=(0, 1), times=("ts", "later")), ".join('e', …, late=('late', None))"),
        (keyed.join("f", others, as_of=("ts", "later")), ".join('f', …, late=('late', None))"),
        (bids.filter("price > 1"), "Side outputs are of process(…), of late records (late=)"),
    ):
        message = complaint(GraphError, partial(made.side_output, "late"))
        assert says(message, "declares no side output 'late'", advice) and "side_outputs=" not in message


def test_side_outputs_belong_to_an_operator(bids: Stream) -> None:
    stream = bids.process("op", Plain(), returns="a long", side_outputs={"late": "a long"})
    for other in (stream.union(stream), stream.rebalance(), stream.side_output("late")):
        message = complaint(GraphError, partial(other.side_output, "late"))
        assert says(message, "side_output('late') after", "'op'", "call side_output on what process(…) returned")


def test_a_side_output_of_an_operator_without_main_output_can_be_read(bids: Stream) -> None:
    late = bids.process("op", Plain(), side_outputs={"late": "a long"}).side_output("late")
    assert late.schema == parse_schema("a long")


def test_side_outputs_are_a_dictionary_of_schemas(bids: Stream) -> None:
    message = complaint(GraphError, lambda: bids.process("op", Plain(), side_outputs=["late"]))  # type: ignore[arg-type]
    assert says(message, "operator 'op'", "['late']", "give a dictionary")


def test_methods_that_a_keyed_stream_lacks_say_where_to_go(bids: Stream) -> None:
    keyed: Any = bids.key_by("auction")
    with pytest.raises(AttributeError, match=r"keyed stream has no 'filter': call \.filter\(…\) before key_by"):
        keyed.filter(bool)
    with pytest.raises(AttributeError, match=r"keyed stream has no 'resample'$"):
        keyed.resample()


def test_methods_that_a_broadcast_stream_lacks_say_where_to_go(bids: Stream) -> None:
    rules: Any = bids.broadcast()
    with pytest.raises(AttributeError, match=r"has no 'connect'.*stream\.connect\(rules\.broadcast\(\)\)"):
        rules.connect(bids)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("aggregate", "call key_by(…) before it"),
        ("join", "left.key_by(…).join(name"),
        ("groupBy", "call key_by(…)"),
        ("dropDuplicates", "call key_by(…).deduplicate(name)"),
        ("top", "call key_by(…) before it, or window(…)"),
        ("withWatermark", "call with_watermark(…)"),
    ],
)
def test_what_users_of_dataframes_look_for_has_another_name(bids: Stream, name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=f"a stream has no '{name}'") as raised:
        getattr(bids, name)
    assert advice in str(raised.value)
    with pytest.raises(AttributeError, match=r"a stream has no 'resample'$"):
        bids.resample  # type: ignore[attr-defined]


def test_with_columns_takes_names_before_expressions(bids: Stream) -> None:
    message = complaint(GraphError, lambda: bids.with_columns("price * 2 AS w"))  # type: ignore[arg-type]
    assert says(message, 'with_columns(name="…")', "not 'price * 2 AS w'")
