"""Watermarks: how far event time has come.

Theory of operation
-------------------
(Carbone et al. 2017 take event time for granted; this follows the Dataflow model that Flink builds on.) A watermark t
on a channel promises that no record with an event time of t or less follows on it. A source derives it from the
records that it sees (`BoundedOutOfOrderness`); a subtask with several inputs may promise only what all of them promise:
the minimum over its channels (`WatermarkMerge`). An input without records would hold that minimum back for ever, so it
can declare itself *idle* and is left out until it speaks again.

Invariants: what is promised never decreases, except that a promise may be repeated (see below). Three subtle cases:

- An *ended* channel (end of input, or a watermark of `MAX_WATERMARK_MS`) promises everything, but it must not lift the
  merge to the end of time while another channel is merely idle: that one may speak again. So ended channels are left
  out of the minimum like idle ones, and the merge reaches the maximum only when all channels have ended.
- A channel that wakes up behind the merged watermark holds it where it is until it has caught up, rather than letting
  the others run further ahead and make more of its records late.
- Whoever was idle and wakes up repeats its watermark. The batch that woke it may be filtered away before it gets
  downstream, and downstream has to know that it is to be waited for again.

A channel that will never carry event time is not idle: leave it out of the merge altogether.
Not here: late records and timers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.protocol.ids import ChannelId

MAX_WATERMARK_MS = 2**63 - 1
MIN_WATERMARK_MS = -(2**63)


@dataclass(frozen=True, slots=True)
class Advanced:
    """Send this watermark downstream. It also says: not idle (any more)."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class BecameIdle:
    """Tell downstream not to wait for this subtask until it speaks again."""


Progress: TypeAlias = Advanced | BecameIdle | None


class WatermarkMerge:
    """The minimum over the input channels of one subtask that are neither idle nor ended."""

    def __init__(self, channels: Iterable[ChannelId]) -> None:
        self._at_ms = dict.fromkeys(channels, MIN_WATERMARK_MS)
        assert self._at_ms, "a subtask without inputs has nothing to merge"
        self._idle: set[ChannelId] = set()
        self._current_ms = MIN_WATERMARK_MS
        self._is_idle = False

    @property
    def current_ms(self) -> int:
        """What has been promised so far."""
        return self._current_ms

    def on_watermark(self, channel: ChannelId, at_ms: int) -> Progress:
        assert channel in self._at_ms, f"{channel} is no input of this subtask"
        self._at_ms[channel] = max(at_ms, self._at_ms[channel])
        self._idle.discard(channel)
        return self._progress()

    def on_end(self, channel: ChannelId) -> Progress:
        return self.on_watermark(channel, MAX_WATERMARK_MS)

    def on_idle(self, channel: ChannelId) -> Progress:
        assert channel in self._at_ms, f"{channel} is no input of this subtask"
        self._idle.add(channel)
        return self._progress()

    def on_batch(self, channel: ChannelId) -> Progress:
        """A batch without a watermark ends idleness, too. Called for every batch, so the usual case is quick."""
        if channel not in self._idle:
            return None
        self._idle.discard(channel)
        return self._progress()

    def _progress(self) -> Progress:
        ahead = [at_ms for at_ms in self._at_ms.values() if at_ms != MAX_WATERMARK_MS]
        live = [at_ms for channel, at_ms in self._at_ms.items()
                if at_ms != MAX_WATERMARK_MS and channel not in self._idle]
        if ahead and not live:
            if self._is_idle:
                return None
            self._is_idle = True
            return BecameIdle()
        woke_up, self._is_idle = self._is_idle, False
        promised_ms = min(live, default=MAX_WATERMARK_MS)
        if promised_ms <= self._current_ms and not woke_up:
            return None
        self._current_ms = max(promised_ms, self._current_ms)
        return Advanced(self._current_ms)


class BoundedOutOfOrderness:
    """Watermarks for records that come at most `delay_ms` behind the latest event time seen so far.

    After `idle_after_ms` without a batch the stream is idle (None: never). Call `on_time` once at the start, from where
    the quiet is counted, and then when `deadline_ms` says so.
    """

    def __init__(self, delay_ms: int, idle_after_ms: int | None = None) -> None:
        assert delay_ms >= 0
        assert idle_after_ms is None or idle_after_ms > 0
        self._delay_ms = delay_ms
        self._idle_after_ms = idle_after_ms
        self._quiet_since_ms: int | None = None
        self._current_ms = MIN_WATERMARK_MS
        self._is_idle = False

    @property
    def current_ms(self) -> int:
        """What has been promised so far."""
        return self._current_ms

    def on_batch(self, max_event_time_ms: int, now_ms: int) -> Progress:
        self._quiet_since_ms = now_ms
        woke_up, self._is_idle = self._is_idle, False
        # A record exactly `delay_ms` behind is still in time, and a watermark excludes its own instant: hence the 1.
        promised_ms = max_event_time_ms - self._delay_ms - 1
        if promised_ms <= self._current_ms and not woke_up:
            return None
        self._current_ms = max(promised_ms, self._current_ms)
        return Advanced(self._current_ms)

    def deadline_ms(self) -> int | None:
        """When `on_time` has something to say, if no batch comes before; None where it has not, as once idle."""
        if self._idle_after_ms is None or self._quiet_since_ms is None or self._is_idle:
            return None
        return self._quiet_since_ms + self._idle_after_ms

    def on_time(self, now_ms: int) -> Progress:
        if self._quiet_since_ms is None:
            self._quiet_since_ms = now_ms
        deadline_ms = self.deadline_ms()
        if deadline_ms is None or now_ms < deadline_ms:
            return None
        self._is_idle = True
        return BecameIdle()
