"""Inputs that are idle for a time, late and disordered, for operators with event time: channels as a subtask has them, with
the real merge of their watermarks, and a model of it in plain Python.

Each channel has an event time of its own. One that wakes up may be far behind the others, which went on meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tidegate.protocol.ids import ChannelId
from tidegate.protocol.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS, Advanced, BecameIdle, WatermarkMerge

Record = tuple[Any, Any, int]  # key, time, number


@dataclass(slots=True)
class Channel:
    id: ChannelId
    port: int
    now: int
    promised_ms: int = MIN_WATERMARK_MS
    is_idle: bool = False


class Inputs:
    """The channels of one subtask."""

    def __init__(self, ports: int, now: int) -> None:
        self.channels = [Channel(ChannelId(port, up, 0), port, now) for port in range(ports) for up in range(2)]
        self._merge = WatermarkMerge([each.id for each in self.channels])
        self._reached_ms = MIN_WATERMARK_MS  # by the model

    def promise(self, channel: Channel, at_ms: int) -> Advanced | BecameIdle | None:
        channel.promised_ms, channel.is_idle = max(at_ms, channel.promised_ms), False
        return self._checked(self._merge.on_watermark(channel.id, at_ms))

    def be_idle(self, channel: Channel) -> Advanced | BecameIdle | None:
        channel.is_idle = True
        return self._checked(self._merge.on_idle(channel.id))

    def _checked(self, progress: Any) -> Advanced | BecameIdle | None:
        ahead = [each for each in self.channels if each.promised_ms != MAX_WATERMARK_MS]
        live = [each.promised_ms for each in ahead if not each.is_idle]
        if live or not ahead:
            self._reached_ms = max(self._reached_ms, min(live, default=MAX_WATERMARK_MS))
        assert self._merge.current_ms == self._reached_ms
        assert isinstance(progress, Advanced | BecameIdle | None)
        return progress


class Subject:
    """What is tested: one subtask of an operator, and what it must emit. Late records are dropped and counted."""

    def __init__(
        self,
        subtask: Any,
        on_records: Callable[[Sequence[Record], int], list[Record]],
        on_watermark: Callable[[int], None],
        expected: Callable[[], list[Any]],
    ) -> None:
        """`subtask` is `Joins` or `Windows`, at parallelism 1. The functions are those of an oracle: it returns late
        records, takes watermarks, and returns all that must have been emitted by now."""
        self._subtask = subtask
        self._on_records = on_records
        self._on_watermark = on_watermark
        self._expected = expected
        self._found: Counter[Any] = Counter()
        self._dropped = self._late = 0

    def feed(self, records: Sequence[Record], port: int) -> None:
        self._late += len(self._on_records(records, port))
        self._subtask.feed(records, port)

    def progress(self, progress: Advanced | BecameIdle | None) -> None:
        operator = self._subtask.benches[0].operator
        if isinstance(progress, Advanced):
            operator.on_watermark(progress.at_ms)
            self._on_watermark(progress.at_ms)
        elif progress is not None:
            operator.on_idle()

    def restore(self) -> None:
        self._dropped += self._subtask.benches[0].operator.late_dropped
        before, self._subtask = self._subtask, self._subtask.restored(parallelism=1)
        self._found.update(before.taken()[0])

    def check(self) -> None:
        self._subtask.finish_work()
        self._found.update(self._subtask.taken()[0])
        expected = Counter(self._expected())
        assert self._found == expected, f"missing {expected - self._found}, too many {self._found - expected}"
        assert self._dropped + self._subtask.benches[0].operator.late_dropped == self._late


def check_idle_run(subject: Subject, *, ports: int, rng: Random, restores: bool = True) -> None:
    """After each step, what was emitted is what the model says."""
    inputs, number = Inputs(ports, rng.randrange(-50, 50)), 0
    for _ in range(rng.randrange(20, 70)):
        channel, what = rng.choice(inputs.channels), rng.random()
        if what < 0.45:
            if channel.is_idle:  # what wakes up sends its watermark ahead of its records
                subject.progress(inputs.promise(channel, channel.promised_ms))
            records: list[Record] = []
            for _ in range(rng.choice((1, 1, 6))):
                number += 1
                key = None if rng.random() < 0.05 else rng.randrange(4)
                records.append((key, channel.now - rng.choice((0, 1, 4, 12, 12, 50)), number))
            channel.now += rng.choice((0, 1, 5, 25))
            subject.feed(records, channel.port)
        elif what < 0.8:
            subject.progress(inputs.promise(channel, channel.now - rng.randrange(1, 12)))
        elif what < 0.95 or not restores:
            subject.progress(inputs.be_idle(channel))
        else:
            subject.restore()
            former = inputs
            inputs = Inputs(ports, 0)  # channels begin again after a restore
            for now, before in zip(inputs.channels, former.channels, strict=True):
                now.now = before.now
        subject.check()
    for channel in inputs.channels:
        subject.progress(inputs.promise(channel, MAX_WATERMARK_MS))
    subject.check()
