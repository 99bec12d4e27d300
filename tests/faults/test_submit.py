"""The program and the commands of docs/clusters.md, on a real cluster whose Python processes have no Tidegate but what comes
with the job.

They run under an environment that has all the libraries of this one and not the package: a virtual environment with a path
file that names this one's folder of packages, whose own path files (by which the package is found here) don't count then.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tests.faults.cluster import Cluster, Host, free_port

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
PAGE = (ROOT / "docs" / "clusters.md").read_text()
SHOWN_MASTER = "spark://master:7077"
# Behind the program: where executors have the package from, and where the driver listens for transforms.
APPENDED = """
from tidegate.spark.transform import _gatherings

print("found in", spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("tidegate").__file__).first())
print("listens at", [gathering.address for gathering in _gatherings.values()])
"""

# Before the program: the session that a job makes which is given none. It has to be the cluster's.
MAKES_SESSION = """
from tidegate.spark.job import local_session

assert local_session(1).sparkContext.master.startswith("spark://")
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
    return dict(word.split("=", 1) for word in words[:at]), words[at + 1 :]


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
    tried = subprocess.run(
        [python, "-c", "import pyarrow, pyspark, tidegate"], env=without_paths(), capture_output=True, text=True, check=False
    )
    assert "No module named 'tidegate'" in tried.stderr, f"this environment was to have no tidegate: {tried}"
    return python


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three network namespaces, joined by a bridge in the first."""
    names = [f"tidegate-{os.getpid()}-{number}" for number in range(3)]
    made = [Host(f"10.77.0.{number + 1}", name) for number, name in enumerate(names)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for host in made:
            ip("netns", "add", str(host.namespace))
            ip("-n", str(host.namespace), "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "bridge", "type", "bridge")
        ip("-n", names[0], "addr", "add", f"{made[0].address}/24", "dev", "bridge")
        ip("-n", names[0], "link", "set", "bridge", "up")
        for number, host in enumerate(made[1:], start=1):
            there = names[number]
            ip("-n", names[0], "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", there)
            ip("-n", names[0], "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", there, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", there, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("PYSPARK_")}


def package_files() -> list[Path]:
    return [path for path in sorted((ROOT / "src" / "tidegate").rglob("*")) if path.suffix in (".py", ".typed")]


def submit(
    cluster: Cluster, folder: Path, *, variables: dict[str, str], words: list[str], before: str = "", **settings: str
) -> str:
    """The page's command, on this cluster. What is added is about this machine, and what the test asks for."""
    (folder / "bid_counts.py").write_text(before + program() + APPENDED)
    added = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": cluster.java_options,
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": cluster.java_options,
        "spark.executorEnv.PYTHONPATH": "",  # which the tests' own workers have from the tests
    }
    confs = [word for key, value in (added | settings).items() for word in ("--conf", f"{key}={value}")]
    words = [cluster.url if word == SHOWN_MASTER else word for word in words]
    done = subprocess.run(
        cluster.host.command(str(SPARK_HOME / "bin" / "spark-submit"), *confs, *words),
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
        env=without_paths() | variables | {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_DIRS": str(cluster.folder / "local")},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}\n{cluster.log()}"
    logged = re.compile(r".* (INFO|WARNING) tidegate\.")  # spark-submit writes the program's stderr to stdout
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not logged.match(line))


def on_this_machine(ports: int) -> dict[str, str]:
    """The driver has a name that isn't what it listens on, and 20 ports."""
    return {
        "spark.driver.host": "localhost",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.tidegate.coordinatorPorts": f"{ports}-{ports + 19}",
    }


def check(printed: str, *, origin: str, host: str, ports: range) -> None:
    assert printed.startswith(printed_by_the_program()), printed
    found, listens = printed.removeprefix(printed_by_the_program()).splitlines()
    assert origin in found, found
    (port,) = re.findall(rf"\('{host}', (\d+)\)", listens)
    assert int(port) in ports


def packed(folder: Path) -> None:
    """As `make dist` does it."""
    (folder / "dist").mkdir()
    with zipfile.ZipFile(folder / "dist" / "tidegate.zip", "w") as package:
        for path in package_files():
            package.write(path, path.relative_to(ROOT / "src"))


def test_a_program_runs_with_the_package_shipped_as_a_zip(cluster: Cluster, bare_python: Path, tmp_path: Path) -> None:
    packed(tmp_path)
    variables, words = command_with("--py-files")
    port = free_port()
    printed = submit(
        cluster, tmp_path, variables=variables | {"PYSPARK_PYTHON": str(bare_python)}, words=words, **on_this_machine(port)
    )
    check(printed, origin="tidegate.zip/tidegate/__init__.py", host="localhost", ports=range(port, port + 20))


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_a_program_runs_on_three_hosts_with_nothing_said_about_addresses(
    hosts: list[Host], bare_python: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Driver, one worker and the other each have a network of their own, and no loopback interface in common."""
    packed(tmp_path)
    variables, words = command_with("--py-files")
    spread = Cluster(tmp_path_factory.mktemp("spread"), hosts=hosts)
    try:
        printed = submit(
            spread,
            tmp_path,
            variables=variables | {"PYSPARK_PYTHON": str(bare_python)},
            words=words,
            **{"spark.tidegate.slotPorts": "40100-40101"},
        )
        work = [folder.name for folder in spread.folder.glob("work-*") if list(folder.glob("app-*"))]
    finally:
        spread.close()
    check(printed, origin="tidegate.zip/tidegate/__init__.py", host=hosts[0].address, ports=range(1, 65_536))
    assert sorted(work) == ["work-0", "work-1"], "the slots were to be on both hosts"


@pytest.mark.long
def test_a_program_runs_with_an_archive_of_its_environment(cluster: Cluster, bare_python: Path, tmp_path: Path) -> None:
    """The environment's libraries are links to ours here: an archive of all of them would take longer than the test. The
    session is the one that a job without a session would make."""
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
    port = free_port()
    check(
        submit(cluster, tmp_path, variables=variables, words=words, before=MAKES_SESSION, **on_this_machine(port)),
        origin="/env/lib/python",
        host="localhost",
        ports=range(port, port + 20),
    )


@pytest.mark.long
def test_make_dist_makes_a_zip_of_the_whole_package(tmp_path: Path) -> None:
    """In a copy of the sources; what is installed stays as it is. Needs the package index, for what builds wheels."""
    for path in [
        ROOT / "pyproject.toml",
        ROOT / "README.md",
        ROOT / "LICENSE",
        ROOT / "Makefile",
        ROOT / "constraints.txt",
        *package_files(),
    ]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    subprocess.run(["make", "dist", f"BIN={Path(sys.executable).parent}"], cwd=tmp_path, check=True)
    packed = set(zipfile.ZipFile(tmp_path / "dist" / "tidegate.zip").namelist())
    assert {path.relative_to(ROOT / "src").as_posix() for path in package_files()} <= packed
