"""Conversions between the values that Spark's stateful processors see and those that Tidegate's state and Arrow hold.

Spark's state holds rows: a processor writes and reads tuples. Tidegate holds a row as a struct, a dict by the fields' names.
So tuples become structs when they are written, and tuples again when they are read. Only a few types differ inside them:

- a timestamp is a datetime without a time zone, in local time, as in Spark (a datetime with a time zone is converted);
- a struct within a row is read as a `Row`.

The records that a processor gets are Spark's: Arrow converts them, with timestamps in the session's time zone.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import pyarrow as pa
from pyspark.sql.types import Row

from tidegate.errors import SchemaError
from tidegate.spark.processor_errors import WRONG_LENGTH, misfit
from tidegate.state.values import form_of
from tidegate.types import ddl_of, to_list

Convert: TypeAlias = Callable[[Any], Any]


# ---------------------------------------------------------------------------------------------------------------- state


def rows_in(schema: pa.Schema) -> Convert:
    """Return the conversion of what a processor writes (a tuple, a list, a Row) to a tuple that the state takes."""
    converts = [_into(field.type) for field in schema]
    if not any(converts):
        return tuple

    def convert(given: Any) -> Any:
        values = tuple(given)
        if len(values) != len(converts):
            return values  # the state refuses it with an error of its own
        return tuple(
            [value if each is None or value is None else each(value) for each, value in zip(converts, values, strict=True)]
        )

    return convert


def rows_out(schema: pa.Schema, *, are_tuples: bool = False) -> Convert:
    """Return the opposite conversion, from a dict, or from a tuple if the state holds tuples."""
    converts = [_out_of(field.type) for field in schema]
    values_of: Convert = as_held if are_tuples else dict.values
    if not any(converts):
        return as_held if are_tuples else lambda held: tuple(held.values())
    return lambda held: tuple(
        [
            value if each is None or value is None else each(value)
            for each, value in zip(converts, values_of(held), strict=True)
        ]
    )


def as_held(value: Any) -> Any:
    return value


def _into(kind: pa.DataType) -> Convert | None:
    return _converter(kind, lambda moment: _moment_in if moment.tz is not None else _plain_moment, _struct_in)


def _out_of(kind: pa.DataType) -> Convert | None:
    return _converter(kind, lambda moment: _moment_out if moment.tz is not None else None, _struct_out)


def _converter(
    kind: pa.DataType, of_moment: Callable[[pa.DataType], Convert | None], of_struct: Callable[[pa.DataType], Convert]
) -> Convert | None:
    """Return the conversion of values of this type; None if they stay as they are. Only timestamps and structs differ."""
    if pa.types.is_timestamp(kind):
        return of_moment(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = _converter(kind.value_type, of_moment, of_struct)
        return None if item is None else lambda values: [None if each is None else item(each) for each in values]
    if pa.types.is_map(kind):
        of_key, of_item = (_converter(each, of_moment, of_struct) for each in (kind.key_type, kind.item_type))
        return None if of_key is None and of_item is None else _of_entries(of_key or as_held, of_item or as_held)
    return of_struct(kind) if pa.types.is_struct(kind) else None


def _of_entries(key: Convert, item: Convert) -> Convert:
    return lambda entries: {key(each): None if value is None else item(value) for each, value in entries.items()}


def _struct_in(kind: pa.DataType) -> Convert:
    inner = rows_in(pa.schema(list(kind)))
    names = [field.name for field in kind]

    def convert(given: Any) -> Any:
        return inner(tuple([given.get(name) for name in names]) if isinstance(given, dict) else given)

    return convert


def _struct_out(kind: pa.DataType) -> Convert:
    inner, make = rows_out(pa.schema(list(kind))), row_maker([field.name for field in kind])
    return lambda held: make(inner(held))


def _plain_moment(given: Any) -> Any:
    return given.to_pydatetime() if hasattr(given, "to_pydatetime") else given


def _moment_in(given: Any) -> Any:
    given = _plain_moment(given)
    return given.astimezone(UTC) if isinstance(given, datetime) else given


def _moment_out(held: datetime) -> datetime:
    return held.astimezone().replace(tzinfo=None)


# ------------------------------------------------------------------------------------------------------- keys of a map


def map_key_type(schema: pa.Schema) -> pa.DataType:
    """Return the type of a map state's keys: that of the field if there is one, JSON text if there are several."""
    return schema.field(0).type if len(schema) == 1 else pa.string()


def map_keys_in(schema: pa.Schema) -> Convert:
    into = rows_in(schema)
    if len(schema) == 1:
        return lambda given: _only(into(given), schema)
    hold, writes = form_of(pa.struct(list(schema))).held, [_WRITTEN.get(field.type.id, as_held) for field in schema]

    def convert(given: Any) -> str:
        values = into(given)
        if len(values) != len(schema):
            _only(values, schema)
        try:
            held = hold(values).values()
        except SchemaError as error:
            raise misfit(f"a key of the map is a tuple of ({ddl_of(schema)}): {error}") from error
        return json.dumps([None if value is None else write(value) for write, value in zip(writes, held, strict=True)])

    return convert


def map_keys_out(schema: pa.Schema) -> Convert:
    out = rows_out(schema)
    names = schema.names
    if len(schema) == 1:
        return lambda held: out({names[0]: held})
    reads = [_READ.get(field.type.id, as_held) for field in schema]
    return lambda held: out(
        {
            name: None if value is None else read(value)
            for name, read, value in zip(names, reads, json.loads(held), strict=True)
        }
    )


def _only(values: tuple[Any, ...], schema: pa.Schema) -> Any:
    if len(values) != len(schema):
        raise misfit(
            f"a key of the map is a tuple of ({ddl_of(schema)}), and {values!r} has {len(values)} values", WRONG_LENGTH
        )
    return values[0]


_BYTES = (pa.binary().id, pa.large_binary().id)
_WRITTEN: dict[int, Convert] = {
    pa.date32().id: date.isoformat,
    pa.timestamp("us").id: datetime.isoformat,
    pa.decimal128(1).id: str,
    **dict.fromkeys(_BYTES, lambda held: b64encode(held).decode()),
}
_READ: dict[int, Convert] = {
    pa.date32().id: date.fromisoformat,
    pa.timestamp("us").id: datetime.fromisoformat,
    pa.decimal128(1).id: Decimal,
    **dict.fromkeys(_BYTES, b64decode),
}


# -------------------------------------------------------------------------------------------------------------- records


def row_class(names: Sequence[str]) -> type[Row]:
    """Return a class of rows with these fields. It finds a field directly, where Spark's `Row` searches its list of names. A
    field that is hidden by a method of `Row` (`count`, `index`) is hidden here, too."""
    # The accessors of a named tuple's fields are written in C, and work on any tuple.
    accessors = vars(namedtuple("Fields", names, rename=True))
    fields = {name: accessors[name] for name in names if name in accessors and not hasattr(Row, name)}
    return type("Row", (Row,), {**fields, "__fields__": list(names)})


def row_maker(names: Sequence[str]) -> Convert:
    kind = row_class(names)
    return lambda values: tuple.__new__(kind, values)


def python_column(column: pa.Array, zone: str) -> list[Any]:
    """Return the column as Arrow converts it, which is what Spark does, but faster."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        moments = to_list(column)
        if zone in ("UTC", "Etc/UTC"):
            return moments
        there = ZoneInfo(zone)
        return [None if moment is None else moment.astimezone(there) for moment in moments]
    if not kind.num_fields:
        return to_list(column)
    values: list[Any] = column.cast(in_zone(kind, zone)).to_pylist()
    return values


def in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    """Return the type with all its timestamps in a time zone."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, zone)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(in_zone(kind.value_type, zone)))
    if pa.types.is_map(kind):
        return pa.map_(in_zone(kind.key_type, zone), kind.item_field.with_type(in_zone(kind.item_type, zone)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(in_zone(field.type, zone)) for field in kind])
    return kind


def user_keys(types: Sequence[pa.DataType], zone: str) -> Callable[[Sequence[Any]], Iterable[tuple[Any, ...]]]:
    """Return the conversion of keys as state has them to the tuples that a processor gets."""
    zoned = [pa.types.is_timestamp(kind) and kind.tz is not None for kind in types]
    if not any(zoned):
        return zip if len(types) == 1 else as_held
    there = ZoneInfo(zone)

    def convert(key: Any) -> tuple[Any, ...]:
        parts = (key,) if len(types) == 1 else key
        return tuple(
            [
                part.astimezone(there) if is_moment and part is not None else part
                for is_moment, part in zip(zoned, parts, strict=True)
            ]
        )

    return lambda keys: map(convert, keys)
