"""Plain data as tables for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tidegate.cli.comparing import StateDifference
from tidegate.cli.verifying import Report
from tidegate.snapshots.savepoints import SavepointInfo
from tidegate.store.layout import shown

Json = dict[str, Any]

_PIPED_WIDTH = 160
_SHOWN_CHARS = 200


def print_json(data: object) -> None:
    click.echo(json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False))


def print_listing(rows: Sequence[Json]) -> None:
    for folder in dict.fromkeys(row["folder"] for row in rows):
        table = _table("epoch >", "attempt >", "created", "size >", "files >", "shared >", "new >", "ending")
        of_folder = [row for row in rows if row["folder"] == folder]
        for row in of_folder:
            if "problem" in row:
                _add(table, row["epoch"], "", "", "", "", "", "", f"unreadable: {row['problem']}")
            else:
                _add(
                    table,
                    row["epoch"],
                    row["attempt"],
                    row["created"],
                    decimal(row["bytes"]),
                    row["files"],
                    decimal(row["shared_bytes"]),
                    decimal(row["new_bytes"]),
                    row["ending"] or "",
                )
        kind = "savepoint of" if any(row.get("savepoint") for row in of_folder) else "snapshots of"
        job = next((row["job"] for row in of_folder if "job" in row), "an unknown job")
        _print(Text(f"{kind} {job} in {folder}"), table)


def print_description(found: Json) -> None:
    _print(
        Text(
            f"{found['job']}, epoch {found['epoch']} by attempt {found['attempt']}, {found['created']}"
            f"{', ended: ' + found['ending'] if found['ending'] else ''}"
        ),
        Text(
            f"{found['files']} files, {decimal(found['bytes'])}, {found['key_group_count']} key-groups, in {found['folder']}"
        ),
    )
    stats = found["stats"]
    if stats["subtasks"]:
        _print(
            Text(
                f"longest in a subtask: alignment {stats['alignment_ms']:.1f} ms, pause {stats['pause_ms']:.1f} ms, "
                f"writing {stats['write_ms']:.1f} ms; in flight {decimal(stats['in_flight_bytes'])}, feedback "
                f"{decimal(stats['feedback_bytes'])}"
            )
        )
    if found["restored_from"]:
        _print(Text(f"began with the state of {found['restored_from']['path']}"))
    for name, operator in found["operators"].items():
        states = _table("state", "kind", "shape", "type", "rows >")
        for state in operator["states"]:
            _add(
                states,
                state["name"],
                state["kind"],
                state["shape"],
                state["type"],
                "in a chain" if state["rows"] is None else f"{state['rows']:,}",
            )
        pieces = _table("subtask >", "key-groups", "file", "form", "size >")
        for piece in operator["pieces"]:
            start, stop = piece["key_groups"]
            groups = f"{start}…{stop}" if stop > start else "none"
            for position, file in enumerate(piece["files"] or [{"name": "no file", "form": "", "bytes": 0}]):
                _add(
                    pieces,
                    piece["subtask"] if not position else "",
                    groups if not position else "",
                    file["name"],
                    file["form"],
                    decimal(file["bytes"]),
                )
        _print(Text(f"\noperator {name}, parallelism {operator['parallelism']}", style="bold"), states, pieces)
    if found["savepoint"]:
        versions = ", ".join(f"{name} {version}" for name, version in found["savepoint"]["versions"].items())
        _print(Text(f"\nsavepoint {found['savepoint']['id']}, written by {versions}"), Text(found["savepoint"]["graph"]))


def print_report(report: Report) -> None:
    for problem in report.problems:
        _print(Text(f"WRONG  epoch {problem.epoch}  {problem.where}: {problem.what}", style="red"))
    for note in report.notes:
        _print(Text(f"note   {note}"))
    summary = (
        f"epoch {', '.join(map(str, report.epochs))}: {report.files:,} files, {decimal(report.bytes)}, "
        f"{report.rows:,} rows read"
    )
    count = len(report.problems)
    _print(Text(f"{summary}; {'all of it is right' if not count else '1 problem' if count == 1 else f'{count} problems'}"))


def print_differences(structure: Sequence[str], differences: Sequence[StateDifference]) -> None:
    for line in structure:
        _print(Text(line))
    table = _table("operator", "state", "added >", "removed >", "changed >", "unchanged >", "note")
    for each in differences:
        _add(
            table,
            each.operator,
            each.state,
            *(f"{count:,}" for count in (each.added, each.removed, each.changed, each.unchanged)),
            each.note,
        )
    _print(table)
    for each in differences:
        if each.examples:
            examples = _table("key", "before", "after")
            for example in each.examples:
                _add(examples, _value(example["key"]), _values(example["before"]), _values(example["after"]))
            _print(Text(f"\n{each.operator} {each.state}", style="bold"), examples)


def print_savepoint(info: SavepointInfo) -> None:
    _print(Text(f"savepoint of epoch {info.epoch}, {decimal(info.bytes)}, in {shown(info.path)}"))
    if info.to_commit:
        _print(
            Text(
                f"it carries {info.to_commit} committables of sinks, and nobody knows whether they were committed: the "
                f"job that begins with it commits them where they were written, so it must reach that place. `tidegate "
                f"savepoint create` takes a savepoint of a running job, which carries none"
            )
        )


def progress(*, quiet: bool) -> Progress:
    """Return a progress bar on standard error, which is disabled if that isn't a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


@contextmanager
def steps(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar that starts again for each state."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    ) as bar:
        task = bar.add_task("comparing")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _print(*parts: RenderableType) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def _table(*headings: str) -> Table:
    """Return a table. A heading that ends in `>` is that of a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        right = heading.endswith(">")
        table.add_column(
            heading.removesuffix(">").strip(), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _values(values: Iterable[Any]) -> str:
    return ", ".join(map(_value, values)) or "–"


def _value(value: Any) -> str:
    text = "" if value is None else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"


def _plain(value: Any) -> Any:
    """Convert a value into one that JSON can represent."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Decimal) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
