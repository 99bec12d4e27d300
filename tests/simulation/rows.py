"""Rows for the sources of jobs that are written down."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tidegate.connectors.rows import RowsSource
from tidegate.testing.simulation.site import Row
from tidegate.types import parse_schema


def rows_source(values: Sequence[Row], ddl: str, splits: int = 1) -> RowsSource:
    return RowsSource.of(values, parse_schema(ddl), split_count=splits)


def keys_of_splits(rng: Random, count: int, *, splits: int, keys: int) -> list[int]:
    """A key for each row such that all rows of one key are in one split, for then their order is determined."""
    keys = max(keys, splits)
    return [rng.randrange(row % splits, keys, splits) for row in range(count)]
