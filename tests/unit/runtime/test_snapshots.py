"""Whether a snapshot can be taken in by the job as it is now: said before anything is deployed."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.errors import RestoreError
from tidegate.runtime.restoring import check_restorable
from tidegate.store.manifest import FileEntry, Manifest, OperatorEntry, PieceEntry, StateEntry

LONGS = pa.schema([("key", pa.int64()), ("value", pa.int64())])
TEXTS = pa.schema([("key", pa.int64()), ("value", pa.string())])
FILE = FileEntry(name="state/x.tgs", bytes=10, checksum=1, index_bytes=2, index_checksum=3)


def manifest(*, files: tuple[FileEntry, ...] = (FILE,), kind: str = "keyed", schema: pa.Schema = LONGS) -> Manifest:
    state = StateEntry.of(name="total", kind=kind, shape="value", schema=schema)
    piece = PieceEntry(subtask=0, key_groups=(0, 128), files=files, item_counts={})
    return Manifest(job="j", epoch=7, attempt=2, created_ms=0, key_group_count=128, ending=None,
                    operators={"sum": OperatorEntry(parallelism=1, pieces=(piece,), states=(state,))}, stats={})


def test_what_fits_is_taken_in() -> None:
    check_restorable(manifest(), operators={"sum": [("total", "keyed", LONGS)], "new": [("x", "keyed", LONGS)]},
                     key_group_count=128)


def test_a_state_that_is_new_starts_empty() -> None:
    check_restorable(manifest(), operators={"sum": [("total", "keyed", LONGS), ("more", "keyed", TEXTS)]},
                     key_group_count=128)


def test_another_number_of_key_groups_is_refused() -> None:
    with pytest.raises(RestoreError, match=r"epoch 7 has 128 key-groups and the job 64.*set it back"):
        check_restorable(manifest(), operators={"sum": [("total", "keyed", LONGS)]}, key_group_count=64)


def test_state_of_an_operator_that_is_gone_is_refused_and_both_names_are_told() -> None:
    with pytest.raises(RestoreError, match=r"state of operator 'sum'.*it has \['total'\].*keep its name"):
        check_restorable(manifest(), operators={"total": [("total", "keyed", LONGS)]}, key_group_count=128)


def test_an_operator_that_is_gone_and_held_nothing_is_let_go() -> None:
    check_restorable(manifest(files=()), operators={}, key_group_count=128)


def test_a_state_that_is_no_longer_declared_is_refused() -> None:
    with pytest.raises(RestoreError, match="'sum' no longer declares the state 'total'"):
        check_restorable(manifest(), operators={"sum": []}, key_group_count=128)


@pytest.mark.parametrize(("kind", "schema"), [("keyed", TEXTS), ("split", LONGS)])
def test_another_type_or_kind_of_state_is_refused(kind: str, schema: pa.Schema) -> None:
    with pytest.raises(RestoreError, match=r"state 'total' of operator 'sum' was keyed .* and is now .*set the type back"):
        check_restorable(manifest(), operators={"sum": [("total", kind, schema)]}, key_group_count=128)
