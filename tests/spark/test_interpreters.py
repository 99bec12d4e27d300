"""Executors whose Python lacks something: the first error ends the job and says what to set. With a real second Python."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.conftest import ROOT
from tidegate.errors import JobError, JobFailed
from tidegate.spark import interpreters
from tidegate.spark.tables import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RESTARTS = tg.FixedDelay(attempts=9, delay="100 ms")


class Count(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int]]:
        yield (record[0],)


def count(stream: Any) -> Any:
    return stream.key_by(stream.schema.names[0]).process("count", Count(), returns="n long")


def counting(spark: SparkSession, folder: Path) -> tg.Job:
    job = tg.Job("counts", spark, slots=2, restart=RESTARTS, snapshots=tg.Snapshots(to=str(folder / "snapshots")))
    count(job.source("in", tg.sources.rows([(1,), (2,)], "n long"))).to("out", tg.sinks.collect())
    return job


class OtherPython:
    """A virtual environment without Tidegate, in which those packages can be imported that pass. `program` starts it without
    the path of this test run, on which Tidegate is, but for the tests: their Spark starts Python by a module of theirs."""

    def __init__(self, folder: Path, passes: Callable[[str], bool] = lambda name: True) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        libraries = folder / "libraries"
        libraries.mkdir()
        for each in Path(sysconfig.get_path("purelib")).iterdir():
            if "tidegate" not in each.name and each.suffix != ".pth" and passes(each.name):
                (libraries / each.name).symlink_to(each)
        self.program = folder / "venv" / "bin" / "program"
        self.program.write_text(f'#!/bin/sh\nPYTHONPATH="{libraries}:{ROOT}" exec "{self.python}" "$@"\n')
        self.program.chmod(0o755)


def executors_run(other: OtherPython, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test. What is registered in a session keeps the Python that it was registered with."""
    register(spark)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other.program))


@pytest.fixture(scope="module")
def without_tidegate(tmp_path_factory: pytest.TempPathFactory) -> OtherPython:
    return OtherPython(tmp_path_factory.mktemp("other"))


@pytest.fixture
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster, where nothing is found out in advance."""
    monkeypatch.setattr(interpreters, "_is_local", lambda spark: False)


def told_of_the_pythons(text: str, other: OtherPython) -> None:
    assert "No module named 'tidegate'" in text
    assert f"xecutors run {other.python}" in text and f"the driver runs {sys.executable}" in text
    assert f"PYSPARK_PYTHON={sys.executable}" in text and "--py-files" in text


@pytest.mark.usefixtures("no_questions")
def test_executors_without_tidegate_end_a_job_at_the_first_try(
    spark: SparkSession, tmp_path: Path, without_tidegate: OtherPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors_run(without_tidegate, spark, monkeypatch)
    handle = counting(spark, tmp_path).start()
    with pytest.raises(JobFailed) as failed:
        handle.wait("1 minute")
    assert len(handle.failures) == 1 and handle.failures[0].permanent
    told_of_the_pythons(str(failed.value), without_tidegate)


@pytest.mark.long
@pytest.mark.usefixtures("no_questions")
def test_executors_without_tidegate_end_a_transform(
    spark: SparkSession, without_tidegate: OtherPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors_run(without_tidegate, spark, monkeypatch)
    with pytest.raises(Exception) as failed:
        tg.transform(spark.range(10), count, slots=2).collect()
    told_of_the_pythons(str(failed.value), without_tidegate)


@pytest.mark.long
@pytest.mark.usefixtures("no_questions")
def test_executors_without_pyarrow_end_a_job_at_the_first_try(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = OtherPython(tmp_path, lambda name: name in ("pyspark", "py4j"))
    executors_run(bare, spark, monkeypatch)
    handle = counting(spark, tmp_path).start()
    with pytest.raises(JobFailed, match=r"No module named 'pyarrow'.*PYSPARK_PYTHON"):
        handle.wait("1 minute")
    assert len(handle.failures) == 1


def test_on_one_machine_it_is_found_out_before_anything_is_deployed(
    spark: SparkSession, tmp_path: Path, without_tidegate: OtherPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counting(spark, tmp_path)
    executors_run(without_tidegate, spark, monkeypatch)
    with pytest.raises(JobError) as refused:
        job.start()
    assert "No module named 'tidegate'" in str(refused.value) and str(without_tidegate.python) in str(refused.value)
    for frame in (spark.range(3), streaming(spark, tmp_path)):
        with pytest.raises(JobError, match="No module named 'tidegate'"):
            tg.transform(
                frame,
                count,
                slots=2,
                name="doubled",
                snapshots=tg.Snapshots(to=str(tmp_path)) if frame.isStreaming else None,
            )


def streaming(spark: SparkSession, folder: Path) -> DataFrame:
    spark.range(3).write.mode("overwrite").parquet(str(folder / "in"))
    return spark.readStream.schema("id long").parquet(str(folder / "in"))


def test_another_python_that_has_everything_is_let_be(
    spark: SparkSession, tmp_path: Path, without_tidegate: OtherPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv's python3 beside another's: nothing is wrong with that as long as it can import Tidegate."""
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    interpreters.check_python(spark)


def test_a_module_of_the_users_that_executors_dont_have_is_sent_along(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "rates_of_mine.py"
    module.write_text("def double(n):\n    return 2 * n\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import rates_of_mine  # type: ignore[import-not-found]

    def doubled(stream: Any) -> Any:
        return stream.map(lambda record: (rates_of_mine.double(record[0]),), returns="n long", name="double")

    def job() -> tg.Job:
        made = tg.Job("doubles", spark, slots=2, restart=RESTARTS, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots")))
        doubled(made.source("in", tg.sources.rows([(1,), (2,)], "n long"))).to("out", tg.sinks.collect())
        return made

    handle = job().start()
    with pytest.raises(JobFailed, match="No module named 'rates_of_mine'") as failed:
        handle.wait("1 minute")
    assert len(handle.failures) == 1
    assert "addPyFile('rates_of_mine.py')" in str(failed.value) and sys.executable in str(failed.value)
    with pytest.raises(Exception, match=r"addPyFile\('rates_of_mine.py'\)"):
        tg.transform(spark.range(3), doubled, slots=2).collect()

    spark.sparkContext.addPyFile(str(module))
    assert job().run() is tg.Status.FINISHED
    assert sorted(tg.transform(spark.range(3), doubled, slots=2).collect()) == [(0,), (2,), (4,)]


@pytest.mark.long
def test_a_session_in_an_environment_that_isnt_activated(tmp_path: Path, without_tidegate: OtherPython) -> None:
    """The first hour of a new user: `venv/bin/python program.py`, a session of their own, and another python3 in PATH."""
    program = tmp_path / "program.py"
    program.write_text("""
import time
import tidegate as tg
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
job = tg.Job("counts", spark, slots=2)
job.source("in", tg.sources.rows([(1,)], "n long")).to("out", tg.sinks.collect())
began = time.monotonic()
try:
    job.run()
except (tg.JobError, tg.JobFailed) as error:
    print(error)
print("after", time.monotonic() - began)
spark.stop()

own = tg.Job("counts", slots=2)
own.source("in", tg.sources.rows([(1,)], "n long")).to("out", tg.sinks.collect())
print(own.run())
""")
    path = tmp_path / "bin"
    path.mkdir()
    (path / "python3").symlink_to(without_tidegate.program)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")},
            "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        },
    )
    told_of = done.stdout.partition("after ")
    assert "No module named 'tidegate'" in told_of[0] and f"PYSPARK_PYTHON={sys.executable}" in told_of[0]
    assert float(told_of[2].split()[0]) < 30
    assert done.stdout.rstrip().endswith("Status.FINISHED"), done.stdout + done.stderr


def test_what_spark_says_of_a_python_that_it_cant_start_is_passed_on() -> None:
    pythons = interpreters.Pythons("/driver/python", "/their/python")
    for said in (
        "Error from python worker:\n  /their/python: Error while finding module specification for 'pyspark.daemon' "
        "(ModuleNotFoundError: No module named 'pyspark')\nPYTHONPATH was:\n",
        "pyspark.errors.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version",
        'java.io.IOException: Cannot run program "/their/python": error=2, No such file or directory',
    ):
        told = interpreters.no_use_in_trying(RuntimeError(said), pythons)
        assert told is not None and "Executors were to run /their/python, the driver runs /driver/python" in told
    for said in ("ExecutorLostFailure (executor 1 exited)", "ValueError: ImportError: pass", "cancelled"):
        assert interpreters.no_use_in_trying(RuntimeError(said), pythons) is None
