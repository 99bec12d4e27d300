"""Recovery: which snapshot is restored, and what each subtask reads of it.

Theory of operation (Carbone et al. 2017, §3.4 "Usages and Consistent Rollback" and §3.2.3 "State Re-Allocation")
----------------------------------------------------------------------------------------------------------------
After a failure, and in every reconfiguration, the job is rolled back to its newest complete snapshot. The snapshot was
written by p subtasks of an operator and is read by q:

- *keyed* state is cut into key-groups, and subtask i of q owns a contiguous range of them. A range of groups is a
  sequential read within each of the old pieces it touches, at any p and q.
- *split* operator state is one list, scattered over the pieces: laid end to end in piece order and dealt out again in
  contiguous ranges whose lengths differ by at most one. Its order survives any number of changes of the parallelism.
- *whole* state stays together: what one old subtask wrote goes to one new subtask, in its order. Committables of sinks
  are of this kind: output of several epochs of one key may be waiting to be committed, all of it in one piece, and it
  must become visible in the order of its epochs.
- *union* operator state goes to every subtask, whole; each takes what concerns it.
- *broadcast* state is the same on every subtask. So subtask 0 alone writes it, and every subtask reads it.

Invariants: of keyed, split and whole state nothing is lost and nothing is read twice; the plan depends on its arguments
only. A snapshot with missing or overlapping pieces is a `RestoreError`. No older snapshot is used silently instead,
because sinks may have committed output that only the newest one lists.

Not here: reading, and matching operators and schemas of the snapshot with those of the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tidegate.errors import RestoreError
from tidegate.keygroups import key_groups_of, overlap


class StateKind(Enum):
    """How a state is distributed at another parallelism. Manifests hold the values, so they never change."""

    KEYED = "keyed"
    SPLIT = "split"
    WHOLE = "whole"
    UNION = "union"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one old subtask wrote. `item_counts` is by state, for states that are not keyed; a missing one is 0."""

    subtask: int
    key_groups: range
    item_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyedShare:
    """A share of a piece's keyed states: these key-groups. `piece` is an index into the pieces given."""

    piece: int
    groups: range


@dataclass(frozen=True, slots=True)
class ItemsShare:
    """A share of a piece's state that is not keyed: items `start` … `stop` (half-open)."""

    piece: int
    state: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SubtaskShares:
    """All shares of one new subtask: key-groups in growing order; items state by state, in the order of the pieces."""

    keyed: tuple[KeyedShare, ...] = ()
    items: tuple[ItemsShare, ...] = ()


def newest_complete(epochs: Sequence[int]) -> int | None:
    """Return the epoch to resume from. `epochs` are those whose manifests exist, readable or not, in any order."""
    return max(epochs, default=None)


def shares_of(
    pieces: Sequence[Piece], kinds: Mapping[str, StateKind], *, parallelism: int, key_group_count: int
) -> tuple[SubtaskShares, ...]:
    """Return the shares of each of `parallelism` new subtasks in one operator's pieces. `pieces[i]` is old subtask i's."""
    _check_subtasks(pieces)
    _check_states(pieces, kinds)
    keyed = StateKind.KEYED in kinds.values()
    if keyed or any(piece.key_groups for piece in pieces):
        _check_tiling(pieces, key_group_count)
    return tuple(
        SubtaskShares(
            keyed=tuple(
                _keyed_shares(pieces, key_groups_of(subtask, parallelism=parallelism, key_group_count=key_group_count))
            )
            if keyed
            else (),
            items=tuple(
                share
                for state, kind in kinds.items()
                for share in _items_shares(pieces, state, kind, subtask=subtask, parallelism=parallelism)
            ),
        )
        for subtask in range(parallelism)
    )


def _keyed_shares(pieces: Sequence[Piece], owned: range) -> Iterator[KeyedShare]:
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index].key_groups.start):
        groups = overlap(pieces[index].key_groups, owned)
        if groups:
            yield KeyedShare(index, groups)


def _items_shares(
    pieces: Sequence[Piece], state: str, kind: StateKind, *, subtask: int, parallelism: int
) -> Iterator[ItemsShare]:
    counts = [piece.item_counts.get(state, 0) for piece in pieces]
    total = sum(counts)
    match kind:
        case StateKind.KEYED:
            return
        case StateKind.UNION | StateKind.BROADCAST:
            wanted = range(total)
        case StateKind.SPLIT:
            wanted = range(subtask * total // parallelism, (subtask + 1) * total // parallelism)
        case StateKind.WHOLE:
            for index in range(subtask, len(counts), parallelism):
                if counts[index]:
                    yield ItemsShare(index, state, 0, counts[index])
            return
    offset = 0
    for index, count in enumerate(counts):
        part = overlap(range(offset, offset + count), wanted)
        if part:
            yield ItemsShare(index, state, part.start - offset, part.stop - offset)
        offset += count


def _check_subtasks(pieces: Sequence[Piece]) -> None:
    found = [piece.subtask for piece in pieces]
    if found != list(range(len(pieces))):
        raise RestoreError(
            f"the snapshot's pieces are of subtasks {found}, not of 0 to {len(pieces) - 1}, each once: "
            "its manifest is not one that Tidegate wrote"
        )


def _check_states(pieces: Sequence[Piece], kinds: Mapping[str, StateKind]) -> None:
    for piece in pieces:
        unknown = sorted(piece.item_counts.keys() - kinds.keys())
        if unknown:
            raise RestoreError(
                f"subtask {piece.subtask} wrote items of {unknown}, of which the snapshot doesn't say "
                "how they are redistributed"
            )
        if any(count < 0 for count in piece.item_counts.values()):
            raise RestoreError(f"subtask {piece.subtask} is said to have written {dict(piece.item_counts)} items")
    for state, kind in kinds.items():
        holders = [piece.subtask for piece in pieces if piece.item_counts.get(state, 0)]
        if kind is StateKind.BROADCAST and len(holders) > 1:
            raise RestoreError(f"broadcast state {state!r} was written by subtasks {holders}; one of them should have")


def _check_tiling(pieces: Sequence[Piece], key_group_count: int) -> None:
    written = Counter(group for piece in pieces for group in piece.key_groups)
    everything = range(key_group_count)
    complaints = [
        f"{what}: {_ranges(groups)}"
        for what, groups in (
            ("missing", [group for group in everything if not written[group]]),
            ("written by more than one subtask", sorted(group for group in written if written[group] > 1)),
            ("out of range", sorted(group for group in written if group not in everything)),
        )
        if groups
    ]
    if complaints:
        raise RestoreError(
            f"the snapshot does not hold each of the {key_group_count} key-groups once "
            f"({'; '.join(complaints)}). The number of key-groups is fixed for the life of a "
            "job's state: was it changed?"
        )


def _ranges(groups: Sequence[int]) -> str:
    """[3, 4, 5, 9] → "3-5, 9"."""
    ranges: list[range] = []
    for group in groups:
        if ranges and ranges[-1].stop == group:
            ranges[-1] = range(ranges[-1].start, group + 1)
        else:
            ranges.append(range(group, group + 1))
    return ", ".join(str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}" for each in ranges)
