"""`tg.plan_restore`: what a restore would do, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.unit.jobs.conftest import Bench
from tidegate.errors import NotFound, RestoreError
from tidegate.store.layout import job_address
from tidegate.testing.processes import ProcessJob


class Count(tg.KeyedProcess):
    seen = tg.value("int", default=0)
    names = tg.list("string")

    def process(self, record: Any, ctx: Any) -> None:
        self.seen.set(self.seen.get() + 1)
        self.names.add("x")


class Wider(tg.KeyedProcess):
    seen = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> None: ...


def build(job: ProcessJob, function: tg.KeyedProcess) -> ProcessJob:
    job.source("in", tg.sources.rows([(1,), (2,)], "key long")).key_by("key").process("count", function)
    return job


def counted(job: ProcessJob) -> None:
    build(job, Count())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_plan_says_what_would_happen_and_nothing_does(bench: Bench) -> None:
    bench.finish(counted)
    before = contents(bench.folder)
    path = job_address(str(bench.snapshots), "job")

    same = tg.plan_restore(build(bench.job(slots=3), Count()), path)
    same.check()
    assert "2 → 3 subtasks" in str(same)
    assert _fates(same, "count") == {"seen": "kept", "names": "kept"}

    changed = tg.plan_restore(build(bench.job(), Wider()), path)
    assert _fates(changed, "count") == {"seen": "converted", "names": "refused"}
    assert "keyed value int by long → keyed value long by long" in str(changed)
    with pytest.raises(RestoreError, match=r"drop_state=\['count.names'\]"):
        changed.check()
    assert contents(bench.folder) == before, "a dry run wrote something"
    assert len(bench.handles) == 1


def test_what_may_be_dropped_is_the_job_s_own_permission(bench: Bench) -> None:
    bench.finish(counted)
    job = ProcessJob(
        "other", slots=1, drop_state=["count.names", "nobody"], snapshots=tg.Snapshots(to=str(bench.folder / "elsewhere"))
    )
    plan = tg.plan_restore(build(job, Wider()), job_address(str(bench.snapshots), "job"))
    plan.check()
    assert "nothing to drop under 'nobody'" in str(plan)
    assert not (bench.folder / "elsewhere").exists()


def test_the_key_group_count_is_the_job_s(bench: Bench) -> None:
    bench.finish(counted)
    plan = tg.plan_restore(
        build(bench.job(tuning=tg.Tuning(key_group_count=64)), Count()), job_address(str(bench.snapshots), "job")
    )
    assert "has 128 key-groups and the job 64" in str(plan)
    with pytest.raises(RestoreError, match="set it back"):
        plan.check()


def test_a_path_may_be_relative_and_must_hold_something(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.finish(counted)
    monkeypatch.chdir(bench.folder)
    tg.plan_restore(build(bench.job(), Count()), "snapshots/job").check()
    with pytest.raises(NotFound, match="give the path of one"):
        tg.plan_restore(build(bench.job(), Count()), "snapshots")
    with pytest.raises(NotFound, match="nothing is there"):
        tg.plan_restore(build(bench.job(), Count()), "nowhere")


def _fates(plan: Any, operator: str) -> dict[str, str]:
    """Of the states that the user declared."""
    found = next(each for each in plan.operators if each.name == operator)
    return {state.name: state.fate.value for state in found.states if not state.name.startswith("__")}
