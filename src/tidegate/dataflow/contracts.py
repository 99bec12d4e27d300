"""The contracts of sources and sinks, which connectors implement.

A `Source` or `Sink` is a small picklable description that the user builds on the driver. On a slot it opens a reader or
a writer for one subtask. Readers and writers run in the slot's event loop: they never block for long, never start
threads that touch the engine, and do no work in their constructors that must survive a crash.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from tidegate.dataflow.changelog import APPEND_ONLY, Changelog
from tidegate.dataflow.finished_splits import FinishedSplits
from tidegate.protocol.watermarks import MIN_WATERMARK_MS

# A position within a split: anything that JSON can carry.
Offset = Any


class SplitListener(Protocol):
    """Receives what a reader reports about its splits."""

    def on_discovered(self, splits: Mapping[str, bool]) -> None: ...

    def on_finished(self, split: str) -> None: ...

    def watermark_ms(self, split: str) -> int: ...


class TimeGroupMember(Protocol):
    """A watermark operator that keeps its source near the other sources of a group (protocol/time_groups.py)."""

    def is_ahead(self, split: str) -> bool: ...

    @property
    def waits(self) -> bool: ...


class Splits:
    """What a reader reports about its splits, so that event time is followed for each of them.

    A reader that reports its splits calls

    - `report` when it is opened;
    - `discover` for every split that it has, as soon as it knows the split;
    - `read` before `poll` returns a batch, with the split of the batch: a batch is of one split;
    - `finish` for a split without further records. If some are added to it later, it is discovered again.

    A batch of a split that is not discovered ends the job: event time would never know when to stop waiting for that split.

    To read a backlog in the order of event time, a reader reads next from the split whose `watermark_ms` is the lowest, if
    event time `is_followed` at all. If that split `is_ahead` of the other sources of its time group, the reader returns
    nothing for now. A reader that does so reports with `holds_back`; otherwise `poll` isn't called while the source as a
    whole is ahead.
    """

    def __init__(self) -> None:
        self.is_reported = False
        self.holds_back = False
        self.member: TimeGroupMember | None = None  # if the source is in a time group
        self.current = ""
        self.live: dict[str, bool] = {}  # by split: whether records are known to wait there
        self._listeners: list[SplitListener] = []
        self._discovered: dict[str, bool] = {}
        self._finished: list[str] = []
        self.is_followed = False

    # What a reader calls.

    def report(self, *, holds_back: bool = False) -> Splits:
        """Start to report: from now on event time is followed split by split. With `holds_back`, the reader doesn't read a
        split that `is_ahead`."""
        self.is_reported, self.holds_back = True, holds_back
        return self

    def discover(self, split: str, *, has_records: bool = False) -> None:
        """Report that records of the split follow. With `has_records` they exist already and only have to be read, so the
        split is never idle until it is finished."""
        if split in self._finished:
            self._finished.remove(split)
        self.live[split] = self._discovered[split] = has_records

    def read(self, split: str) -> None:
        """Report the split of the batch that `poll` is about to return."""
        self.current = split

    def finish(self, split: str) -> None:
        """Report that no record of the split follows, so that event time doesn't wait for it."""
        if self.live.pop(split, None) is not None:
            self._finished.append(split)

    def watermark_ms(self, split: str) -> int:
        """Return the watermark of a split: `MIN_WATERMARK_MS` if nothing of it was read, or event time isn't followed."""
        return self._listeners[0].watermark_ms(split) if self._listeners else MIN_WATERMARK_MS

    def is_ahead(self, split: str) -> bool:
        """Whether the split must not be read now, because it is too far ahead of the other sources of its time group."""
        return self.member is not None and self.member.is_ahead(split)

    # What the engine calls.

    @property
    def must_wait(self) -> bool:
        """Whether the reader must not be polled, since it can't hold back single splits."""
        return self.member is not None and not self.holds_back and self.member.waits

    @property
    def is_current_known(self) -> bool:
        """Whether the split of the present batch was discovered. It may be finished with this batch."""
        return self.current in self.live or self.current in self._finished

    def follow(self, listener: SplitListener) -> None:
        """Add a listener. It knows already which splits are live."""
        self._listeners.append(listener)

    def tell_discovered(self) -> None:
        """Called before the batch that was read is passed on."""
        discovered, self._discovered = self._discovered, {}
        if discovered:
            for listener in self._listeners:
                listener.on_discovered(discovered)

    def tell_finished(self) -> None:
        """Called after the batch was passed on."""
        finished, self._finished = self._finished, []
        for split in finished:
            for listener in self._listeners:
                listener.on_finished(split)


@dataclass(frozen=True, slots=True)
class SourceContext:
    """Which subtask reads, and the offsets at which it continues.

    `restored` holds the offsets of *all* splits of the source, whichever subtask read them before, so that a source
    can be rescaled; the reader takes those that it owns at the present parallelism. `finished` holds the splits of this
    subtask that were read to their end, if the source declares `finishes_splits`.
    """

    subtask: int
    parallelism: int
    restored: Mapping[str, Offset]
    now_ms: Callable[[], int]
    splits: Splits = field(default_factory=Splits)
    finished: FinishedSplits = field(default_factory=FinishedSplits)


class SourceReader(ABC):
    """Reads the splits of one subtask.

    If a reader reports its splits (`SourceContext.splits`), event time is followed split by split. If not, all its records
    are taken for one split, which must then be read in the order of event time.

    Contract: after `poll` has returned a batch, `offsets` is the position right behind its last record; a reader opened
    with those offsets returns exactly the records that this reader would have returned next, in the same order per split.
    If input can't be read at all, raise `SourceError`, which ends the job; any other error may be cured by a restart.
    """

    @abstractmethod
    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        """Return at most `max_rows` records that are available now, or None. Never wait."""

    @abstractmethod
    def offsets(self) -> Mapping[str, Offset]:
        """Return the position of every split that this reader owns, without those in `SourceContext.finished`. All of it is
        written in every snapshot."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """True once no record will ever follow."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Release files and sockets."""


class Source(ABC):
    """A description of where records come from."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of the records, and their Arrow types."""

    @property
    @abstractmethod
    def bounded(self) -> bool:
        """True if its readers finish without being stopped."""

    @property
    def finishes_splits(self) -> bool:
        """True if its readers move splits that were read to their end from the offsets to `SourceContext.finished`, and own
        the splits that this says they own. For sources whose number of splits grows as long as they are read."""
        return False

    @abstractmethod
    def open(self, context: SourceContext) -> SourceReader:
        """Return the reader of one subtask. Called in its slot, in every attempt."""


# Describes output that any process can commit later: text, usually JSON.
Committable = str


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Which subtask writes. `attempt` makes names unique: an older attempt may still be alive and writing. `snapshots` is
    the address of the job's snapshots, without secrets: two jobs with one name and different folders count their attempts
    separately, and must leave each other's output alone. `key` is the key of upserts, or of changes that leave one row for
    each key; it is empty for other records."""

    job: str
    sink: str
    subtask: int
    parallelism: int
    attempt: int
    schema: pa.Schema
    deliver: Callable[[Committable], None]  # hands a committable to the driver, for sinks that end there (collect)
    snapshots: str = ""
    key: tuple[str, ...] = ()


class SinkWriter(ABC):
    """Writes the records of one subtask. The defaults make a sink without transactions (at-least-once).

    The life of an epoch: `write`* → `pre_commit(epoch)` → (the snapshot completes) → `commit`. A crash at any point
    leads to a new writer. Its `commit` gets the committables of the restored snapshot again, unless it is known that all of
    them were committed. Leftovers of older attempts are discarded once the new attempt has a complete snapshot. A savepoint
    is made when `commit` has returned on every subtask, so it has no committables.
    """

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take the records of a batch, which belong to the epoch that ends next."""

    def pre_commit(self, epoch: int) -> Callable[[], Sequence[Committable]]:
        """End the epoch's output. This must be quick: the slow work (flush, close, fsync) is in the returned function, which
        a background thread calls once while the writer already takes records of the next epoch. When that function
        returns, everything written in the epoch is durable and can be committed by any process."""
        return lambda: ()

    def commit(self, committables: Sequence[Committable]) -> None:  # noqa: B027  (optional)
        """Make the output visible, durably. This must be idempotent: it is called again after a recovery, perhaps by a sink
        with other settings, so a committable includes the address of its output. Raise `CommitError` if the outcome is
        unknown, with `final=True` if no attempt can make the commit; never take an unknown outcome for success."""

    def discard_leftovers(self) -> None:  # noqa: B027  (optional)
        """Remove the uncommitted output of older attempts, and nothing that the present attempt writes.

        Called once, on one subtask, when the attempt's first snapshot is complete and was committed there. All subtasks
        have committed what they restored by then, so whatever is left of older attempts can be deleted at once."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Release files and sockets. Leave uncommitted output as it is."""


class Sink(ABC):
    """A description of where records go."""

    @property
    def changelogs(self) -> frozenset[Changelog]:
        """What the records may mean: appended only, unless a sink declares more.

        A sink that takes `UPSERT` gets the updates of a key in their order, on one subtask, and must let the later replace
        the earlier. One that takes `RETRACT` gets batches with the column `row_kind`: "+I" inserts the row, and "-D" deletes
        one row that is equal to it. If there is a `SinkContext.key`, a "-D" deletes the row of its key, and the changes of a
        key arrive in their order, on one subtask."""
        return APPEND_ONLY

    def check(self, schema: pa.Schema) -> None:  # noqa: B027  (optional)
        """Raise `SchemaError` if records of this schema can't be written. Called when the job is built."""

    @abstractmethod
    def open(self, context: SinkContext) -> SinkWriter:
        """Return the writer of one subtask. Called in its slot, in every attempt."""
