"""The ids of subtasks and channels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ChannelId:
    """A FIFO link from subtask `upstream` of the edge's source vertex to subtask `downstream` of its target vertex."""

    edge: int
    upstream: int
    downstream: int

    def __str__(self) -> str:
        return f"e{self.edge}:{self.upstream}>{self.downstream}"


@dataclass(frozen=True, slots=True, order=True)
class SubtaskId:
    """Parallel instance `subtask` of vertex `vertex`."""

    vertex: int
    subtask: int

    def __str__(self) -> str:
        return f"v{self.vertex}[{self.subtask}]"
