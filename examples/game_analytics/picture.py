"""The picture of a run: throughput, epochs and state over time, with the crash and the recovery in it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from events import START_MS, Game
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rules import RULES
from watch import Sample, Watch

INK, SOFT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
WATER, DEEP, CRASH, RECOVERED = "#7cc4e8", "#1b6ca8", "#c53030", "#23744d"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
}
CALL_OUT: dict[str, Any] = {
    "va": "top",
    "fontweight": "bold",
    "bbox": {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2},
}
SMOOTH_OVER = 3  # samples


def draw(watch: Watch, game: Game, path: Path, *, outcome: str) -> None:
    """`outcome` is the line under the title."""
    matplotlib.use("agg")  # draws to files; needs no display
    with plt.rc_context(STYLE):
        figure, (rate, epochs, state) = plt.subplots(
            3, 1, figsize=(10, 6.6), sharex=True, height_ratios=[3, 1.6, 1.2], layout="constrained"
        )
        _draw_rate(rate, watch, game)
        _draw_rules(rate, watch, game)
        _draw_epochs(epochs, watch)
        _draw_state(state, watch)
        _draw_crash(rate, epochs, state, watch)
        state.set_xlim(0, watch.complete[-1].completed_s + 0.3)
        state.set_xlabel("seconds since the job first ran")
        figure.align_ylabels()
        figure.suptitle(
            "Tidegate on Spark: one of two slots is killed, the job goes on from its last snapshot",
            x=0.008,
            ha="left",
            fontsize=13.5,
            fontweight="bold",
        )
        rate.set_title(outcome, loc="left", x=-0.115, pad=26, fontsize=11, color=SOFT)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_rate(axes: Axes, watch: Watch, game: Game) -> None:
    for start_s, stop_s in pairwise((0.0, *_breaks(watch), watch.complete[-1].completed_s)):
        points = _rates([sample for sample in watch.samples if start_s <= sample.at_s <= stop_s])
        if points:
            seconds = [start_s, *(at_s for at_s, _ in points), stop_s]
            per_s = [points[0][1], *(value for _, value in points), points[-1][1]]
            axes.fill_between(seconds, per_s, color=WATER, alpha=0.35, linewidth=0)
            axes.plot(seconds, per_s, color=DEEP, linewidth=1.8)
    axes.set_ylim(0, 1.5 * game.rate)
    axes.set_yticks([0, game.rate // 2, game.rate])
    axes.set_ylabel("events per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _rates(samples: list[Sample]) -> list[tuple[float, float]]:
    """Events per second between samples some apart, each at the middle between the two."""
    return [
        ((before.at_s + after.at_s) / 2, (after.played - before.played) / (after.at_s - before.at_s))
        for before, after in zip(samples, samples[SMOOTH_OVER:], strict=False)
    ]


def _breaks(watch: Watch) -> tuple[float, ...]:
    """When the job was killed and when it ran again: the rate is never taken across these."""
    crash = watch.crash
    return () if crash is None or crash.seconds is None else (crash.at_s, crash.at_s + crash.seconds)


def _draw_rules(axes: Axes, watch: Watch, game: Game) -> None:
    """Each rule above the place where its first event was committed."""
    place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.text(-0.01, 1.055, "new rules", ha="right", fontsize=10, color=SOFT, transform=axes.transAxes)
    for rule in RULES:
        first = (rule.since_ms(game) - START_MS) * game.rate / 1000
        at_s = next((sample.at_s for sample in watch.samples if sample.progress >= first), None)
        if at_s is not None:
            axes.text(at_s, 1.055, rule.name, ha="center", fontsize=10, style="italic", **place)
            axes.plot(at_s, 1.025, "v", color=SOFT, markersize=4, **place)


def _draw_epochs(axes: Axes, watch: Watch) -> None:
    complete, restored = watch.complete, None if watch.crash is None else watch.crash.restored_epoch
    for epoch in complete:
        colour = RECOVERED if epoch.number == restored else DEEP
        axes.vlines(epoch.completed_s, 0, epoch.took_ms, color=colour, linewidth=2.5, alpha=0.5)
        axes.plot(epoch.completed_s, epoch.took_ms, "o", color=colour, markersize=5)
        if epoch.number == restored:
            axes.annotate(
                f"{restored}",
                (epoch.completed_s, epoch.took_ms),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=colour,
                fontweight="bold",
            )
    axes.set_ylim(0, 1.35 * max(epoch.took_ms for epoch in complete))
    axes.set_ylabel("epoch: trigger\nto complete (ms)")


def _draw_state(axes: Axes, watch: Watch) -> None:
    seconds = [epoch.completed_s for epoch in watch.complete]
    axes.step(seconds, [epoch.state_bytes / 1e6 for epoch in watch.complete], where="post", color=DEEP, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("state in\nsnapshot (MB)")


def _draw_crash(rate: Axes, epochs: Axes, state: Axes, watch: Watch) -> None:
    crash = watch.crash
    if crash is None or crash.seconds is None:
        return
    back_s = crash.at_s + crash.seconds
    for axes in (rate, epochs, state):
        axes.axvspan(crash.at_s, back_s, color=CRASH, alpha=0.10, linewidth=0)
        axes.axvline(crash.at_s, color=CRASH, linewidth=1.5)
        axes.axvline(back_s, color=RECOVERED, linewidth=1.5)
    height = 1.45 * rate.get_yticks()[-1]
    rate.annotate(
        f"kill -9 of slot {crash.slot}",
        (crash.at_s, height),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
        color=CRASH,
        **CALL_OUT,
    )
    rate.annotate(
        f"runs again {crash.seconds:.1f} s later, from the snapshot of epoch {crash.restored_epoch}",
        (back_s, height),
        xytext=(8, 0),
        textcoords="offset points",
        ha="left",
        color=RECOVERED,
        **CALL_OUT,
    )
