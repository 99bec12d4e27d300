"""What streams have for look-ups: rows of a table are added to records, by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from tidegate.arguments import Duration
from tidegate.dataflow.flow import Flow, Names, SchemaLike, called, check_same_pipeline
from tidegate.dataflow.keyed_stream import BroadcastStream
from tidegate.dataflow.lookups import LookUp, lookup_join_spec, lookup_spec
from tidegate.errors import GraphError

if TYPE_CHECKING:
    from tidegate.dataflow.stream import Stream


class LookupFlow(Flow):
    """The methods of `Stream` that look up."""

    __slots__ = ()

    def lookup_join(
        self,
        name: str,
        table: BroadcastStream | pa.Table,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        how: Literal["inner", "left"] = "inner",
        parallelism: int | None = None,
        alias: Names = (),
    ) -> Stream:
        """Add the columns of a table that every subtask has: `.lookup_join("rates", rates.broadcast(), on="currency")`.

        The table is a broadcast stream, in which a later row replaces the one before with the same key, or an Arrow table
        that is part of the program. `on={"currency": "code"}` says which columns of the records and the table are equal. A
        record gets the row that its key has when it is processed; without one it is dropped, or with `how="left"` gets
        nulls. Nothing is emitted again when the table changes.
        """
        where = f"lookup join {name!r}"
        input, pipeline = self._input(), self._pipeline
        if not isinstance(table, BroadcastStream | pa.Table | pa.RecordBatch):
            raise GraphError(
                f"{where} takes a broadcast stream, such as rates.broadcast(), or an Arrow table, not {called(table):.60}"
            )
        inputs: tuple[Flow, ...] = (input,)
        if isinstance(table, BroadcastStream):
            check_same_pipeline(where, self, table)
            inputs = (input, table._input())
        name = pipeline._new_name("operator", name)
        aliases = pipeline._new_aliases("operator", name, alias)
        given = table.schema if isinstance(table, BroadcastStream) else table
        spec, schema = lookup_join_spec(name, self._schema, given, on=on, how=how)
        return pipeline._add(
            spec,
            name=name,
            schema=schema,
            inputs=inputs,
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
        )

    def lookup(
        self,
        name: str,
        look_up: LookUp,
        returns: SchemaLike,
        *,
        on: str | Sequence[str],
        how: Literal["inner", "left"] = "left",
        cache: int = 100_000,
        ttl: Duration | None = None,
        retries: int = 3,
        parallelism: int | None = None,
    ) -> Stream:
        """Add columns of a table outside: `orders.lookup("customers", fetch, "name string, tier int", on="customer")`.

        The function (or `tg.Lookup`, which can open a connection) is called with a record batch of keys, each of them once,
        and returns their rows: a batch with the columns of `on` and of `returns`, in any order. It is called once for each
        batch, if keys of it are not in the cache. The cache of each subtask holds up to `cache` keys, known or unknown ones,
        and forgets them after the `ttl`. It is not part of snapshots. Errors of the world outside, such as a
        `ConnectionError`, are retried after 100 ms, 200 ms, and so on.
        """
        pipeline, input = self._pipeline, self._input()
        name = pipeline._new_name("operator", name)
        spec, schema = lookup_spec(
            name, self._schema, look_up, returns, on=on, how=how, cache=cache, ttl=ttl, retries=retries
        )
        return pipeline._add(spec, name=name, schema=schema, inputs=(input,), parallelism=parallelism, named_by_user=True)
