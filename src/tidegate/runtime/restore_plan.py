"""What becomes of every state of a snapshot in the job as it is now, decided before anything is deployed.

`plan_restore` looks at a manifest and at what the job declares, and reads nothing else. The plan has an entry for every
operator and every state on both sides:

- *kept*: it goes on as it is; *renamed*: as it is, under another name; *converted*: its rows take another type on their
  way in (state/evolution.py);
- *new*: the snapshot doesn't have it, it begins empty;
- *dropped*: the job doesn't take it, which was allowed by name or is no loss, since it held nothing;
- *refused*: it can't be taken in, and may not be dropped. With one of these the job doesn't start (`check`).

Who is who: an operator is found under its name, else under one of its aliases; so is a state within its operator. What a
snapshot holds under one name goes to one of the job's at most. Dropping by name (`drop`: "operator" or "operator.state")
is for what would be refused. What fits is never dropped: the permission may stay in the program while the job runs on,
fails and recovers from newer snapshots. A parallelism may always change, up to the number of key-groups.

How far event time was (`EVENT_TIME`) is state of the engine's own, which operators without a stable name have as well. It is
never a reason to refuse: an operator that is new, renamed or gone begins, or ends, without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tidegate.dataflow.functions import Function
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.event_time import WATERMARK
from tidegate.dataflow.operators.grouped import GroupFunction
from tidegate.dataflow.operators.source import SPLIT_WATERMARKS
from tidegate.dataflow.plan import Plan
from tidegate.errors import RestoreError
from tidegate.runtime.in_flight import places_of
from tidegate.state.descriptors import Descriptor, descriptors_of
from tidegate.state.evolution import IN_A_CLASS, Advice, ConvertRows, DeclaredState, described, evolve
from tidegate.state.sections import StateInfo, StateKind
from tidegate.store.manifest import ROWS, Manifest, OperatorEntry, StateEntry

EVENT_TIME = frozenset({WATERMARK.name, SPLIT_WATERMARKS.name})
ALL = ("all",)  # of a state, lost


class Fate(Enum):
    KEPT = "kept"
    CONVERTED = "converted"
    RENAMED = "renamed"
    NEW = "new"
    DROPPED = "dropped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class DeclaredOperator:
    """An operator of the job as it is now."""

    name: str
    parallelism: int
    states: tuple[DeclaredState, ...] = ()
    aliases: tuple[str, ...] = ()
    in_flight: tuple[StateInfo, ...] = ()  # what it takes in where the snapshot has it
    advice: Advice = IN_A_CLASS


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What becomes of a state. `name` is the job's, and the snapshot's where the job doesn't have it; `was` is its name
    in the snapshot. `text` says what it is, `why` the rest, `lost` what of it is not taken in."""

    name: str
    fate: Fate
    text: str
    why: str = ""
    was: str | None = None
    convert: ConvertRows | None = None
    lost: tuple[str, ...] = ()

    @property
    def taken_in(self) -> bool:
        """Whether the job has what the snapshot holds of it."""
        return self.fate in (Fate.KEPT, Fate.CONVERTED, Fate.RENAMED)


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """What becomes of an operator and its states. `was` is its name in the snapshot, None where it is new."""

    name: str
    fate: Fate
    states: tuple[StatePlan, ...]
    text: str = ""
    why: str = ""
    was: str | None = None
    advice: Advice = IN_A_CLASS

    @property
    def unchanged(self) -> bool:
        """Whether the snapshot has exactly these states, under these names and types; but for event time, which older
        snapshots don't have."""
        return self.fate is Fate.KEPT and all(state.fate is Fate.KEPT or state.name in EVENT_TIME for state in self.states)

    def refusals(self) -> Iterator[str]:
        """Return why the operator or states of it can't be taken in."""
        if self.fate is Fate.REFUSED and self.why:
            yield f"operator {self.name!r}: {self.why}"
        for state in self.states:
            if state.fate is Fate.REFUSED and state.why:
                yield f"state {state.name!r} of operator {self.name!r} ({state.text}): {state.why}"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The whole of it. `str(plan)` is for people."""

    job: str
    epoch: int
    operators: tuple[OperatorPlan, ...]
    refusals_of_all: tuple[str, ...] = ()
    unused_drops: tuple[str, ...] = ()

    def of(self, operator: str) -> OperatorPlan | None:
        """What becomes of an operator of the job."""
        gone = (Fate.DROPPED, Fate.REFUSED)
        return next((each for each in self.operators if each.name == operator and each.fate not in gone), None)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Everything that stands in the way."""
        return (*self.refusals_of_all, *(text for operator in self.operators for text in operator.refusals()))

    @property
    def losses(self) -> tuple[str, ...]:
        """What the snapshot holds and the job doesn't take in, as the program says or allows."""
        return tuple(
            f"{what} of state {state.name!r} of operator {operator.name!r}"
            for operator in self.operators
            for state in operator.states
            for what in state.lost
        )

    def check(self) -> None:
        """Raises `RestoreError` with all that stands in the way of this restore."""
        found = self.refusals
        if found:
            reasons = f"{len(found)} reasons" if len(found) > 1 else "a reason"
            possible = dict.fromkeys(operator.advice.possible for operator in self.operators if any(operator.refusals()))
            raise RestoreError(
                f"the snapshot of epoch {self.epoch} can't be taken in by the job as it is now, for "
                f"{reasons}:\n" + "".join(f"- {text}\n" for text in found) + "\n".join(possible or [IN_A_CLASS.possible])
            )

    def __str__(self) -> str:
        counts = Counter(state.fate for operator in self.operators for state in operator.states)
        told = ", ".join(f"{counts[fate]} {fate.value}" for fate in Fate if counts[fate]) or "no state"
        lines = [f"Restore of epoch {self.epoch} of job {self.job!r}: {told}"]
        lines += [f"  refused: {text}" for text in self.refusals_of_all]
        width = max((len(state.name) for operator in self.operators for state in operator.states), default=0)
        for operator in self.operators:
            if operator.states or operator.was is not None:
                about = "; ".join(filter(None, (operator.fate.value, operator.text, operator.why)))
                lines.append(f"operator {operator.name!r}: {about}")
            lines += [
                f"  {state.fate.value:<9}  {state.name:<{width}}  {'; '.join(filter(None, (state.text, state.why)))}"
                for state in operator.states
            ]
        if self.unused_drops:
            lines.append(f"nothing to drop under {', '.join(map(repr, self.unused_drops))}")
        return "\n".join(lines)


def state_info(entry: StateEntry) -> StateInfo:
    """What a manifest says about a state, as the job's own declarations say it."""
    return StateInfo(entry.name, StateKind(entry.kind), entry.shape, entry.arrow_schema())


def declared_operators(plan: Plan) -> tuple[DeclaredOperator, ...]:
    """What a job's plan declares."""
    return tuple(
        DeclaredOperator(
            node.name,
            vertex.parallelism,
            _declared_states(node),
            node.aliases,
            tuple(place.info for place in places_of(node) if not place.is_feedback),
            getattr(node.spec, "advice", IN_A_CLASS),
        )
        for vertex in plan.vertices
        for node in vertex.nodes
    )


def _declared_states(node: Node) -> tuple[DeclaredState, ...]:
    function: Any = getattr(node.spec, "function", None)
    declared: Iterable[Descriptor] = ()
    if isinstance(function, Function):
        declared = descriptors_of(function).values()
    elif isinstance(function, GroupFunction):
        declared = function.states
    by_name = {descriptor.name: descriptor for descriptor in declared}
    return tuple(
        DeclaredState(info)
        if (found := by_name.get(info.name)) is None
        else DeclaredState(info, found.aliases, found.changes, found.pickled)
        for info in node.spec.states(node)
    )


def plan_restore(
    manifest: Manifest, *, operators: Sequence[DeclaredOperator], key_group_count: int, drop: Collection[str] = ()
) -> RestorePlan:
    """What the restore of a snapshot into a job with these operators would do. Raises nothing for what doesn't fit: that
    is in the plan, and `check` raises it."""
    drops = _Drops(drop)
    whole = []
    if manifest.key_group_count != key_group_count:
        whole.append(
            f"the snapshot of epoch {manifest.epoch} has {manifest.key_group_count} key-groups and the job "
            f"{key_group_count}: the number is fixed for the life of a job's state, set it back "
            f"(key_group_count={manifest.key_group_count})"
        )
    named = {operator.name: operator.aliases for operator in operators}
    match = _matched(
        named,
        [name for name, entry in manifest.operators.items() if _has_files(entry)],
        drops.allows,
        slight=[name for name, entry in manifest.operators.items() if not _holds_anything(entry)],
    )
    # Of an operator that held nothing the snapshot still knows its states.
    empty = {name: name for name in named if name in manifest.operators and name not in match.found}
    plans = []
    for operator in operators:
        was = (match.found | empty).get(operator.name)
        if operator.name in match.problems:
            states = tuple(StatePlan(each.info.name, Fate.REFUSED, _text(each.info)) for each in operator.states)
            plans.append(
                OperatorPlan(operator.name, Fate.REFUSED, states, why=match.problems[operator.name], advice=operator.advice)
            )
        else:
            plans.append(_operator_plan(operator, was, manifest, drops))
    taken = {plan.was for plan in plans} | match.disputed
    plans += [_gone_plan(name, entry, named, drops) for name, entry in manifest.operators.items() if name not in taken]
    return RestorePlan(manifest.job, manifest.epoch, tuple(plans), tuple(whole), drops.unused())


# ------------------------------------------------------------------------------------------------- one operator


def _operator_plan(operator: DeclaredOperator, was: str | None, manifest: Manifest, drops: _Drops) -> OperatorPlan:
    if was is None:
        fresh = tuple(_new(each.info) for each in operator.states)
        return OperatorPlan(operator.name, Fate.NEW, fresh, text=_subtasks(operator.parallelism))
    entry = manifest.operators[was]
    paths = dict.fromkeys((operator.name, was))  # by either name

    def allows(state: str) -> bool:
        return drops.allows(*(f"{path}.{state}" for path in paths))

    before = {each.name: each for each in entry.states}
    declared = (*operator.states, *(DeclaredState(info) for info in operator.in_flight if info.name in before))
    match = _matched({each.info.name: each.aliases for each in declared}, before, allows)
    states: list[StatePlan] = []
    for each in declared:
        name = each.info.name
        if name in match.problems:
            states.append(StatePlan(name, Fate.REFUSED, _text(each.info), match.problems[name]))
        elif name in match.found:
            found = before[match.found[name]]
            states.append(_state_plan(found, each, allows, held_nothing=_held_nothing(found, entry)))
        else:
            states.append(_new(each.info))
    new = [each.name for each in states if each.fate is Fate.NEW and not each.name.startswith("__")]
    left = set(before) - set(match.found.values()) - match.disputed
    states += [
        _gone_state(
            each,
            entry,
            allows,
            f"the operator no longer declares it: declare it again, or "
            f"{operator.advice.alias_of(each.name, new)}, or let it go with "
            f"drop_state=['{operator.name}.{each.name}']",
        )
        for each in entry.states
        if each.name in left
    ]
    fate = Fate.KEPT if was == operator.name else Fate.RENAMED
    about = [f"was {was!r}"] if fate is Fate.RENAMED else []
    about.append(_subtasks(operator.parallelism, entry.parallelism))
    forms = sorted({file.form for piece in entry.pieces for file in piece.files} - {ROWS})
    about += [f"from files of {form}" for form in forms]
    return OperatorPlan(operator.name, fate, tuple(states), text=", ".join(about), was=was, advice=operator.advice)


def _state_plan(was: StateEntry, now: DeclaredState, allows: Callable[[str], bool], *, held_nothing: bool) -> StatePlan:
    name, text = now.info.name, _text(now.info)
    renamed = "" if was.name == name else f"was {was.name!r}"
    before = state_info(was)
    if (before_text := _text(before)) != text:
        text = f"{before_text} → {text}"
    try:
        evolved = evolve(before, now)
    except RestoreError as error:
        if held_nothing:
            return StatePlan(name, Fate.DROPPED, text, "held nothing", was.name)
        if allows(was.name) or allows(name):
            return StatePlan(name, Fate.DROPPED, text, f"begins empty, as allowed ({error})", was.name, lost=ALL)
        return StatePlan(name, Fate.REFUSED, text, "; ".join(filter(None, (renamed, str(error)))), was.name)
    fate = Fate.CONVERTED if evolved.notes else Fate.RENAMED if renamed else Fate.KEPT
    why = "; ".join(filter(None, (renamed, ", ".join(evolved.notes))))
    return StatePlan(name, fate, text, why, was.name, evolved.convert, evolved.dropped)


def _gone_plan(name: str, entry: OperatorEntry, now: Collection[str], drops: _Drops) -> OperatorPlan:
    """Of an operator of the snapshot that the job doesn't have."""
    if not _has_files(entry):
        states = tuple(
            StatePlan(each.name, Fate.DROPPED, _entry_text(each), "held nothing", each.name) for each in entry.states
        )
        return OperatorPlan(name, Fate.DROPPED, states, why="not in the job", was=name)
    whole = drops.allows(name)
    states = tuple(
        _gone_state(each, entry, lambda state: drops.allows(f"{name}.{state}") or whole, "") for each in entry.states
    )
    if any(state.fate is Fate.REFUSED for state in states):
        held = "; ".join(f"{state.name!r}, {state.text}" for state in states if state.fate is Fate.REFUSED)
        has = ", ".join(map(repr, sorted(now))) or "none"
        return OperatorPlan(
            name,
            Fate.REFUSED,
            states,
            was=name,
            why=(
                f"the snapshot holds state of it ({held}), and the job doesn't have it (it has {has}): give an operator "
                f"this name, or alias={name!r}, to go on with its state, or let it go with drop_state=[{name!r}]"
            ),
        )
    return OperatorPlan(name, Fate.DROPPED, states, why="not in the job", was=name)


def _gone_state(state: StateEntry, entry: OperatorEntry, allows: Callable[[str], bool], why: str) -> StatePlan:
    text = _entry_text(state)
    if _held_nothing(state, entry):
        return StatePlan(state.name, Fate.DROPPED, text, "held nothing", state.name)
    if state.name in EVENT_TIME:
        return StatePlan(state.name, Fate.DROPPED, text, "nothing in the job follows this event time", state.name)
    if allows(state.name):
        lost = "; output that was still to be committed is lost" if state.shape == "committables" else ""
        return StatePlan(state.name, Fate.DROPPED, text, f"as allowed{lost}", state.name, lost=ALL)
    return StatePlan(state.name, Fate.REFUSED, text, why, state.name)


def _new(info: StateInfo) -> StatePlan:
    return StatePlan(info.name, Fate.NEW, _text(info), "begins empty")


def _has_files(entry: OperatorEntry) -> bool:
    return any(piece.files for piece in entry.pieces)


def _holds_anything(entry: OperatorEntry) -> bool:
    """Whether there would be something to lose."""
    return any(state.name not in EVENT_TIME and not _held_nothing(state, entry) for state in entry.states)


def _held_nothing(state: StateEntry, entry: OperatorEntry) -> bool:
    """Of keyed state a manifest doesn't say, unless the operator has no files at all."""
    counted = state.kind != StateKind.KEYED.value
    return not _has_files(entry) or (counted and not any(piece.item_counts.get(state.name) for piece in entry.pieces))


# --------------------------------------------------------------------------------------------------- who is who


@dataclass(slots=True)
class _Match:
    """`found`: the snapshot's name for a declared one. `problems`, by declared name. `disputed`: the snapshot's names
    that a problem is about."""

    found: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    disputed: set[str] = field(default_factory=set)


def _matched(
    declared: Mapping[str, tuple[str, ...]],
    existing: Collection[str],
    allows: Callable[[str], bool],
    slight: Collection[str] = (),
) -> _Match:
    """Finds each declared name, or else one of its aliases, among the existing ones. The `slight` ones hold nothing that
    would be missed, and are no reason for a problem."""
    match = _Match()
    claims: dict[str, list[str]] = {}
    for name, aliases in declared.items():
        candidates = [each for each in (name, *aliases) if each in existing]
        # What is another's own name goes to that one, unless it is all there is.
        candidates = [each for each in candidates if each == name or each not in declared] or candidates
        if len(candidates) > 1:
            candidates = [each for each in candidates if each == name or not allows(each)] or candidates
        if len(candidates) > 1:
            candidates = [each for each in candidates if each not in slight] or candidates[:1]
        if len(candidates) > 1:
            match.problems[name] = (
                f"the snapshot has state under {' and '.join(map(repr, candidates))}, and it can go on "
                f"with one of them: leave the alias away, or let the other go with drop_state="
            )
            match.disputed |= set(candidates)
        elif candidates:
            claims.setdefault(candidates[0], []).append(name)
    for existing_name, names in claims.items():
        if len(names) == 1:
            match.found[names[0]] = existing_name
            continue
        if existing_name in slight:
            continue
        for name in names:
            match.problems[name] = (
                f"what the snapshot holds under {existing_name!r} is claimed by "
                f"{' and '.join(map(repr, names))}, and goes to one of them: leave an alias away"
            )
        match.disputed.add(existing_name)
    return match


class _Drops:
    """What may be dropped, by name; and which of the names were of use."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)
        self._used: set[str] = set()

    def allows(self, *names: str) -> bool:
        found = set(names) & set(self._names)
        self._used |= found
        return bool(found)

    def unused(self) -> tuple[str, ...]:
        return tuple(name for name in self._names if name not in self._used)


# ------------------------------------------------------------------------------------------------------- wording


def _text(info: StateInfo) -> str:
    return described(info.kind.value, info.shape, info.schema)


def _entry_text(state: StateEntry) -> str:
    return described(state.kind, state.shape, state.arrow_schema())


def _subtasks(now: int, was: int | None = None) -> str:
    return f"{now} subtask{'s' if now > 1 else ''}" if was in (None, now) else f"{was} → {now} subtasks"
