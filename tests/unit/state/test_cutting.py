"""Rows become sections, sorted by key-group, in pieces that don't grow with the state."""

from __future__ import annotations

import time
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.state import cutting
from tidegate.state.cutting import (
    MAX_CHUNK_ENTRIES,
    MIN_CHUNK_ENTRIES,
    MOST_REST,
    REST,
    TURN_S,
    Pace,
    cut_by_group,
    rested,
    without_rests,
)
from tidegate.state.sections import Section

SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64())])


def chunk(keys: list[int], first_value: int = 0) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(keys, pa.int64()), pa.array(range(first_value, first_value + len(keys)), pa.int64())], schema=SCHEMA
    )


def rows(sections: list[Section], of_key: list[int]) -> list[tuple[int, int, int]]:
    """Sorted by key-group, and otherwise as they come."""
    found = [
        (of_key[key], key, value)
        for section in sections
        for key, value in zip(*(column.to_pylist() for column in section.rows.columns), strict=True)
    ]
    return sorted(found, key=lambda row: row[0])


@given(
    sizes=st.lists(st.integers(0, 5), max_size=12),
    groups=st.integers(1, 9),
    run_rows=st.integers(1, 20),
    section_rows=st.integers(1, 9),
)
def test_every_row_is_in_the_section_of_its_group_in_the_order_it_came(
    sizes: list[int], groups: int, run_rows: int, section_rows: int
) -> None:
    chunks, count = [], 0
    for size in sizes:
        chunks.append(chunk(list(range(count, count + size)), first_value=count))
        count += size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cutting, "BATCH_ROWS", run_rows)
        patched.setattr(cutting, "SECTION_ROWS", section_rows)
        sections = list(cut_by_group("state", iter(chunks), groups))
    of_key = groups_of(hash_columns([pa.array(range(count), pa.int64())]), groups).tolist() if count else []
    assert rows(sections, of_key) == sorted((group, key, key) for key, group in enumerate(of_key))
    assert all(section.rows.num_rows and section.state == "state" for section in sections)
    for one, other in pairwise(sections):
        assert one.groups is not None and other.groups is not None
        assert one.groups == other.groups or one.groups.stop <= other.groups.start
    for section in sections:
        assert section.groups is not None
        few = {of_key[key] for key in section.rows.column("key").to_pylist()}
        assert min(few) >= section.groups.start and max(few) < section.groups.stop
        short = section.rows.num_rows - of_key.count(section.groups.stop - 1)
        assert len(section.groups) == 1 or short < section_rows, "several groups only where they have few rows"


def test_sections_begin_and_end_where_there_are_rows() -> None:
    """Those of a block of key-groups must not reach into the next one's."""
    sections = list(cut_by_group("state", [chunk([7])], 128))
    (group,) = groups_of(hash_columns([pa.array([7])]), 128).tolist()
    assert [section.groups for section in sections] == [range(group, group + 1)]


def test_a_section_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "BATCH_ROWS", 10)
    sections = list(cut_by_group("state", (chunk([number] * 4) for number in range(50)), 1))
    assert sum(section.rows.num_rows for section in sections) == 200
    assert max(section.rows.num_rows for section in sections) < 10 + 4
    assert {section.groups for section in sections} == {range(1)}


def test_no_rows_are_no_sections() -> None:
    assert list(cut_by_group("state", [], 8)) == []
    assert list(cut_by_group("state", [chunk([])], 8)) == []


# ------------------------------------------------------------------------------------------------------------ pace


class Clock:
    """The thread's time, moved by hand; sleeps are noted. The loop beside it uses `busy` of a processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, busy: float = 0.0) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []
        monkeypatch.setattr(cutting._thread, "busy", busy)
        monkeypatch.setattr(time, "thread_time", lambda: self.now_s)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s + sum(self.slept_s))
        monkeypatch.setattr(time, "process_time", lambda: self.now_s + busy * (self.now_s + sum(self.slept_s)))
        monkeypatch.setattr(time, "sleep", self.slept_s.append)


def test_a_rest_is_a_multiple_of_the_work_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(rest_factor=3.0)
    for _ in range(2):
        clock.now_s += TURN_S
        pace.rest_if_due()
    assert clock.slept_s == pytest.approx([3 * TURN_S, 3 * TURN_S])


@pytest.mark.parametrize(("busy", "share"), [(0.0, 0.5), (0.2, 0.4), (0.5, 0.25), (0.6, 0.2), (0.9, 0.2), (1.0, 0.2)])
def test_the_writer_takes_half_of_what_the_loop_leaves_and_at_least_a_fifth(
    monkeypatch: pytest.MonkeyPatch, busy: float, share: float
) -> None:
    clock = Clock(monkeypatch, busy=busy)
    pace = Pace(rest_factor=REST)
    for _ in range(100):
        clock.now_s += TURN_S
        pace.rest_if_due()
    assert clock.now_s / (clock.now_s + sum(clock.slept_s)) == pytest.approx(share)


def test_the_writer_notices_that_the_loop_has_become_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, busy=0.9)
    cutting._thread.busy = 0.0
    for _ in range(20):
        pace = Pace(rest_factor=REST)  # a thread's estimate lasts longer than one piece of work
        clock.now_s += TURN_S
        pace.rest_if_due()
    assert clock.slept_s[0] < 2 * TURN_S and clock.slept_s[-1] == pytest.approx(MOST_REST * TURN_S)


def test_little_work_needs_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(rest_factor=3.0)
    clock.now_s += TURN_S / 10
    pace.rest_if_due()
    assert clock.slept_s == []
    clock.now_s += TURN_S
    pace.rest_if_due()
    assert clock.slept_s == pytest.approx([3 * TURN_S * 1.1]), "it is not forgotten"


def test_what_is_done_with_a_thing_counts_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    seen = []
    for thing in rested("abc"):
        clock.now_s += TURN_S
        seen.append(thing)
    assert seen == ["a", "b", "c"]
    assert clock.slept_s == pytest.approx([REST * TURN_S] * 3)


def test_beside_an_idle_loop_nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(rest_factor=3.0)
    with without_rests():
        clock.now_s += TURN_S
        pace.rest_if_due()
    assert clock.slept_s == []
    clock.now_s += TURN_S
    pace.rest_if_due()
    assert clock.slept_s == pytest.approx([3 * TURN_S])


@pytest.mark.parametrize(
    ("entry_s", "expected"), [(TURN_S / 500, 512), (TURN_S, MIN_CHUNK_ENTRIES), (0.0, MAX_CHUNK_ENTRIES)]
)
def test_chunks_get_the_size_of_a_turn(monkeypatch: pytest.MonkeyPatch, entry_s: float, expected: int) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(rest_factor=1.0)
    for _ in range(20):
        clock.now_s += pace.entries * entry_s
        pace.rest_if_due()
    assert expected / 2 <= pace.entries <= expected
