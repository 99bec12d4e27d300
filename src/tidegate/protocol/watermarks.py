"""Watermarks: how far event time has come.

Theory of operation
-------------------
(Carbone et al. 2017 take event time for granted; this follows the Dataflow model that Flink builds on.) A watermark t
on a channel promises that no record with an event time of t or less follows on it. A source derives it from the
records that it sees, split by split, since each split (a file, a partition) is in order and several of them are not
(`SplitWatermarks`); a subtask with several inputs may promise only what all of them promise: the minimum over its channels
(`WatermarkMerge`). A split or an input without records would hold that minimum back forever, so it can become *idle*,
and is left out until it has records again.

Invariants: what is promised never decreases, except that a promise may be repeated (see below). The subtle cases:

- An *ended* channel (end of input, or a watermark of `MAX_WATERMARK_MS`) promises everything, but it must not lift the
  merge to the end of time while another channel is merely idle: it may still have records. So ended channels are left
  out of the minimum like idle ones, and the merge reaches the maximum only when all channels have ended.
- A channel inside a loop is *held* when that part of the loop has no more input, but records may still leave the loop. While
  another channel is live it is left out, so that event time advances in the parts of the loop that have input; otherwise
  the merge stays where it is. Outside the loop it is left out only while another channel of the same edge, which is
  another part of the loop, is live. Otherwise its last promise counts, since operators behind the loop have to wait.
- A channel that wakes up behind the merged watermark holds it where it is until it has caught up, rather than letting
  the others run further ahead and make more of its records late.
- A split that is discovered later can't lower what was promised: it holds the stream there until it has caught up.
- A subtask that was idle and has records again repeats its watermark ahead of them. Records alone don't end idleness:
  downstream may not get them because they are filtered out, and records that came round a loop or that a timer of
  processing time made carry no event time. No watermark would follow them, and downstream would wait for one forever.
- If time moves by epochs, idle means: without records in this epoch. So `on_epoch` ends it.

A channel that will never carry event time is not idle. Either it is `without_event_time`, and only its end counts, or the
merge doesn't include it.

Not here: late records and timers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tidegate.protocol.ids import ChannelId

MAX_WATERMARK_MS = 2**63 - 1
MIN_WATERMARK_MS = -(2**63)


@dataclass(frozen=True, slots=True)
class Advanced:
    """Send this watermark downstream. It also ends idleness."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class BecameIdle:
    """Send downstream not to wait for this subtask until its next watermark."""


@dataclass(frozen=True, slots=True)
class BecameHeld:
    """Send the rest of the loop not to wait for this subtask until the loop is quiet. Operators behind the loop wait."""


Progress: TypeAlias = Advanced | BecameIdle | BecameHeld | None


class WatermarkMerge:
    """The minimum over the input channels of one subtask that are neither idle, held nor ended.

    For the channels in `without_event_time`, only the end counts.
    """

    def __init__(self, channels: Iterable[ChannelId], *, without_event_time: Iterable[ChannelId] = ()) -> None:
        self._without_event_time = frozenset(without_event_time)
        self._at_ms = dict.fromkeys((*channels, *self._without_event_time), MIN_WATERMARK_MS)
        assert self._at_ms, "a subtask without inputs has nothing to merge"
        self._idle: set[ChannelId] = set()
        self._held: dict[ChannelId, bool] = {}  # by channel: whether the loop is one that this subtask is in
        self.current_ms = MIN_WATERMARK_MS  # what has been promised so far
        self._said: BecameIdle | BecameHeld | None = None  # the last outcome, if downstream doesn't wait

    def on_watermark(self, channel: ChannelId, at_ms: int) -> Progress:
        assert channel in self._at_ms, f"{channel} is no input of this subtask"
        if channel in self._without_event_time and at_ms != MAX_WATERMARK_MS:
            return None
        self._at_ms[channel] = max(at_ms, self._at_ms[channel])
        self._idle.discard(channel)
        self._held.pop(channel, None)
        return self._progress()

    def on_end(self, channel: ChannelId) -> Progress:
        return self.on_watermark(channel, MAX_WATERMARK_MS)

    def on_idle(self, channel: ChannelId) -> Progress:
        assert channel in self._at_ms, f"{channel} is no input of this subtask"
        self._idle.add(channel)
        self._held.pop(channel, None)
        return self._progress()

    def on_held(self, channel: ChannelId, *, inside: bool = True) -> Progress:
        """`inside`: the loop is one that this subtask is in."""
        assert channel in self._at_ms, f"{channel} is no input of this subtask"
        self._held[channel] = inside
        self._idle.discard(channel)
        return self._progress()

    def on_epoch(self) -> None:
        """An epoch has ended on all channels, and idleness ends with it. What was promised is still promised."""
        self._idle.clear()
        if isinstance(self._said, BecameIdle):
            self._said = None

    def _progress(self) -> Progress:
        ahead = {channel: at_ms for channel, at_ms in self._at_ms.items() if at_ms != MAX_WATERMARK_MS}
        live = {
            channel: at_ms
            for channel, at_ms in ahead.items()
            if channel not in self._idle and channel not in self._held and channel not in self._without_event_time
        }
        moving = {channel.edge for channel in live}
        waiting = [channel for channel, inside in self._held.items() if not inside and channel.edge not in moving]
        promised = [*live.values(), *(ahead[channel] for channel in waiting if channel in ahead)]
        if ahead and not promised:
            before, self._said = self._said, BecameHeld() if self._held else BecameIdle()
            return None if self._said == before else self._said
        woke_up, self._said = self._said is not None, None
        promised_ms = min(promised, default=MAX_WATERMARK_MS)
        if promised_ms <= self.current_ms and not woke_up:
            return None
        self.current_ms = max(promised_ms, self.current_ms)
        return Advanced(self.current_ms)


class SplitWatermarks:
    """Watermarks of a stream whose records come from splits, each at most `delay_ms` behind the latest event time of its
    split: the minimum over the live splits.

    A split is live from when it is discovered until it is finished. One that was not read yet has promised nothing, and
    holds the stream back. After `idle_after_ms` without a batch a split is idle (None: never), and so is a stream without
    live splits; a split that is known to have records waiting is never idle, however long nobody reads it. Nor is one that
    `is_held`: it may have records that nobody has looked for, because its source waits for others
    (protocol/time_groups.py), or because the subtask was busy. `deadline_ms` says when `on_time` is due.
    """

    def __init__(
        self,
        delay_ms: int,
        idle_after_ms: int | None = None,
        *,
        now_ms: int = 0,
        is_held: Callable[[str], bool] = lambda split: False,
    ) -> None:
        assert delay_ms >= 0
        assert idle_after_ms is None or idle_after_ms > 0
        self._delay_ms = delay_ms
        self._idle_after_ms = idle_after_ms
        self._is_held = is_held
        self._live: dict[str, _Split] = {}
        self._active: list[tuple[int, str]] = []  # a heap; entries that no longer hold are passed over
        self._active_count = 0
        self._quiet: dict[str, _Split] = {}  # active ones that may become idle, the longest quiet one first
        self._quiet_since_ms = now_ms  # of the stream
        self.current_ms = MIN_WATERMARK_MS  # what has been promised so far
        self._is_idle = False

    def watermark_ms(self, split: str) -> int:
        """Return what one split has promised."""
        return self._live[split].at_ms if split in self._live else MIN_WATERMARK_MS

    def reached_ms(self) -> int | None:
        """Return the least watermark of the splits that other sources wait for, or None if there is none. A split that was
        not read yet counts only if records are known to wait in it: it may never have any."""
        if not self._active_count:
            return None
        if (least_ms := self._least_ms()) != MIN_WATERMARK_MS:
            return least_ms
        return min(
            (
                each.at_ms
                for each in self._live.values()
                if not each.is_idle and (each.at_ms != MIN_WATERMARK_MS or each.has_records)
            ),
            default=None,
        )

    def latest_ms(self) -> dict[str, int]:
        """Return the latest event time of each live split of which a record was read."""
        return {name: each.at_ms + self._delay_ms + 1 for name, each in self._live.items() if each.at_ms != MIN_WATERMARK_MS}

    def on_discovered(
        self, splits: Mapping[str, bool], now_ms: int, *, latest_ms: Mapping[str, int] | None = None
    ) -> Progress:
        """Add splits, all of them before any counts. `splits`: by split, whether records are known to wait in it.
        `latest_ms`: the latest event time of splits of which records were read before the job was restored."""
        for split, has_records in splits.items():
            if split in self._live:
                self._activate(split, self._live[split], now_ms)
                continue
            before_ms = None if latest_ms is None else latest_ms.get(split)
            found = _Split(MIN_WATERMARK_MS if before_ms is None else self._promise(before_ms), now_ms, has_records)
            self._live[split] = found
            self._active_count += 1
            self._enter(split, found, now_ms)
        return self._progress()

    def on_active(self) -> Progress:
        """Return what to send ahead of a batch with event times. `on_batch` follows."""
        if not self._is_idle:
            return None
        self._is_idle = False
        return Advanced(self.current_ms)

    def on_batch(self, split: str, max_event_time_ms: int, now_ms: int) -> Progress:
        self._quiet_since_ms = now_ms
        found = self._live.get(split)
        if found is None:
            return self.on_discovered({split: False}, now_ms, latest_ms={split: max_event_time_ms})
        at_ms = max(self._promise(max_event_time_ms), found.at_ms)
        if at_ms == found.at_ms and not found.is_idle and split not in self._quiet:
            return None
        found.at_ms = at_ms
        self._activate(split, found, now_ms)
        return self._progress()

    def on_finished(self, split: str, now_ms: int) -> Progress:
        found = self._live.pop(split, None)
        if found is None:
            return None
        self._quiet_since_ms = now_ms
        self._quiet.pop(split, None)
        self._active_count -= not found.is_idle
        return self._progress()

    def on_idle(self, split: str) -> Progress:
        """Don't wait for this split until it has a batch again."""
        found = self._live[split]
        if found.is_idle:
            return None
        found.is_idle = True
        self._active_count -= 1
        self._quiet.pop(split, None)
        return self._progress()

    def deadline_ms(self) -> int | None:
        """Return when to call `on_time` if nothing happens before; None if it has nothing to do, as in an idle stream."""
        if self._idle_after_ms is None or self._is_idle:
            return None
        for each in self._quiet.values():
            return each.quiet_since_ms + self._idle_after_ms
        return None if self._live else self._quiet_since_ms + self._idle_after_ms

    def on_time(self, now_ms: int) -> Progress:
        outcome: Progress = None
        while (deadline_ms := self.deadline_ms()) is not None and now_ms >= deadline_ms:
            if not self._live:
                self._is_idle = True
                return BecameIdle()
            split, found = next(iter(self._quiet.items()))
            if self._is_held(split):
                self._enter(split, found, now_ms)
            else:
                outcome = self.on_idle(split) or outcome
        return outcome

    # Inside.

    def _promise(self, latest_ms: int) -> int:
        # A record exactly `delay_ms` behind is still in time, and a watermark excludes its own instant: hence the 1.
        return max(latest_ms - self._delay_ms - 1, MIN_WATERMARK_MS)

    def _activate(self, split: str, found: _Split, now_ms: int) -> None:
        if found.is_idle:
            found.is_idle = False
            self._active_count += 1
        self._enter(split, found, now_ms)

    def _enter(self, split: str, found: _Split, now_ms: int) -> None:
        found.quiet_since_ms = now_ms
        if self._idle_after_ms is not None and not found.has_records:
            self._quiet.pop(split, None)
            self._quiet[split] = found
        heapq.heappush(self._active, (found.at_ms, split))
        if len(self._active) > 2 * len(self._live) + 64:
            self._active = [(each.at_ms, name) for name, each in self._live.items() if not each.is_idle]
            heapq.heapify(self._active)

    def _least_ms(self) -> int:
        while True:
            at_ms, split = self._active[0]
            found = self._live.get(split)
            if found is not None and not found.is_idle and found.at_ms == at_ms:
                return at_ms
            heapq.heappop(self._active)

    def _progress(self) -> Progress:
        if not self._active_count:
            if not self._live or self._is_idle:  # without live splits, `on_time` decides
                return None
            self._is_idle = True
            return BecameIdle()
        woke_up, self._is_idle = self._is_idle, False
        promised_ms = self._least_ms()
        if promised_ms <= self.current_ms and not woke_up:
            return None
        self.current_ms = max(promised_ms, self.current_ms)
        return Advanced(self.current_ms)


@dataclass(slots=True)
class _Split:
    at_ms: int  # what it has promised
    quiet_since_ms: int
    has_records: bool
    is_idle: bool = False
