"""Writing state into savepoints, without Spark: one piece after the other, as its tasks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tests import declaring
from tests.unit.cli.made import GROUPS, Made, run
from tidegate.errors import JobError, NotFound, SchemaError, StoreError
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.savepoints import create_savepoint, savepoint_in_writing
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.state_tables import state_table
from tidegate.snapshots.state_writing import StateWriting, check_rows, declared_info, nullable, planned_writing
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.local import LocalStore

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64())])
INFO = StateInfo("count", StateKind.KEYED, "value", SCHEMA)


def sorted_rows(values: dict[str, int], piece: tuple[int, int]) -> list[pa.RecordBatch]:
    """Two batches, by key-group and key."""
    keys = sorted(values)
    groups = groups_of(hash_columns([pa.array(keys)]), GROUPS)
    order = [index for index in np.argsort(groups, kind="stable") if piece[0] <= groups[index] < piece[1]]
    batch = pa.record_batch([[keys[index] for index in order], [values[keys[index]] for index in order]], schema=SCHEMA)
    half = len(batch) // 2
    return [batch.slice(0, half), batch.slice(half)]


def write(target: Path, values: dict[str, int], base: Snapshot | None = None, **rest: Any) -> StateWriting:
    store = LocalStore(target)
    given: dict[str, Any] = {
        "operator": "counting",
        "info": INFO,
        "add": False,
        "job": None,
        "key_group_count": None,
        "parallelism": 3,
    }
    writing = planned_writing(target=store.address, base=base, **(given | rest))
    with savepoint_in_writing(store, job=writing.job, epoch=writing.epoch):
        pieces = [
            (writing.operator, writing.write_piece(piece.subtask, sorted_rows(values, piece.key_groups)))
            for piece in writing.pieces
        ]
        others = [] if base is None else [name for name in base.manifest.operators if name != writing.operator]
        pieces += [
            (name, writing.copy_piece(name, piece.subtask))
            for name in others
            if base is not None
            for piece in base.manifest.operators[name].pieces
        ]
        create_savepoint(store, writing.manifest(pieces, created_ms=7), created_ms=7, graph="", versions={})
    return writing


def values_of(path: Path, state: str = "count") -> dict[str, Any]:
    table = state_table(find_snapshot(str(path)), state, None, per="key")
    batches = (batch for part in table.parts(None) for batch in table.read(part))
    return {row["key"]: row["value"] for batch in batches for row in batch.to_pylist()}


def test_a_savepoint_from_nothing(tmp_path: Path) -> None:
    values = {f"k{i}": i for i in range(500)}
    write(tmp_path / "sp", values, key_group_count=GROUPS, job="mine")
    assert values_of(tmp_path / "sp") == values
    assert run("snapshots", "verify", tmp_path / "sp").exit_code == 0
    manifest = find_snapshot(str(tmp_path / "sp")).manifest
    assert manifest.job == "mine" and manifest.operators["counting"].parallelism == 3 and manifest.savepoint is not None


def test_a_state_is_rewritten_and_all_else_stays(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {f"k{i}": i for i in range(50)}, "scores": {"a": {"x": 1.0}}}, items=[1, 2, 3])
    made.write(2, {"count": {"k1": 100}, "scores": {"b": {"y": 2.0}}}, on=1, items=[1, 2, 4])
    base = find_snapshot(str(made.path))
    write(tmp_path / "sp", {"k1": -1, "other": -2}, base)
    assert values_of(tmp_path / "sp") == {"k1": -1, "other": -2}
    assert values_of(tmp_path / "sp", "scores") == {"a": [("x", 1.0)], "b": [("y", 2.0)]}
    assert run("snapshots", "verify", tmp_path / "sp").exit_code == 0
    difference = run("snapshots", "diff", made.path, tmp_path / "sp", "--json")
    assert '"offsets"' in difference.output and values_of(made.path)["k2"] == 2
    write(tmp_path / "none", {}, base)
    assert values_of(tmp_path / "none") == {} and values_of(tmp_path / "none", "scores")
    assert run("snapshots", "verify", tmp_path / "none").exit_code == 0


def test_a_state_and_an_operator_are_added_when_that_is_meant(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1}})
    base = find_snapshot(str(made.path))
    fresh = StateInfo("fresh", StateKind.KEYED, "value", SCHEMA)
    with pytest.raises(NotFound, match=r"no state 'fresh' in operator 'counting'(.|\n)*'scores'"):
        write(tmp_path / "x", {"a": 1}, base, info=fresh)
    write(tmp_path / "one", {"a": 5}, base, info=fresh, add=True)
    assert values_of(tmp_path / "one", "fresh") == {"a": 5} and values_of(tmp_path / "one") == {"a": 1}
    write(tmp_path / "two", {"a": 6}, find_snapshot(str(tmp_path / "one")), info=fresh, add=True, operator="another")
    assert run("snapshots", "verify", tmp_path / "two").exit_code == 0
    assert set(find_snapshot(str(tmp_path / "two")).manifest.operators) == {"counting", "another"}


def test_a_key_that_is_there_twice_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "sp")
    writing = planned_writing(
        target=store.address, base=None, operator="op", info=INFO, add=False, job=None, key_group_count=GROUPS, parallelism=1
    )
    one = pa.record_batch([["a"], [1]], schema=SCHEMA)
    with pytest.raises(JobError, match="'a' comes more than once"), savepoint_in_writing(store, job="j", epoch=1):
        writing.write_piece(0, [one, one])
    assert not (tmp_path / "sp").exists()


def test_rows_out_of_order_are_refused(tmp_path: Path) -> None:
    writing = planned_writing(
        target=LocalStore(tmp_path / "sp").address,
        base=None,
        operator="op",
        info=INFO,
        add=False,
        job=None,
        key_group_count=GROUPS,
        parallelism=1,
    )
    batches = sorted_rows({f"k{i}": i for i in range(50)}, (0, GROUPS))
    with pytest.raises(StoreError, match="order of their key-groups"):
        writing.write_piece(0, reversed(batches))


class Function(tg.KeyedProcess):
    total = declaring.value("struct<a: long, b: string>", ttl="1 day")
    shared = declaring.operator_list("long")

    def process(self, record: Any, ctx: Any) -> Any: ...


def test_what_a_state_is_comes_from_its_declaration_or_the_base_or_the_rows(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1}})
    base = find_snapshot(str(made.path))
    given: dict[str, Any] = {"key": pa.string(), "value": pa.int64(), "shape": None, "expiring": False}
    assert declared_info(None, "op", Function.total, **given).schema.names == ["key", "value", "expires"]
    assert declared_info(base, "counting", "scores", **given).shape == "map"
    assert declared_info(None, "op", "n", **given | {"expiring": True}).schema.field("expires").type == pa.int64()
    assert declared_info(None, "op", "__event_timers", **given).shape == "timers"
    for refused in ("__offsets", Function.shared):
        with pytest.raises(JobError):
            declared_info(None, "op", refused, **given)
    with pytest.raises(JobError, match="only keyed state"):
        declared_info(base, "counting", "offsets", **given)
    with pytest.raises(JobError, match="is a map"):
        declared_info(base, "counting", "scores", **given | {"shape": "list"})


def test_rows_of_another_type_are_shown_beside_the_right_one() -> None:
    with pytest.raises(SchemaError, match=r"are   \(key string, value long\)\n.*these are  \(key int, value long\)"):
        check_rows(INFO, key=pa.int32(), value=pa.int64())
    strict = pa.struct([pa.field("a", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False)])
    assert nullable(strict) == pa.struct([pa.field("a", pa.list_(pa.int64()))])


def test_an_operator_has_one_kind_of_keys(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1}})
    numbers = StateInfo("n", StateKind.KEYED, "value", pa.schema([("key", pa.int64()), ("value", pa.int64())]))
    with pytest.raises(SchemaError, match="has keys of"):
        write(tmp_path / "x", {}, find_snapshot(str(made.path)), info=numbers, add=True)
