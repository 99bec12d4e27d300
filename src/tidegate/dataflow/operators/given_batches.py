"""What a user's function on columns returned: record batches of the declared schema, or an error that says so."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyarrow import types

from tidegate.errors import SchemaError
from tidegate.types import ddl_of


def batches_of(given: Any) -> Iterable[Any]:
    """Return what a function returned as several batches, not checked yet."""
    if given is None:
        return ()
    if isinstance(given, Generator):
        return _all_of(given)
    several = isinstance(given, Iterable) and not isinstance(given, pa.RecordBatch | pa.Table | Mapping | str)
    return given if several else (given,)


def _all_of(given: Generator[Any, None, Any]) -> Iterator[Any]:
    """Yield what a generator yields. What it returns beside that would be lost."""
    returned = yield from given
    if returned is not None:
        name = getattr(given, "__qualname__", "the generator").rpartition("<locals>.")[2]
        raise SchemaError(
            f"{name} returned a {type(returned).__name__} and has a `yield` elsewhere, so that what it returns is lost. "
            f"Give each batch with `yield`, and end with `return` alone"
        )


def checked_batch(operator: str, out: Any, schema: pa.Schema, *, side: str | None = None) -> pa.RecordBatch:
    """Return a batch that has the schema declared for it: `returns`, or that of a side output."""
    if isinstance(out, pa.RecordBatch) and out.schema.equals(schema):
        return out
    got = ddl_of(out.schema) if isinstance(out, pa.RecordBatch) else f"a {type(out).__name__}"
    argument = "returns=" if side is None else f"side_outputs[{side!r}]="
    raise SchemaError(
        f"operator {operator!r} is declared with {argument}{ddl_of(schema)!r}, and its function gave {got!r}. Give record "
        f"batches of the declared schema (RecordBatch.cast may help), or change {argument.removesuffix('=')}."
    )


_KINDS = (
    types.is_integer,
    types.is_floating,
    types.is_decimal,
    types.is_timestamp,
    lambda kind: types.is_string(kind) or types.is_large_string(kind),
    lambda kind: types.is_binary(kind) or types.is_large_binary(kind),
)


def is_of_kind(given: pa.DataType, declared: pa.DataType) -> bool:
    """Whether a column may be cast to the declared type. Its values stay what they are: another width, whole numbers as
    doubles or decimals, nulls alone. A number doesn't become a text."""
    if types.is_dictionary(given):
        given = given.value_type
    if given.equals(declared) or types.is_null(given):
        return True
    if given.num_fields or declared.num_fields:
        return given.num_fields == declared.num_fields and all(
            is_of_kind(given.field(i).type, declared.field(i).type) for i in range(given.num_fields)
        )
    is_number = types.is_integer(given) and (types.is_floating(declared) or types.is_decimal(declared))
    return is_number or any(is_kind(given) and is_kind(declared) for is_kind in _KINDS)
