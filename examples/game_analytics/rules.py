"""The rules: what analysts want to be told about players, published and withdrawn while the job runs.

A rule watches one number of a player and fires when an event takes that number up to its threshold. It applies to the
events from the moment at which it was published (in event time) to the moment at which it was withdrawn.

The stream of rules ticks ten times a second, also when there is nothing new. So it isn't only known which rules there
are, but also up to when no other can come: that is what its watermark says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from events import START_MS, Game

SCHEMA = "ts long, rule string, watches string, at_least long, action string"
TICKS_PER_S = 10
FOREVER_MS = 2**62


@dataclass(frozen=True, slots=True)
class Rule:
    """`published` and `withdrawn` are shares of the season, so that they also fit a short one."""

    name: str
    watches: str  # tries, losses (both at the player's present level), level or spent (in cents)
    at_least: int
    action: str
    published: float
    withdrawn: float | None = None

    def since_ms(self, game: Game) -> int:
        return _tick_ms(_tick_of(self.published, game))

    def until_ms(self, game: Game) -> int:
        return FOREVER_MS if self.withdrawn is None else _tick_ms(_tick_of(self.withdrawn, game))

    def __str__(self) -> str:
        threshold = f"{self.at_least / 100:.2f}" if self.watches == "spent" else f"{self.at_least}"
        return f"{self.name}: {self.watches} ≥ {threshold} → {self.action}"


RULES = (
    Rule("stuck", "losses", 8, "offer a booster", published=0.10, withdrawn=0.60),
    Rule("big spender", "spent", 4000, "invite to the VIP club", published=0.22),
    Rule("keen", "tries", 13, "ask for a rating", published=0.35, withdrawn=0.90),
    Rule("stuck soon", "losses", 7, "offer a booster", published=0.65),
    Rule("rising star", "level", 16, "unlock an episode", published=0.80),
)


@dataclass(frozen=True, slots=True)
class Ticks:
    """The stream of rules: `Ticks(game)(k)` is its record k."""

    game: Game

    @property
    def count(self) -> int:
        return self.game.seconds * TICKS_PER_S

    def __call__(self, tick: int) -> tuple[Any, ...]:
        at_ms = _tick_ms(tick)
        for rule in RULES:
            if rule.since_ms(self.game) == at_ms:
                return at_ms, rule.name, rule.watches, rule.at_least, rule.action
            if rule.until_ms(self.game) == at_ms:
                return at_ms, rule.name, None, None, None
        return at_ms, None, None, None, None


def _tick_of(share: float, game: Game) -> int:
    return round(share * game.seconds * TICKS_PER_S)


def _tick_ms(tick: int) -> int:
    return START_MS + tick * 1000 // TICKS_PER_S
