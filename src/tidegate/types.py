"""Spark's type names, Arrow's types, and the way between Python values and Arrow columns.

Users declare types as Spark does, in DDL text (`"auction long, price double"`) or as a pyspark `StructType`; the engine
works with Arrow types only. `parse_type` and `parse_schema` go one way, `ddl_of` the other.

`to_list`/`from_list` turn one column into Python values and back, `rows_of`/`batch_of` a whole batch into named tuples
and back. These four stand in the hottest loop there is: the work in them is done by C code over whole columns.

Invariants:
- `to_list(from_list(values, t))` equals `values`: maps and structs come back as dicts, a timestamp as an aware datetime
  in UTC, a timestamp_ntz as a naive one.
- `from_list` never changes a value to make it fit. A float in a long column, a bool among numbers, bytes in a string
  column, a naive datetime in a timestamp column: each is a `SchemaError` that shows the value. Only an int may stand in
  a float, double or decimal column, where it is exact; and a float column rounds (1e300 to infinity), as it must.

What it doesn't do: casts between Arrow types, schema evolution, collations, column comments (read and forgotten).
pyspark is never imported here; its types are recognised by their `jsonValue` method.
"""

from __future__ import annotations

import difflib
import re
import struct
from collections import namedtuple
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import chain, islice, repeat
from operator import attrgetter, itemgetter
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from tidegate.errors import JobError, SchemaError

_ATOMIC: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = ("decimal", "dec", "numeric")
_BOUNDED_STRING = ("varchar", "char", "character")
_TYPE_NAMES = (*_ATOMIC, *_DECIMAL, *_BOUNDED_STRING, "array", "map", "struct")
_TYPES_SHOWN = (
    "boolean, byte, short, int, long, float, double, decimal(p,s), string, binary, date, timestamp, "
    "timestamp_ntz, array<…>, map<…,…>, struct<…>"
)
_SPARK_NAMES: dict[int, str] = {
    **{
        _ATOMIC[name].id: name
        for name in ("boolean", "byte", "short", "int", "long", "float", "double", "string", "binary", "date")
    },
    pa.large_string().id: "string",
    pa.large_binary().id: "binary",
}
_MAX_DECIMAL_PRECISION = 38


def parse_type(declared: Any) -> pa.DataType:
    """The Arrow type of Spark DDL text such as "map<string, array<double>>", or of a pyspark `DataType`.

    An Arrow type is returned as it is, if Spark has a name for it.
    """
    if isinstance(declared, pa.DataType):
        if _spark_name(declared) is None:
            raise SchemaError(f"Spark has no type for Arrow's {declared}; cast it to one of {_TYPES_SHOWN}")
        return declared
    if isinstance(declared, str):
        return _DdlReader(declared, what="type").whole_type()
    if hasattr(declared, "jsonValue"):
        return _type_of_json(declared.jsonValue())
    raise SchemaError(
        f"can't read a type from {declared!r}: give Spark DDL text such as 'long' or 'array<double>', "
        "a pyspark DataType or a pyarrow DataType"
    )


def parse_schema(declared: Any) -> pa.Schema:
    """The Arrow schema of Spark DDL text such as "auction long, price double", or of a pyspark `StructType`.

    An Arrow schema is returned as it is, if Spark has a name for each of its types.
    """
    if isinstance(declared, pa.Schema):
        schema = declared
    elif isinstance(declared, str):
        schema = pa.schema(_DdlReader(declared, what="schema").whole_schema())
    elif hasattr(declared, "jsonValue") and pa.types.is_struct(parsed := _type_of_json(declared.jsonValue())):
        schema = pa.schema(list(parsed))
    else:
        raise SchemaError(
            f"can't read a schema from {declared!r}: give Spark DDL text such as "
            "'auction long, price double', a pyspark StructType or a pyarrow Schema"
        )
    if not len(schema):
        raise SchemaError("a schema needs at least one column")
    for index, field in enumerate(schema):
        parse_type(field.type)
        if field.name in schema.names[:index]:
            raise SchemaError(f"the column {field.name!r} is there twice: {ddl_of(schema)}")
    return schema


def ddl_of(declared: pa.Schema | pa.DataType) -> str:
    """Spark DDL text for a schema or a type. A type that Spark has no name for keeps Arrow's, for messages."""
    if isinstance(declared, pa.Schema):
        return ", ".join(_ddl_of_field(field, separator=" ") for field in declared)
    return _spark_name(declared) or str(declared)


def _spark_name(arrow: pa.DataType) -> str | None:
    """None where Spark has no such type."""
    if arrow.id in _SPARK_NAMES:
        return _SPARK_NAMES[arrow.id]
    if pa.types.is_timestamp(arrow):
        return "timestamp_ntz" if arrow.tz is None else "timestamp"
    if pa.types.is_decimal128(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_dictionary(arrow):
        return _spark_name(arrow.value_type)
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        element = _spark_name(arrow.value_type)
        return element and f"array<{element}>"
    if pa.types.is_map(arrow):
        key, item = _spark_name(arrow.key_type), _spark_name(arrow.item_type)
        return key and item and f"map<{key},{item}>"
    if pa.types.is_struct(arrow) and all(_spark_name(field.type) for field in arrow):
        return f"struct<{', '.join(_ddl_of_field(field, separator=': ') for field in arrow)}>"
    return None


def _ddl_of_field(field: pa.Field, *, separator: str) -> str:
    name = field.name if _PLAIN_NAME.fullmatch(field.name) else "`" + field.name.replace("`", "``") + "`"
    return f"{name}{separator}{ddl_of(field.type)}{'' if field.nullable else ' NOT NULL'}"


def _type_of_json(declared: Any) -> pa.DataType:
    """Of what pyspark's `DataType.jsonValue()` returns; its `simpleString()` would lose quoting and nullability."""
    if isinstance(declared, str):
        return parse_type(declared)
    kind = declared.get("type")
    if kind == "struct":
        return pa.struct([pa.field(f["name"], _type_of_json(f["type"]), nullable=f["nullable"]) for f in declared["fields"]])
    if kind == "array":
        return pa.list_(pa.field("item", _type_of_json(declared["elementType"]), nullable=declared["containsNull"]))
    if kind == "map":
        return pa.map_(
            _type_of_json(declared["keyType"]),
            pa.field("value", _type_of_json(declared["valueType"]), nullable=declared["valueContainsNull"]),
        )
    raise SchemaError(f"pyspark's type {kind!r} is not supported; the types are {_TYPES_SHOWN}")


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+")
_TOKEN = re.compile(
    r"""\s*(?:(?P<word>\w+)|(?P<quoted>`(?:[^`]|``)+`)|(?P<mark>[<>(),:])|(?P<end>\Z)"""
    r"""|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*")|(?P<other>\S))"""
)


class _DdlReader:
    """Recursive descent over the DDL text. Every error quotes the text and points at the place."""

    def __init__(self, text: str, *, what: str) -> None:
        self._text = text
        self._what = what
        self._tokens = [
            (kind, found[kind], found.start(kind)) for found in _TOKEN.finditer(text) if (kind := found.lastgroup)
        ]
        self._next = 0

    def whole_type(self) -> pa.DataType:
        parsed = self._type("a type")
        if self._kind != "end":
            self._fail("the end of the type")
        return parsed

    def whole_schema(self) -> list[pa.Field]:
        if [text.lower() for _, text, _ in self._tokens[:2]] == ["struct", "<"]:
            return list(self.whole_type())  # as pyspark's simpleString() writes a schema
        fields = self._fields("a column")
        if self._kind != "end":
            self._fail("',' or the end of the schema")
        return fields

    def _fields(self, what: str) -> list[pa.Field]:
        fields: dict[str, pa.Field] = {}
        while True:
            name = self._name(what, taken=fields)
            self._take_if(":")
            arrow = self._type(f"the type of {name!r}")
            required = self._take_if("not")
            if required:
                self._take("null")
            if self._take_if("comment"):
                self._take("text")
            fields[name] = pa.field(name, arrow, nullable=not required)
            if not self._take_if(","):
                return list(fields.values())

    def _name(self, what: str, *, taken: Container[str]) -> str:
        kind, text, _ = self._tokens[self._next]
        if kind not in ("word", "quoted"):
            self._fail(f"the name of {what}")
        if kind == "word" and not _PLAIN_NAME.fullmatch(text):
            self._fail(f"the name of {what} in back-quotes, `{text}`,")
        name = text if kind == "word" else text[1:-1].replace("``", "`")
        if name in taken:
            self._fail(f"another name ({name!r} is taken)")
        self._next += 1
        return name

    def _type(self, what: str) -> pa.DataType:
        name = self._word
        if name not in _TYPE_NAMES:
            near = difflib.get_close_matches(name, _TYPE_NAMES, n=1)
            self._fail(f"{what} (did you mean {near[0]!r}?)" if near else f"{what} (one of {_TYPES_SHOWN})")
        self._next += 1
        if name in _ATOMIC:
            return _ATOMIC[name]
        if name in _DECIMAL:
            return self._decimal()
        if name in _BOUNDED_STRING:
            self._take("(")
            self._number("a length", least=1, most=2**31 - 1)
            self._take(")")
            return pa.string()
        self._take("<")
        nested: pa.DataType
        if name == "array":
            nested = pa.list_(self._type("the type of the elements"))
        elif name == "map":
            key = self._type("the type of the keys")
            self._take(",")
            nested = pa.map_(key, self._type("the type of the values"))
        else:
            nested = pa.struct(self._fields("a field"))
        self._take(">")
        return nested

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._take_if("("):
            precision = self._number("a precision", least=1, most=_MAX_DECIMAL_PRECISION)
            if self._take_if(","):
                scale = self._number("a scale", least=0, most=precision)
            self._take(")")
        return pa.decimal128(precision, scale)

    def _number(self, what: str, *, least: int, most: int) -> int:
        text = self._word
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            self._fail(f"{what} from {least} to {most}")
        self._next += 1
        return int(text)

    @property
    def _kind(self) -> str:
        return self._tokens[self._next][0]

    @property
    def _word(self) -> str:
        return self._tokens[self._next][1].lower()

    def _take(self, wanted: str) -> None:
        if not self._take_if(wanted):
            self._fail("a quoted text" if wanted == "text" else repr(wanted.upper()))

    def _take_if(self, wanted: str) -> bool:
        """Goes on behind `wanted`, which is a mark, a keyword in small letters, or "text" for any quoted text."""
        taken = self._kind == "text" if wanted == "text" else self._word == wanted
        self._next += taken
        return taken

    def _fail(self, expected: str) -> NoReturn:
        kind, text, at = self._tokens[self._next]
        found = "the end" if kind == "end" else repr(text)
        shown = re.sub(r"\s", " ", self._text)
        raise SchemaError(
            f"can't read the {self._what}: expected {expected} at position {at}, found {found}\n    {shown}\n    {' ' * at}^"
        )


_UNITS_MS: dict[str, float] = {
    "us": 0.001,
    "microsecond": 0.001,
    "ms": 1,
    "millisecond": 1,
    "s": 1_000,
    "sec": 1_000,
    "second": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "week": 604_800_000,
}
_DURATION_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def parse_duration_ms(text: str | int | float | timedelta) -> int:
    """Milliseconds of "1 s", "200 ms", "5 seconds", "1 minute 30 s", a timedelta, or a bare number of milliseconds.

    Rounded to whole milliseconds; what isn't zero never becomes zero.
    """
    total_ms: float = -1  # no duration
    if isinstance(text, timedelta):
        total_ms = text / timedelta(milliseconds=1)
    elif isinstance(text, str):
        parts = _DURATION_PART.findall(text.lower())
        units_ms = [_UNITS_MS.get(unit) or _UNITS_MS.get(unit.removesuffix("s")) for _, unit in parts]
        if parts and None not in units_ms and not _DURATION_PART.sub("", text.lower()):
            total_ms = sum(float(number) * (unit_ms or 0) for (number, _), unit_ms in zip(parts, units_ms, strict=True))
    elif type(text) in (int, float):
        total_ms = text
    if not 0 <= total_ms < 2**53 or 0 < total_ms < 0.5:
        raise JobError(
            f"{text!r} is no duration from a millisecond up: write it like '5 seconds', '200 ms', "
            "'1 minute', '1 day', or as a number of milliseconds"
        )
    return round(total_ms)


# From Arrow to Python. Arrow's own `to_pylist` is the fastest way for strings, bools, decimals and what nests them. For
# numbers numpy is a little faster, for dates and timestamps thirty times.

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999", "us")


def to_list(array: pa.Array) -> list[Any]:
    """The column as Python values, None for null."""
    convert = _TO_LIST.get(array.type.id)
    values: list[Any] = array.to_pylist() if convert is None else convert(array)
    return values


def _numbers_to_list(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist() if array.null_count else array.to_numpy().tolist()
    return values


def _moments_to_list(array: pa.Array) -> list[Any]:
    moments = array.to_numpy(zero_copy_only=False)
    if moments.dtype == "datetime64[ns]":
        moments = moments.astype("datetime64[us]")  # finer than Python's, but always within its years
    # numpy would give bare numbers for these. Nulls are NaT here, which compares false, and become None.
    outside = (moments < _FIRST.astype(moments.dtype)) | (moments > _LAST.astype(moments.dtype))
    if outside.any():
        raise SchemaError(f"{moments[outside][0]} is outside of the years 1 to 9999, all that Python can hold")
    if array.type.id == _DATE or array.type.tz is None:
        values: list[Any] = moments.tolist()
        return values
    since_epoch = moments.astype("datetime64[us]", copy=False).view("timedelta64[us]").tolist()
    if array.null_count:
        return [None if elapsed is None else _EPOCH + elapsed for elapsed in since_epoch]
    return list(map(_EPOCH.__add__, since_epoch))


def _nested_to_list(array: pa.Array) -> list[Any]:
    values: list[Any]
    if not _holds_maps_or_moments(array.type):
        values = array.to_pylist()
        return values
    if array.type.id == _STRUCT:
        names = [field.name for field in array.type]
        values = [dict(zip(names, fields, strict=True)) for fields in zip(*map(to_list, array.flatten()), strict=True)]
    else:
        bounds = array.offsets.to_numpy()
        here = slice(int(bounds[0]), int(bounds[-1]))
        pieces = (array.keys, array.items) if array.type.id == _MAP else (array.values,)
        columns = [to_list(piece[here]) for piece in pieces]
        elements: Iterator[Any] = zip(*columns, strict=True) if array.type.id == _MAP else iter(columns[0])
        make = dict if array.type.id == _MAP else list
        values = [make(islice(elements, length)) for length in np.diff(bounds).tolist()]
    if array.null_count:
        for index in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[index] = None
    return values


def _holds_maps_or_moments(arrow: pa.DataType) -> bool:
    """Maps in Arrow's `to_pylist` are lists of pairs, and its dates are slow."""
    return arrow.id in (_MAP, _DATE, _TIMESTAMP) or any(
        _holds_maps_or_moments(arrow.field(index).type) for index in range(arrow.num_fields)
    )


# Arrow's type ids, by which the tables below are looked up.
_INTS = {pa.int8().id: "b", pa.int16().id: "h", pa.int32().id: "i", pa.int64().id: "q"}  # with struct's codes
_FLOATS = (pa.float32().id, pa.float64().id)
_STRINGS = (pa.string().id, pa.large_string().id)
_LISTS = (pa.list_(pa.null()).id, pa.large_list(pa.null()).id)
_MAP, _STRUCT = pa.map_(pa.string(), pa.null()).id, pa.struct([]).id
_DATE, _TIMESTAMP = pa.date32().id, pa.timestamp("us").id

_TO_LIST: dict[int, Callable[[pa.Array], list[Any]]] = {
    **dict.fromkeys((*_INTS, *_FLOATS), _numbers_to_list),
    **dict.fromkeys((_DATE, _TIMESTAMP), _moments_to_list),
    **dict.fromkeys((*_LISTS, _MAP, _STRUCT), _nested_to_list),
    pa.dictionary(pa.int32(), pa.string()).id: lambda array: to_list(array.dictionary_decode()),
}


# From Python to Arrow. pyarrow alone would cut 1.5 to 1 in a long column, make 1.0 of True and text of bytes, so the
# Python types are checked first: by C code over the whole column, by hand only when there is an error to describe.

_FEW = 256  # below this many values numpy's fixed cost is more than a look at each
_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)
_PYTHON_TYPES: dict[int, tuple[type, ...]] = {
    pa.bool_().id: (bool, np.bool_),
    **dict.fromkeys(_INTS, (int, np.integer)),
    **dict.fromkeys(_FLOATS, (float, np.floating, int, np.integer)),
    pa.decimal128(1).id: (Decimal, int, np.integer),
    **dict.fromkeys(_STRINGS, (str,)),
    **dict.fromkeys((pa.binary().id, pa.large_binary().id), (bytes, bytearray, memoryview)),
    _DATE: (date,),
    _TIMESTAMP: (datetime,),
    **dict.fromkeys(_LISTS, (list, tuple, np.ndarray)),
    _MAP: (dict,),
    _STRUCT: (dict, tuple),
}


def from_list(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """The column of these Python values, None for null. Raises `SchemaError` where one isn't a value of `type`."""
    quick = _FROM_LIST.get(type.id)
    if quick is not None and (array := quick(values, type)) is not None:
        return array
    if _fits(values, type):
        try:
            return pa.array(values, type=type)
        except _REFUSALS:
            pass
    raise SchemaError(_misfit(values, type))


def _quick_ints(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    # struct takes ints alone and is three times as fast as pa.array; None, floats and what is too large it refuses.
    try:
        packed = struct.pack(f"<{len(values)}{_INTS[arrow.id]}", *values)
    except (struct.error, TypeError, OverflowError):
        return None
    array = pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(packed)])
    return None if _hides_bools(values, array) else array


def _quick_floats(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    try:
        array = pa.array(values, type=arrow)
    except _REFUSALS:
        return None
    return None if _hides_bools(values, array) else array


def _hides_bools(values: Sequence[Any], array: pa.Array) -> bool:
    """Whether a bool was taken for a number. It can only hide where there is 0 or 1 now: look nowhere else."""
    if len(values) > _FEW:
        numbers = array.to_numpy(zero_copy_only=False)
        suspects = np.flatnonzero((numbers == 0) | (numbers == 1))
        if suspects.size * 3 < len(values):
            return bool in set(map(type, map(values.__getitem__, suspects.tolist())))
    return bool in set(map(type, values))


def _quick_bools(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    try:
        return pa.array(values, type=arrow)  # strict by itself here
    except _REFUSALS:
        return None


def _quick_strings(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    try:
        "".join(values)  # the fastest way to ask whether all of them are str
        return pa.array(values, type=arrow)
    except _REFUSALS:
        return None


_FROM_LIST: dict[int, Callable[[Sequence[Any], pa.DataType], pa.Array | None]] = {
    **dict.fromkeys(_INTS, _quick_ints),
    **dict.fromkeys(_FLOATS, _quick_floats),
    **dict.fromkeys(_STRINGS, _quick_strings),
    pa.bool_().id: _quick_bools,
}


def _fits(values: Sequence[Any], arrow: pa.DataType, *, nullable: bool = True) -> bool:
    """Whether the Python types of all values, nested ones too, are those of `arrow`. Ranges are pa.array's to check."""
    if pa.types.is_dictionary(arrow):
        return _fits(values, arrow.value_type, nullable=nullable)
    kinds = set(map(type, values))
    if type(None) in kinds and not nullable:
        return False
    kinds.discard(type(None))
    wanted = _PYTHON_TYPES.get(arrow.id, ())
    # A bool is an int to Python, and a datetime a date; here they are not.
    if not all(issubclass(kind, wanted) and (kind is not bool or bool in wanted) for kind in kinds):
        return False
    if arrow.id == _DATE:
        return not any(issubclass(kind, datetime) for kind in kinds)
    if arrow.id not in (_TIMESTAMP, *_LISTS, _MAP, _STRUCT):
        return True
    values = [value for value in values if value is not None]
    if arrow.id == _TIMESTAMP:
        return {zone is None for zone in set(map(attrgetter("tzinfo"), values))} <= {arrow.tz is None}
    if arrow.id == _STRUCT:
        return _structs_fit(values, arrow)
    flat = list(chain.from_iterable(values))  # of maps, the keys
    if arrow.id in _LISTS:
        return _fits(flat, arrow.value_type, nullable=arrow.value_field.nullable)
    items = list(chain.from_iterable(map(dict.values, values)))
    return _fits(flat, arrow.key_type, nullable=False) and _fits(items, arrow.item_type, nullable=arrow.item_field.nullable)


def _structs_fit(values: list[Any], arrow: pa.DataType) -> bool:
    """A struct is a dict with exactly the fields' names, or a tuple of their values in order."""
    names = dict.fromkeys(field.name for field in arrow)
    dicts = [value for value in values if isinstance(value, dict)]
    tuples = [value for value in values if isinstance(value, tuple)]
    if any(value.keys() != names.keys() for value in dicts) or any(len(value) != len(names) for value in tuples):
        return False
    return all(
        _fits([*map(itemgetter(field.name), dicts), *map(itemgetter(index), tuples)], field.type, nullable=field.nullable)
        for index, field in enumerate(arrow)
    )


def _misfit(values: Sequence[Any], arrow: pa.DataType) -> str:
    """Describes the first value that doesn't fit."""
    for index, value in enumerate(values):
        reason = f"it is of the Python type {type(value).__name__}"
        if arrow.id == _TIMESTAMP and isinstance(value, datetime):
            reason = (
                "give it a time zone, such as datetime.UTC, or declare timestamp_ntz"
                if value.tzinfo is None
                else "drop its time zone, or declare timestamp"
            )
        try:
            if _fits((value,), arrow):
                pa.array([value], type=arrow)
                continue
        except _REFUSALS as refusal:
            reason = str(refusal)
        return f"{shown(value)} at index {index} is no {ddl_of(arrow)}: {reason}"
    return f"the {len(values)} values, each of which fits alone, are together no column of type {ddl_of(arrow)}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


# Rows. Each costs about 100 ns and, under Python's default gc thresholds, as much again for the collector, which looks
# at the young rows again and again: whoever makes rows in a hot loop should raise them (gc.set_threshold).


def row_class(schema: pa.Schema) -> type[tuple[Any, ...]]:
    """A named tuple class with the columns' names; those that a named tuple can't have are reached by getattr."""
    return _row_class(tuple(schema.names))


@lru_cache(maxsize=1024)
def _row_class(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    row: type[tuple[Any, ...]] = namedtuple("Row", names, rename=True)  # type: ignore[misc]
    for index, name in enumerate(names):
        if not hasattr(row, name):
            setattr(row, name, property(itemgetter(index)))
    return row


def rows_of(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The batch as named tuples."""
    row = _row_class(tuple(batch.schema.names))
    return list(map(tuple.__new__, repeat(row), zip(*map(to_list, batch.columns), strict=True)))


def batch_of(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """The rows (tuples or lists; dicts too, slowly) as a batch. Raises `SchemaError` naming the row or the column."""
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=schema)
    if not all(issubclass(kind, tuple | list) for kind in set(map(type, rows))):
        rows = [_positional(row, index, schema) for index, row in enumerate(rows)]
    try:
        columns = list(zip(*rows, strict=True))
    except ValueError:
        columns = []
    if len(columns) != len(schema):
        index, row = next((index, row) for index, row in enumerate(rows) if len(row) != len(schema))
        raise SchemaError(f"row {index} {shown(row)} has {len(row)} values; expected {len(schema)}: {ddl_of(schema)}")
    arrays = [_column_of(values, field) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column_of(values: Sequence[Any], field: pa.Field) -> pa.Array:
    try:
        array = from_list(values, field.type)
    except SchemaError as misfit:
        raise SchemaError(f"column {field.name!r}: {misfit}") from None
    if array.null_count and not field.nullable:
        raise SchemaError(f"column {field.name!r} is NOT NULL, but row {values.index(None)} has None there")
    return array


def _positional(row: Any, index: int, schema: pa.Schema) -> Sequence[Any]:
    if isinstance(row, tuple | list):
        return row
    if not isinstance(row, dict):
        hint = ", also where there is one column: (value,)" if len(schema) == 1 else ""
        raise SchemaError(
            f"row {index} is {shown(row)}, of type {type(row).__name__}; expected a tuple, list or dict "
            f"of the columns {ddl_of(schema)}{hint}"
        )
    if row.keys() != set(schema.names):
        raise SchemaError(f"row {index} {shown(row)} doesn't have exactly the columns {ddl_of(schema)}")
    return [row[name] for name in schema.names]
