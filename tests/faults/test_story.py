"""The log of a job on a cluster whose slots were killed twice: the driver's log has the coordinator's lines, and the
executors' logs have the slots'."""

from __future__ import annotations

from pathlib import Path

from tests.faults.cluster import Cluster
from tests.faults.conftest import Driver
from tests.story import check_story, lines_of


def test_the_logs_of_a_driver_and_its_executors_tell_the_story(driver: Driver, cluster: Cluster, tmp_path: Path) -> None:
    driver.ask(
        job="story",
        graph="ledger",
        mode="exactly once",
        folder=str(tmp_path),
        rows=6_000,
        rate=2_000,
        kills=[("slot", "idle"), ("slot", "committing")],
        at_the_end=False,
        seed=0,
    )
    assert driver.until("ended")["status"] == "finished", cluster.log()
    drivers = lines_of(driver.log(), "story")
    executors = [
        line
        for path in sorted(cluster.folder.glob("work-*/*/*/stderr"))
        for line in lines_of(path.read_text(errors="replace"), "story")
    ]
    assert {line["logger"] for line in drivers} == {"tidegate.job"}
    assert "tidegate.slot" in {line["logger"] for line in executors} <= {"tidegate.slot", "tidegate.channels"}
    assert check_story([*drivers, *executors], slots=2) == "finished"
