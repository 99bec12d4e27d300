"""A source whose crashes are written as data, to show that a job of yours survives them.

        source = ScriptedSource([(1, "a"), Crash(), (2, "b"), Pause("50 ms"), Kill(), (3, "c")],
                                schema="n long, s string")

The records are read in order; at `Crash()` the reader raises, and at `Kill()` the process that reads is killed with SIGKILL.
The job recovers and reads again from its last snapshot, and this time the reader passes the crash: each happens once (or
`times` times), because it leaves a mark in a folder before it happens. The job's committed output must be what it would be
without the crashes.

Invariants:
- A step of the script other than a record yields no record: the script without them is the expected input.
- A crash happens when all records before it have been given to the job, and no record behind it.

Not here: faults of the network, the store or other processes (tidegate/testing/simulation and tests/faults).
"""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader, Splits
from tidegate.errors import JobError, RestoreError
from tidegate.types import batch_of, parse_duration_ms, parse_schema


@dataclass(frozen=True, slots=True)
class Crash:
    """Raises `ScriptedCrash` in the reader, the first `times` times it is reached, counted over all attempts."""

    times: int = 1


@dataclass(frozen=True, slots=True)
class Kill:
    """Kills the process that reads (SIGKILL), the first `times` times it is reached. Use it only if slots are processes of
    their own: in a test's process it ends the test."""

    times: int = 1


@dataclass(frozen=True, slots=True)
class Pause:
    """Gives no record for this long ("50 ms"; a bare number is milliseconds), each time it is reached."""

    duration: Any


@dataclass(frozen=True, slots=True)
class AwaitSnapshot:
    """Gives no further record until `times` snapshots were taken at this position.

    With one snapshot at a time (the default), the first is complete or aborted when the second is taken; so
    `AwaitSnapshot(times=2), Crash()` crashes when there is a snapshot to restore. The job needs a snapshot interval.
    """

    times: int = 1


Step = Crash | Kill | Pause | AwaitSnapshot


class ScriptedCrash(RuntimeError):
    """Raised at `Crash()`. It isn't a `TidegateError`, since it stands for any failure."""


@dataclass(frozen=True, slots=True, init=False)
class ScriptedSource(Source):
    """Reads scripts of records (tuples) and steps. Bounded.

    Each script is a split: script i is read by subtask i % parallelism, in order. `memory` is the folder in which crashes
    leave their marks; every slot and attempt must see the same folder. The default is a new folder for each
    `ScriptedSource` in the machine's folder for temporary files: right for one machine, not for a cluster.
    """

    schema: pa.Schema = field()  # without `field()`, the property of `Source` would be its default
    scripts: tuple[tuple[Any, ...], ...]
    memory: str
    bounded = True

    def __init__(self, *scripts: Sequence[Any], schema: Any, memory: str | os.PathLike[str] | None = None) -> None:
        if not scripts:
            raise JobError("a ScriptedSource needs a script: a list of records and steps")
        parsed = parse_schema(schema)
        for script in scripts:
            batch_of([item for item in script if not isinstance(item, Step)], parsed)
            for item in script:
                if isinstance(item, Pause):
                    parse_duration_ms(item.duration)
        folder = Path(tempfile.gettempdir()) / f"tidegate-script-{uuid.uuid4().hex}" if memory is None else Path(memory)
        object.__setattr__(self, "schema", parsed)
        object.__setattr__(self, "scripts", tuple(tuple(script) for script in scripts))
        object.__setattr__(self, "memory", str(folder.absolute()))

    def open(self, context: SourceContext) -> SourceReader:
        owned = range(context.subtask, len(self.scripts), context.parallelism)
        return ScriptedReader([_Playback(index, self, context) for index in owned], context.splits)


class ScriptedReader(SourceReader):
    """Reads its scripts in turn."""

    def __init__(self, playbacks: list[_Playback], splits: Splits) -> None:
        self._playbacks = playbacks
        self._splits = splits.report(holds_back=True)
        for playback in playbacks:
            if not playback.finished:
                splits.discover(playback.split)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        for index, playback in enumerate(self._playbacks):
            if self._splits.is_ahead(playback.split):
                continue
            batch = playback.next(max_rows)
            if playback.finished:
                self._splits.finish(playback.split)
            if batch is not None:
                self._splits.read(playback.split)
                self._playbacks = self._playbacks[index + 1 :] + self._playbacks[: index + 1]
                return batch
        return None

    def offsets(self) -> Mapping[str, Offset]:
        return {playback.split: playback.snapshot() for playback in self._playbacks}

    @property
    def finished(self) -> bool:
        return all(playback.finished for playback in self._playbacks)


class _Playback:
    """A script, and how many of its items were passed."""

    def __init__(self, index: int, source: ScriptedSource, context: SourceContext) -> None:
        self.split = f"script-{index}"
        self._script = source.scripts[index]
        self._schema = source.schema
        self._memory = Path(source.memory)
        self._now_ms: Callable[[], int] = context.now_ms
        self._passed = int(context.restored.get(self.split, 0))
        self._resume_ms: int | None = None
        # The snapshot that was restored was complete, and was taken at this very place.
        self._taken_at = self._passed if self.split in context.restored else None
        self._taken_times = 0
        if self._passed > len(self._script):
            raise RestoreError(
                f"the snapshot was taken after item {self._passed} of {self.split}, which has only "
                f"{len(self._script)} now: give the source the script it had, or a longer one"
            )

    @property
    def finished(self) -> bool:
        return self._passed == len(self._script)

    def snapshot(self) -> int:
        self._taken_times += 1
        return self._passed

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        while not self.finished and isinstance(self._script[self._passed], Step):
            if not self._pass(self._script[self._passed]):
                return None
            self._move(1)
        records: list[Any] = []
        for item in self._script[self._passed : self._passed + max_rows]:
            if isinstance(item, Step):
                break
            records.append(item)
        if not records:
            return None
        self._move(len(records))
        return batch_of(records, self._schema)

    def _move(self, count: int) -> None:
        self._passed += count
        self._taken_times = 0
        self._taken_at = None

    def _pass(self, step: Step) -> bool:
        """Whether the items after the step may be read now."""
        if isinstance(step, AwaitSnapshot):
            return self._taken_at == self._passed or self._taken_times >= step.times
        if isinstance(step, Pause):
            now = self._now_ms()
            if self._resume_ms is None:
                self._resume_ms = now + parse_duration_ms(step.duration)
            if now < self._resume_ms:
                return False
            self._resume_ms = None
            return True
        if self._happens_now(step.times):
            if isinstance(step, Kill):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ScriptedCrash(f"item {self._passed} of {self.split} is {step}")
        return True

    def _happens_now(self, times: int) -> bool:
        """Leave one more mark. Return False if there are `times` marks already."""
        self._memory.mkdir(parents=True, exist_ok=True)
        for time in range(times):
            try:
                (self._memory / f"{self.split}-item-{self._passed}-time-{time}").touch(exist_ok=False)
                return True
            except FileExistsError:
                continue
        return False
