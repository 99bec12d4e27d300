"""How Tidegate logs: one tree of loggers, `tidegate`, and the same fields everywhere.

A text names the job, the attempt and the slot, so that it is understood in any format. The record has them as attributes,
too (`FIELDS`), for formats and filters. `event` names what happened, and stays the same when the text is improved.

A program that has set up logging, for `tidegate` or for everything, gets the records in its own way. Otherwise `set_up`
writes them to stderr, as text or as JSON lines. An executor's stderr is its log, so the slots' lines are in that.

Not here: what is logged (driver/job_log.py, slot/slot_log.py, channels/refusals.py). Nothing logs by record or by batch.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

ROOT = "tidegate"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = ("event", "job", "attempt", "epoch", "slot", "subtask", "operator", "delay_ms", "duration_ms", "bytes")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MINUTE_MS = 60_000

# As `Logger.log`: a level, a text with %s in it, what they stand for, and `extra=` with fields.
Speak: TypeAlias = Callable[..., None]


def keep_silent(level: int, text: str, *args: object, **rest: object) -> None:
    """A `Speak` for the simulation and for tests."""


class JsonLines(logging.Formatter):
    """One JSON object in each line: the time, the level, the logger, the fields that there are, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **{name: value for name in FIELDS if (value := getattr(record, name, None)) is not None},
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at that moment, as long as the program hasn't set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logging.getLogger(ROOT).handlers == [self]:
            try:
                sys.stderr.write(f"{self.format(record)}\n")  # in one call: other processes write there, too
            except Exception:  # noqa: BLE001  (as every handler does)
                self.handleError(record)


def set_up(log_format: str, log_level: str) -> None:
    """Log to stderr from this level on, unless the program has set up logging. The last job that is started decides."""
    logger = logging.getLogger(ROOT)
    handler = next((each for each in logger.handlers if isinstance(each, _Stderr)), None)
    if handler is None:
        if logger.hasHandlers():
            return
        handler = _Stderr()
        logger.addHandler(handler)
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(TEXT))
    logger.setLevel(log_level.upper())


class OncePer:
    """Lets one line through in every `every_ms`."""

    def __init__(self, every_ms: int = MINUTE_MS) -> None:
        self._every_ms = every_ms
        self._due_ms: int | None = None
        self._held_back = 0

    def take(self, now_ms: int) -> int | None:
        """Return how many lines were held back since the last one, or None if this one is to be held back as well."""
        if self._due_ms is not None and now_ms < self._due_ms:
            self._held_back += 1
            return None
        self._due_ms, held_back, self._held_back = now_ms + self._every_ms, self._held_back, 0
        return held_back
