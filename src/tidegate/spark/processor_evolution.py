"""The earlier names of a stateful processor's states and fields, for state that an earlier version of the processor wrote.

    tg.transform_with_state(df.groupBy("user"), Accounts(), …, evolve={
        "account": tg.Evolution(alias="balance", renamed={"cents": "amount"}, added={"orders": 0})})

A processor declares its states by calls of Spark's handle, which has no argument for earlier names. What Spark's engine does
by default is done here without `evolve=`, too: a new field is null in existing state, a missing field is dropped, numbers
are widened, and fields may change their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate import arguments
from tidegate.errors import JobError
from tidegate.state.descriptors import Names
from tidegate.state.evolution import Advice

ADVICE = Advice(
    alias="give it to another state, by evolve={{{state}: tg.Evolution(alias={was!r})}}",
    possible=(
        "What is possible: add a field (evolve={<state>: tg.Evolution(added={<field>: <default>})} where null won't do), "
        "drop a field, rename one (evolve={<state>: tg.Evolution(renamed={<new>: <old>})}), change the order of fields, "
        "widen a number (byte → short → int → long; float → double; byte, short and int → double; byte and short → float; a "
        "decimal to one with as many digits on both sides of the point, or more); rename a state "
        "(evolve={<state>: tg.Evolution(alias=<old name>)}) or the operator (alias=<old name>); let state go by its name "
        "(deleteIfExists in init, or drop_state=['<operator>.<state>'] or ['<operator>']). evolve=, alias= and drop_state= "
        "are arguments of tg.transform_with_state"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolution:
    """How a state of a stateful processor has changed since an earlier program, for `evolve=` of `tg.transform_with_state`.

    `alias` is an earlier name of the state (or a list of them); `added={"n": 0}` gives a new field a value in existing state
    (without it, null); `renamed={"new": "old"}` gives the earlier names of fields. Fields inside fields are joined by dots,
    and lists and maps add no name: `"address.zip"`. For a map, the fields are those of its values.

    It may stay in the program: state that already has the present names and fields is read as it is.
    """

    alias: Names = ()
    added: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.alias, str):
            arguments.names("Evolution", "alias", self.alias)
        for name, give in (("added", "the defaults of new fields by their names"), ("renamed", "old names by new ones")):
            if not isinstance(getattr(self, name), Mapping):
                arguments.refuse("Evolution", name, getattr(self, name), give)


UNCHANGED = Evolution()


def checked_evolve(evolve: Any, *, declared: Mapping[str, Any], operator: str) -> dict[str, Evolution]:
    """Return `evolve=` as a dict, if its names are names of states that `init` declares."""
    given = {} if evolve is None else evolve
    if not isinstance(given, Mapping) or not all(isinstance(each, Evolution) for each in given.values()):
        raise JobError(
            f"evolve={evolve!r}: give tg.Evolution(…) by the names of states, such as "
            f"evolve={{'account': tg.Evolution(added={{'orders': 0}})}}"
        )
    unknown = set(given) - set(declared)
    if unknown:
        raise JobError(
            f"evolve= has {min(unknown)!r}, and init of the processor of {operator!r} declares "
            f"{', '.join(map(repr, declared)) or 'no states'}: give the names that the states have now"
        )
    return dict(given)


def check_aliases(aliases: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse an alias that would give the state under one name in a snapshot to two states."""
    claimed = [*aliases, *(each for of_state in aliases.values() for each in of_state)]
    twice = {name for name in claimed if claimed.count(name) > 1}
    if twice:
        raise JobError(
            f"evolve= has an alias that is the name or alias of another state, or its own: {sorted(twice)}. What "
            f"a snapshot holds under a name goes to one state"
        )
