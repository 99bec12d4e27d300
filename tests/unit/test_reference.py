"""The tables of docs/context.md are complete: every method of the handle, every option of the sources, every metric."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import tidegate as tg
from tidegate.control.messages import SubtaskMetrics

PAGE = (Path(__file__).resolve().parents[2] / "docs/context.md").read_text("utf-8")
NAME = re.compile(r"`(\w+)`")


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its first two lines."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    table = lines[start:]
    end = next(index for index, line in enumerate(table) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:end]]


def default_text(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def test_the_table_of_the_handle_has_its_methods_with_their_arguments() -> None:
    written = {row[0].strip("`").replace('"', "'") for row in rows_of("**A running job: `tg.Handle`**")}
    public = {name: member for name, member in inspect.getmembers(tg.Handle) if not name.startswith("_")}
    assert written == {
        f"{name}({', '.join(map(default_text, list(inspect.signature(member).parameters.values())[1:]))})"
        if callable(member)
        else name
        for name, member in public.items()
    }


def test_the_table_of_the_sources_has_their_options_with_their_defaults() -> None:
    written: dict[str, dict[str, str]] = {}
    source = ""
    for first, options, default, *_ in rows_of("**Sources: `tg.sources`**"):
        source = NAME.findall(first)[0] if first else source
        for option in NAME.findall(options):
            written.setdefault(source, {})[option] = default
    assert written.keys() == set(tg.sources.__all__)
    for name, listed in written.items():
        parameters = inspect.signature(getattr(tg.sources, name)).parameters
        assert listed.keys() == parameters.keys(), f"tg.sources.{name}"
        for option, default in listed.items():
            if default:
                expected = str(parameters[option].default)
                assert default.strip("`").strip('"').partition(":")[0] == expected, f"tg.sources.{name}({option}=…)"


def test_the_table_names_every_metric() -> None:
    (metrics,) = (row[1] for row in rows_of("**A running job: `tg.Handle`**") if row[0] == "`metrics`")
    assert NAME.findall(metrics) == [field.name for field in fields(SubtaskMetrics)]
