"""An operator by itself: fed with rows, its output collected, frozen and restored in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tidegate.dataflow.graph import Node, Spec
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.budget import Budget
from tidegate.state.heap import HeapBackend
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.sections import StateKind
from tidegate.types import batch_of, parse_schema, rows_of

GROUPS = 16

Restored = dict[str, list[pa.RecordBatch]]


class Collected:
    """A consumer that notes what it gets, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        assert batch.num_rows, "no operator emits empty batches"
        batch.validate(full=True)
        self.events.append(("batch", *map(tuple, rows_of(batch))))

    def on_watermark(self, at_ms: int) -> None:
        self.events.append(("watermark", at_ms))

    def on_idle(self) -> None:
        self.events.append(("idle",))

    def on_end(self) -> None:
        self.events.append(("end",))

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return [row for event in self.events if event[0] == "batch" for row in event[1:]]

    @property
    def others(self) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[0] != "batch"]


class Clock:
    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def on_heap(key_type: pa.DataType) -> HeapBackend:
    return HeapBackend(key_type=key_type, key_group_count=GROUPS)


class Bench:
    """An opened operator with a consumer on each output."""

    def __init__(
        self,
        spec: Spec,
        *inputs: str | pa.Schema,
        returns: str | pa.Schema | None = None,
        sides: Mapping[str, str] | None = None,
        name: str = "the operator",
        restored: Restored | None = None,
        subtask: int = 0,
        parallelism: int = 1,
        batch_clock: Clock | None = None,
        budget: Budget | None = None,
        open: bool = True,
        make_backend: Callable[[pa.DataType], Any] = on_heap,
    ) -> None:
        self.schemas = tuple(map(parse_schema, inputs))
        schema = pa.schema([]) if returns is None else parse_schema(returns)
        self.node = Node(
            0, name, spec, (), schema, self.schemas, {tag: parse_schema(declared) for tag, declared in (sides or {}).items()}
        )
        self.operator: Operator = spec.create(self.node)
        self.out = Collected()
        self.layers: list[LayerInMemory] = []
        self.sides = {tag: Collected() for tag in self.node.side_schemas}
        self.clock = Clock()
        self.delivered: list[tuple[str, str]] = []
        self.context = OperatorContext(
            job="job",
            subtask=subtask,
            parallelism=parallelism,
            attempt=7,
            key_group_count=GROUPS,
            now_ms=self.clock,
            deliver=lambda sink, committable: self.delivered.append((sink, committable)),
            make_backend=make_backend,
            restored=restored or {},
            is_restored=restored is not None,
            batch_now_ms=batch_clock,
            budget=budget or Budget(),
        )
        self.operator.consumers.append(self.out)
        for tag, collected in self.sides.items():
            self.operator.side_consumers[tag].append(collected)
        if open:
            self.operator.open(self.context)

    def feed(self, *rows: Sequence[Any], port: int = 0) -> list[tuple[Any, ...]]:
        """Feeds one batch; the rows that came out of it."""
        before = len(self.out.rows)
        self.operator.on_batch(batch_of(list(rows), self.schemas[port]), port)
        return self.out.rows[before:]

    def freeze(self, epoch: int = 1) -> Restored:
        """The state as another operator is given it."""
        frozen = self.operator.freeze(epoch)
        assert frozen is not None
        sections = list(frozen.sections())
        frozen.release()
        keyed = [section for section in sections if section.groups is not None]
        if frozen.complete:
            self.layers.clear()
        self.layers.append(LayerInMemory(keyed, key_group_count=GROUPS))
        return {
            info.name: list(resolved_rows(info.name, self.layers, range(GROUPS)))
            if info.kind is StateKind.KEYED
            else [section.rows for section in sections if section.state == info.name]
            for info in frozen.states
        }
