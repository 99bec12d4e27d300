"""Windows as a node of the graph: which operator runs them, and what is in their snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.count_windows import CountWindowOperator
from tidegate.dataflow.operators.early_windows import EarlyWindowOperator
from tidegate.dataflow.operators.global_windows import GlobalWindowOperator
from tidegate.dataflow.operators.paned_windows import PanedWindowOperator, ProcessingTimeWindowOperator
from tidegate.dataflow.operators.session_windows import SessionWindowOperator
from tidegate.dataflow.operators.window import window_key_type
from tidegate.dataflow.operators.window_aggregates import WindowSettings, window_state
from tidegate.dataflow.windows import Assigner, Global, Sessions
from tidegate.state.descriptors import Columns
from tidegate.state.event_time import WATERMARK
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Aggregates by key and window."""

    assigner: Assigner
    settings: WindowSettings
    kind: str = "window"
    stateful: bool = True
    in_columns: ClassVar[bool] = True

    @property
    def needs_event_time(self) -> bool:
        """Results of a trigger need none, as in Spark's update mode."""
        return not isinstance(self.assigner, Global) and self.assigner.column is not None and not self._has_triggers

    @property
    def window_columns(self) -> tuple[str | None, ...]:
        return (None if isinstance(self.assigner, Global) else self.assigner.column,)

    @property
    def _has_triggers(self) -> bool:
        return self.settings.early_ms is not None or self.settings.aggregation.has_triggers

    def create(self, node: Node) -> Operator:
        if isinstance(self.assigner, Sessions):
            return SessionWindowOperator(node, self.assigner, self.settings)
        if isinstance(self.assigner, Global):
            kind_of_global = GlobalWindowOperator if self.assigner.count is None else CountWindowOperator
            return kind_of_global(node, self.assigner, self.settings)
        if self.assigner.column is None:
            return ProcessingTimeWindowOperator(node, self.assigner, self.settings)
        kind = EarlyWindowOperator if self._has_triggers else PanedWindowOperator
        return kind(node, self.assigner, self.settings)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = window_key_type(node.input_schemas[0], self.settings.key)
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        return (window_state(self.assigner, self.settings),)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        early = [] if self.settings.early_ms is None else [f"after {self.settings.early_ms} ms"]
        triggers = " or ".join([*self.settings.aggregation.trigger_labels, *early])
        shown = f", shown {triggers}{', purging' if self.settings.purges else ''}" if triggers else ""
        return f"{self.assigner.text}{shown}: {self.settings.aggregation.text}"
