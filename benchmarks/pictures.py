"""Pictures of what some benchmarks print, in the style of the demo's. `draw` knows which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, SOFT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
WATER, DEEP, CRASH = "#7cc4e8", "#1b6ca8", "#c53030"
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
EXPERIMENTS = ("Chandy-Lamport", "stop the world")

Lines = Sequence[Mapping[str, Any]]


def draw(name: str, lines: Lines, folder: Path) -> Path | None:
    """The picture of a benchmark's lines, as a file in the folder; None where it has no picture."""
    if name not in DRAWINGS:
        return None
    matplotlib.use("agg")  # draws to files; needs no display
    path = folder / f"{FILES.get(name, name)}.png"
    with plt.rc_context(STYLE):
        figure = DRAWINGS[name](lines)
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return path


def _titled(figure: Figure, title: str, below: str) -> None:
    figure.suptitle(title, x=0.012, ha="left", fontsize=13.5, fontweight="bold")
    figure.text(0.012, 0.012, below, ha="left", va="bottom", fontsize=9.5, color=SOFT)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0.06, 1, 0.94)))


# Alignment.


def _alignment(lines: Lines, *, label: Callable[[Mapping[str, Any]], str], axis: str, what: str) -> Figure:
    """The median of each size, and the middle half of the epochs."""
    figure, axes = plt.subplots(figsize=(8, 3.9))
    points = [line for line in lines if "alignment_p75_ms" in line]
    medians = [line["alignment_ms"] for line in points]
    spread = [
        [line["alignment_ms"] - line["alignment_p25_ms"] for line in points],
        [line["alignment_p75_ms"] - line["alignment_ms"] for line in points],
    ]
    axes.errorbar(range(len(points)), medians, yerr=spread, fmt="o-", color=DEEP, ecolor=WATER, elinewidth=6, markersize=7)
    for place, line in enumerate(points):
        axes.annotate(
            f"{line['alignment_ms']:.2f} ms",
            (place, line["alignment_p75_ms"]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontweight="bold",
            color=DEEP,
        )
    axes.set_xticks(range(len(points)), [label(line) for line in points])
    axes.set_xlim(-0.4, len(points) - 0.4)
    axes.set_ylim(0, 1.2 * max(line["alignment_p75_ms"] for line in points))
    axes.set_xlabel(axis)
    axes.set_ylabel("alignment (ms)")
    _titled(
        figure,
        f"Alignment against {what}: {medians[-1] / medians[0]:.2f} times from {label(points[0])} to {label(points[-1])}",
        f"{points[0]['epochs']} epochs each; dot: median, bar: the middle half of them",
    )
    return figure


def _against_state(lines: Lines) -> Figure:
    return _alignment(
        lines, label=lambda line: f"{line['state_bytes'] / 1e6:,.0f} MB", axis="state of the job", what="state"
    )


def _against_parallelism(lines: Lines) -> Figure:
    return _alignment(lines, label=lambda line: f"{line['slots']} slots", axis="parallelism, on 2 cores", what="parallelism")


def _against_shuffles(lines: Lines) -> Figure:
    return _alignment(
        lines, label=lambda line: f"{line['shuffles']}", axis="shuffles, one behind the other", what="shuffles"
    )


# Protocols.


def _protocols(lines: Lines) -> Figure:
    figure, panels = plt.subplots(2, 2, figsize=(10, 6.4), sharey="row")
    usual = [line for line in lines if line["load"] == "usual"]
    slow = [line for line in lines if line["load"] == "back-pressure" and "snapshot_ms" in line]
    _bars(panels[0][0], usual, lambda line: line["ratio"], "{:.2f}", "throughput, over that without snapshots")
    _bars(panels[0][1], usual, lambda line: line["p99_ms"], "{:,.0f} ms", "99th percentile of latency during snapshots (ms)")
    _bars(panels[1][0], slow, lambda line: line["snapshot_ms"] / 1e3, "{:.2f} s", "with a slow sink: a snapshot takes (s)")
    _bars(
        panels[1][1],
        slow,
        lambda line: line["in_flight_bytes"] / 1e6,
        "{:.1f} MB",
        "with a slow sink: records kept in a snapshot (MB)",
    )
    _titled(
        figure,
        "Ways to take a snapshot, at the usual load and under back-pressure",
        "2 slots on 2 cores; grey: the protocols that the paper argues against",
    )
    return figure


def _bars(axes: Axes, lines: Lines, value: Callable[[Mapping[str, Any]], float], text: str, label: str) -> None:
    values = [value(line) for line in lines]
    colours = [
        SOFT if line["protocol"] in EXPERIMENTS else WATER if line["protocol"] == "no snapshots" else DEEP for line in lines
    ]
    bars = axes.barh([line["protocol"] for line in lines], values, color=colours, height=0.62)
    axes.bar_label(bars, [text.format(each) for each in values], padding=4, color=INK, fontsize=10)
    axes.set_xlim(0, 1.22 * max(values))
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)


# Latency.


def _over_time(lines: Lines) -> Figure:
    """The oldest record of each span of time, in a panel for each line, and when snapshots were taken."""
    shown = [line for line in lines if "over_time" in line]
    figure, panels = plt.subplots(len(shown), 1, figsize=(9, 1.2 + 1.9 * len(shown)), sharex=True, squeeze=False)
    compares = shown[0]["name"] == "latency-before"
    highest_ms = max(max(line["over_time"]["oldest_ms"]) for line in shown)
    for axes, line in zip(panels[:, 0], shown, strict=True):
        over_time = line["over_time"]
        span_ms, oldest_ms = over_time["span_ms"], over_time["oldest_ms"]
        for start_ms, end_ms in over_time["snapshots_ms"]:
            axes.axvspan(start_ms / 1e3, end_ms / 1e3, color=WATER, alpha=0.5, linewidth=0)
        axes.plot([place * span_ms / 1e3 for place in range(len(oldest_ms))], oldest_ms, color=DEEP, linewidth=0.9)
        axes.set_xlim(0, len(oldest_ms) * span_ms / 1e3)
        axes.set_ylim(0, max(25.0, 1.1 * (highest_ms if compares else max(oldest_ms))))
        axes.set_ylabel("ms")
        p99 = "" if line.get("p99_ms") is None else f": 99th percentile {line['p99_ms']:.1f} ms"
        axes.set_title(f"{line['path']}{p99}", loc="left", fontsize=11, color=INK)
    panels[-1][0].set_xlabel("time (s)")
    span_ms = shown[0]["over_time"]["span_ms"]
    _titled(
        figure,
        "Latency over time, at one rate" if compares else "Latency over time, at half of the capacity",
        f"the oldest record of each {span_ms} ms; shaded: from the trigger of a snapshot until it is complete",
    )
    return figure


FILES = {
    "latency": "latency-over-time",
    "latency-before": "latency-before-and-now",
}  # where a picture isn't named as its benchmark

DRAWINGS: dict[str, Callable[[Lines], Figure]] = {
    "alignment-vs-state": _against_state,
    "alignment-vs-parallelism": _against_parallelism,
    "alignment-vs-shuffles": _against_shuffles,
    "snapshot-protocols": _protocols,
    "latency": _over_time,
    "latency-before": _over_time,
}
