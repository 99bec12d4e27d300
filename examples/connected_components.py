"""Which nodes of a graph hang together, while its edges stream in. `.venv/bin/python examples/connected_components.py`

    edges ──► [ spread ──by node──► label ]──► labels     one row for each time that a node gets a smaller label
                  ▲                   │
                  └──── messages ─────┘

Every node keeps a label, the smallest node that it knows itself to be connected with, and tells its neighbours. The news
goes round the loop until nobody has any: then all nodes of a component have the label of the smallest. The loop ends by
itself when the edges have ended and no message is under way. What is under way at a snapshot is part of the snapshot.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import tidegate as tg
from tidegate.dataflow.stream import Stream

NODES, EDGES = 3_000, 1_500  # about as many as it takes for the first large components
MESSAGE = "node long, sender long, label long"


def edge(number: int) -> list[int]:
    return random.Random(number).sample(range(NODES), 2)


class Label(tg.KeyedProcess):
    label = tg.value("long")
    neighbours = tg.map("long", "long")  # neighbour → the smallest label that it has, or was told from here

    def process(self, message: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        before = self.label.get()
        label = min(ctx.key if before is None else before, message.label)
        if label != before:
            self.label.set(label)
            ctx.side("labels", (ctx.key, label))
        self.neighbours.put(message.sender, min(message.label, self.neighbours.get(message.sender, message.label)))
        for neighbour, known in self.neighbours.items():
            if label < known:
                self.neighbours.put(neighbour, label)
                yield neighbour, ctx.key, label


def spread(messages: Stream) -> tuple[Stream, Stream]:
    """The body of the loop: what goes round again, and what leaves it."""
    labelled = messages.key_by("node").process(
        "label", Label(), returns=MESSAGE, side_outputs={"labels": "node long, label long"}
    )
    return labelled, labelled.side_output("labels")


def edges(**rest: Any) -> tg.Source:
    return tg.sources.generator(make_row=edge, schema="a long, b long", rows=EDGES, splits=2, **rest)


def build(job: tg.Job, source: tg.Source) -> tg.Job:
    (
        job.source("edges", source)
        .flat_map(lambda edge: [(edge.a, edge.b, edge.b), (edge.b, edge.a, edge.a)], returns=MESSAGE)
        .iterate("spread", spread)
        .to("labels", tg.sinks.collect())
    )
    return job


def labels_of(rows: Iterable[tuple[Any, ...]]) -> dict[int, int]:
    """The label of each node in the end: the last that it got. Each is smaller than the one before."""
    labels: dict[int, int] = {}
    for node, label in rows:
        assert label < labels.get(node, NODES), f"node {node} has {labels[node]} already, and gets {label}"
        labels[node] = label
    return labels


def in_sequence() -> dict[int, int]:
    """The same by union-find, one edge after the other."""
    parents: dict[int, int] = {}

    def find(node: int) -> int:
        while parents.setdefault(node, node) != node:
            node = parents[node]
        return node

    for a, b in map(edge, range(EDGES)):
        low, high = sorted((find(a), find(b)))
        parents[high] = low
    return {node: find(node) for node in parents}


def main() -> None:
    handle = build(tg.Job("connected components", slots=2), edges()).start()
    handle.wait()
    labels = labels_of(handle.results("labels"))
    assert labels == in_sequence()
    sizes = sorted(list(labels.values()).count(component) for component in set(labels.values()))
    print(
        f"{EDGES:,} edges join {len(labels):,} nodes to {len(sizes):,} components, as union-find does; "
        f"the largest has {sizes[-1]:,} nodes."
    )


if __name__ == "__main__":
    main()
