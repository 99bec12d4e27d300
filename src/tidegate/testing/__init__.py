"""What Tidegate is tested with, shipped so that you can test your jobs with it.

`ScriptedSource` has crashes written as data; `ProcessJob` runs the engine in plain processes, without Spark;
`ExperimentalSnapshots` measures the protocols that the paper argues
against; `tidegate.testing.simulation` runs it under a seeded scheduler with a simulated clock, network and store.
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
