"""Whether a snapshot can be restored into the job as it is now, what becomes of every state, and the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pytest

from tests import declaring as tg
from tidegate.dataflow.declared import declared_operators
from tidegate.dataflow.functions import KeyedProcess
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import RestoreError
from tidegate.hashing import hash_value
from tidegate.keygroups import owner_of
from tidegate.sinks import collect
from tidegate.snapshots.manifest import FileEntry, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.plan import DeclaredOperator, Fate, RestorePlan, plan_restore
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.writing import PieceWriter
from tidegate.sources import rows as rows_source
from tidegate.state.columns import key_list
from tidegate.state.descriptors import Descriptor
from tidegate.state.event_time import SPLIT_WATERMARKS, WATERMARK
from tidegate.state.evolution import DeclaredState
from tidegate.state.heap import HeapBackend
from tidegate.state.operator_state import FrozenTogether, OperatorStates
from tidegate.state.pickled import pickled
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.memory import MemoryStore
from tidegate.types import to_list

LONG = pa.int64()
FILE = FileEntry(name="state/x.tgs", bytes=10, checksum=1, index_bytes=2, index_checksum=3)
OFFSETS = StateInfo("__offsets", StateKind.UNION, "offsets", pa.schema([pa.field("value", pa.string())]))
COMMITTABLES = StateInfo("__committables", StateKind.WHOLE, "committables", pa.schema([pa.field("value", pa.string())]))


def state(name: str, declared: Descriptor, key: pa.DataType = LONG) -> DeclaredState:
    declared.name = name
    info = declared.info(key if declared.kind is StateKind.KEYED else None)
    return DeclaredState(info, declared.aliases, declared.changes, declared.pickled)


def operator(name: str, *states: DeclaredState, alias: tuple[str, ...] = (), parallelism: int = 1) -> DeclaredOperator:
    return DeclaredOperator(name, parallelism, states, alias)


def entry(
    *states: DeclaredState, files: tuple[FileEntry, ...] = (FILE,), counts: Mapping[str, int] | None = None
) -> OperatorEntry:
    piece = PieceEntry(subtask=0, key_groups=(0, 128), files=files, item_counts=counts or {})
    return OperatorEntry(
        parallelism=1,
        pieces=(piece,),
        states=tuple(StateEntry.of(each.info) for each in states),
    )


def manifest(**operators: OperatorEntry) -> Manifest:
    return Manifest(
        job="shop",
        epoch=7,
        attempt=2,
        created_ms=0,
        key_group_count=128,
        ending=None,
        operators={name.replace("_", " "): found for name, found in operators.items()},
    )


def planned(snapshot: Manifest, *operators: DeclaredOperator, drop: Iterable[str] = (), groups: int = 128) -> RestorePlan:
    return plan_restore(snapshot, operators=operators, key_group_count=groups, drop=tuple(drop))


def fates(plan: RestorePlan) -> dict[str, str]:
    return {f"{each.name}.{one.name}": one.fate.value for each in plan.operators for one in each.states}


def refusals(plan: RestorePlan) -> str:
    with pytest.raises(RestoreError) as caught:
        plan.check()
    return str(caught.value)


TOTAL = state("total", tg.value("long"))
SNAPSHOT = manifest(sum=entry(TOTAL))


# --------------------------------------------------------------------------------------------- what is taken in


def test_what_fits_is_taken_in() -> None:
    plan = planned(SNAPSHOT, operator("sum", TOTAL), operator("new", state("x", tg.value("long"))))
    plan.check()
    assert fates(plan) == {"sum.total": "kept", "new.x": "new"}
    assert plan.operators[0].unchanged and plan.operators[0].states[0].convert is None


def test_a_state_that_is_new_begins_empty() -> None:
    plan = planned(SNAPSHOT, operator("sum", TOTAL, state("more", tg.list_("string"))))
    plan.check()
    assert fates(plan) == {"sum.total": "kept", "sum.more": "new"}
    assert not plan.operators[0].unchanged


def test_a_state_is_converted_and_renamed() -> None:
    now = state("sums", tg.value("double", alias=["all", "total"]))
    plan = planned(manifest(sum=entry(state("total", tg.value("int")))), operator("sum", now))
    plan.check()
    (found,) = plan.operators[0].states
    assert (found.name, found.was, found.fate) == ("sums", "total", Fate.CONVERTED)
    assert found.why == "was 'total'; value int → double"
    only_renamed = planned(SNAPSHOT, operator("sum", state("sums", tg.value("long", alias="total"))))
    assert fates(only_renamed) == {"sum.sums": "renamed"}


def test_an_operator_is_found_under_its_alias() -> None:
    plan = planned(SNAPSHOT, operator("sums", TOTAL, alias=("sum",), parallelism=3))
    plan.check()
    assert (plan.operators[0].fate, plan.operators[0].was, plan.operators[0].text) == (
        Fate.RENAMED,
        "sum",
        "was 'sum', 1 → 3 subtasks",
    )
    assert fates(plan) == {"sums.total": "kept"}


def test_an_alias_that_is_not_needed_any_more_is_no_matter() -> None:
    plan = planned(SNAPSHOT, operator("sum", state("total", tg.value("long", alias="all")), alias=("sums",)))
    plan.check()
    assert plan.operators[0].unchanged


def test_an_operator_that_is_gone_and_held_nothing_is_let_go() -> None:
    plan = planned(manifest(sum=entry(TOTAL, files=())))
    plan.check()
    assert fates(plan) == {"sum.total": "dropped"}


def test_a_type_may_change_where_nothing_was_held() -> None:
    for snapshot in (manifest(sum=entry(TOTAL, files=())), manifest(sum=entry(state("total", tg.operator_list("long"))))):
        plan = planned(snapshot, operator("sum", state("total", tg.operator_list("string"))))
        plan.check()
        assert fates(plan) == {"sum.total": "dropped"}


def test_operator_state_that_is_gone_and_held_nothing_is_let_go() -> None:
    gone = state("waiting", tg.operator_list("long"))
    plan = planned(manifest(sum=entry(TOTAL, gone)), operator("sum", TOTAL))
    plan.check()
    assert fates(plan) == {"sum.total": "kept", "sum.waiting": "dropped"}
    with pytest.raises(RestoreError, match="'waiting'"):
        planned(manifest(sum=entry(TOTAL, gone, counts={"waiting": 3})), operator("sum", TOTAL)).check()


# ---------------------------------------------------------------------------------------------- what is refused


def test_another_number_of_key_groups_is_refused() -> None:
    told = refusals(planned(SNAPSHOT, operator("sum", TOTAL), groups=64))
    assert "epoch 7 has 128 key-groups and the job 64" in told and "set it back (key_group_count=128)" in told


def test_state_of_an_operator_that_is_gone_is_refused_and_all_ways_out_are_told() -> None:
    told = refusals(planned(SNAPSHOT, operator("total", TOTAL)))
    assert (
        "operator 'sum': the snapshot holds state of it ('total', keyed value long by long), and the job doesn't have "
        "it (it has 'total'): give an operator this name, or alias='sum', to keep its state, or drop it with "
        "drop_state=['sum']"
    ) in told


def test_a_state_that_is_no_longer_declared_is_refused() -> None:
    told = refusals(planned(SNAPSHOT, operator("sum")))
    assert (
        "state 'total' of operator 'sum' (keyed value long by long): the operator no longer declares it: declare it "
        "again, or give alias='total' to the state that continues it, or drop it with "
        "drop_state=['sum.total']"
    ) in told


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (tg.value("string"), "(keyed value long by long → keyed value string by long): value: long can't become string"),
        (tg.value("int"), "value: long can't become int, which can't hold all of its numbers"),
        (tg.list_("long"), "a keyed value can't become a keyed list"),
        (tg.operator_list("long"), "(keyed value long by long → split list long): a keyed value can't become a split list"),
        (tg.value(pickled()), "values that were pickled can't become others"),
    ],
)
def test_another_type_shape_or_kind_is_refused_with_both_and_what_is_possible(declared: Descriptor, told: str) -> None:
    text = refusals(planned(SNAPSHOT, operator("sum", state("total", declared))))
    assert "state 'total' of operator 'sum'" in text and told in text
    assert "What is possible: add a field" in text


def test_another_key_is_refused() -> None:
    told = refusals(planned(SNAPSHOT, operator("sum", state("total", tg.value("long"), key=pa.string()))))
    assert "its key was long and is now string" in told


def test_all_refusals_are_told_at_once() -> None:
    snapshot = manifest(sum=entry(TOTAL, state("gone", tg.list_("long"))), old=entry(TOTAL))
    told = refusals(planned(snapshot, operator("sum", state("total", tg.value("string"))), groups=4))
    assert "for 4 reasons:\n" in told and told.count("\n- ") == 4


def test_two_that_claim_one_are_refused() -> None:
    plan = planned(SNAPSHOT, operator("a", TOTAL, alias=("sum",)), operator("b", TOTAL, alias=("sum",)))
    assert "what the snapshot holds under 'sum' is claimed by 'a' and 'b'" in refusals(plan)
    assert fates(plan) == {"a.total": "refused", "b.total": "refused"}
    assert plan.of("a") is None
    states = (state("x", tg.value("long", alias="total")), state("y", tg.value("long", alias="total")))
    assert "claimed by 'x' and 'y'" in refusals(planned(SNAPSHOT, operator("sum", *states)))


def test_a_name_and_its_alias_can_t_both_be_it() -> None:
    snapshot = manifest(sum=entry(TOTAL), sums=entry(TOTAL))
    now = operator("sums", TOTAL, alias=("sum",))
    assert "the snapshot has state under 'sums' and 'sum'" in refusals(planned(snapshot, now))
    plan = planned(snapshot, now, drop=["sum"])
    plan.check()
    assert [(each.name, each.was, each.fate.value) for each in plan.operators] == [
        ("sums", "sums", "kept"),
        ("sum", "sum", "dropped"),
    ]


def test_what_another_has_under_its_own_name_is_that_one_s() -> None:
    snapshot = manifest(sum=entry(TOTAL), sums=entry(TOTAL))
    plan = planned(snapshot, operator("sums", TOTAL, alias=("sum",)), operator("sum", TOTAL))
    plan.check()
    assert [each.was for each in plan.operators] == ["sums", "sum"]


# ---------------------------------------------------------------------------------------------- dropping by name


def test_state_is_dropped_where_its_name_allows_it() -> None:
    snapshot = manifest(
        sum=entry(TOTAL, state("best", tg.value("long"))),
        old_sink=entry(DeclaredState(COMMITTABLES), counts={"__committables": 2}),
    )
    plan = planned(snapshot, operator("sums", TOTAL, alias=("sum",)), drop=["sum.best", "old sink", "never there"])
    plan.check()
    assert fates(plan) == {"sums.total": "kept", "sums.best": "dropped", "old sink.__committables": "dropped"}
    assert plan.unused_drops == ("never there",)
    assert "output that was still to be committed is lost" in str(plan)
    planned(snapshot, operator("sums", TOTAL, alias=("sum",)), drop=["sums.best", "old sink.__committables"]).check()


def test_a_type_that_can_t_be_converted_begins_empty_where_that_is_allowed() -> None:
    plan = planned(SNAPSHOT, operator("sum", state("total", tg.value("string"))), drop=["sum.total"])
    plan.check()
    assert fates(plan) == {"sum.total": "dropped"}


def test_what_fits_is_never_dropped() -> None:
    """The permission stays in the program, and the job recovers from its own later snapshots."""
    plan = planned(SNAPSHOT, operator("sum", TOTAL), drop=["sum", "sum.total"])
    plan.check()
    assert fates(plan) == {"sum.total": "kept"}
    told = refusals(planned(SNAPSHOT, operator("sum", state("total", tg.value("string"))), drop=["sum"]))
    assert "long can't become string" in told, "an operator that is still there is not dropped as a whole"


def test_event_time_is_no_reason_to_refuse() -> None:
    """Operators without a stable name have it, too."""
    watermark, splits = DeclaredState(WATERMARK), DeclaredState(SPLIT_WATERMARKS)
    snapshot = manifest(
        **{
            "watermark-1": entry(splits, counts={SPLIT_WATERMARKS.name: 2}),
            "look": entry(watermark, counts={WATERMARK.name: 1}),
            "show": entry(watermark, counts={WATERMARK.name: 1}),
            "sum": entry(TOTAL, watermark, counts={WATERMARK.name: 1}),
        }
    )
    plan = planned(
        snapshot,
        operator("watch", watermark, alias=("look", "show")),
        operator("sum", TOTAL, watermark),
        operator("watermark-2", splits),
    )
    plan.check()
    assert fates(plan) == {
        "watch.__watermark": "kept",
        "sum.total": "kept",
        "sum.__watermark": "kept",
        "watermark-2.__split_watermarks": "new",
        "watermark-1.__split_watermarks": "dropped",
        "show.__watermark": "dropped",
    }
    plan = planned(
        snapshot,
        operator("both", watermark, alias=("look",)),
        operator("sum", TOTAL),
        operator("others", watermark, alias=("look",)),
    )
    plan.check()
    gone = planned(snapshot, operator("look", watermark))
    assert "'total'" in refusals(gone) and "__watermark" not in refusals(gone)


def test_a_snapshot_of_before_there_was_event_time_in_them_is_taken_in_as_it_is() -> None:
    plan = planned(manifest(sum=entry(TOTAL)), operator("sum", TOTAL, DeclaredState(WATERMARK)))
    plan.check()
    assert fates(plan) == {"sum.total": "kept", "sum.__watermark": "new"}
    assert plan.operators[0].unchanged, "its files are built upon"


# ---------------------------------------------------------------------------------------------------- for people


def test_a_plan_is_shown_as_a_table() -> None:
    snapshot = manifest(
        sum=entry(state("total", tg.value("int")), state("best", tg.value("struct<a: long>")), state("x", tg.value("long"))),
        bids=entry(DeclaredState(OFFSETS), counts={"__offsets": 1}),
        old=entry(TOTAL),
    )
    plan = planned(
        snapshot,
        operator("bids", DeclaredState(OFFSETS)),
        operator("no state"),
        operator(
            "sums",
            state("total", tg.value("long")),
            state("highest", tg.value("struct<a: long>", alias="best")),
            state("x", tg.value("long")),
            state("more", tg.value(pickled())),
            alias=("sum",),
            parallelism=2,
        ),
    )
    assert (
        str(plan)
        == """\
Restore of epoch 7 of job 'shop': 2 kept, 1 converted, 1 renamed, 1 new, 1 refused
operator 'bids': kept; 1 subtask
  kept       __offsets  union offsets string
operator 'sums': renamed; was 'sum', 1 → 2 subtasks
  converted  total      keyed value int by long → keyed value long by long; value int → long
  renamed    highest    keyed value struct<a: long> by long; was 'best'
  kept       x          keyed value long by long
  new        more       keyed value pickled(version=1) by long; begins empty
operator 'old': refused; the snapshot holds state of it ('total', keyed value long by long), and the job doesn't have it \
(it has 'bids', 'no state', 'sums'): give an operator this name, or alias='old', to keep its state, or drop it \
with drop_state=['old']
  refused    total      keyed value long by long"""
    )


def test_a_plan_says_what_form_the_files_have() -> None:
    native = FileEntry(name="state/000012.sst", bytes=10, checksum=1, form="rocksdb", local="000012.sst")
    plan = planned(manifest(sum=entry(TOTAL, files=(native,))), operator("sum", TOTAL))
    assert plan.operators[0].text == "1 subtask, from files of rocksdb"


# ----------------------------------------------------------------------------------------------- from job to plan


class Counting(KeyedProcess):
    count = tg.value("long", alias="n")
    best = tg.value("struct<a: long, b: string>", added={"b": "x"})

    def process(self, record: Any, ctx: Any) -> None: ...


def test_a_job_declares_its_operators_with_names_aliases_and_changes() -> None:
    pipeline = Pipeline()
    bids = pipeline.source("bids", rows_source([(1,)], "a long"), alias="offers")
    bids.key_by("a").process("count", Counting(), alias=["counts", "sum"], parallelism=2)
    bids.to("out", collect(), alias="console")
    found = {each.name: each for each in declared_operators(make_plan(pipeline.build(), slots=3, key_group_count=8))}
    assert {name: each.aliases for name, each in found.items()} == {
        "bids": ("offers",),
        "count": ("counts", "sum"),
        "out": ("console",),
    }
    assert found["count"].parallelism == 2
    states = {each.info.name: each for each in found["count"].states}
    assert states.keys() == {"count", "best", "__event_timers", "__processing_timers", "__watermark"}
    assert states["count"].aliases == ("n",) and states["best"].changes.added == {"b": "x"}
    assert [each.info.name for each in found["bids"].states] == ["__offsets"]


# ------------------------------------------------------------------------------------------------------- the rows


GROUPS = 16
OLD = {
    "total": tg.value("int", name="total"),
    "best": tg.list_("struct<a: int>", name="best"),
    "gone": tg.value("long", name="gone"),
    "waiting": tg.operator_list("int", name="waiting"),
    "rules": tg.broadcast_map("string", "int", name="rules"),
    "model": tg.value(pickled(), name="model"),
}


def written(store: MemoryStore, *, parallelism: int, keys: int) -> Manifest:
    """A snapshot of an operator 'sum' with the states above: key k has the total k."""
    pieces: list[PieceEntry] = []
    states: tuple[StateEntry, ...] = ()
    for subtask in range(parallelism):
        backend = HeapBackend(key_type=LONG, key_group_count=GROUPS)
        owned = OperatorStates(attempt=1, subtask=subtask)
        objects: dict[str, Any] = {
            name: (backend.table if each.kind is StateKind.KEYED else owned.state)(each) for name, each in OLD.items()
        }
        owned.set_writable(True)
        for key in keys_of(subtask, parallelism, keys):
            backend.cursor.key = key
            objects["total"].set(key)
            objects["best"].add({"a": key})
            objects["gone"].set(key)
            objects["model"].set({key})
            objects["waiting"].add(key)
        objects["rules"].put("factor", 3)
        writer = PieceWriter("sum", store=store, attempt=1, subtask=subtask, parallelism=parallelism, key_group_count=GROUPS)
        told = writer.write(FrozenTogether(backend.freeze(), owned.freeze()), epoch=1, base=0, full=True)
        pieces += told.pieces
        states = told.states
    return Manifest(
        job="shop",
        epoch=1,
        attempt=1,
        created_ms=0,
        key_group_count=GROUPS,
        ending=None,
        operators={"sum": OperatorEntry(parallelism=parallelism, states=states, pieces=tuple(pieces))},
    )


def keys_of(subtask: int, parallelism: int, keys: int) -> list[int]:
    return [
        key
        for key in range(keys)
        if owner_of(hash_value(key, LONG) % GROUPS, parallelism=parallelism, key_group_count=GROUPS) == subtask
    ]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_rows_come_under_the_present_names_and_types_at_any_parallelism(parallelism: int) -> None:
    store = MemoryStore()
    snapshot = written(store, parallelism=2, keys=50)
    now = [
        state("sums", tg.value("double", alias="total")),
        state("best", tg.list_("struct<a: long, b: string>", added={"b": "x"})),
        state("waiting", tg.operator_list("long")),
        state("rules", tg.broadcast_map("string", "long")),
        state("model", tg.value(pickled(version=2, migrate=lambda value, version: sorted(value)))),
        state("fresh", tg.value("long")),
    ]
    plan = plan_restore(
        snapshot,
        operators=[operator("sums", *now, alias=("sum",), parallelism=parallelism)],
        key_group_count=GROUPS,
        drop=["sum.gone"],
    )
    assert fates(plan) == {
        "sums.sums": "converted",
        "sums.best": "converted",
        "sums.waiting": "converted",
        "sums.rules": "converted",
        "sums.model": "converted",
        "sums.fresh": "new",
        "sums.gone": "dropped",
    }
    found: dict[str, list[Any]] = {}
    for subtask in range(parallelism):
        rows = Snapshot(store, snapshot).rows("sums", subtask=subtask, parallelism=parallelism, plan=plan)
        assert rows.keys() == {"sums", "best", "waiting", "rules", "model"}
        for name, batches in rows.items():
            for batch in batches:
                assert batch.schema == next(each.info.schema for each in now if each.info.name == name)
                values = to_list(batch.column("value"))
                found.setdefault(name, []).extend(
                    zip(key_list(batch.column("key")), values, strict=True) if "key" in batch.schema.names else values
                )
    assert sorted(found["sums"]) == [(key, float(key)) for key in range(50)]
    assert sorted(found["best"]) == [(key, [{"a": key, "b": "x"}]) for key in range(50)]
    assert sorted(found["waiting"]) == list(range(50))
    assert found["rules"] == [{"key": "factor", "value": 3}] * parallelism
    second = pickled(version=2)
    assert sorted((key, second.handed_out(held, "model")) for key, held in found["model"]) == [(k, [k]) for k in range(50)]


def test_nothing_is_read_by_a_plan_that_refuses_something() -> None:
    plan = planned(SNAPSHOT, operator("other", TOTAL))
    with pytest.raises(RestoreError, match="alias='sum'"):
        Snapshot(MemoryStore(), SNAPSHOT).rows("other", plan=plan)


def test_an_operator_that_is_new_or_unknown_has_no_rows() -> None:
    plan = planned(SNAPSHOT, operator("sum", TOTAL), operator("new", TOTAL))
    for name in ("new", "unknown"):
        assert Snapshot(MemoryStore(), SNAPSHOT).rows(name, plan=plan) == {}
