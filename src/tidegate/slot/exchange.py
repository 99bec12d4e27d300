"""The writer of one outgoing edge of one subtask: it sends each record to its channel.

On a keyed edge records are partitioned by key-group, with the hash that also allocates state, so a record always meets its
state. This is vectorised for each batch. On other edges a whole batch goes to one channel, or to all of them. Control
elements go to every channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import End, Held, Idle, Lap, Marker, Watermark
from tidegate.channels.ports import Outlet
from tidegate.dataflow.graph import Partitioning
from tidegate.dataflow.null_keys import refuse_null_keys
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, owners_of

# Up to this many, records are picked for each outlet. Sorting them by outlet takes about twice as long for 2, as long for 6.
FEW_OUTLETS = 4


class EdgeWriter:
    def __init__(
        self,
        outlets: Sequence[Outlet],
        *,
        partitioning: Partitioning,
        key: tuple[str, ...],
        key_group_count: int,
        first: int,
        loops: frozenset[int] = frozenset(),
        refuses_nulls_for: str | None = None,
    ) -> None:
        """`refuses_nulls_for` is the name of the target operator if it refuses records whose key is null."""
        assert outlets
        self.loops = loops  # the loops that the edge is in
        self.batch_count = 0
        self.sent_count = 0  # records and control elements, once for each channel
        self._outlets = tuple(outlets)
        self._partitioning = partitioning
        self._key = key
        self._refuses_nulls_for = refuses_nulls_for
        self._key_group_count = key_group_count
        if partitioning is Partitioning.HASH:
            owners = owners_of(
                np.arange(key_group_count, dtype=np.int32), parallelism=len(outlets), key_group_count=key_group_count
            )
            self._owners = owners.astype(np.uint8 if len(self._outlets) <= 256 else np.uint16)  # by key-group
        self._next = first % len(self._outlets)  # where this subtask's round-robin starts

    @property
    def full(self) -> bool:
        for outlet in self._outlets:  # noqa: SIM110  (called at every step: a generator takes three times as long)
            if outlet.full:
                return True
        return False

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        if self._refuses_nulls_for is not None:
            refuse_null_keys(batch, self._key, self._refuses_nulls_for)
        self.batch_count += 1
        self.sent_count += batch.num_rows
        if len(self._outlets) == 1:
            self._outlets[0].send(batch)
        elif self._partitioning is Partitioning.HASH:
            self._send_by_key(batch)
        elif self._partitioning is Partitioning.REBALANCE:
            self._outlets[self._next].send(batch)
            self._next = (self._next + 1) % len(self._outlets)
        else:
            assert self._partitioning is Partitioning.BROADCAST
            self.sent_count += batch.num_rows * (len(self._outlets) - 1)
            for outlet in self._outlets:
                outlet.send(batch)

    def on_watermark(self, at_ms: int) -> None:
        self.send(Watermark(at_ms))

    def on_idle(self) -> None:
        self.send(Idle())

    def on_end(self) -> None:
        self.send(End())

    def send(self, control: Marker | Watermark | Idle | Held | Lap | End) -> None:
        self.sent_count += len(self._outlets)
        for outlet in self._outlets:
            outlet.send(control)

    def _send_by_key(self, batch: pa.RecordBatch) -> None:
        count = len(self._outlets)
        groups = groups_of(hash_columns([batch.column(name) for name in self._key]), self._key_group_count)
        owners = self._owners.take(groups)
        if count <= FEW_OUTLETS:
            for owner, outlet in enumerate(self._outlets):
                places = np.flatnonzero(owners == owner)
                if len(places):
                    outlet.send(batch.take(pa.array(places)))
            return
        # Small integers are sorted by radix. The sort is stable, so records of a key stay in order.
        order = np.argsort(owners, kind="stable")
        stops = np.cumsum(np.bincount(owners, minlength=count)).tolist()
        sorted_batch = batch.take(pa.array(order))
        start = 0
        for outlet, stop in zip(self._outlets, stops, strict=True):
            if stop > start:
                outlet.send(sorted_batch.slice(start, stop - start))
            start = stop
