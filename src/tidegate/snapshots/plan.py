"""The restore plan: what happens to every state of a snapshot in the job as it is now, decided before deployment.

`plan_restore` compares a manifest with what the job declares, and reads nothing else. The plan has an entry for every
operator and every state of either:

- *kept*: the job restores it unchanged; *renamed*: unchanged, under another name; *converted*: its rows get another type
  when they are read (state/evolution.py);
- *new*: the snapshot doesn't have it, it begins empty;
- *dropped*: the job doesn't restore it, because the user allowed that by name, or because it held nothing;
- *refused*: it can't be restored, and may not be dropped. The job doesn't start (`check`).

Matching: an operator is found by its name, otherwise by one of its aliases; so is a state within its operator. At most one
operator or state of the job gets what the snapshot holds under one name. Names in `drop` ("operator" or "operator.state")
apply only to what would be refused; state that fits is never dropped. So they may stay in the program while the job runs,
fails and recovers from newer snapshots. A parallelism may always change, up to the number of key-groups.

The event time that operators have reached (`EVENT_TIME`) is the engine's own state. Operators without a stable name have it
as well, so it is never refused: an operator that is new, renamed or gone begins, or ends, without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tidegate.errors import RestoreError
from tidegate.snapshots.manifest import ROWS, Manifest, OperatorEntry, StateEntry
from tidegate.state.event_time import SPLIT_WATERMARKS, WATERMARK
from tidegate.state.evolution import IN_A_CLASS, Advice, ConvertRows, DeclaredState, described, evolve
from tidegate.state.sections import StateInfo, StateKind

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
    in_flight: tuple[DeclaredState, ...] = ()  # restored if the snapshot has it
    advice: Advice = IN_A_CLASS


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What happens to a state. `name` is its name in the job, or in the snapshot if the job doesn't have it; `was` is its
    name in the snapshot. `text` describes the state, `why` its fate; `lost` is what of it is not restored."""

    name: str
    fate: Fate
    text: str
    why: str = ""
    was: str | None = None
    convert: ConvertRows | None = None
    lost: tuple[str, ...] = ()

    @property
    def taken_in(self) -> bool:
        """Return whether the job restores it."""
        return self.fate in (Fate.KEPT, Fate.CONVERTED, Fate.RENAMED)


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """What happens to an operator and its states. `was` is its name in the snapshot, None if it is new."""

    name: str
    fate: Fate
    states: tuple[StatePlan, ...]
    text: str = ""
    why: str = ""
    was: str | None = None
    advice: Advice = IN_A_CLASS

    @property
    def unchanged(self) -> bool:
        """Return whether the snapshot has exactly these states, names and types. Event time doesn't count: older snapshots
        don't have it."""
        return self.fate is Fate.KEPT and all(state.fate is Fate.KEPT or state.name in EVENT_TIME for state in self.states)

    def refusals(self) -> Iterator[str]:
        """Return why the operator, or states of it, can't be restored."""
        if self.fate is Fate.REFUSED and self.why:
            yield f"operator {self.name!r}: {self.why}"
        for state in self.states:
            if state.fate is Fate.REFUSED and state.why:
                yield f"state {state.name!r} of operator {self.name!r} ({state.text}): {state.why}"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What happens to all operators and states. `str(plan)` is for people."""

    job: str
    epoch: int
    operators: tuple[OperatorPlan, ...]
    refusals_of_all: tuple[str, ...] = ()
    unused_drops: tuple[str, ...] = ()

    def of(self, operator: str) -> OperatorPlan | None:
        """Return the plan of an operator of the job."""
        gone = (Fate.DROPPED, Fate.REFUSED)
        return next((each for each in self.operators if each.name == operator and each.fate not in gone), None)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return all reasons why the job can't restore the snapshot."""
        return (*self.refusals_of_all, *(text for operator in self.operators for text in operator.refusals()))

    @property
    def losses(self) -> tuple[str, ...]:
        """Return what the job doesn't restore because the program allows or causes it."""
        return tuple(
            f"{what} of state {state.name!r} of operator {operator.name!r}"
            for operator in self.operators
            for state in operator.states
            for what in state.lost
        )

    def check(self) -> None:
        """Raise `RestoreError` with all refusals, if there are any."""
        found = self.refusals
        if found:
            reasons = f"{len(found)} reasons" if len(found) > 1 else "a reason"
            possible = dict.fromkeys(operator.advice.possible for operator in self.operators if any(operator.refusals()))
            raise RestoreError(
                f"the snapshot of epoch {self.epoch} can't be restored into the job as it is now, for "
                f"{reasons}:\n" + "".join(f"- {text}\n" for text in found) + "\n".join(possible or [IN_A_CLASS.possible])
            )

    def __str__(self) -> str:
        counts = Counter(state.fate for operator in self.operators for state in operator.states)
        summary = ", ".join(f"{counts[fate]} {fate.value}" for fate in Fate if counts[fate]) or "no state"
        lines = [f"Restore of epoch {self.epoch} of job {self.job!r}: {summary}"]
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


def plan_restore(
    manifest: Manifest, *, operators: Sequence[DeclaredOperator], key_group_count: int, drop: Collection[str] = ()
) -> RestorePlan:
    """Return the plan of a restore into a job with these operators. State that doesn't fit is refused in the plan, and
    `check` raises the error."""
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
    # The manifest lists the states of an operator even if it held nothing.
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
    paths = dict.fromkeys((operator.name, was))  # `drop` may use either name

    def allows(state: str) -> bool:
        return drops.allows(*(f"{path}.{state}" for path in paths))

    before = {each.name: each for each in entry.states}
    declared = (*operator.states, *(each for each in operator.in_flight if each.info.name in before))
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
            f"{operator.advice.alias_of(each.name, new)}, or drop it with "
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
    before = was.info
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
    """Plan for an operator of the snapshot that the job doesn't have."""
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
                f"this name, or alias={name!r}, to keep its state, or drop it with drop_state=[{name!r}]"
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
    """Return whether dropping the operator would lose state."""
    return any(state.name not in EVENT_TIME and not _held_nothing(state, entry) for state in entry.states)


def _held_nothing(state: StateEntry, entry: OperatorEntry) -> bool:
    """Return whether the state was certainly empty. For keyed state only an operator without files is certain."""
    counted = state.kind != StateKind.KEYED.value
    return not _has_files(entry) or (counted and not any(piece.item_counts.get(state.name) for piece in entry.pieces))


# --------------------------------------------------------------------------------------------------- matching


@dataclass(slots=True)
class _Match:
    """`found` has the snapshot's name by declared name, `problems` a text by declared name; `disputed` are the snapshot's
    names that problems are about."""

    found: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    disputed: set[str] = field(default_factory=set)


def _matched(
    declared: Mapping[str, tuple[str, ...]],
    existing: Collection[str],
    allows: Callable[[str], bool],
    slight: Collection[str] = (),
) -> _Match:
    """Find each declared name, or one of its aliases, among the existing names. The `slight` ones held nothing, so they are
    never a problem."""
    match = _Match()
    claims: dict[str, list[str]] = {}
    for name, aliases in declared.items():
        candidates = [each for each in (name, *aliases) if each in existing]
        # An alias that another one declares as its name belongs to that one, unless it is the only candidate.
        candidates = [each for each in candidates if each == name or each not in declared] or candidates
        if len(candidates) > 1:
            candidates = [each for each in candidates if each == name or not allows(each)] or candidates
        if len(candidates) > 1:
            candidates = [each for each in candidates if each not in slight] or candidates[:1]
        if len(candidates) > 1:
            match.problems[name] = (
                f"the snapshot has state under {' and '.join(map(repr, candidates))}, and only one of "
                f"them can be restored: omit the alias, or drop the other with drop_state="
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
                f"{' and '.join(map(repr, names))}, and only one of them can have it: omit an alias"
            )
        match.disputed.add(existing_name)
    return match


class _Drops:
    """The names that may be dropped, and which of them were used."""

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
