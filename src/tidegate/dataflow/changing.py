"""Make streams of upserts, and of changes, from what the user wrote: `as_upserts` and `as_changelog`.

Not here: what they mean and who may take them (changelog.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.arguments import Duration
from tidegate.dataflow import checks
from tidegate.dataflow.changelog import Changelog, check_no_row_kind, meaning
from tidegate.dataflow.flow import Flow, Names
from tidegate.dataflow.graph import Partitioning
from tidegate.dataflow.operators.changelog import ChangelogSpec, changes_schema
from tidegate.errors import GraphError, SchemaError
from tidegate.types import ddl_of

if TYPE_CHECKING:
    from tidegate.dataflow.stream import Stream


def as_upserts(stream: Stream, key: tuple[str, ...]) -> Stream:
    where = f"as_upserts after {stream._origin()}"
    key = checks.check_key(where, key, stream._input()._schema, method="as_upserts")
    given = meaning(stream._pipeline._nodes, *stream._edges)
    if given.changelog is not Changelog.APPEND:
        what = "changes" if given.retracts else f"upserts by ({', '.join(given.key)})"
        raise GraphError(f"{where}: the records are {what} already; use .as_append() before it to take them for other ones")
    return type(stream)(stream._pipeline, tuple(replace(edge, upserts_by=key) for edge in stream._edges), stream._schema)


def as_changelog(stream: Stream, name: str, ttl: Duration | None, parallelism: int | None, alias: Names) -> Stream:
    pipeline, input = stream._pipeline, stream._input()
    name = pipeline._new_name("operator", name)
    aliases = pipeline._new_aliases("operator", name, alias)
    where = f"operator {name!r}"
    given = meaning(pipeline._nodes, *input._edges)
    if given.changelog is not Changelog.UPSERT:
        what = (
            "are changes already: omit it"
            if given.retracts
            else "are appended, so none replaces another; use .as_upserts(…) before it to name the key by which they do"
        )
        raise GraphError(f"{where}: as_changelog takes upserts, and the records of {stream._origin()} {what}")
    check_no_row_kind(where, input._schema.names)
    schema = changes_schema(input._schema)
    rows = schema.remove(0)
    ttl_ms = None if ttl is None else checks.duration_ms(name, "ttl", ttl)
    keyed = Flow(pipeline, input._repartitioned(Partitioning.HASH, given.key), input._schema)
    return pipeline._add(
        ChangelogSpec(given.key, rows, ttl_ms),
        name=name,
        schema=schema,
        inputs=(keyed,),
        parallelism=parallelism,
        named_by_user=True,
        aliases=aliases,
        upserts_by=given.key,
        retracts=True,
    )


def check_found_by_values(where: str, rows: pa.Schema, stream: str) -> None:
    """Check that the rows of a stream with deletions can be found by their values."""
    for field in rows:
        if checks.has_map(field.type):
            raise SchemaError(
                f"{where}: column {field.name!r} of the {stream} is of type {ddl_of(field.type)}, and the stream has "
                f"deletions: a deleted row is found by its values, and maps can't be compared. Take the entries that matter "
                f"into columns with select"
            )
