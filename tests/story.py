"""Reads the log of a job, in JSON lines, and looks for the story of one that was killed twice."""

from __future__ import annotations

import json
from typing import Any


def lines_of(text: str, job: str) -> list[dict[str, Any]]:
    """Return Tidegate's lines about a job, among others. Lines of other jobs may be cut off, where a process was killed."""
    named = f'"job": {json.dumps(job)}'
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"time": ') and named in line]
    return [line for line in lines if line.get("job") == job]


def check_story(lines: list[dict[str, Any]], *, slots: int) -> str:
    """Check the lines of the coordinator and of the slots, and return how the job ended."""
    story = [line for line in lines if line["logger"] == "tidegate.job" and line["event"] not in ("snapshot", "aborted")]
    attempt = ["begun", "running", "restarting"]
    assert [line["event"] for line in story[:-1]] == [*attempt, *attempt, *attempt[:2]], story
    assert [line["attempt"] for line in story] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "epoch" not in story[0] and story[0]["message"].endswith("attempt 1 begins, from no snapshot.")
    for failed, begun in ((story[2], story[3]), (story[5], story[6])):
        assert failed["level"] == "warning" and "was lost: " in failed["message"]
        assert "\nRestarting from snapshot " in failed["message"]
        assert begun["epoch"] >= failed["epoch"], "it resumes from the newest snapshot, which may have become complete since"
        assert begun["message"].endswith(f"begins, from snapshot {begun['epoch']}.")
    for begun, running in ((story[3], story[4]), (story[6], story[7])):
        deployed = [
            line
            for line in lines
            if line["event"] == "deployed" and (line["attempt"], line.get("epoch")) == (begun["attempt"], begun["epoch"])
        ]
        assert sorted(line["slot"] for line in deployed) == list(range(slots)), "the slots' lines are there, too"
        assert sum(line["bytes"] for line in deployed) == running["bytes"] > 0
    return str(story[-1]["event"])
