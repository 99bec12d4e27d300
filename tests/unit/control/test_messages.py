"""The codec between slots and coordinator: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.control.messages import (
    Acknowledge,
    Failed,
    Heartbeat,
    Message,
    Register,
    RestoreStats,
    SubtaskMetrics,
    Trigger,
    from_wire,
    to_wire,
)
from tidegate.errors import ProtocolError
from tidegate.protocol.time_groups import Least, Reached
from tidegate.snapshots.manifest import FileEntry, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.stats import SubtaskStats
from tidegate.state.sections import StateInfo, StateKind

KINDS = get_args(Message)
MS = st.floats(allow_nan=False, allow_infinity=False)
STATE = StateEntry.of(StateInfo("n", StateKind.KEYED, "value", pa.schema([pa.field("key", pa.int64())])))
PARTS = st.builds(
    lambda subtask, files: OperatorEntry(8, (STATE,), (PieceEntry(subtask, (3, 5), tuple(files), {"n": len(files)}),)),
    st.integers(0, 7),
    st.lists(st.builds(FileEntry, st.just("state/x"), st.integers(0, 9), st.integers(0, 2**32 - 1)), max_size=2),
)
BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    str: st.text(max_size=8),
    int | None: st.none() | st.integers(),
    str | None: st.none() | st.text(max_size=8),
    tuple[tuple[str, int], ...]: st.lists(st.tuples(st.text(max_size=5), st.integers()), max_size=3).map(tuple),
    Mapping[str, OperatorEntry]: st.dictionaries(st.text(max_size=5), PARTS, max_size=3),
    Mapping[str, SubtaskMetrics]: st.dictionaries(st.text(max_size=5), st.builds(SubtaskMetrics, st.integers(), MS)),
    Mapping[str, Reached]: st.dictionaries(
        st.text(max_size=5), st.builds(Reached, st.none() | st.integers(), st.booleans(), st.text(max_size=5)), max_size=3
    ),
    Mapping[str, Least]: st.dictionaries(
        st.text(max_size=5), st.builds(Least, st.none() | st.integers(), st.text(max_size=5)), max_size=3
    ),
    RestoreStats | None: st.none() | st.builds(RestoreStats, st.integers(), MS),
    SubtaskStats: st.builds(SubtaskStats, pause_ms=MS, state_bytes=st.integers(), alarm_ms=st.none() | st.integers()),
}


@st.composite
def messages(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(KINDS))
    hints = get_type_hints(kind)
    return kind(**{field.name: draw(BY_HINT[hints[field.name]]) for field in fields(kind)})


@given(messages())
def test_every_message_survives_the_wire(message: Message) -> None:
    assert from_wire(json.loads(json.dumps(to_wire(message)))) == message


@given(messages(), st.data())
def test_a_message_that_lacks_a_field_is_refused(message: Message, data: st.DataObject) -> None:
    wire = to_wire(message)
    if len(wire) > 1:
        del wire[data.draw(st.sampled_from(sorted(wire.keys() - {"kind"})))]
        with pytest.raises(ProtocolError, match=f"malformed {type(message).__name__}"):
            from_wire(wire)


@given(messages())
def test_a_message_with_a_field_too_many_is_refused(message: Message) -> None:
    with pytest.raises(ProtocolError, match=r"malformed.*surplus"):
        from_wire(to_wire(message) | {"surplus": 1})


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Register(0, "h", 1, 2), "port", "1"),
        (Register(0, "h", 1, 2), "slot", None),
        (Register(0, "h", 1, 2), "slot", True),  # a bool is no int here, though Python says so
        (Register(0, "h", 1, 2), "host", b"h"),
        (Failed(0, "text"), "permanent", 1),
        (Failed(0, "text"), "permanent", None),
        (Trigger(1, None), "ending", 7),
        (Trigger(1, None), "epoch", 1.0),
        (Acknowledge(0, 0, 1, {}), "operators", []),
        (Acknowledge(0, 0, 1, {}), "stats", {"pause_ms": "1"}),
        (Acknowledge(0, 0, 1, {}), "operators", {"sum": {"parallelism": 1, "states": []}}),
        (Acknowledge(0, 0, 1, {}), "operators", {"sum": {"parallelism": "1", "states": [], "pieces": []}}),
        (Acknowledge(0, 0, 1, {}), "operators", {"sum": {"parallelism": 1, "states": [], "pieces": [{"subtask": 0}]}}),
        (Heartbeat(0, {}), "metrics", None),
    ],
)
def test_a_value_of_another_type_is_refused(message: Message, field: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=f"malformed {type(message).__name__} message: .*{field}"):
        from_wire(to_wire(message) | {field: value})


@pytest.mark.parametrize("kind", ["Reboot", None, 3, "register", "Message"])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    with pytest.raises(ProtocolError, match="unknown kind"):
        from_wire({"kind": kind})


def test_a_kind_that_cant_even_be_looked_up_is_refused() -> None:
    with pytest.raises(ProtocolError):
        from_wire({"kind": ["Register"]})
