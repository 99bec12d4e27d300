"""All subtasks of an operator on columns that is keyed by a long: fed, restored and rescaled in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from tests.unit.operators.harness import GROUPS, Bench, Clock, Restored, on_heap
from tests.unit.operators.windowing import own_part, subtask_of
from tidegate.dataflow.graph import Spec
from tidegate.state.rocks_db import SlotMemory
from tidegate.state.rocksdb import RocksDB


class LittleMemory(SlotMemory):
    """So little that a backend forgets all that it may."""

    def allowed(self, user: object, used_bytes: float) -> float:
        return 1.0


def on_rocksdb(key_type: pa.DataType) -> Any:
    backend = RocksDB("16 MB").create(key_type=key_type, key_group_count=GROUPS)
    backend._memory = LittleMemory(16 << 20)
    return backend


BACKENDS: dict[str, Callable[[pa.DataType], Any]] = {"heap": on_heap, "rocksdb": on_rocksdb}


class Subtasks:
    """The subtasks, and one clock. A record goes to the subtask of its key, which is its first value."""

    def __init__(
        self,
        spec: Spec,
        record: str,
        returns: Any,
        *,
        backend: str,
        parallelism: int,
        sides: Mapping[str, str] | None = None,
        whole: Restored | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._make = dict(spec=spec, record=record, returns=returns, backend=backend, sides=sides)
        self.clock = clock or Clock()
        self.benches = [
            Bench(
                spec,
                record,
                returns=returns,
                sides=sides,
                restored=None if whole is None else own_part(whole, subtask, parallelism),
                subtask=subtask,
                parallelism=parallelism,
                make_backend=BACKENDS[backend],
                open=False,
            )
            for subtask in range(parallelism)
        ]
        for bench in self.benches:
            bench.clock.now_ms = self.clock.now_ms
            bench.operator.open(bench.context)
            bench.operator.resume()

    def at(self, now_ms: int) -> None:
        self.clock.now_ms = now_ms
        for bench in self.benches:
            bench.clock.now_ms = now_ms

    def feed(self, records: Sequence[Any]) -> list[Any]:
        for subtask, bench in enumerate(self.benches):
            own = [each for each in records if subtask_of(each[0], len(self.benches)) == subtask]
            if own:
                bench.feed(*own)
            bench.operator.maintain(1000)
        return self.taken()

    def watermark(self, at_ms: int) -> list[Any]:
        for bench in self.benches:
            bench.operator.on_watermark(at_ms)
        return self.taken()

    def taken(self) -> list[Any]:
        """What came out since the last call, but for the side outputs."""
        rows = [row for bench in self.benches for row in bench.out.rows]
        for bench in self.benches:
            bench.out.events.clear()
        return rows

    def aside(self, tag: str) -> list[Any]:
        rows = [row for bench in self.benches for row in bench.sides[tag].rows]
        for bench in self.benches:
            bench.sides[tag].events.clear()
        return rows

    def restored(self, parallelism: int) -> Subtasks:
        """The same after a snapshot now, at another parallelism."""
        whole: Restored = {}
        for bench in self.benches:
            while bench.operator.holds_records():
                bench.operator.work()
            for state, batches in bench.freeze().items():
                whole.setdefault(state, []).extend(batches)
            bench.operator.close()
        return Subtasks(**self._make, parallelism=parallelism, whole=whole, clock=self.clock)
