"""Log the connections that a listener refuses: at most one line a minute, so that a scan of its port can't fill the log.

A line has the peer's address and the reason, which never quotes a secret or a MAC.
"""

from __future__ import annotations

import logging
import time

from tidegate.logs import OncePer

LOGGER = logging.getLogger("tidegate.channels")


class Refusals:
    """The refused connections of one listener."""

    def __init__(self) -> None:
        self._once = OncePer()

    def add(self, job: str, attempt: int, peer: tuple[str, int] | None, reason: object) -> None:
        """Log the refusal, or only count it. `peer` is None if not even its address is known."""
        held_back = self._once.take(int(time.monotonic() * 1000))
        if held_back is not None:
            LOGGER.warning(
                "Job %r, attempt %d: a connection from %s was refused: %s; %d others since the last line.",
                job,
                attempt,
                peer or "an unknown host",
                reason,
                held_back,
                extra={"event": "refused", "job": job, "attempt": attempt},
            )
