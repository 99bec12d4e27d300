"""A call of a function by its name: its arguments, checked and converted as the function needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.expressions.casts import implicitly
from tidegate.expressions.coercion import is_integer, is_number
from tidegate.expressions.typed import DOUBLE, LONG, NULL, STRING, Text, Typed, constant, type_name


@dataclass(frozen=True, slots=True)
class Call:
    """`fields` are the names that arguments of `struct` have."""

    name: str
    parts: Sequence[Typed]
    source: Text
    at: int | None
    fields: Sequence[str | None] = ()

    @property
    def sql(self) -> str:
        return f"{self.name}({', '.join(part.sql for part in self.parts)})"

    def fail(self, message: str) -> NoReturn:
        raise self.error(message)

    def error(self, message: str) -> SchemaError:
        return self.source.error(f"{self.name}: {message}", self.at)

    def takes(self, least: int, most: int | None = None) -> None:
        """Check the number of arguments; without `most`, any number from `least` on."""
        if len(self.parts) < least or (most is not None and len(self.parts) > most):
            wanted = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
            self.fail(f"it takes {wanted} arguments, and there are {len(self.parts)}")

    def text(self, index: int) -> Typed:
        return self.of_type(index, STRING)

    def of_type(self, index: int, type: pa.DataType) -> Typed:
        """Return an argument that has this type."""
        part = self.parts[index]
        if part.type == NULL:
            return constant(None, type, part.sql)
        if part.type != type:
            self._refuse(index, type_name(type))
        return part

    def double(self, index: int) -> Typed:
        part = self.parts[index]
        if part.type != NULL and not is_number(part.type):
            self._refuse(index, "a number")
        return implicitly(part, DOUBLE, self.source, self.at)

    def whole(self, index: int) -> Typed:
        """Return an argument that is an integer of any size, as a long."""
        part = self.parts[index]
        if part.type != NULL and not is_integer(part.type):
            self._refuse(index, "an integer")
        return implicitly(part, LONG, self.source, self.at)

    def constant_text(self, index: int) -> str:
        return str(self._constant(index, STRING, "text"))

    def constant_int(self, index: int) -> int:
        part = self.parts[index]
        if not is_integer(part.type):
            self._refuse(index, "an integer")
        return int(self._constant(index, part.type, "an integer"))

    def _constant(self, index: int, type: pa.DataType, what: str) -> Any:
        part = self.parts[index]
        if part.type != type:
            self._refuse(index, what)
        if part.constant is None or not part.constant.is_valid:
            self.fail(f"argument {index + 1} has to be a constant, and it is {part.sql}")
        return part.constant.as_py()

    def _refuse(self, index: int, wanted: str) -> NoReturn:
        part = self.parts[index]
        self.fail(f"argument {index + 1} has to be {wanted}, and {part.sql} is of type {type_name(part.type)}; use CAST")
