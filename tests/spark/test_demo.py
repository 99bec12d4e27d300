"""The demo, as a viewer runs it but for a shorter season; and that its proof can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT

DEMO = ROOT / "examples/game_analytics"
sys.path.append(str(DEMO))  # its files import each other like those of any program

from demo import tamper  # noqa: E402
from events import SPLITS, Game  # noqa: E402
from proof import Comparison, in_sequence, prove  # noqa: E402
from rules import RULES, Ticks  # noqa: E402

SECONDS, RATE, PLAYERS = 8, 5_000, 1_000
PICTURE_BYTES_AT_MOST = 300_000
ENDS_WITHIN_S = 250
PROCESSES_END_WITHIN_S = 20

pytestmark = pytest.mark.xdist_group("demo")  # they look at one run of it


@dataclass(frozen=True, slots=True)
class Finished:
    code: int
    said: str
    complained: str
    left_running: list[str]
    out: Path


def run_demo(out: Path, *arguments: str) -> Finished:
    """In a session of its own, so that whatever it leaves running can be found."""
    process = subprocess.Popen(
        [
            sys.executable,
            str(DEMO / "demo.py"),
            "--rate",
            str(RATE),
            "--players",
            str(PLAYERS),
            "--out",
            str(out),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=ENDS_WITHIN_S)
    finally:
        process.kill()
    deadline = time.monotonic() + PROCESSES_END_WITHIN_S
    while (left := list(processes_of(process.pid))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return Finished(process.returncode, said, complained, left, out)


def processes_of(session: int) -> Iterator[str]:
    listing = subprocess.run(["ps", "-e", "-o", "sid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    return (line for line in listing.splitlines() if line.split(maxsplit=1)[0] == str(session))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_demo(tmp_path_factory.mktemp("demo"), "--seconds", str(SECONDS))


def test_the_demo_kills_a_slot_recovers_and_proves_its_output(demo: Finished) -> None:
    assert demo.code == 0, demo.said + demo.complained
    events = SECONDS * RATE
    assert f"{events:,} events in, {events:,} accounted for, 0 lost, 0 twice, 0 wrong" in demo.said
    killed, again = demo.said.index("kill -9"), demo.said.index("the job runs again")
    assert killed < again < demo.said.index("nothing lost, nothing twice")


def test_the_viewer_sees_no_stack_trace_and_nothing_is_left_running(demo: Finished) -> None:
    assert not demo.complained
    assert "Traceback" not in demo.said and "Exception" not in demo.said
    assert not demo.left_running


def test_there_are_a_picture_and_output_that_any_reader_can_read(demo: Finished) -> None:
    picture = (demo.out / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < PICTURE_BYTES_AT_MOST
    assert sorted(pq.read_table(demo.out / "progress")["n"].to_pylist()) == list(range(SECONDS * RATE))
    assert pq.read_table(demo.out / "alerts").num_rows > 0


@pytest.mark.long
def test_the_demo_fails_where_its_output_is_wrong(tmp_path: Path) -> None:
    demo = run_demo(tmp_path, "--seconds", "4", "--tamper", "lose")
    assert demo.code == 1, demo.said + demo.complained
    assert "THE OUTPUT IS WRONG" in demo.said
    assert " 0 lost" not in next(line for line in demo.said.splitlines() if "events in" in line)


def test_the_proof_notices_a_file_that_is_there_twice(demo: Finished, tmp_path: Path) -> None:
    shutil.copytree(demo.out, tmp_path, dirs_exist_ok=True)
    tamper("twice", tmp_path / "progress")
    found = prove(Game(seconds=SECONDS, rate=RATE, players=PLAYERS), tmp_path).progress
    assert (found.lost, found.wrong, found.holds) == (0, 0, False) and found.twice > 0


# -------------------------------------------------------------------------------------------- parts, without Spark


def test_a_comparison_tells_lost_repeated_and_wrong_rows_apart() -> None:
    expected = Counter([("a",), ("b",), ("b",), ("c",)])
    assert Comparison.of(expected, Counter(expected)) == Comparison(expected=4, lost=0, twice=0, wrong=0)
    assert Comparison.of(expected, Counter([("a",), ("b",), ("c",)])).lost == 1
    assert Comparison.of(expected, expected + Counter([("b",)])).twice == 1
    spoilt = Comparison.of(expected, expected - Counter([("c",)]) + Counter([("d",)]))
    assert (spoilt.lost, spoilt.wrong, spoilt.accounted, spoilt.holds) == (1, 1, 3, False)


def test_an_event_is_the_same_however_the_range_is_cut() -> None:
    game = Game(seconds=1, rate=8_000, players=80)
    whole = game.events(np.arange(game.event_count))
    for split in range(SPLITS):
        parts = [game.make(split, start, 125) for start in range(0, game.event_count // SPLITS, 125)]
        for column, values in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[column] for part in parts]), values[split::SPLITS])


def test_all_events_of_a_player_are_in_one_split() -> None:
    events = Game(seconds=1, rate=8_000, players=80).events(np.arange(8_000))
    splits_of = {player: {n % SPLITS for n in events["n"][events["player"] == player]} for player in range(80)}
    assert all(len(splits) == 1 for splits in splits_of.values())


@pytest.mark.parametrize("seconds", [4, 8, 45])
def test_no_two_changes_of_rules_fall_on_one_tick(seconds: int) -> None:
    ticks = Ticks(Game(seconds=seconds, rate=1, players=8))
    changes = [ticks(number)[1] for number in range(ticks.count) if ticks(number)[1] is not None]
    assert Counter(changes) == Counter({rule.name: 1 if rule.withdrawn is None else 2 for rule in RULES})


def test_every_rule_fires_in_the_season_that_the_demo_shows() -> None:
    game = Game(seconds=45, rate=20_000, players=10_000)
    fired = {alert[2] for _, alerts in in_sequence(game) for alert in alerts}
    assert fired == {rule.name for rule in RULES}
