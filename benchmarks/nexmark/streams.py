"""What a query's program is given: the three streams of a job, with the columns that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

import tidegate as tg
from benchmarks.nexmark.events import Events
from tidegate.driver.job import Job

KEPT_BEHIND = "0 s"  # each split has its events in the order of their times


@dataclass(frozen=True, slots=True)
class Nexmark:
    """The streams of one job. With `timed`, they carry event time, which is that of the column `date_time`."""

    job: Job
    events: Events

    def bid(self, *columns: str, timed: bool = False) -> tg.Stream:
        """Return the stream of bids, with these columns (default: all)."""
        return _timed(self.job.source("bid", self.events.bid(*columns)), timed)

    def auction(self, *columns: str, timed: bool = False) -> tg.Stream:
        """Return the stream of auctions, with these columns (default: all)."""
        return _timed(self.job.source("auction", self.events.auction(*columns)), timed)

    def person(self, *columns: str, timed: bool = False) -> tg.Stream:
        """Return the stream of persons, with these columns (default: all)."""
        return _timed(self.job.source("person", self.events.person(*columns)), timed)


def _timed(stream: tg.Stream, timed: bool) -> tg.Stream:
    return stream.with_watermark("date_time", KEPT_BEHIND) if timed else stream
