"""The functions that declare states, for tests of what is behind a declaration: to type checkers, what they give is the
descriptor that it is. Of `tidegate.state.declaring` it would be the state that a function has under that name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidegate.state import declaring
from tidegate.state.descriptors import Descriptor

Declare = Callable[..., Descriptor]


def _declare(function: Callable[..., Any]) -> Declare:
    return function


value = _declare(declaring.value)
list_ = _declare(declaring.list_)
map_ = _declare(declaring.map_)
reducing = _declare(declaring.reducing)
aggregating = _declare(declaring.aggregating)
operator_list = _declare(declaring.operator_list)
broadcast_map = _declare(declaring.broadcast_map)
