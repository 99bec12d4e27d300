"""Every snippet of the README and of docs/ is run, page by page, as a user would type it, and what a page shows is compared.

A ```python block is run; a ```text block behind it is what it printed. In a ```console block each line with `$ ` is a
command for the shell, run between the Python before it and the Python after it, and the rest is what the command said.
Compared is what is the same in every run: times, sizes, ids and the width of columns are not, and a line `…` stands for
lines that are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(python|console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
END = "\x1e"
# Where the pages say that they were run.
SHOWN_FOLDER = "/tmp/guide"
VARYING = [
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"), "<time>"),
    (re.compile(r"\b[\d.,]+ (bytes|kB|MB)\b"), "<size>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" $", re.MULTILINE), ""),
]


class Block(NamedTuple):
    kind: str
    line_index: int
    text: str


def blocks_of(text: str) -> list[Block]:
    return [Block(match[1], text[: match.start(2)].count("\n"), match[2]) for match in FENCE.finditer(text)]


def script_of(blocks: list[Block], line_count: int) -> str:
    """Each snippet keeps its line number, so that an error points into the page; behind each one the end is printed."""
    lines = [""] * line_count
    for block in blocks:
        if block.kind == "text":
            continue
        for offset, line in enumerate(block.text.splitlines()):
            if block.kind == "python":
                lines[block.line_index + offset] = line
            elif line.startswith("$ "):
                lines[block.line_index + offset] = (
                    f"print({line!r}); __import__('subprocess').run({line[2:]!r}, shell=True, stderr=-2)"
                )
        lines[block.line_index + block.text.count("\n")] = f"print({END!r})"
    return "\n".join(lines)


def shown(blocks: list[Block]) -> dict[int, str]:
    """By the number of the snippet: what the page says that it printed."""
    found: dict[int, str] = {}
    ran = -1
    for block in blocks:
        if block.kind == "text":
            found[ran] = block.text
        else:
            ran += 1
            if block.kind == "console":
                found[ran] = block.text
    return found


def without_what_varies(text: str) -> str:
    for pattern, instead in VARYING:
        text = pattern.sub(instead, text)
    return text.strip("\n")


def same(shown_text: str, printed: str) -> bool:
    parts = (
        r"(?:.*\n)*?" if line == "…" else f"{re.escape(line)}\n" for line in without_what_varies(shown_text).splitlines()
    )
    return re.fullmatch("".join(parts), without_what_varies(printed) + "\n") is not None


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if any(block.kind == "python" for block in blocks_of(page.read_text()))]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with the command `tidegate` of this very tree, installed or not."""
    folder = tmp_path / "commands"
    folder.mkdir()
    command = folder / "tidegate"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tidegate.cli.main "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path, commands: Path) -> None:
    text = page.read_text()
    blocks = blocks_of(text)
    folder = tmp_path / "guide"
    folder.mkdir()
    script = folder / "snippets.py"
    script.write_text(script_of(blocks, text.count("\n")))
    done = subprocess.run(
        [sys.executable, "-u", str(script)],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=280,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"},
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    printed = done.stdout.replace(str(folder), SHOWN_FOLDER).split(f"{END}\n")
    for ran, expected in shown(blocks).items():
        assert same(expected, printed[ran]), f"{page.name} shows\n\n{expected}\nand it printed\n\n{printed[ran]}"


def test_there_are_pages_with_snippets() -> None:
    known = {
        "README.md",
        "guide.md",
        "testing.md",
        "operating-state.md",
        "consistency.md",
        "dataframes.md",
        "migrating.md",
        "context.md",
        "columns.md",
        "joins.md",
    }
    assert known <= {page.name for page in pages()}


def test_what_a_page_shows_is_held_against_what_was_printed() -> None:
    printed = "epoch  created                      size\n    1  2026-01-31T12:00:00+00:00  1.2 kB\nmore\nend\n"
    assert same("epoch  created      size\n 1  2025-12-31T00:00:00+00:00  341.0 kB\n…\nend\n", printed)
    assert not same("epoch  created      size\n 2  2025-12-31T00:00:00+00:00  341.0 kB\n…\nend\n", printed)
    assert not same("epoch  created      size\n 1  2025-12-31T00:00:00+00:00  341.0 kB\n", printed)
