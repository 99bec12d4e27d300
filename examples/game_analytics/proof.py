"""The proof: the committed output against a sequential computation of the same input.

`in_sequence` is the job once more as a plain Python loop: one event after the other, dictionaries for state, no
Tidegate and no Spark. It knows nothing of the run: the same season has the same answer, with or without a crash. Since
every row of `progress` carries the player's running numbers, an event that was lost, played twice or played out of turn
would also change the rows of that player from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq
from events import Game
from rules import RULES

Row: TypeAlias = tuple[Any, ...]
CHUNK_EVENTS = 50_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Committed rows against expected ones. `wrong`: rows that nobody expected, neither lost nor repeated ones."""

    expected: int
    lost: int
    twice: int
    wrong: int

    @property
    def accounted(self) -> int:
        return self.expected - self.lost

    @property
    def holds(self) -> bool:
        return not (self.lost or self.twice or self.wrong)

    @classmethod
    def of(cls, expected: Counter[Row], found: Counter[Row]) -> Comparison:
        return cls(
            expected=expected.total(),
            lost=(expected - found).total(),
            twice=sum(found[row] - expected[row] for row in found if 0 < expected[row] < found[row]),
            wrong=sum(found[row] for row in found if row not in expected),
        )


@dataclass(frozen=True, slots=True)
class Proof:
    progress: Comparison
    alerts: Comparison

    @property
    def holds(self) -> bool:
        return self.progress.holds and self.alerts.holds


def prove(game: Game, out: Path) -> Proof:
    """Compares all that is committed in `out` with what a sequential program makes of the same season."""
    progress: Counter[Row] = Counter()
    alerts: Counter[Row] = Counter()
    for row, fired in in_sequence(game):
        progress[row] += 1
        for alert in fired:
            alerts[alert] += 1
    return Proof(
        progress=Comparison.of(progress, committed(out / "progress")),
        alerts=Comparison.of(alerts, committed(out / "alerts")),
    )


def in_sequence(game: Game) -> Iterator[tuple[Row, list[Row]]]:
    """For each event in turn: its row of `progress`, and its rows of `alerts`."""
    rules = [(rule, rule.since_ms(game), rule.until_ms(game)) for rule in RULES]
    players: dict[int, dict[str, int]] = {}
    for n, player, kind, cents, ts in events_of(game):
        before = players.setdefault(player, {"level": 1, "tries": 0, "losses": 0, "spent": 0})
        after = dict(before)
        if kind == "start":
            after["tries"] += 1
        elif kind == "win":
            after.update(level=before["level"] + 1, tries=0, losses=0)
        elif kind == "lose":
            after["losses"] += 1
        else:
            after["spent"] += cents
        players[player] = after
        fired = [
            (n, player, rule.name, after[rule.watches], rule.action)
            for rule, since, until in rules
            if since <= ts < until and before[rule.watches] < rule.at_least <= after[rule.watches]
        ]
        yield (n, player, kind, after["level"], after["tries"], after["losses"], after["spent"]), fired


def events_of(game: Game) -> Iterator[Row]:
    for start in range(0, game.event_count, CHUNK_EVENTS):
        columns = game.events(np.arange(start, min(start + CHUNK_EVENTS, game.event_count)))
        yield from zip(*(column.tolist() for column in columns.values()), strict=True)


def committed(folder: Path) -> Counter[Row]:
    """The rows that any reader of the folder sees, Spark too."""
    table = pq.read_table(folder)
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
