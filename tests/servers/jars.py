"""Java programs for the tests, by their Maven coordinates: `python -m tests.servers.jars` gets all of them.

They come through the Ivy that is among PySpark's own jars, so that neither Maven nor an address is needed, into Ivy's own
cache in the home folder, where they are found again. `TIDEGATE_IVY_SETTINGS` names an Ivy settings file for a machine
that gets them elsewhere. Where they can't be had, whoever asks is told why.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyspark

SPARK_JARS = Path(pyspark.__file__).parent / "jars"
CACHE = Path.home() / ".ivy2" / "tidegate-tests"
GETS_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Program:
    """Artifacts as `group:artifact:version`, and all that they need at run time; or nothing else where they are `alone`."""

    artifacts: tuple[str, ...]
    alone: bool = False


KAFKA_BROKER = Program(("org.apache.kafka:kafka_2.13:4.1.2",))
# The newest that there are for Spark. Of the second one not every version is everywhere; it is for secured clusters.
SPARK_KAFKA = Program(
    (
        "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
        "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
        "org.apache.kafka:kafka-clients:3.9.2",
        "org.apache.commons:commons-pool2:2.13.1",
    ),
    alone=True,
)


def hdfs_cluster() -> Program:
    """Hadoop's mini-cluster, of the version of the Hadoop that is among PySpark's jars."""
    (client,) = SPARK_JARS.glob("hadoop-client-api-*.jar")
    version = client.stem.removeprefix("hadoop-client-api-")
    return Program(
        (
            f"org.apache.hadoop:hadoop-client-minicluster:{version}",
            "org.mockito:mockito-core:4.11.0",
            "org.junit.jupiter:junit-jupiter-api:5.11.4",
            "org.junit.platform:junit-platform-commons:1.11.4",
            "org.opentest4j:opentest4j:1.3.0",
        ),
        alone=True,
    )


class JarsMissing(Exception):
    """They can't be had here; the text says why."""


def jars_of(program: Program) -> list[str]:
    """Paths. `JarsMissing` where there is no way to get them."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # several processes run tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = [path for artifact in program.artifacts for path in _found_or_got(artifact, alone=program.alone)]
    return list(dict.fromkeys(found))


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    return os.path.join(home, "bin", "java") if home else "java"


def _found_or_got(artifact: str, *, alone: bool) -> list[str]:
    listed = CACHE / f"{artifact.replace(':', '-')}{'-alone' if alone else ''}.paths"
    return _paths_in(listed) or _got(artifact, listed, ["-notransitive"] if alone else [])


def _paths_in(listed: Path) -> list[str]:
    """None at all where one of them is gone."""
    paths = listed.read_text().strip().split(os.pathsep) if listed.exists() else []
    return paths if all(map(os.path.exists, paths)) else []


def _got(artifact: str, listed: Path, options: list[str]) -> list[str]:
    (ivy,) = SPARK_JARS.glob("ivy-*.jar")
    settings = os.environ.get("TIDEGATE_IVY_SETTINGS")
    print(f"getting {artifact} …", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [
                java(),
                "-jar",
                str(ivy),
                *(["-settings", settings] if settings else []),
                "-warn",
                "-types",
                "jar",
                "bundle",
                "-cache",
                str(CACHE),
                "-confs",
                "default",
                "-cachepath",
                f"{listed}.part",
                *options,
                "-dependency",
                *artifact.split(":"),
            ],
            capture_output=True,
            text=True,
            timeout=GETS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JarsMissing(f"{artifact} couldn't be got: {error}") from error
    paths = _paths_in(Path(f"{listed}.part"))
    if done.returncode or not paths:
        raise JarsMissing(f"{artifact} couldn't be got:\n{(done.stdout + done.stderr)[-2000:]}")
    os.rename(f"{listed}.part", listed)
    return paths


if __name__ == "__main__":
    for each in (KAFKA_BROKER, SPARK_KAFKA, hdfs_cluster()):
        try:
            print(f"{each.artifacts[0]}: {len(jars_of(each))} jars", flush=True)
        except JarsMissing as missing:
            print(f"{missing}\nThe tests that need it are skipped.", flush=True)
