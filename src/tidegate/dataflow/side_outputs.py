"""Which argument gives an operator a side output, for the error of one that it doesn't have."""

from __future__ import annotations

from tidegate.dataflow.functions import Function
from tidegate.dataflow.graph import Node


def how_to_declare(tag: object, node: Node) -> str:
    """Return how an operator of this kind gets a side output."""
    if isinstance(getattr(node.spec, "function", None), Function):
        return f"Declare it: process({node.name!r}, …, side_outputs={{{tag!r}: 'column type, …'}})"
    if not hasattr(node.spec, "late") and not hasattr(getattr(node.spec, "settings", None), "late"):
        return "Side outputs are of process(…), of late records (late=), and of rate_limit(…, excess=)"
    if node.spec.kind in ("interval join", "temporal join"):
        return f"For late records, name it when you join: .join({node.name!r}, …, late=({tag!r}, None))"
    return f"For late records, name it when you make the windows: .window(…, late={tag!r})"
