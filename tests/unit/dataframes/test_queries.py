"""Which transform of which running query has a store."""

from __future__ import annotations

import pytest

from tidegate.dataframes.queries import BatchTimes, StoreHolders
from tidegate.errors import JobError
from tidegate.snapshots.manifest import MicroBatch


class Active:
    """Runs by query."""

    def __init__(self, **runs: str) -> None:
        self.runs = runs
        self.transforms = {"a"}

    def batch_times(self, batch: MicroBatch) -> BatchTimes:
        return BatchTimes(0, 0)

    def transforms_of(self, query: str, observed_as: str) -> set[str]:
        assert observed_as == "counts in "
        return self.transforms

    def run_of(self, query: str) -> str | None:
        return self.runs.get(query)


def take(holders: StoreHolders, transform: str, query: str, queries: Active, store: str = "memory://s") -> None:
    holders.take(store, name="counts", transform=transform, query=query, queries=queries, observed_as="counts in ")


def test_two_transforms_of_one_query_need_two_stores() -> None:
    holders, queries = StoreHolders(), Active(q="run 1")
    take(holders, "a", "q", queries)
    take(holders, "b", "q", queries, store="memory://other")
    with pytest.raises(
        JobError,
        match=r"this query has another transform named 'counts' with the same folder of snapshots, "
        r"memory://s\. Give each transform a name of its own",
    ):
        take(holders, "b", "q", queries)
    take(holders, "a", "q", queries)


def test_a_store_belongs_to_one_query_while_that_runs() -> None:
    holders, queries = StoreHolders(), Active(q="run 1", r="run 2")
    take(holders, "a", "q", queries)
    with pytest.raises(JobError, match=r"the running query q has another transform .*, or stop that query first"):
        take(holders, "b", "r", queries)
    with pytest.raises(JobError, match=r"the transform 'counts' is in two running streaming queries, q and r"):
        take(holders, "a", "r", queries)


def test_a_transform_that_is_built_again_takes_the_store_when_the_query_was_stopped() -> None:
    holders, queries = StoreHolders(), Active(q="run 1")
    take(holders, "a", "q", queries)
    queries.runs = {"q": "run 2"}  # stopped, and started with another DataFrame
    take(holders, "b", "q", queries)
    queries.runs = {"r": "run 3"}
    take(holders, "a", "r", queries)


def test_two_transforms_in_the_plan_of_a_query_are_refused_before_either_has_run() -> None:
    holders, queries = StoreHolders(), Active(q="run 1")
    queries.transforms = {"a", "b"}
    with pytest.raises(JobError, match="this query has another transform named 'counts'"):
        take(holders, "a", "q", queries)
    queries.transforms = {"a"}
    take(holders, "a", "q", queries)
