"""The formats of the log, where it goes, and that it stays quiet."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

import tidegate as tg
from tidegate.errors import JobError
from tidegate.logs import FIELDS, JsonLines, OncePer


@pytest.fixture
def record() -> logging.LogRecord:
    record = logging.LogRecord("tidegate.job", logging.WARNING, __file__, 1, "Job %r: %s", ("counts", "a\nb é"), None)
    record.created = 1_700_000_000.25
    vars(record).update(event="failed", job="counts", attempt=2, epoch=17, slot=None, password="hush")
    return record


def test_a_json_line_is_one_line_with_the_fields_that_there_are(record: logging.LogRecord) -> None:
    line = JsonLines().format(record)
    assert "\n" not in line and line.isascii()
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "logger": "tidegate.job",
        "event": "failed",
        "job": "counts",
        "attempt": 2,
        "epoch": 17,
        "message": "Job 'counts': a\nb é",
    }


def test_a_json_line_holds_the_traceback(record: logging.LogRecord) -> None:
    try:
        raise KeyError("no price")
    except KeyError as error:
        record.exc_info = type(error), error, error.__traceback__
    assert "KeyError: 'no price'" in json.loads(JsonLines().format(record))["exception"]


def test_no_field_is_an_attribute_that_python_gives_every_record() -> None:
    assert not set(FIELDS) & set(vars(logging.makeLogRecord({})))


PROGRAM = """
import json, logging, sys
from tidegate import logs
{before}
logs.set_up(*{settings})
{after}
for level in ("debug", "info", "warning"):
    getattr(logging.getLogger("tidegate.job"), level)("a %s", level, extra={{"job": "counts"}})
"""


def logged(settings: tuple[str, str], *, before: str = "", after: str = "") -> list[str]:
    """What a program writes to stderr."""
    program = PROGRAM.format(settings=settings, before=before, after=after)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr.splitlines()


def test_a_program_that_sets_up_no_logging_has_the_log_on_stderr() -> None:
    info, warning = logged(("text", "info"))
    assert info.endswith(" INFO tidegate.job: a info") and warning.endswith(" WARNING tidegate.job: a warning")
    assert len(logged(("text", "debug"))) == 3 and len(logged(("text", "error"))) == 0


def test_the_job_that_is_started_last_decides() -> None:
    (line,) = logged(("text", "info"), after="logs.set_up('json', 'warning')")
    assert json.loads(line)["job"] == "counts"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["''", "'tidegate'"])
def test_a_program_that_sets_up_logging_has_the_log_in_its_own_way_only(name: str, when: str) -> None:
    own = (
        f"logger = logging.getLogger({name}); handler = logging.StreamHandler(); logger.addHandler(handler);"
        "handler.setFormatter(logging.Formatter('own %(job)s: %(message)s')); handler.setLevel('WARNING')"
    )
    assert logged(("json", "info"), **{when: own}) == ["own counts: a warning"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"log_format": "xml"}, "Tuning(log_format='xml'): give 'text' or 'json'"),
        ({"log_level": "loud"}, "Tuning(log_level='loud'): give 'debug', 'info', 'warning' or 'error'"),
        ({"log_level": 10}, "Tuning(log_level=10): give 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_setting_of_the_log_that_isnt_one_is_refused(wrong: dict[str, str], told: str) -> None:
    with pytest.raises(JobError) as refused:
        tg.Tuning(**wrong)  # type: ignore[arg-type]
    assert str(refused.value) == told


def test_lines_that_come_too_often_are_counted_instead() -> None:
    once = OncePer(1_000)
    assert [once.take(at_ms) for at_ms in (5, 6, 1_004, 1_005, 1_006, 9_000)] == [0, None, None, 2, None, 1]
