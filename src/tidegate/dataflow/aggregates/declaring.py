"""The functions with which a job names its aggregates: `tg.count()`, `tg.sum("price")`.

Each takes expressions as text. What they return is given to `keyed.aggregate(…)`, `keyed.running(…)` and windows. Nulls and
types of results are as in Spark SQL's functions of these names.
"""

from __future__ import annotations

from tidegate.dataflow.aggregates.base import Aggregate
from tidegate.dataflow.aggregates.choosing import Arrived, ChosenBy, Extreme, Logical
from tidegate.dataflow.aggregates.collecting import CollectList, CollectSet, CountDistinct
from tidegate.dataflow.aggregates.sketching import ApproxCountDistinct
from tidegate.dataflow.aggregates.summing import Count, Mean, Sum, Variance


def count(value: str | None = None) -> Aggregate:
    """Return the number of records, or with a value the number of records in which it is not null. A long."""
    return Count() if value is None else Count(value)


def sum_(value: str) -> Aggregate:
    """Return the sum. Of whole numbers it is a long, of decimal(p, s) a decimal(p + 10, s), otherwise a double. A sum that
    doesn't fit its type ends the job."""
    return Sum(value)


def min_(value: str) -> Aggregate:
    """Return the smallest value."""
    return Extreme(value, largest=False, name="min")


def max_(value: str) -> Aggregate:
    """Return the largest value. NaN is larger than any other number."""
    return Extreme(value, largest=True, name="max")


def mean(value: str) -> Aggregate:
    """Return the mean: a double, or of decimal(p, s) a decimal(p + 4, s + 4)."""
    return Mean(value)


def variance(value: str, *, population: bool = False) -> Aggregate:
    """Return the variance of a sample, or with `population` that of the population (`var_pop`). A double."""
    return Variance(value, population=population, root=False)


def stddev(value: str, *, population: bool = False) -> Aggregate:
    """Return the standard deviation of a sample, or with `population` that of the population (`stddev_pop`). A double."""
    return Variance(value, population=population, root=True)


def first(value: str, *, by: str | None = None, ignore_nulls: bool = False) -> Aggregate:
    """Return the value of the record that arrived first, or of the earliest by another value: `tg.first("price", by="ts")`.

    Of records with the same `by`, the one that arrived first counts. `ignore_nulls` is for the order of arrival only.
    """
    if by is not None:
        return ChosenBy(value, by, largest=False, earliest=True, name="first")
    return Arrived(value, latest=False, ignore_nulls=ignore_nulls)


def last(value: str, *, by: str | None = None, ignore_nulls: bool = False) -> Aggregate:
    """Return the value of the record that arrived last, or of the latest by another value: `tg.last("price", by="ts")`.

    Of records with the same `by`, the one that arrived last counts. The rest is as in `first`.
    """
    if by is not None:
        return ChosenBy(value, by, largest=True, earliest=False, name="last")
    return Arrived(value, latest=True, ignore_nulls=ignore_nulls)


def min_by(value: str, by: str) -> Aggregate:
    """Return the value of the record in which `by` is smallest: `tg.min_by("bidder", by="price")`."""
    return ChosenBy(value, by, largest=False, earliest=True, name="min_by")


def max_by(value: str, by: str) -> Aggregate:
    """Return the value of the record in which `by` is largest: `tg.max_by("bidder", by="price")`."""
    return ChosenBy(value, by, largest=True, earliest=True, name="max_by")


def count_distinct(value: str) -> Aggregate:
    """Return the number of distinct values: exact, so the state holds every one of them. A long."""
    return CountDistinct(value)


def approx_count_distinct(value: str, *, relative_error: float = 0.02) -> Aggregate:
    """Return about how many distinct values there are, by a HyperLogLog sketch of a bounded size. A long.

    `relative_error` is the standard error: two of three results are closer. The default takes 2 kB for a key with many
    values, and a tenth of it 128 kB; few values take a few bytes each, and their number is nearly exact. Needs the extra
    `sketches`.
    """
    return ApproxCountDistinct(value, relative_error)


def collect_list(value: str) -> Aggregate:
    """Return all values that are not null, in the order in which they arrived. In windows that are merged (sliding and
    cumulating ones, and sessions) only those of one pane are in that order."""
    return CollectList(value)


def collect_set(value: str) -> Aggregate:
    """Return all distinct values that are not null, in the order in which they first arrived; in windows that are merged
    as in `collect_list`."""
    return CollectSet(value)


def any_(condition: str) -> Aggregate:
    """Return whether the condition is true for any record: `tg.any("price > 100")`. Null if it is always null."""
    return Logical(condition, largest=True, name="any")


def all_(condition: str) -> Aggregate:
    """Return whether the condition is true for all records for which it is not null. Null if it is always null."""
    return Logical(condition, largest=False, name="all")
