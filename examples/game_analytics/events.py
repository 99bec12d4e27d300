"""The input: what players do, as a pure function of the event's number.

Nothing is stored anywhere: event n is computed from n, by a slot when it is due, by a slot again after a crash, and by
the proof at the end. Events are dealt out over `SPLITS` splits, and all events of a player are in one of them, as in a
Kafka topic that is partitioned by player. Event time is tied to the number: event n happens n / rate seconds after
`START_MS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SCHEMA = "n long, player long, kind string, cents long, ts long"
SPLITS = 8
START_MS = 1_767_225_600_000  # 2026-01-01 00:00:00 UTC

KINDS = np.array(["start", "win", "lose", "purchase"])
_SHARES = np.array([45, 60, 95, 100])  # percent, cumulated


@dataclass(frozen=True, slots=True)
class Game:
    """A season of a game: so many seconds, so many events per second, so many players."""

    seconds: int
    rate: int
    players: int

    @property
    def event_count(self) -> int:
        return self.seconds * self.rate

    def make(self, split: int, start: int, count: int) -> dict[str, np.ndarray]:
        """The events `start … start + count - 1` of a split, as the generator source wants them."""
        return self.events(split + SPLITS * np.arange(start, start + count, dtype=np.int64))

    def events(self, n: np.ndarray) -> dict[str, np.ndarray]:
        """The events with these numbers, as columns."""
        dice = _mixed(n)
        kind = np.searchsorted(_SHARES, dice % 100, side="right")
        return {
            "n": n,
            "player": (dice // 100 % (self.players // SPLITS)).astype(np.int64) * SPLITS + n % SPLITS,
            "kind": KINDS[kind],
            "cents": np.where(kind == 3, 99 + 100 * (dice // 1_000_003 % 10), 0).astype(np.int64),
            "ts": self.time_of(n),
        }

    def time_of(self, n: np.ndarray) -> np.ndarray:
        return START_MS + n * 1000 // self.rate


def _mixed(n: np.ndarray) -> np.ndarray:
    """Dice that always fall alike: the finaliser of splitmix64, 64 well-mixed bits for each number."""
    z = (n.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
