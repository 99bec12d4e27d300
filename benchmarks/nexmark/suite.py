"""The list of queries, and how one is put into a job."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pyarrow as pa

import tidegate as tg
from benchmarks.nexmark.events import Events
from benchmarks.nexmark.streams import Nexmark
from tidegate.driver.job import Job

# Number 10 of the original is here; 21 and 23 are not part of what we compare ourselves with.
QUERIES = ("q0", "q4", "q6", "q8", "q9", "q13", "q20")


def query(name: str) -> ModuleType:
    """Return the query's module: queries/__init__.py says what is in it."""
    return import_module(f"benchmarks.nexmark.queries.{name}")


def build(job: Job, name: str, events: Events, sink: tg.Sink) -> pa.Schema:
    """Add the query's program to a job, and return the columns of its results."""
    results: tg.Stream = query(name).program(Nexmark(job, events))
    results.to("out", sink)
    return results.schema
