"""What a transform asks about the streaming queries on this driver, and which query has which folder of snapshots.

Spark knows the times of a micro-batch, from its own log, and whether a query runs (spark/queries.py asks it). `StoreHolders`
keeps two transforms from writing to one folder: each would take the other's snapshots for its own, or fence it off. Two
drivers that share a folder fence each other off (snapshots/catalog.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidegate.errors import JobError
from tidegate.snapshots.manifest import MicroBatch
from tidegate.store.layout import shown


class BatchTimes(NamedTuple):
    """The time of a micro-batch, and the query's watermark, by which the batch's timers of event time are due."""

    now_ms: int
    watermark_ms: int


class Queries(Protocol):
    """The streaming queries of a Spark session, by their ids."""

    def batch_times(self, batch: MicroBatch) -> BatchTimes:
        """Return the times of a running micro-batch from Spark's log: the same whenever the batch runs."""

    def transforms_of(self, query: str, observed_as: str) -> set[str]:
        """Return what follows that text in the names of what transforms observe, in the plan that the query runs."""

    def run_of(self, query: str) -> str | None:
        """Return the id of the query's current run; None if the query isn't active."""


@dataclass(frozen=True, slots=True)
class _Holder:
    transform: str
    query: str
    run: str | None


class StoreHolders:
    """The transform, and the run of a query, that each store's snapshots are being written by, in this process."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._lock = threading.Lock()

    def take(self, store: str, *, name: str, transform: str, query: str, queries: Queries, observed_as: str) -> None:
        """Give the store to a transform of a running query. Raises `JobError` if another transform or another running query
        has the store, or if the query has two transforms for it. A query that was stopped no longer has its store."""
        if len(queries.transforms_of(query, observed_as)) > 1:
            raise JobError(twice_in_a_query(name, shown(store)))
        with self._lock:
            held = self._holders.get(store)
            if (
                held is not None
                and (held.transform, held.query) != (transform, query)
                and (held.run is not None and queries.run_of(held.query) == held.run)
            ):
                raise JobError(_in_use(held, name=name, transform=transform, query=query, store=store))
            self._holders[store] = _Holder(transform, query, queries.run_of(query))


def _in_use(held: _Holder, *, name: str, transform: str, query: str, store: str) -> str:
    if held.query != query and held.transform == transform:
        return (
            f"the transform {name!r} is in two running streaming queries, {held.query} and {query}, and its state belongs "
            f"to one of them. Build a transform for each query, each with its own name (name=…) or its own folder "
            f"(Snapshots(to=…))"
        )
    if held.query == query:
        return twice_in_a_query(name, shown(store))
    return (
        f"the running query {held.query} has another transform named {name!r} with the same folder of snapshots, "
        f"{shown(store)}. {_A_NAME_EACH}, or stop that query first"
    )


def twice_in_a_query(name: str, folder: str) -> str:
    return f"this query has another transform named {name!r} with the same folder of snapshots, {folder}. {_A_NAME_EACH}"


_A_NAME_EACH = "Give each transform a name of its own (name=…), under which its state is kept"
