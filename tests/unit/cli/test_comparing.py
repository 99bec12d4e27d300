"""`tidegate snapshots diff`, against what a dictionary says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.cli.made import COUNTS, GONE, SCORES, STATES, Made, run, run_json
from tidegate.snapshots import state_changes, state_tables
from tidegate.snapshots.savepoints import export_snapshot
from tidegate.snapshots.snapshot import Snapshot
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.local import LocalStore

KEYS = st.text("abc", min_size=1, max_size=2)
TABLE = st.dictionaries(KEYS, st.integers(-3, 3), max_size=12)
MAPS = st.dictionaries(KEYS, st.dictionaries(KEYS, st.floats(), max_size=2), max_size=6)
LAYER = st.dictionaries(KEYS, st.one_of(st.integers(-3, 3), st.just(GONE)), max_size=8)


def differences(*arguments: object) -> dict[str, dict[str, Any]]:
    return {each["state"]: each for each in run_json("snapshots", "diff", *arguments)["states"]}


def counted(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int, int, int]:
    """(added, removed, changed, unchanged) by the definition."""
    both = before.keys() & after.keys()
    same = sum(repr(before[key]) == repr(after[key]) for key in both)
    return len(after.keys() - both), len(before.keys() - both), len(both) - same, same


def numbers(each: dict[str, Any]) -> tuple[int, int, int, int]:
    return each["added"], each["removed"], each["changed"], each["unchanged"]


def bag(before: list[int], after: list[int]) -> tuple[int, int, int, int]:
    left = list(after)
    same = 0
    for item in before:
        if item in left:
            left.remove(item)
            same += 1
    return len(left), len(before) - same, 0, same


def resolved(base: dict[str, Any], *layers: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for layer in layers:
        merged |= layer
    return {key: value for key, value in merged.items() if value is not GONE}


def sorted_maps(table: dict[str, dict[str, float]]) -> dict[str, list[tuple[str, float]]]:
    return {key: sorted((name, value + 0.0) for name, value in entries.items()) for key, entries in table.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    one=TABLE,
    layer=LAYER,
    second=LAYER,
    other=TABLE,
    scores=MAPS,
    more=MAPS,
    items=st.lists(st.integers(0, 3)),
    later=st.lists(st.integers(0, 3)),
    parallelism=st.integers(1, 5),
)
def test_the_difference_is_that_of_the_dictionaries(
    tmp_path_factory: pytest.TempPathFactory,
    one: dict[str, Any],
    layer: dict[str, Any],
    second: dict[str, Any],
    other: dict[str, Any],
    scores: dict[str, Any],
    more: dict[str, Any],
    items: list[int],
    later: list[int],
    parallelism: int,
) -> None:
    made = Made(tmp_path_factory.mktemp("snapshots"))
    made.write(1, {"count": one, "scores": scores}, items=items)
    made.write(2, {"count": layer}, on=1)
    made.write(3, {"count": second}, on=2, items=later)
    made.write(4, {"count": other, "scores": more}, items=later, parallelism=parallelism)
    chain = resolved(one, layer, second)
    found = differences(made.path, "--epochs", 1, 3)
    assert numbers(found["count"]) == counted(one, chain)
    assert numbers(found["scores"]) == (0, 0, 0, len(scores))
    assert numbers(found["offsets"]) == bag(items, later)
    found = differences(made.path, made.path, "--epochs", 3, 4)
    assert numbers(found["count"]) == counted(chain, other)
    assert numbers(found["scores"]) == counted(sorted_maps(scores), sorted_maps(more))


def test_without_epochs_the_two_newest_or_the_newest_of_each_are_compared(tmp_path: Path) -> None:
    made, other = Made(tmp_path / "one"), Made(tmp_path / "two")
    for epoch in (1, 2, 3):
        made.write(epoch, {"count": {f"k{i}": epoch for i in range(epoch)}})
    other.write(9, {"count": {"k0": 3}})
    assert numbers(differences(made.path)["count"]) == (1, 0, 2, 0)
    assert numbers(differences(made.path, other.path)["count"]) == (0, 2, 0, 1)
    assert numbers(differences(made.manifest_path(1), made.manifest_path(3))["count"]) == (2, 0, 1, 0)
    assert run("snapshots", "diff", other.path).exit_code == 2
    result = run("snapshots", "diff", made.path)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split() == ["counting", "count", "1", "0", "2", "0"]


def test_a_savepoint_is_compared_with_the_job_it_is_of(tmp_path: Path) -> None:
    made = Made(tmp_path / "snapshots")
    manifest = made.write(1, {"count": {f"k{i}": i for i in range(20)}})
    export_snapshot(Snapshot(made.store, manifest), LocalStore(tmp_path / "savepoint"), created_ms=1)
    made.write(2, {"count": {"k1": 0, "k2": GONE}}, on=1)
    assert numbers(differences(tmp_path / "savepoint", made.path)["count"]) == (0, 1, 1, 18)


def test_examples_show_keys_and_values_as_users_know_them(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1, "b": 2, "same": 0}, "scores": {"x": {"p": 1.0}}}, items=[1, 2])
    made.write(2, {"count": {"a": 10, "c": 3, "same": 0}, "scores": {"x": {"p": math.nan}}}, items=[2, 3])
    found = differences(made.path, "--keys", 10)
    examples = {example["key"]: (example["before"], example["after"]) for example in found["count"]["examples"]}
    assert examples == {"a": ([1], [10]), "b": ([2], []), "c": ([], [3])}
    assert found["scores"]["examples"] == [{"key": "x", "before": [{"p": 1.0}], "after": [{"p": "nan"}]}]
    assert [(each["before"], each["after"]) for each in found["offsets"]["examples"]] == [([1], []), ([], [3])]
    assert len(differences(made.path, "--keys", 2)["count"]["examples"]) == 2
    assert differences(made.path)["count"]["examples"] == []
    text = run("snapshots", "diff", made.path, "--keys", 10).stdout
    assert "'a'  1       10" in text and "{'p': 1.0}" in text


def test_the_order_of_a_map_and_nan_make_no_difference(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"scores": {"x": {"a": 1.0, "b": math.nan}, "y": {"z": 2.0}}})
    made.write(2, {"scores": {"x": {"b": math.nan, "a": 1.0}, "y": {}}})
    assert numbers(differences(made.path)["scores"]) == (0, 0, 1, 1)


def test_differences_that_are_not_in_the_rows_are_told(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1, "b": 2}}, parallelism=2)
    wide = replace(COUNTS, schema=pa.schema([("key", pa.string()), ("value", pa.float64())]))
    made.write(
        2,
        {"count": {"a": 1.0, "b": 2.5}, "fresh": {"q": {"p": 1.0}}},
        parallelism=3,
        states=(wide, replace(SCORES, name="fresh")),
    )
    found = run_json("snapshots", "diff", made.path)
    assert found["structure"] == [
        "operator 'counting' had parallelism 2 and has 3",
        "state 'count' of operator 'counting' had the type (key string, value int64) and has (key string, value double)",
        "state 'scores' of operator 'counting' is gone",
        "state 'offsets' of operator 'counting' is gone",
        "state 'fresh' of operator 'counting' is new",
    ]
    states = {each["state"]: each for each in found["states"]}
    assert numbers(states["count"]) == (0, 0, 1, 1)  # 1 is 1.0
    assert numbers(states["fresh"]) == (1, 0, 0, 0)


def test_an_operator_that_is_new_or_gone_counts_with_all_its_rows(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"a": 1, "b": 2}}, operator="old", items=[1])
    made.write(2, {"count": {"a": 1, "b": 2, "c": 3}}, operator="new")
    found = run_json("snapshots", "diff", made.path)
    assert found["structure"] == ["operator 'old' is gone", "operator 'new' is new"]
    by_name = {(each["operator"], each["state"]): numbers(each) for each in found["states"]}
    assert by_name["old", "count"] == (0, 2, 0, 0)
    assert by_name["old", "offsets"] == (0, 1, 0, 0)
    assert by_name["new", "count"] == (3, 0, 0, 0)


def test_rows_of_other_keys_or_kinds_are_not_compared(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {"1": 1}})
    longs = replace(COUNTS, schema=pa.schema([("key", pa.int64()), ("value", pa.int64())]))
    made.write(2, {"count": {1: 1}}, states=(longs,))
    made.write(3, {}, states=(StateInfo("count", StateKind.UNION, "list", pa.schema([("value", pa.int64())])),))
    assert differences(made.path, "--epochs", 1, 2)["count"]["note"] == "not compared: the type of the key differs"
    assert differences(made.path, "--epochs", 2, 3)["count"]["note"] == "not compared: it was keyed and is union"


def test_rows_come_a_few_key_groups_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {f"k{i}": i for i in range(1000)}})
    made.write(2, {"count": {f"k{i}": -i for i in range(1000)}})
    sizes: list[int] = []
    real = state_changes._together

    def watched(batches: Any, schema: Any) -> Any:
        table = real(batches, schema)
        sizes.append(table.num_rows)
        return table

    monkeypatch.setattr(state_changes, "_together", watched)
    monkeypatch.setattr(state_tables, "PART_BYTES", sum(file.bytes for file in made.manifests[1].files()) // 20)
    assert numbers(differences(made.path)["count"]) == (0, 0, 999, 1)
    assert sum(sizes) == 2000 and max(sizes) < 120


def test_a_corrupt_file_is_an_error_and_not_a_difference(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {"count": {f"k{i}": i for i in range(1000)}})
    manifest = made.write(2, {"count": {f"k{i}": i for i in range(1000)}})
    path = made.path / next(manifest.files()).name
    content = bytearray(path.read_bytes())
    content[500] ^= 4
    path.write_bytes(content)
    result = run("snapshots", "diff", made.path)
    assert result.exit_code == 2 and "checksum" in result.stderr


def test_all_states_of_the_tests_are_compared(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.write(1, {})
    made.write(2, {})
    assert list(differences(made.path)) == [info.name for info in STATES]
