"""The list of queries, and how one is put into a job."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pyarrow as pa

import tidegate as tg
from benchmarks.nexmark.events import Events
from benchmarks.nexmark.streams import Nexmark
from benchmarks.workloads import Discard
from tidegate.driver.job import Job

QUERIES = tuple(f"q{number}" for number in (*range(21), 22))


def query(name: str) -> ModuleType:
    """Return the query's module: queries/__init__.py says what is in it."""
    return import_module(f"benchmarks.nexmark.queries.{name}")


def build(job: Job, name: str, events: Events, sink: tg.Sink) -> pa.Schema:
    """Add the query's program to a job, and return the columns of its results."""
    results: tg.Stream = query(name).program(Nexmark(job, events))
    # A file can't replace a row of another: of upserts, every update is written.
    (results if isinstance(sink, Discard) else results.as_append()).to("out", sink)
    return results.schema
