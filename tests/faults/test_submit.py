"""The program and the commands of docs/clusters.md, on a real cluster whose Python processes have no Tidegate but what comes
with the job.

They run under an environment that has all the libraries of this one and not the package: a virtual environment with a path
file that names this one's folder of packages, whose own path files (by which the package is found here) don't count then.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.faults.cluster import SPARK_HOME, Cluster, free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
SHOWN_MASTER = "spark://master:7077"
# Behind the program: where executors have the package from, and where the driver listens for transforms.
APPENDED = """
from tidegate.spark.transform import _gatherings

print("found in", spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("tidegate").__file__).first())
print("listens at", [gathering.address for gathering in _gatherings.values()])
"""


def program() -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def printed_by_the_program() -> str:
    (found,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def command_with(option: str) -> tuple[dict[str, str], list[str]]:
    """The command of the page that has this option and is for a standalone cluster: its variables and its words."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if option in block and SHOWN_MASTER in block)
    words = shlex.split(block.replace("\\\n", " "))
    at = words.index("spark-submit")
    return dict(word.split("=", 1) for word in words[:at]), words[at + 1:]


def packages_of(python: Path) -> Path:
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages_of(python) / "libraries.pth").write_text("\n".join(ours) + "\n")
    tried = subprocess.run([python, "-c", "import pyarrow, pyspark, tidegate"], env=without_paths(), capture_output=True,
                           text=True, check=False)
    assert "No module named 'tidegate'" in tried.stderr, f"this environment was to have no tidegate: {tried}"
    return python


def without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PYSPARK_")}


def package_files() -> list[Path]:
    return [path for path in sorted((ROOT / "src" / "tidegate").rglob("*")) if path.suffix in (".py", ".typed")]


def submit(cluster: Cluster, folder: Path, *, variables: dict[str, str], words: list[str], ports: int) -> str:
    """The page's command, on this cluster. What is added is about this machine, and about ports."""
    (folder / "bid_counts.py").write_text(program() + APPENDED)
    settings = {
        "spark.ui.enabled": "false", "spark.driver.host": "localhost", "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m", "spark.driver.extraJavaOptions": cluster.java_options,
        "spark.executor.memory": "512m", "spark.executor.extraJavaOptions": cluster.java_options,
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.PYTHONPATH": "",         # which the tests' own workers have from the tests
        "spark.tidegate.masterPorts": f"{ports}-{ports + 19}"}
    confs = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    words = [cluster.url if word == SHOWN_MASTER else word for word in words]
    done = subprocess.run(
        [str(SPARK_HOME / "bin" / "spark-submit"), *confs, *words], cwd=folder, text=True, capture_output=True,
        timeout=150, check=False, env=without_paths() | variables | {
            "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(cluster.folder / "local")})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}\n{cluster.log()}"
    return done.stdout


def check(printed: str, *, origin: str, ports: int) -> None:
    assert printed.startswith(printed_by_the_program()), printed
    found, listens = printed.removeprefix(printed_by_the_program()).splitlines()
    assert origin in found, found
    (port,) = re.findall(r"\('localhost', (\d+)\)", listens)
    assert ports <= int(port) < ports + 20


def test_a_program_runs_with_the_package_shipped_as_a_zip(cluster: Cluster, bare_python: Path, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    with zipfile.ZipFile(tmp_path / "dist" / "tidegate.zip", "w") as package:
        for path in package_files():
            package.write(path, path.relative_to(ROOT / "src"))
    variables, words = command_with("--py-files")
    ports = free_port()
    printed = submit(cluster, tmp_path, variables=variables | {"PYSPARK_PYTHON": str(bare_python)}, words=words, ports=ports)
    check(printed, origin="tidegate.zip/tidegate/__init__.py", ports=ports)


@pytest.mark.long
def test_a_program_runs_with_an_archive_of_its_environment(cluster: Cluster, bare_python: Path, tmp_path: Path) -> None:
    """The environment's libraries are links to ours here: an archive of all of them would take longer than the test."""
    env = tmp_path / "env"
    venv.create(env, symlinks=True)
    packages = packages_of(env / "bin" / "python")
    (packages / "libraries.pth").write_text((packages_of(bare_python) / "libraries.pth").read_text())
    for path in package_files():
        copy = packages / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(env, ".")
    variables, words = command_with("--archives")
    ports = free_port()
    check(submit(cluster, tmp_path, variables=variables, words=words, ports=ports),
          origin="/env/lib/python", ports=ports)


@pytest.mark.long
def test_make_dist_makes_a_zip_of_the_whole_package(tmp_path: Path) -> None:
    """In a copy of the sources; what is installed stays as it is. Needs the package index, for what builds wheels."""
    for path in [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE", ROOT / "Makefile", ROOT / "constraints.txt",
                 *package_files()]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    subprocess.run(["make", "dist", f"BIN={Path(sys.executable).parent}"], cwd=tmp_path, check=True)
    packed = set(zipfile.ZipFile(tmp_path / "dist" / "tidegate.zip").namelist())
    assert {path.relative_to(ROOT / "src").as_posix() for path in package_files()} <= packed
