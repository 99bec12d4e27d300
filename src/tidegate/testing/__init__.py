"""What Tidegate is tested with, shipped so that you can test your jobs with it.

`ScriptedSource` has crashes written as data; `ProcessJob` runs the engine in plain processes, without Spark;
`tidegate.testing.simulation` runs the engine under a seeded scheduler with a simulated clock, network and store;
`ExperimentalSnapshots` measures the protocols that the paper argues against.
"""

from __future__ import annotations

from tidegate.testing.experimental import ExperimentalSnapshots
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Crash, Kill, Pause, ScriptedCrash, ScriptedSource

__all__ = [
    "AwaitSnapshot",
    "Crash",
    "ExperimentalSnapshots",
    "Kill",
    "Pause",
    "ProcessJob",
    "ScriptedCrash",
    "ScriptedSource",
]
