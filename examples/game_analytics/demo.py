"""Live game analytics on Tidegate, with a crash in the middle and a proof at the end. `make demo` runs it.

Players' events and analysts' rules stream into a job on two slots, on a Spark of this machine. In the middle of the
season the demo kills one of the slots with `kill -9`. The job goes on by itself, and in the end what it committed is
compared with a sequential computation of the same input. The exit code is 0 only if the two are equal, row by row.

    app.py      the job                       proof.py     the sequential computation, and the comparison
    events.py   what players do               watch.py     what is recorded of the job while it runs …
    rules.py    what analysts ask for         screen.py    … as you see it, and picture.py, as it was
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import app
import picture
from events import Game
from proof import Comparison, Proof, prove
from pyspark.sql import SparkSession
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from screen import BAD, Screen
from watch import EVERY_S, Watch

import tidegate as tg

SLOTS = 2
VICTIM = 1  # the slot that is killed …
KILL_AFTER = 0.4  # … when so much of the season is over
EPOCHS_BEFORE_KILL = 1
PLAIN_WIDTH = 120  # of the lines where there is no terminal

INTRODUCTION = """\
{events:,} events of {players:,} players in {seconds} s, while analysts publish and withdraw rules. Two slots on \
Spark, a snapshot every second.
Rules apply by event time: an event waits in its player's state until the stream of rules has passed it, so the right \
output doesn't depend on how the two streams happen to interleave, and a plain Python loop can compute it, too.
"""


def main() -> int:
    options = _options()
    game = Game(seconds=options.seconds, rate=options.rate, players=options.players)
    out = _emptied(options.out)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.rule("[bold]Tidegate: live game analytics")
    console.print(INTRODUCTION.format(events=game.event_count, players=game.players, seconds=game.seconds))

    with console.status("Starting Spark …"):
        spark = start_spark(out / "spark.log")
    try:
        watch = run(spark, game, out, Screen(console, game))
    except KeyboardInterrupt:
        console.print("Stopped. Nothing is proved.")
        return 130
    except tg.JobFailed as failed:
        console.print(f"{failed}\nSpark's own log is {out / 'spark.log'}.", markup=False)
        return 2
    finally:
        spark.stop()

    if options.tamper is not None:
        tamper(options.tamper, out / "progress")
    with console.status("Comparing the output with a sequential computation of the same input …"):
        proof = prove(game, out)
        picture.draw(watch, game, out / "demo.png", outcome=outcome(proof.progress, "events in"))
    console.print(summary(watch, proof, out))
    if watch.crash is None or watch.crash.seconds is None:
        console.print("The season was over before a slot was killed and back: make it longer.", style=BAD)
        return 1
    return 0 if proof.holds else 1


def start_spark(log: Path) -> SparkSession:
    """A Spark on this machine. A killed Python process makes it say a lot: that goes to the log."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{SLOTS}]").appName("game analytics")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parent),  # the slots import `app`, too
    }.items():
        builder = builder.config(key, value)
    with _stderr_to(log):  # Java inherits it, and keeps it
        spark = builder.getOrCreate()
    logging.getLogger("tidegate").addHandler(logging.FileHandler(log))  # the screen shows the crash itself
    return spark


def run(spark: SparkSession, game: Game, out: Path, screen: Screen) -> Watch:
    """Runs the season to its end and kills a slot on the way."""
    job = tg.Job(
        "game analytics",
        spark,
        slots=SLOTS,
        snapshots=tg.Snapshots(every="1 s", to=str(out / "snapshots")),
        tuning=tg.Tuning(linger="20 ms", heartbeat="50 ms"),
    )
    app.build(job, game, out)
    vertex = next(vertex.id for vertex in job.plan().vertices if vertex.first.name == "play")
    handle = job.start()
    watch = Watch(handle, vertex, out)
    try:
        with screen.open():
            while not handle.status.terminal:
                time.sleep(EVERY_S)
                watch.look()
                if watch.crash is None and _is_time_to_kill(watch, game):
                    pid = handle.attempts[-1].slots[VICTIM]
                    watch.killed(VICTIM, pid)
                    os.kill(pid, signal.SIGKILL)
                screen.show(watch)
        handle.wait()
    finally:
        if not handle.status.terminal:
            handle.cancel()
    return watch


def _is_time_to_kill(watch: Watch, game: Game) -> bool:
    return (
        watch.handle.status is tg.Status.RUNNING
        and len(watch.complete) >= EPOCHS_BEFORE_KILL
        and watch.now_s() >= KILL_AFTER * game.seconds
    )


def tamper(how: str, folder: Path) -> None:
    """Spoils the committed output, to show that the proof can fail."""
    victim = max(folder.glob("*.parquet"), key=lambda path: path.stat().st_size)
    if how == "lose":
        victim.unlink()
    else:
        shutil.copy(victim, folder / "part-copied.parquet")


def summary(watch: Watch, proof: Proof, out: Path) -> Panel:
    crash, took = watch.crash, sorted(epoch.took_ms for epoch in watch.complete)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    table.add_row("proof", f"[bold]{'it holds' if proof.holds else 'IT FAILS'}[/]")
    table.add_row("events", outcome(proof.progress, "events in"))
    table.add_row("alerts", outcome(proof.alerts, "alerts due"))
    table.add_row(
        "epochs", f"{len(took)} complete snapshots, each within {took[-1]} ms, half of them within {took[len(took) // 2]} ms"
    )
    if crash is not None and crash.seconds is not None:
        table.add_row(
            "crash",
            f"kill -9 of slot {crash.slot} at {crash.at_s:.1f} s; the job ran again "
            f"{crash.seconds:.1f} s later, from the snapshot of epoch {crash.restored_epoch}",
        )
    table.add_row("output", f"{out / 'progress'}/ and {out / 'alerts'}/, Parquet for Spark or anything else to read")
    table.add_row("picture", f"{out / 'demo.png'}")
    table.add_row("next", "read examples/game_analytics/app.py: it is the whole job; add a rule to rules.py")
    table.add_row("", ".venv/bin/python examples/game_analytics/demo.py --tamper lose   spoils the output first")
    return Panel(
        table,
        title="nothing lost, nothing twice" if proof.holds else "THE OUTPUT IS WRONG",
        title_align="left",
        border_style="green" if proof.holds else "red",
    )


def outcome(found: Comparison, what: str) -> str:
    return (
        f"{found.expected:,} {what}, {found.accounted:,} accounted for, {found.lost:,} lost, "
        f"{found.twice:,} twice, {found.wrong:,} wrong"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Live game analytics: a crash in the middle, a proof at the end.")
    parser.add_argument("--seconds", type=int, default=45, help="length of the season (%(default)s)")
    parser.add_argument("--rate", type=int, default=20_000, help="events per second (%(default)s)")
    parser.add_argument("--players", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where output and picture go (%(default)s)")
    parser.add_argument("--tamper", choices=["lose", "twice"], help="lose or repeat a committed file before the proof")
    return parser.parse_args()


def _emptied(out: Path) -> Path:
    """Removes what an earlier demo left in the folder, and nothing else."""
    for name in ("progress", "alerts", "snapshots"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    return out


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    kept = os.dup(2)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
