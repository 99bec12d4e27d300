"""Where the slots of tests come from: forked, but as strange to one another as processes that were started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.unit.jobs.conftest import Bench
from tidegate.testing import processes
from tidegate.testing.processes import ProcessJob


class Tell(tg.Process):
    def process(self, record: Any, ctx: Any) -> Any:
        yield ctx.subtask, hash("a text"), os.getcwd(), os.environ.get("TIDEGATE_NURSERY_TEST", ""), os.getppid()


def test_slots_are_where_their_job_was_started_and_hash_texts_by_themselves(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(job: ProcessJob) -> None:
        stream = job.source("in", tg.sources.rows([(number,) for number in range(20)], "number long", splits=2))
        stream.process("tell", Tell(), returns="slot long, hash long, folder string, set string, parent long").to(
            "out", tg.sinks.collect()
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEGATE_NURSERY_TEST", "here")
    told = {row[0]: row[1:] for row in bench.finish(build).results("out")}
    assert set(told) == {0, 1} and told[0][0] != told[1][0]
    assert {row[1:3] for row in told.values()} == {(str(tmp_path), "here")}

    # A nursery that was killed is replaced.
    for nursery in processes._NURSERIES:
        assert nursery._process is not None
        nursery._process.kill()
        nursery._process.wait()
    bench.snapshots = tmp_path / "other snapshots"
    again = {row[0]: row[1:] for row in bench.finish(build).results("out")}
    assert set(again) == {0, 1} and not {row[3] for row in again.values()} & {row[3] for row in told.values()}
