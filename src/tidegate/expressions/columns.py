"""Columns and fields of structs: names to positions, and Arrow's many encodings to one for each of Spark's types.

A column that is selected as it is keeps its encoding (`Compiled` passes it on). Inside an expression dictionaries are
decoded, large strings are strings, and timestamps have microseconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.typed import BINARY, STRING, Run, Text, Typed, Value, type_name


def column(schema: pa.Schema, names: Sequence[str], source: Text, at: int | None) -> Typed:
    """Return the column `names[0]`, or the field that the further names lead to."""
    index = _index(names[0], schema.names, "column", source, at)
    field = schema.field(index)
    part = Typed(plain_type(field.type), _reader(index, field.type), names[0], field.nullable)
    if pa.types.is_dictionary(field.type) and field.type.value_type == STRING:
        part = replace(part, encoded=lambda batch: batch.column(index))
    for name in names[1:]:
        part = struct_field(part, name, source, at)
    return part


def struct_field(part: Typed, name: str, source: Text, at: int | None) -> Typed:
    if not pa.types.is_struct(part.type):
        source.fail(f"{part.sql} is of type {type_name(part.type)} and has no field {name!r}", at)
    fields = list(part.type)
    index = _index(name, [field.name for field in fields], "field", source, at)
    wanted, plain = fields[index].type, plain_type(fields[index].type)
    run = part.run

    def read(batch: pa.RecordBatch) -> Value:
        field = pc.struct_field(run(batch), [index])
        return field if wanted == plain else _plain(field, plain)

    nullable = part.nullable or fields[index].nullable
    return Typed(plain, read, name, nullable, part.may_fail)


def _index(name: str, names: Sequence[str], what: str, source: Text, at: int | None) -> int:
    """Return where the name is: as it is written, or else the only one that differs in case."""
    if name in names:
        if list(names).count(name) > 1:
            source.fail(f"the {what} {name!r} is there more than once", at)
        return list(names).index(name)
    same = [index for index, each in enumerate(names) if each.lower() == name.lower()]
    if len(same) == 1:
        return same[0]
    if same:
        source.fail(f"{name!r} may be any of the {what}s {', '.join(names[index] for index in same)}", at)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise source.error(f"unknown {what} {name!r}{hint}; the {what}s are {', '.join(names) or 'none'}", at)


def plain_type(type: pa.DataType) -> pa.DataType:
    """Return the type as which a column is computed with."""
    if pa.types.is_dictionary(type):
        return plain_type(type.value_type)
    if pa.types.is_large_string(type):
        return STRING
    if pa.types.is_large_binary(type):
        return BINARY
    if pa.types.is_timestamp(type):
        return pa.timestamp("us", tz=None if type.tz is None else "UTC")
    return type


def _reader(index: int, type: pa.DataType) -> Run:
    plain = plain_type(type)
    if type == plain:
        return lambda batch: batch.column(index)
    return lambda batch: _plain(batch.column(index), plain)


def _plain(value: Value, plain: pa.DataType) -> Value:
    if pa.types.is_dictionary(value.type):
        value = value.dictionary_decode()
    return value.cast(plain)
