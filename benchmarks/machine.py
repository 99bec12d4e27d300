"""What else the machine does while a benchmark runs: how many cores other processes use, or the hypervisor takes.

A 99th percentile is about the worst hundredth of the time, and on a machine that is nearly full a short command of somebody
else makes that hundredth. So a benchmark of latency reports how quiet its machine was. Only Linux tells: elsewhere the
figure is None.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_WINDOW_S = 0.5
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7  # columns of /proc/stat


class Others:
    """Within `with`: the cores that processes other than this one and its descendants use, in windows of half a second."""

    def __init__(self) -> None:
        self._windows: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tidegate-bench-others")

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def cores(self) -> dict[str, float] | None:
        """Return the mean over the windows, and the window in which others used most."""
        if not self._windows:
            return None
        return {"mean": round(sum(self._windows) / len(self._windows), 2), "most": round(max(self._windows), 2)}

    def _watch(self) -> None:
        if not (_PROC / "stat").exists():
            return
        ticks_per_s, before = os.sysconf("SC_CLK_TCK"), used()
        while not self._ended.wait(_WINDOW_S):
            now = used()
            theirs = (now[0] - before[0]) - (now[1] - before[1])
            self._windows.append(max(0.0, theirs / ticks_per_s / _WINDOW_S))
            before = now


def used() -> tuple[int, int]:
    """Return the ticks of processor time used by all, stolen ones included, and by this process and its descendants."""
    columns = [int(each) for each in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    everybody = sum(ticks for place, ticks in enumerate(columns) if place not in (_IDLE, _IO_WAIT))
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                # The name of a process, in parentheses, may have spaces. Behind it: state, parent, …
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            pid = int(folder.name)
            children.setdefault(int(fields[1]), []).append(pid)
            ticks[pid] = sum(int(each) for each in fields[11:15])  # its own, and those of its children that have ended
    own, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        own += ticks.get(pid, 0)
        todo += children.get(pid, [])
    return everybody, own
