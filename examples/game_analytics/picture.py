"""The picture of a run: throughput, epochs and state over time, with the crash and the recovery in it."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")           # draws to files; needs no display

import matplotlib.pyplot as plt  # noqa: E402
from events import Game  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402
from rules import RULES  # noqa: E402
from watch import Watch  # noqa: E402

INK, SOFT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
WATER, DEEP, CRASH, RECOVERED = "#3fa7d6", "#1b6ca8", "#d64545", "#2f855a"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 10.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT,
    "xtick.color": SOFT, "ytick.color": SOFT, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": GRID, "axes.axisbelow": True,
}


def draw(watch: Watch, game: Game, path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, (rate, epochs, state) = plt.subplots(
            3, 1, figsize=(10, 6.4), sharex=True, height_ratios=[3, 1.5, 1.1], layout="constrained")
        _draw_rate(rate, watch, game)
        _draw_epochs(epochs, watch)
        _draw_state(state, watch)
        for axes in (rate, epochs, state):
            _draw_crash(axes, watch)
        state.set_xlabel("seconds since the job first ran")
        state.set_xlim(0, max(sample.at_s for sample in watch.samples))
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_rate(axes: Axes, watch: Watch, game: Game) -> None:
    seconds = [sample.at_s for sample in watch.samples]
    per_s = [sample.per_s for sample in watch.samples]
    axes.fill_between(seconds, per_s, color=WATER, alpha=0.25, linewidth=0)
    axes.plot(seconds, per_s, color=DEEP, linewidth=1.6)
    axes.set_ylim(0, 1.45 * game.rate)
    axes.set_ylabel("events per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_title("One slot is killed; the job goes on from its last snapshot, and its output is exactly-once", loc="left",
                   fontsize=12, fontweight="bold", color=INK)


def _draw_epochs(axes: Axes, watch: Watch) -> None:
    complete = watch.complete
    axes.vlines([epoch.completed_s for epoch in complete], 0, [epoch.took_ms for epoch in complete], color=WATER, linewidth=2)
    axes.plot([epoch.completed_s for epoch in complete], [epoch.took_ms for epoch in complete], "o", color=DEEP, markersize=4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("epoch: trigger\nto complete, ms")


def _draw_state(axes: Axes, watch: Watch) -> None:
    complete = watch.complete
    axes.step([epoch.completed_s for epoch in complete], [epoch.state_bytes / 1e6 for epoch in complete], where="post",
              color=DEEP, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("state in\nsnapshot, MB")


def _draw_crash(axes: Axes, watch: Watch) -> None:
    crash = watch.crash
    if crash is None or crash.seconds is None:
        return
    axes.axvspan(crash.at_s, crash.at_s + crash.seconds, color=CRASH, alpha=0.10, linewidth=0)
    axes.axvline(crash.at_s, color=CRASH, linewidth=1.4)
    axes.axvline(crash.at_s + crash.seconds, color=RECOVERED, linewidth=1.4)
