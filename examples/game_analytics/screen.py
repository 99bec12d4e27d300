"""What you see: a live table where there is a terminal, plain lines where there is none (in CI, in a file)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from events import START_MS, Game
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rules import RULES
from watch import Watch

import tidegate as tg

EPOCHS_SHOWN = 5
PLAIN_EVERY_S = 3.0
_BARS = " ▁▂▃▄▅▆▇█"
_BARS_SHOWN = 48

NOTE, GOOD, BAD = "cyan", "bold white on green4", "bold white on red3"


@dataclass(slots=True)
class Screen:
    """`say_at` writes a line that stays; `show` brings what changes up to date."""

    console: Console
    game: Game
    _live: Live | None = None
    _said: set[str] = field(default_factory=set)
    _shown_at_s: float = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live("Deploying the job …", console=self.console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def say_at(self, at_s: float, text: str, style: str = "") -> None:
        line = Text.assemble((f"{at_s:6.1f} s  ", "dim"), (f" {text} " if " on " in style else text, style))
        self.console.print(line, soft_wrap=True)

    def show(self, watch: Watch) -> None:
        if not watch.samples:
            return
        self._say_news(watch)
        if self._live is not None:
            self._live.update(_panel(watch, self.game), refresh=True)
        elif watch.samples[-1].at_s - self._shown_at_s >= PLAIN_EVERY_S:
            self._shown_at_s = watch.samples[-1].at_s
            self.say_at(self._shown_at_s, _line(watch, self.game))

    def _say_news(self, watch: Watch) -> None:
        now = watch.samples[-1]
        at_ms = START_MS + now.progress * 1000 // self.game.rate
        for rule in RULES:
            if rule.since_ms(self.game) <= at_ms:
                self._say_once(now.at_s, f"new rule  {rule}")
            if rule.until_ms(self.game) <= at_ms:
                self._say_once(now.at_s, f"withdrawn  {rule.name}")
        crash = watch.crash
        if crash is not None:
            self._say_once(crash.at_s, f"kill -9 {crash.pid}: slot {crash.slot} is dead", BAD)
            if crash.seconds is not None:
                self._say_once(
                    crash.at_s + crash.seconds,
                    f"the job runs again, {crash.seconds:.1f} s after the kill, "
                    f"from the snapshot of epoch {crash.restored_epoch}",
                    GOOD,
                )

    def _say_once(self, at_s: float, text: str, style: str = NOTE) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say_at(at_s, text, style)


def in_force(game: Game, committed: int) -> list[str]:
    """The rules that apply to the newest committed events."""
    at_ms = START_MS + committed * 1000 // game.rate
    return [rule.name for rule in RULES if rule.since_ms(game) <= at_ms < rule.until_ms(game)]


def _line(watch: Watch, game: Game) -> str:
    now, complete = watch.samples[-1], watch.complete
    epoch = (
        f"epoch {complete[-1].number} took {complete[-1].took_ms} ms, state {_size(complete[-1].state_bytes)}"
        if complete
        else "no epoch yet"
    )
    return (
        f"{watch.handle.status.value}, attempt {watch.handle.attempts[-1].attempt}: {now.per_s:,.0f} events/s, "
        f"{epoch}; committed: {now.progress:,} events, {now.alerts:,} alerts; "
        f"{len(in_force(game, now.progress))} rules"
    )


def _panel(watch: Watch, game: Game) -> Panel:
    now, status = watch.samples[-1], watch.handle.status
    rates = [sample.per_s for sample in watch.samples[-2 * _BARS_SHOWN :: 2]]
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="dim", min_width=10)
    numbers.add_column(justify="right", min_width=8)
    numbers.add_column()
    numbers.add_row("events/s", f"{now.per_s:,.0f}", Text(_spark_line(rates, top=1.25 * game.rate), "cyan"))
    numbers.add_row(
        "committed", f"{now.progress:,}", ProgressBar(total=game.event_count, completed=now.progress, width=_BARS_SHOWN)
    )
    rules = in_force(game, now.progress)
    numbers.add_row("rules", f"{len(rules)}", ", ".join(rules))
    numbers.add_row("alerts", f"{now.alerts:,}")
    colour = "red" if status is tg.Status.RESTARTING else "green"
    title = f"Tidegate · game analytics · [{colour}]{status.value}[/], attempt {watch.handle.attempts[-1].attempt}"
    return Panel(Group(numbers, "", _epochs(watch)), title=title, title_align="left", border_style=colour, width=92)


def _epochs(watch: Watch) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("epoch", "attempt", "trigger to complete", "state"):
        table.add_column(column, justify="right")
    attempt = watch.handle.attempts[-1].attempt
    for epoch in watch.epochs[-EPOCHS_SHOWN:]:
        under_way = "…" if epoch.attempt == attempt else "[red]lost in the crash"
        took, size = (under_way, "") if epoch.completed_s is None else (f"{epoch.took_ms} ms", _size(epoch.state_bytes))
        table.add_row(f"{epoch.number}", f"{epoch.attempt}", took, size)
    return table


def _spark_line(values: list[float], *, top: float) -> str:
    return "".join(_BARS[min(len(_BARS) - 1, round(value / top * (len(_BARS) - 1)))] for value in values)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
