"""Sends sources that wait for one another what the slowest of them has reached: the shell around protocol/time_groups.py."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.control.messages import LeastTimes
from tidegate.dataflow.plan import Plan
from tidegate.driver.deployment import Links
from tidegate.protocol.time_groups import Reached, TimeGroups


class TimeKeeping:
    """The time groups of the attempt that runs."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._groups = TimeGroups({})

    def begin(self, plan: Plan) -> None:
        """Begin again: no slot of the attempt has reported yet."""
        slots: dict[str, set[int]] = {}
        for vertex in plan.vertices:
            for node in vertex.nodes:
                if node.time_group is not None:
                    slots.setdefault(node.time_group, set()).update(range(vertex.parallelism))
        self._groups = TimeGroups(slots)

    def on_reached(self, slot: int, reached: Mapping[str, Reached]) -> None:
        """Take a slot's report."""
        for message in self._groups.on_reached(slot, reached):
            self._links.send(message.slot, LeastTimes(message.least))
