"""What `tidegate` exports is documented, method by method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tidegate import errors

PUBLIC = [*tg.__all__, "all", "any", "list", "map", "max", "min", "sum"]


def documentable() -> Iterator[tuple[str, Any]]:
    """Classes and functions, and the public methods and properties of the classes; a name for a union has no docstring."""
    for name in PUBLIC:
        thing = getattr(tg, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)) or thing.__module__.split(".")[0] != "tidegate":
            continue
        yield name, thing
        for owner in thing.__mro__ if inspect.isclass(thing) else ():
            if owner.__module__.split(".")[0] == "tidegate":
                yield from (
                    (f"{name}.{attribute}", member)
                    for attribute, member in vars(owner).items()
                    if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
                )


def inherited(name: str) -> str | None:
    """A method is documented where it is declared first: in the contract that it fulfils."""
    owner, _, attribute = name.rpartition(".")
    return inspect.getdoc(getattr(getattr(tg, owner), attribute)) if owner else None


def test_everything_public_is_documented() -> None:
    bare = [name for name, thing in documentable() if not inspect.getdoc(thing) and not inherited(name)]
    assert bare == []


def test_all_errors_are_exported() -> None:
    tree = {name for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, errors.TidegateError)}
    assert tree <= set(tg.__all__)
    drawn = errors.__doc__ or ""
    assert [name for name in sorted(tree) if name not in drawn] == []


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(tg, name) is not None
