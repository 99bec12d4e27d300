"""Chains of files: what a subtask writes, epoch after epoch, is its state at every complete one.

Random programs write and delete keys, freeze, complete, abort, fail to write, ask for full snapshots, and go on in another
attempt. Files that no retained snapshot lists are deleted at once, as the coordinator would, so a piece that refers to one
is found out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import declaring as tg
from tidegate.errors import StoreError
from tidegate.snapshots import writing
from tidegate.snapshots.manifest import Manifest, PieceEntry
from tidegate.snapshots.row_files import Chain
from tidegate.snapshots.snapshot import Snapshot
from tidegate.snapshots.writing import PieceWriter, chain_to_continue
from tidegate.state.heap import HeapBackend
from tidegate.state.operator_state import FrozenTogether, OperatorStates
from tidegate.store.memory import MemoryStore

GROUPS = 8


class Subtask:
    """The only subtask of one operator, with its coordinator: manifests in a list, the newest `retain` of them live."""

    def __init__(self, *, retain: int = 1) -> None:
        self.store = MemoryStore()
        self.retain = retain
        self.attempt = 0
        self.epoch = 0
        self.manifests: list[tuple[Manifest, dict[str, Any]]] = []
        self.oracle: dict[str, Any] = {"total": {}, "words": {}, "items": []}
        self.begin()

    def begin(self) -> None:
        """Another attempt, from the newest complete snapshot."""
        self.attempt += 1
        self.backend = HeapBackend(key_type=pa.int64(), key_group_count=GROUPS)
        self.total: Any = self.backend.table(tg.value("long", name="total"))
        self.words: Any = self.backend.table(tg.list_("long", name="words"))
        self.operator_states = OperatorStates(attempt=self.attempt, subtask=0)
        self.items = self.operator_states.state(tg.operator_list("long", name="items"))
        restored: tuple[int, Chain] | None = None
        self.complete = 0
        self.oracle = {"total": {}, "words": {}, "items": []}
        if self.manifests:
            manifest, self.oracle = self.manifests[-1][0], copy.deepcopy(self.manifests[-1][1])
            self.complete = manifest.epoch
            infos = (*self.backend.freeze().states, *self.operator_states.freeze().states)
            chain = chain_to_continue(manifest, "op", infos, subtask=0, parallelism=1)
            assert chain is not None
            restored = manifest.epoch, chain
            for state, batches in Snapshot(self.store, manifest).rows("op").items():
                for rows in batches:
                    if state == "items":
                        self.operator_states.load(state, rows)
                    else:
                        self.backend.load(state, rows, known=True)
        self.writer = PieceWriter(
            "op", store=self.store, attempt=self.attempt, subtask=0, parallelism=1, key_group_count=GROUPS, restored=restored
        )

    def set(self, key: int, value: int) -> None:
        self.backend.cursor.key = key
        self.total.set(value)
        self.words.add(value)
        self.oracle["total"][key] = value
        self.oracle["words"][key] = [*self.oracle["words"].get(key, []), value]

    def clear(self, key: int) -> None:
        self.backend.cursor.key = key
        self.total.clear()
        self.words.clear()
        self.oracle["total"].pop(key, None)
        self.oracle["words"].pop(key, None)

    def replace_items(self, *items: int) -> None:
        self.items.replace(items)
        self.oracle["items"] = list(items)

    def snapshot(self, *, completes: bool = True, full: bool = False) -> PieceEntry | None:
        """Takes an epoch's snapshot; None where the store fails."""
        self.epoch += 1
        frozen = FrozenTogether(self.backend.freeze(), self.operator_states.freeze())
        expected = copy.deepcopy(self.oracle)
        try:
            entry = self.writer.write(frozen, epoch=self.epoch, base=self.complete, full=full)
        except StoreError:
            return None
        finally:
            frozen.release()
            self.backend.maintain(1)
        (piece,) = entry.pieces
        if completes:
            self.manifests.append(
                (
                    Manifest(
                        job="job",
                        epoch=self.epoch,
                        attempt=self.attempt,
                        created_ms=1,
                        key_group_count=GROUPS,
                        ending=None,
                        operators={"op": entry},
                    ),
                    expected,
                )
            )
            self.manifests = self.manifests[-self.retain :]
            self.complete = self.epoch
        needed = {file.name for manifest, _ in self.manifests for file in manifest.files()}
        for name in self.store.list("state"):
            if name not in needed:
                self.store.delete(name)
        return piece

    def check(self) -> None:
        for manifest, expected in self.manifests:
            assert held(manifest, self.store) == expected


def held(manifest: Manifest, store: MemoryStore) -> dict[str, Any]:
    found: dict[str, Any] = {"total": {}, "words": {}, "items": []}
    rows: Mapping[str, Any] = Snapshot(store, manifest).rows("op")
    for state, batches in rows.items():
        for batch in batches:
            if state == "items":
                found[state] += batch.column("value").to_pylist()
            else:
                keys = batch.column("key").to_pylist()
                assert not set(keys) & set(found[state])
                found[state] |= zip(keys, batch.column("value").to_pylist(), strict=True)
    return found


_keys, _values = st.integers(0, 40), st.integers(0, 99)
_steps = st.one_of(
    st.tuples(st.just("set"), _keys, _values),
    st.tuples(st.just("set"), _keys, _values),
    st.tuples(st.just("clear"), _keys),
    st.tuples(st.just("items"), st.lists(_values, max_size=3)),
    st.tuples(st.just("snapshot"), st.sampled_from(["complete", "complete", "abort", "full", "store fails"])),
    st.tuples(st.just("begin")),
)


@pytest.mark.parametrize(("share", "deltas"), [(0.5, 32), (100.0, 2), (100.0, 32)])
@pytest.mark.parametrize("retain", [1, 3])
@given(steps=st.lists(_steps, max_size=60))
def test_every_complete_snapshot_is_the_state_at_its_epoch(
    share: float, deltas: int, retain: int, steps: list[tuple[Any, ...]]
) -> None:
    subtask = Subtask(retain=retain)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "MAX_DELTA_SHARE", share)
        patched.setattr(writing, "MAX_DELTAS", deltas)
        for key in range(20):
            subtask.set(key, key)
        for step in steps:
            match step:
                case ("set", key, value):
                    subtask.set(key, value)
                case ("clear", key):
                    subtask.clear(key)
                case ("items", items):
                    subtask.replace_items(*items)
                case ("snapshot", "store fails"):
                    with pytest.MonkeyPatch.context() as failing:
                        failing.setattr(subtask.store, "write", _fails)
                        subtask.snapshot(completes=False)
                case ("snapshot", how):
                    piece = subtask.snapshot(completes=how != "abort", full=how == "full")
                    assert piece is not None and (how != "full" or len(piece.files) <= 1)
                    subtask.check()
                case ("begin",):
                    subtask.begin()
        subtask.snapshot()
        subtask.check()


def _fails(*_: Any) -> None:
    raise StoreError("the disk is full")


def test_a_delta_is_small_and_the_base_stays() -> None:
    subtask = Subtask()
    for key in range(10_000):
        subtask.set(key, key)
    base = subtask.snapshot()
    for number in range(20):
        for key in range(number * 100, number * 100 + 100):
            subtask.set(key, -1)
        piece = subtask.snapshot()
        assert base is not None and piece is not None
        assert piece.files[0] == base.files[0] and len(piece.files) == number + 2
        assert piece.files[-1].bytes < 0.03 * base.files[0].bytes
    subtask.check()


def test_an_epoch_without_changes_writes_nothing() -> None:
    subtask = Subtask()
    subtask.set(1, 1)
    first, second = subtask.snapshot(), subtask.snapshot()
    assert first is not None and second is not None and first.files == second.files
    subtask.check()


def test_an_aborted_epoch_s_changes_are_in_the_next_and_its_file_in_no_chain() -> None:
    subtask = Subtask()
    for key in range(1000):
        subtask.set(key, 0)
    subtask.snapshot()
    subtask.set(1, 1)
    subtask.clear(2)
    aborted = subtask.snapshot(completes=False)
    subtask.set(3, 3)
    piece = subtask.snapshot()
    assert aborted is not None and piece is not None
    assert aborted.files[-1] not in piece.files and len(piece.files) == 2
    subtask.check()


def test_many_deltas_become_one_without_the_base_being_written_again() -> None:
    subtask = Subtask()
    for key in range(10_000):
        subtask.set(key, 0)
    base = subtask.snapshot()
    lengths = []
    for number in range(40):
        subtask.set(number, 1)
        piece = subtask.snapshot()
        assert base is not None and piece is not None and piece.files[0] == base.files[0]
        lengths.append(len(piece.files))
    assert max(lengths) == writing.MAX_DELTAS + 1 and lengths[writing.MAX_DELTAS] == 2
    subtask.check()


def test_deltas_of_half_the_base_s_size_make_a_new_base() -> None:
    subtask = Subtask()
    for key in range(10_000):
        subtask.set(key, 0)
    subtask.snapshot()
    lengths = []
    for number in range(6):
        for key in range(number * 1000, number * 1000 + 1000):
            subtask.set(key, 1)
        piece = subtask.snapshot()
        assert piece is not None
        lengths.append(len(piece.files))
    assert 1 in lengths and max(lengths) <= 6
    subtask.check()


def test_operator_state_may_stand_before_keyed_state_in_what_is_frozen() -> None:
    subtask = Subtask()
    subtask.set(1, 10)
    subtask.replace_items(7)
    frozen = FrozenTogether(subtask.operator_states.freeze(), subtask.backend.freeze())
    entry = subtask.writer.write(frozen, epoch=1, base=0, full=False)
    manifest = Manifest(
        job="job", epoch=1, attempt=1, created_ms=1, key_group_count=GROUPS, ending=None, operators={"op": entry}
    )
    rows = Snapshot(subtask.store, manifest).rows("op")
    assert {state: [row for batch in batches for row in batch.to_pylist()] for state, batches in rows.items()} == {
        "total": [{"key": 1, "value": 10}],
        "words": [{"key": 1, "value": [10]}],
        "items": [{"value": 7}],
    }
