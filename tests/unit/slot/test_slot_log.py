"""What a slot logs about alignments that take long, and about errors."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import tidegate as tg
from tests.unit.driver.test_job_log import Lines
from tidegate.channels.tcp_ends import ChannelLost
from tidegate.control.settings import JobSettings, Snapshots
from tidegate.errors import UserFunctionError
from tidegate.protocol.alignment import Alignment
from tidegate.protocol.ids import ChannelId, SubtaskId
from tidegate.protocol.time_groups import Least
from tidegate.slot.slot_log import SLOW_ALIGNMENT_MS, SLOW_WRITE_MS, STUCK_TIME_MS, SlotLog
from tidegate.slot.time_group_members import Member
from tidegate.testing.processes import ProcessJob


@dataclass
class Aligning:
    """As much of a subtask as the log looks at."""

    id: SubtaskId
    aligning: tuple[int, frozenset[ChannelId]]


@dataclass
class Dropping:
    operators: list[Any]


def logged(lines: Lines, causes: list[BaseException | None]) -> SlotLog:
    job = ProcessJob("m", slots=2, snapshots=Snapshots(to="unused"))
    source = job.source("in", tg.sources.rows([(1,)], "n long", splits=2))
    source.key_by("n").process("count", Count(), returns="n long").to("out", tg.sinks.collect())
    settings = JobSettings(name="m", snapshots=Snapshots(to="unused"))

    def speak(level: int, text: str, *args: object, exc_info: BaseException | None, extra: dict[str, Any]) -> None:
        lines(level, text, *args, extra=extra)
        causes.append(exc_info)

    return SlotLog(1, plan=job.plan(), settings=settings, attempt=3, speak=speak)


class Count(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Any:
        yield (record.n,)


def test_an_alignment_that_takes_long_is_logged_with_who_is_missing_once_a_minute() -> None:
    lines = Lines()
    log = logged(lines, [])
    subtask = Aligning(SubtaskId(1, 1), (17, frozenset({ChannelId(0, 0, 1)})))
    for at_ms in range(0, 130_000, 1_000):
        log.look_at_alignments(cast(Any, [subtask]), at_ms)
    assert [fields["duration_ms"] for _, fields, _ in lines.all] == [SLOW_ALIGNMENT_MS, 70_000]
    level, fields, text = lines.all[0]
    assert level == logging.WARNING
    assert text == (
        "Job 'm', attempt 3, slot 1 has slow alignment: "
        "count → out[1] has waited 10 s for the marker of epoch 17 from in[0]."
    )
    assert (fields["slot"], fields["epoch"], fields["subtask"]) == (1, 17, "v1[1]")


def test_alignments_that_are_quick_are_not_logged() -> None:
    lines = Lines()
    log = logged(lines, [])
    for at_ms in range(0, 60_000, 1_000):
        missing = frozenset({ChannelId(0, 0, 1)}) if at_ms % 9_000 else frozenset()
        log.look_at_alignments(cast(Any, [Aligning(SubtaskId(1, 1), (at_ms // 9_000, missing))]), at_ms)
    assert lines.all == []


def test_an_error_is_logged_with_its_traceback_unless_a_connection_broke() -> None:
    lines, causes, bug = Lines(), list[BaseException | None](), ZeroDivisionError("division by zero")
    log = logged(lines, causes)
    log.failed(bug)
    log.failed(ChannelLost(ChannelId(0, 0, 1), "reset by peer"))
    assert causes == [bug, None]
    assert lines.all[1][2].endswith("slot 1 fails: ChannelLost: channel e0:0>1 is lost: reset by peer")


def test_an_error_of_a_users_function_is_left_to_the_drivers_log() -> None:
    lines, causes = Lines(), list[BaseException | None]()
    error = UserFunctionError(operator="count", user_traceback="Traceback …\nZeroDivisionError", record="Row(n=1)")
    logged(lines, causes).failed(error)
    assert causes == [None] and [level for level, _, _ in lines.all] == [logging.INFO]
    assert lines.all[0][2].endswith("slot 1 ends, because operator 'count' raised an error: the driver logs it.")


def test_a_snapshot_that_is_slow_to_write_is_logged_once_a_minute() -> None:
    lines = Lines()
    log = logged(lines, [])
    for at_ms in range(0, 130_000, 1_000):
        log.look_at_writes({(SubtaskId(1, 1), 17): 0, (SubtaskId(0, 1), 17): at_ms}, at_ms)
    assert [fields["duration_ms"] for _, fields, _ in lines.all] == [SLOW_WRITE_MS, 70_000]
    level, fields, text = lines.all[0]
    assert (level, fields["event"], fields["epoch"]) == (logging.WARNING, "slow-write", 17)
    assert text == (
        "Job 'm', attempt 3, slot 1 has slow writes: count → out[1] has written its part of snapshot 17 for 10 s, and isn't "
        "done. The snapshot folder or the network to it is slow."
    )


def test_a_source_that_waits_for_one_that_does_not_move_is_logged_once_a_minute() -> None:
    lines = Lines()
    log = logged(lines, [])
    member = Member(
        cast(Any, Aligning(SubtaskId(0, 1), (0, frozenset()))), cast(Any, None), "events", "bids[1]", Least(5, "asks[0]")
    )
    for at_ms in range(0, 130_000, 1_000):
        log.look_at_waits([(member, at_ms)], at_ms)
    assert [fields["duration_ms"] for _, fields, _ in lines.all] == [STUCK_TIME_MS, 90_000]
    assert lines.all[0][2] == (
        "Job 'm', attempt 3, slot 1 doesn't read source bids[1]: for 30 s it has waited for asks[0] of time group 'events', "
        "which is more than max_ahead behind in event time. If that source may be without records for long, give its "
        "with_watermark an idle_after."
    )


@dataclass
class Late:
    """As much of an operator as the log looks at."""

    name: str
    late_dropped: int = 0


def test_late_records_that_were_dropped_are_logged_once_a_minute_as_long_as_there_are_more() -> None:
    lines = Lines()
    log = logged(lines, [])
    subtasks = [Dropping([Late("fine"), operator := Late("windows")])]
    for at_ms in range(0, 200_000, 1_000):
        operator.late_dropped = min(at_ms // 1_000, 100)
        log.look_at_late(cast(Any, subtasks), at_ms)
    assert [text.partition("records: ")[2].partition(" since")[0] for _, _, text in lines.all] == [
        "1 in operator 'windows'",
        "61 in operator 'windows'",
        "100 in operator 'windows'",
    ]
    level, fields, text = lines.all[0]
    assert (level, fields["event"]) == (logging.WARNING, "late-records")
    assert text == (
        "Job 'm', attempt 3, slot 1 has dropped late records: 1 in operator 'windows' since the attempt began. Give the "
        "window late='…' to get them as a side output, or give with_watermark a larger delay."
    )


def test_late_records_that_were_dropped_since_the_last_line_are_logged_at_the_end() -> None:
    lines = Lines()
    log = logged(lines, [])
    subtasks = [Dropping([operator := Late("windows", 1)])]
    log.look_at_late(cast(Any, subtasks), 0)
    operator.late_dropped = 3
    log.look_at_late(cast(Any, subtasks), 10)
    assert len(lines.all) == 1
    log.look_at_late(cast(Any, subtasks), 20, is_last=True)
    log.look_at_late(cast(Any, subtasks), 30, is_last=True)
    assert len(lines.all) == 2
    assert "3 in operator 'windows'" in lines.all[1][2]


def test_the_channels_that_an_alignment_waits_for() -> None:
    one, other = ChannelId(0, 0, 1), ChannelId(0, 1, 1)
    alignment = Alignment([one, other])
    assert alignment.missing == frozenset()
    alignment.on_marker(one, 1)
    assert alignment.missing == {other}
    alignment.on_marker(other, 1)
    assert alignment.missing == frozenset()
