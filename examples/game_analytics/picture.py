"""The picture of a run: throughput, epochs and state over time, with the crash and the recovery in it."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from events import START_MS, Game
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rules import RULES
from watch import Watch

INK, SOFT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
WATER, DEEP, CRASH, RECOVERED = "#7cc4e8", "#1b6ca8", "#c53030", "#23744d"
STYLE = {
    "font.size": 11, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT, "xtick.color": SOFT,
    "ytick.color": SOFT, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True,
}


def draw(watch: Watch, game: Game, path: Path) -> None:
    matplotlib.use("agg")       # draws to files; needs no display
    with plt.rc_context(STYLE):
        figure, (rate, epochs, state) = plt.subplots(
            3, 1, figsize=(10, 6.6), sharex=True, height_ratios=[3, 1.6, 1.2], layout="constrained")
        _draw_rate(rate, watch, game)
        _draw_rules(rate, watch, game)
        _draw_epochs(epochs, watch)
        _draw_state(state, watch)
        _draw_crash(rate, epochs, state, watch)
        state.set_xlim(0, watch.complete[-1].completed_s)
        state.set_xlabel("seconds since the job first ran")
        figure.align_ylabels()
        figure.suptitle("Tidegate on Spark: one of two slots is killed, the job goes on from its last snapshot",
                        x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_rate(axes: Axes, watch: Watch, game: Game) -> None:
    around = list(zip(watch.samples, watch.samples[3:], strict=False))
    seconds = [(before.at_s + after.at_s) / 2 for before, after in around]
    per_s = [(after.played - before.played) / (after.at_s - before.at_s) for before, after in around]
    axes.fill_between(seconds, per_s, color=WATER, alpha=0.35, linewidth=0)
    axes.plot(seconds, per_s, color=DEEP, linewidth=1.8)
    axes.set_ylim(0, 1.75 * game.rate)
    axes.set_yticks([0, game.rate // 2, game.rate])
    axes.set_ylabel("events per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_rules(axes: Axes, watch: Watch, game: Game) -> None:
    """Each rule where its first event was committed."""
    for rule in RULES:
        first = (rule.since_ms(game) - START_MS) * game.rate / 1000
        at_s = next((sample.at_s for sample in watch.samples if sample.progress >= first), None)
        if at_s is not None:
            axes.annotate(f"rule “{rule.name}”", (at_s, 1.6 * game.rate), ha="center", va="bottom", fontsize=9.5, color=SOFT)
            axes.plot(at_s, 1.57 * game.rate, "v", color=SOFT, markersize=4)


def _draw_epochs(axes: Axes, watch: Watch) -> None:
    complete, restored = watch.complete, None if watch.crash is None else watch.crash.restored_epoch
    for epoch in complete:
        colour = RECOVERED if epoch.number == restored else DEEP
        axes.vlines(epoch.completed_s, 0, epoch.took_ms, color=colour, linewidth=2.5, alpha=0.5)
        axes.plot(epoch.completed_s, epoch.took_ms, "o", color=colour, markersize=5)
        if epoch.number == restored:
            axes.annotate(f"epoch {restored}  ", (epoch.completed_s, epoch.took_ms), ha="right", va="bottom",
                          fontsize=10, color=colour)
    axes.set_ylim(0, 1.35 * max(epoch.took_ms for epoch in complete))
    axes.set_ylabel("snapshot taken\nwithin (ms)")


def _draw_state(axes: Axes, watch: Watch) -> None:
    seconds = [epoch.completed_s for epoch in watch.complete]
    axes.step(seconds, [epoch.state_bytes / 1e6 for epoch in watch.complete], where="post", color=DEEP, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("snapshot's\nsize (MB)")


def _draw_crash(rate: Axes, epochs: Axes, state: Axes, watch: Watch) -> None:
    crash = watch.crash
    if crash is None or crash.seconds is None:
        return
    back_s = crash.at_s + crash.seconds
    for axes in (rate, epochs, state):
        axes.axvspan(crash.at_s, back_s, color=CRASH, alpha=0.10, linewidth=0)
        axes.axvline(crash.at_s, color=CRASH, linewidth=1.5)
        axes.axvline(back_s, color=RECOVERED, linewidth=1.5)
    height = 1.4 * rate.get_yticks()[-1]
    rate.annotate(f"kill -9 of slot {crash.slot}  ", (crash.at_s, height), ha="right", va="center", color=CRASH,
                  fontweight="bold")
    rate.annotate(f"  running again {crash.seconds:.1f} s later,\n  from epoch {crash.restored_epoch}", (back_s, height),
                  ha="left", va="center", color=RECOVERED, fontweight="bold")
