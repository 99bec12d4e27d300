"""Build the logical graph from the user's calls.

    pipeline = Pipeline()
    bids = pipeline.source("bids", source).with_watermark("ts", "5 seconds")
    counts = bids.key_by("auction").process("count", CountBids(), returns="auction long, n long")
    counts.to("out", sink)
    graph = pipeline.build()

A mistake in the job is an error at the call that made it (`checks.py`). Slots, chains and running operators are not known
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tidegate.dataflow import checks
from tidegate.dataflow.changelog import APPEND_ONLY, check_input, meaning
from tidegate.dataflow.contracts import Sink, Source
from tidegate.dataflow.flow import Flow, Names, SchemaLike, Takes
from tidegate.dataflow.graph import Edge, LogicalGraph, Node, Partitioning, Spec
from tidegate.dataflow.operators.sink import SinkSpec
from tidegate.dataflow.operators.source import SourceSpec
from tidegate.dataflow.stream import NO_OUTPUT, Stream
from tidegate.errors import GraphError


class Pipeline:
    """The nodes of one job. `time_by_epoch`: watermarks move only when an epoch ends, since records come in no order."""

    time_by_epoch = False

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._names: dict[str, Node] = {}
        self._aliases: dict[str, Node] = {}
        self._functions: dict[int, str] = {}  # id of a process function → the operator that has it

    def source(self, name: str, source: Source, *, parallelism: int | None = None, alias: Names = ()) -> Stream:
        """Return a stream of the records of a source. Its offsets are kept in snapshots under `name`.

        To rename something that has state (a source, a process, a sink), give its old name as `alias`: its state is then
        found in snapshots under the old name.
        """
        name = self._new_name("source", name)
        schema = checks.check_source(name, source)
        return self._add(
            SourceSpec(source),
            name=name,
            schema=schema,
            parallelism=parallelism,
            named_by_user=True,
            aliases=self._new_aliases("source", name, alias),
        )

    def build(self) -> LogicalGraph:
        """Return the graph as it is now, checked for loose ends."""
        graph = LogicalGraph(tuple(self._nodes))
        checks.check_complete(graph)
        return graph

    def _new_name(self, kind: str, name: str | None) -> str:
        """Return a name that no operator has yet: the user's, or a generated one such as "map-1" if `name` is None."""
        if name is None:
            number = 1 + sum(not node.named_by_user and node.spec.kind == kind for node in self._nodes)
            while f"{kind}-{number}" in self._names | self._aliases:
                number += 1
            return f"{kind}-{number}"
        name = checks.check_name(kind, name)
        taken = self._names.get(name)
        if taken is not None:
            whose = "" if taken.named_by_user else ", by a generated name"
            article = "an" if taken.spec.kind[0] in "aeiou" else "a"
            raise GraphError(
                f"{kind} {name!r}: the name is already taken by {article} {taken.spec.kind}{whose}; names are "
                f"unique in a job, since state is found by them: choose another"
            )
        if name in self._aliases:
            raise GraphError(
                f"{kind} {name!r}: the name is an alias of {self._aliases[name].name!r}, and what a snapshot "
                f"holds under a name goes to one operator: omit that alias, or choose another name"
            )
        return name

    def _new_aliases(self, kind: str, name: str, alias: Names) -> tuple[str, ...]:
        aliases = checks.check_aliases(kind, name, alias)
        for each in aliases:
            taken = self._names.get(each) or self._aliases.get(each)
            if taken is not None:
                raise GraphError(
                    f"{kind} {name!r}, alias={each!r}: that is a name or alias of the {taken.spec.kind} "
                    f"{taken.name!r}, and what a snapshot holds under a name goes to one operator"
                )
        return aliases

    def _add(
        self,
        spec: Spec,
        *,
        name: str,
        schema: pa.Schema,
        inputs: Sequence[Flow] = (),
        side_schemas: Mapping[str, pa.Schema] | None = None,
        parallelism: int | None = None,
        named_by_user: bool,
        aliases: tuple[str, ...] = (),
        upserts_by: tuple[str, ...] = (),
        retracts: bool = False,
    ) -> Stream:
        """Add a node whose `inputs` are by port, and return the stream of its output: of changes if it `retracts`, or else
        of upserts by a key if there is one in `upserts_by`."""
        parallelism = checks.check_parallelism(name, parallelism)
        is_sink, takes = isinstance(spec, SinkSpec), getattr(spec, "changelogs", APPEND_ONLY)
        for flow in inputs:
            check_input(self._nodes, f"{spec.kind} {name!r}", flow._edges, takes=takes, sink=is_sink)
        node = Node(
            id=len(self._nodes),
            name=name,
            spec=spec,
            inputs=tuple(replace(edge, port=port) for port, flow in enumerate(inputs) for edge in flow._edges),
            schema=schema,
            input_schemas=tuple(flow.schema for flow in inputs),
            side_schemas=dict(side_schemas or {}),
            parallelism=parallelism,
            named_by_user=named_by_user,
            aliases=aliases,
            upserts_by=upserts_by,
            retracts=retracts,
        )
        self._nodes.append(node)
        self._names[name] = node
        self._aliases |= dict.fromkeys(aliases, node)
        return Stream(self, (Edge(node.id, None, 0, Partitioning.FORWARD),), schema)

    def _add_process(
        self,
        spec: Spec,
        function: Any,
        *,
        takes: Takes,
        name: str,
        inputs: Sequence[Flow],
        returns: SchemaLike,
        side_outputs: Mapping[str, SchemaLike] | None,
        parallelism: int | None,
        alias: Names,
    ) -> Stream:
        """Add a node with a process function, and return the stream of its output."""
        name = self._new_name("operator", name)
        aliases = self._new_aliases("operator", name, alias)
        checks.check_function(name, function, expected=takes.expected, here=takes.here)
        checks.check_states(name, function, keyed=takes.keyed)
        other = self._functions.get(id(function))
        if other is not None:
            raise GraphError(
                f"operator {name!r}: this {type(function).__name__} is already the function of {other!r}, "
                f"and an instance holds the state of one operator; make a second instance"
            )
        schema = NO_OUTPUT if returns is None else checks.declared_schema(name, returns)
        stream = self._add(
            spec,
            name=name,
            schema=schema,
            inputs=inputs,
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
            side_schemas=checks.declared_sides(name, {} if side_outputs is None else side_outputs),
        )
        self._functions[id(function)] = name
        return stream

    def _add_sink(self, flow: Flow, name: str, sink: Sink, parallelism: int | None, alias: Names) -> None:
        name = self._new_name("sink", name)
        aliases = self._new_aliases("sink", name, alias)
        checks.check_sink(name, sink, flow._input().schema)
        self._add(
            SinkSpec(sink, meaning(self._nodes, *flow._edges).key),
            name=name,
            schema=NO_OUTPUT,
            inputs=(flow,),
            parallelism=parallelism,
            named_by_user=True,
            aliases=aliases,
        )
