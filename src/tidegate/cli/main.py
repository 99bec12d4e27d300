"""The command `tidegate`: it shows and checks snapshots, and makes savepoints.

    tidegate snapshots list PATH
    tidegate snapshots show PATH [--epoch N]
    tidegate snapshots verify PATH [--epoch N | --all]
    tidegate snapshots diff PATH [PATH] [--epochs A B] [--keys N]
    tidegate savepoint create SNAPSHOTS TO
    tidegate savepoint export SNAPSHOTS TO [--epoch N]

Exit codes: 0 success; 1 a snapshot is damaged; 2 the command can't run (no such path, bad options). Every command takes
`--json`. The other modules of this package produce the content.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import ParamSpec, TypeVar

import click
import pyarrow as pa

from tidegate.cli import comparing, describing, printing, verifying
from tidegate.cli.comparing import readable
from tidegate.cli.finding import find_folder, find_folders, find_job
from tidegate.errors import TidegateError
from tidegate.snapshots.committed import committable_count
from tidegate.snapshots.finding import resolved
from tidegate.snapshots.requests import REQUEST_TIMEOUT_S, request_savepoint, wait_for_savepoint
from tidegate.snapshots.savepoints import SavepointInfo, export_snapshot, versions_here
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store.opening import open_store

_P = ParamSpec("_P")
_R = TypeVar("_R")


class NoAnswer(click.ClickException):
    """An error in one line, with exit code 2."""

    exit_code = 2


def answering(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Report errors of the input in one line, without a traceback."""

    @functools.wraps(command)
    def answer(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except (TidegateError, OSError, ValueError, pa.ArrowException) as error:
            raise NoAnswer(" ".join(str(error).split()) or type(error).__name__) from error

    return answer


as_json = click.option("--json", "as_json", is_flag=True, help="For programs: JSON on standard output.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tidegate")
def main() -> None:
    """Tidegate's snapshots and savepoints."""


@main.group()
def snapshots() -> None:
    """Show and check snapshots. Nothing is changed.

    PATH is the folder of Snapshots(to=…), one job's folder in it, a savepoint's folder, or the file of a manifest; a path
    or a URI such as s3://bucket/folder.
    """


@snapshots.command("list")
@click.argument("path")
@as_json
@answering
def list_snapshots(path: str, as_json: bool) -> None:
    """List the complete snapshots, and how much each shares with the one before."""
    rows = [row for folder in find_folders(path) for row in describing.listing(folder)]
    _print(as_json, {"snapshots": rows}, printing.print_listing, rows)
    if any("problem" in row for row in rows):
        sys.exit(1)


@snapshots.command()
@click.argument("path")
@click.option("--epoch", type=int, help="Which one; the newest by default.")
@as_json
@answering
def show(path: str, epoch: int | None, as_json: bool) -> None:
    """Show the content of a snapshot: operators, states, types, key-groups, files."""
    folder = find_folder(path)
    found = describing.description(folder, folder.load(folder.newest if epoch is None else epoch))
    _print(as_json, found, printing.print_description, found)


@snapshots.command()
@click.argument("path")
@click.option("--epoch", type=int, help="Which one; the newest by default.")
@click.option("--all", "every", is_flag=True, help="All snapshots.")
@as_json
@answering
def verify(path: str, epoch: int | None, every: bool, as_json: bool) -> None:
    """Check every byte against its checksum, that the key-groups tile, and that every key is in its key-group.

    Exit code 1 if anything is wrong.
    """
    if every and epoch is not None:
        raise click.UsageError("give --epoch or --all, not both")
    folder = find_folder(path)
    epochs = list(folder.manifests) if every else [folder.newest if epoch is None else epoch]
    if epoch is not None and epoch not in folder.manifests:
        folder.load(epoch)  # raises an error that lists the epochs
    with printing.progress(quiet=as_json) as bar:
        task = bar.add_task("verifying")
        report = verifying.verify(
            folder,
            epochs,
            on_total=lambda total: bar.update(task, total=total),
            on_read=lambda count: bar.advance(task, count),
        )
    _print(as_json, {"ok": not report.problems, **asdict(report)}, printing.print_report, report)
    if report.problems:
        sys.exit(1)


@snapshots.command()
@click.argument("path_a")
@click.argument("path_b", required=False)
@click.option("--epochs", type=int, nargs=2, help="Which ones; by default the newest of each path, or the two newest.")
@click.option("--keys", type=click.IntRange(min=0), default=0, help="How many differing keys of each state to show.")
@as_json
@answering
def diff(path_a: str, path_b: str | None, epochs: tuple[int, int] | None, keys: int, as_json: bool) -> None:
    """Show what changed from one snapshot to another, by operator and state, in rows.

    With one path, compare two snapshots of it.
    """
    before = find_folder(path_a)
    after = before if path_b is None else find_folder(path_b)
    if epochs is None and path_b is None:
        if len(before.manifests) < 2:
            raise NoAnswer(f"{before.shown} has one snapshot: give a second path to compare it with")
        newest = list(before.manifests)[-2:]
        epochs = newest[0], newest[1]
    first, second = epochs if epochs is not None else (before.newest, after.newest)
    one, other = before.snapshot(first), after.snapshot(second)
    with readable(one) as one, readable(other) as other, printing.steps(quiet=as_json) as on_step:
        differences = list(comparing.compare(one, other, examples=keys, on_step=on_step))
    structure = comparing.structure(one, other)
    found = {
        "from": {"folder": before.shown, "epoch": first},
        "to": {"folder": after.shown, "epoch": second},
        "structure": structure,
        "states": [asdict(each) for each in differences],
    }
    _print(as_json, found, printing.print_differences, structure, differences)


@main.group()
def savepoint() -> None:
    """Make savepoints: self-contained copies of a job's state.

    SNAPSHOTS is the folder of Snapshots(to=…) or the job's folder in it, TO an empty or new folder; paths or URIs.
    """


@savepoint.command()
@click.argument("snapshots")
@click.argument("to")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=REQUEST_TIMEOUT_S,
    show_default=True,
    help="Seconds to wait for the job.",
)
@as_json
@answering
def create(snapshots: str, to: str, timeout_s: float, as_json: bool) -> None:
    """Ask the running job for a savepoint of its present state, and wait for it."""
    job = find_job(snapshots)
    request = request_savepoint(job, to, timeout_s=timeout_s)
    info = wait_for_savepoint(job, request, timeout_s=timeout_s)
    _print(as_json, asdict(info), printing.print_savepoint, info)


@savepoint.command()
@click.argument("snapshots")
@click.argument("to")
@click.option("--epoch", type=int, help="Which snapshot; the newest by default.")
@as_json
@answering
def export(snapshots: str, to: str, epoch: int | None, as_json: bool) -> None:
    """Make a savepoint of a complete snapshot. The job need not run.

    The savepoint includes output that may not be committed yet: the job that begins with the savepoint commits it.
    """
    folder = find_folder(snapshots)
    snapshot = folder.snapshot(folder.newest if epoch is None else epoch).still_to_commit()
    target = open_store(resolved(to))
    made = export_snapshot(
        snapshot, target, created_ms=round(time.time() * 1000), versions=versions_here(), rewrite=Snapshot.rewrite
    )
    size_bytes = sum(describing.file_sizes(made).values())
    info = SavepointInfo(path=target.address, epoch=made.epoch, bytes=size_bytes, to_commit=committable_count(made))
    _print(as_json, asdict(info), printing.print_savepoint, info)


def _print(as_json: bool, content: object, for_people: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Print the content as JSON, or call a function that prints it for people."""
    if as_json:
        printing.print_json(content)
    else:
        for_people(*args, **kwargs)


if __name__ == "__main__":
    main()
