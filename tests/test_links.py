"""Every link, anchor and file that the pages, comments and docstrings of this project cite leads somewhere.

- A relative link of a page leads to a file or folder of the repository, and its `#anchor` to a heading there.
- A file that is cited by name (`docs/protocol.md`, `protocol/alignment.py`, `alignment.py`) is the end of a path in the
  repository. In Python that holds for comments and docstrings, in a page for all but its code blocks.

Addresses on the web are not looked at.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|(?:src|href)=\"([^\"]+)\"")
ON_THE_WEB = re.compile(r"[a-z][a-z0-9+.-]*:|//")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
CITED = re.compile(r"(?<![\w./*{}<>~@:+-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml))(?![\w*/-])(?!\.\w)")
PROSE = (".md", ".py", ".toml", ".txt", "Makefile")

NOT_OURS = {
    "bid_counts.py",  # programs of a user, as the pages call them
    "program.py",
    "daemon.py",  # PySpark's
    "worker.py",
}


def test_every_link_and_anchor_of_a_page_leads_somewhere() -> None:
    _none(f"{page}:{line} {target}: {why}" for page in _pages() for line, target, why in _dead_links(page))


def test_every_file_that_is_cited_is_in_the_repository() -> None:
    _none(
        f"{path}:{line} {cited}"
        for path, line, cited in _citations()
        if cited not in NOT_OURS and not _is_here(cited, of=path)
    )


def test_nothing_is_excused_that_nobody_cites() -> None:
    assert {cited for _, _, cited in _citations()} >= NOT_OURS


@pytest.mark.parametrize(
    ("text", "anchors"),
    [
        ("# One word\n## Two `words`, or *more*\n", {"one-word", "two-words-or-more"}),
        ("## 3. What's lost?\n## Same\n## Same\n", {"3-whats-lost", "same", "same-1"}),
        ("## [A link](x.md) in it\n```\n# no heading\n```\n", {"a-link-in-it"}),
        ("## at_least_once\n", {"at_least_once"}),
    ],
)
def test_anchors_are_made_of_headings_as_github_makes_them(text: str, anchors: set[str]) -> None:
    assert _anchors(text) == anchors


def test_a_dead_link_and_a_file_that_is_not_there_are_found() -> None:
    links = [*_links("see [this](no/such.md), [that](../README.md#x)\n\n```\n[code](is/code.md)\n```\n`[code](c.md)`")]
    assert links == [(1, "no/such.md"), (1, "../README.md#x")]
    assert CITED.findall("as in docs/nothing.md, `nowhere/else.py`; not https://example.org/x.py or **/*.py") == [
        "docs/nothing.md",
        "nowhere/else.py",
    ]
    assert not _is_here("docs/nothing.md", of="README.md") and _is_here("protocol/alignment.py", of="README.md")


# ------------------------------------------------------------------------------------------------------------ links


def _dead_links(page: str) -> Iterator[tuple[int, str, str]]:
    for line, target in _links(_text(page)):
        if ON_THE_WEB.match(target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        if not found.exists():
            yield line, target, "no such file"
        elif anchor and found.suffix == ".md" and anchor not in _anchors(found.read_text("utf-8")):
            yield line, target, "no such heading"


def _links(text: str) -> Iterator[tuple[int, str]]:
    bare = _without(INLINE_CODE, _without(FENCED, text))
    for link in LINK.finditer(bare):
        yield bare.count("\n", 0, link.start()) + 1, link[1] or link[2]


def _anchors(text: str) -> set[str]:
    found: set[str] = set()
    for heading in HEADING.findall(_without(FENCED, text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        while (anchor := slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(anchor)
    return found


# ------------------------------------------------------------------------------------------------------------ files


def _is_here(cited: str, *, of: str) -> bool:
    beside = ((ROOT / of).parent / cited).resolve()
    return beside.is_file() or any(path == cited or path.endswith(f"/{cited}") for path in _tracked())


@cache
def _citations() -> list[tuple[str, int, str]]:
    citing = [path for path in _tracked() if path.endswith(PROSE) and CITED.search(_text(path))]
    return [(path, line, cited) for path in citing for line, text in _prose(path) for cited in CITED.findall(text)]


def _prose(path: str) -> Iterator[tuple[int, str]]:
    """What people wrote for people, with its lines."""
    if path.endswith(".md"):
        yield from enumerate(_without(FENCED, _text(path)).splitlines(), start=1)
    elif path.endswith(".py"):
        yield from _comments_and_docstrings(_text(path))
    else:
        yield from ((at, line.partition("#")[2]) for at, line in enumerate(_text(path).splitlines(), start=1))


def _comments_and_docstrings(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield from enumerate(docstring.splitlines(), start=node.body[0].lineno)


# ------------------------------------------------------------------------------------------------------------ means


def _pages() -> list[str]:
    return [path for path in _tracked() if path.endswith(".md")]


def _without(pattern: re.Pattern[str], text: str) -> str:
    """The same lines, but for what the pattern finds."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


@cache
def _tracked() -> tuple[str, ...]:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode("utf-8").split("\0")
    return tuple(path for path in listed if path and (ROOT / path).is_file())


def _none(complaints: Iterator[str]) -> None:
    found = list(complaints)
    assert not found, "\n" + "\n".join(found)
