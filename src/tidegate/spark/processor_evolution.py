"""What a stateful processor's states were called before, for state that an earlier version of it wrote.

    tg.transform_with_state(df.groupBy("user"), Accounts(), …, evolve={
        "account": tg.Evolution(alias="balance", renamed={"cents": "amount"}, added={"orders": 0})})

A processor declares its states by calls of Spark's handle, which has no place for that. What Spark's engine does without
being told is done here without it, too: a new field is null in what is there already, a field that is gone is dropped,
numbers are widened, fields may change their order.
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
    alias="let another state go on with it, by evolve={{{state}: tg.Evolution(alias={was!r})}}",
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
    """What an earlier program wrote for a state of a stateful processor, as `evolve=` of `tg.transform_with_state` takes it.

    `alias` is the name that the state had (or a list of them); `added={"n": 0}` gives a field that is new a value in what
    is there already (null without it); `renamed={"new": "old"}` says what a field was called. Fields inside fields are
    joined by dots, and lists and maps need no name: `"address.zip"`. Of a map they are the fields of its values.

    It may stay in the program: state that already has the present names and fields is taken in as it is.
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
    """What the user gave, by the names of states that `init` declares."""
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
    """What a snapshot holds under a name goes to one state."""
    claimed = [*aliases, *(each for of_state in aliases.values() for each in of_state)]
    twice = {name for name in claimed if claimed.count(name) > 1}
    if twice:
        raise JobError(
            f"evolve= has an alias that is the name or alias of another state, or its own: {sorted(twice)}. What "
            f"a snapshot holds under a name goes to one state"
        )
