"""The outside: a transactional store, and the two-phase sink that writes to it.

The store's rules: a transaction is prepared once, under a name that was never used before; committing a prepared transaction
makes its rows visible, in the order of commits; committing it again changes nothing; an unknown transaction, or one that was
given up, must never be committed. An answer can be lost after the store has done what it was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.dataflow.contracts import Committable, Sink, SinkContext, SinkWriter
from tidegate.errors import CommitError
from tidegate.testing.simulation.world import World
from tidegate.types import rows_of


@dataclass(frozen=True, slots=True)
class Transaction:
    sink: str
    subtask: int
    epoch: int
    attempt: int
    rows: tuple[tuple[Any, ...], ...] = field(repr=False)
    prepared_us: int

    @property
    def name(self) -> str:
        return json.dumps([self.sink, self.subtask, self.epoch, self.attempt])


# What goes wrong with a deed ("prepare" or "commit"): "refused", "answer lost", or None.
Outage: TypeAlias = Callable[[str, Transaction], str | None]


class External:
    def __init__(self, world: World, *, outage: Outage, before_commit: Callable[[Transaction], None]) -> None:
        self.prepared: dict[str, Transaction] = {}
        self.committed: dict[str, Transaction] = {}  # in the order of their commits
        self.given_up: dict[str, Transaction] = {}
        self.discarded_us: dict[tuple[str, int], int] = {}  # by sink and attempt
        self._world = world
        self._outage = outage
        self._before_commit = before_commit

    def rows(self, sink: str) -> list[tuple[Any, ...]]:
        """Return the rows that a reader sees, in the order in which they became visible."""
        return [row for transaction in self.committed.values() if transaction.sink == sink for row in transaction.rows]

    def prepare(self, transaction: Transaction) -> None:
        if any(transaction.name in names for names in (self.prepared, self.committed, self.given_up)):
            self._world.violate(f"transaction {transaction.name} was prepared twice")
        outage = self._outage("prepare", transaction)
        if outage != "refused":
            self.prepared[transaction.name] = transaction
            self._world.tell(f"outside: prepared {transaction.name}")
        if outage is not None:
            raise CommitError(f"prepare {transaction.name}: {outage}")

    def commit(self, name: str) -> None:
        transaction = self.prepared.get(name) or self.committed.get(name)
        if transaction is None:
            state = "was given up" if name in self.given_up else "is unknown"
            self._world.violate(f"transaction {name} is to be committed, but it {state}")
        outage = self._outage("commit", transaction)
        if outage != "refused" and name in self.prepared:
            self._before_commit(transaction)
            self.committed[name] = self.prepared.pop(name)
            self._world.tell(f"outside: committed {name}")
        if outage is not None:
            raise CommitError(f"commit {name}: {outage}")

    def give_up_older(self, sink: str, attempt: int) -> None:
        """Give up what attempts before this one left prepared."""
        old = [name for name, left in self.prepared.items() if left.sink == sink and left.attempt < attempt]
        for name in old:
            self.given_up[name] = self.prepared.pop(name)
            self._world.tell(f"outside: gave up {name}")
        self.discarded_us[sink, attempt] = self._world.now_us


@dataclass(frozen=True, slots=True)
class TransactionalSink(Sink):
    external: External
    world: World

    def open(self, context: SinkContext) -> SinkWriter:
        return TransactionalWriter(self, context)


@dataclass(slots=True, eq=False)
class TransactionalWriter(SinkWriter):
    sink: TransactionalSink
    context: SinkContext
    _rows: list[tuple[Any, ...]] = field(default_factory=list)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.extend(tuple(row) for row in rows_of(batch))

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        rows, self._rows = tuple(self._rows), []
        if not rows:
            return lambda: ()
        return partial(self._prepare, epoch, rows)

    def _prepare(self, epoch: int, rows: tuple[tuple[Any, ...], ...]) -> Sequence[Committable]:
        context = self.context
        transaction = Transaction(
            sink=context.sink,
            subtask=context.subtask,
            epoch=epoch,
            attempt=context.attempt,
            rows=rows,
            prepared_us=self.sink.world.now_us,
        )
        self.sink.external.prepare(transaction)
        return (transaction.name,)

    def commit(self, committables: Sequence[Committable]) -> None:
        for committable in committables:
            self.sink.external.commit(committable)

    def discard_leftovers(self) -> None:
        self.sink.external.give_up_older(self.context.sink, self.context.attempt)
