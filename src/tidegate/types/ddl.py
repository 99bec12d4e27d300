"""Spark's type names and Arrow's types: `parse_type` and `parse_schema` read DDL text, `ddl_of` writes it.

Users declare types as Spark does, in DDL text (`"auction long, price double"`) or as a pyspark `StructType`. pyspark is
never imported here; its types are recognised by their `jsonValue` method.

Not here: collations, and column comments (read and dropped).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container
from typing import Any, NoReturn

import pyarrow as pa

from tidegate.errors import SchemaError

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
    """Return the Arrow type of Spark DDL text such as "map<string, array<double>>", or of a pyspark `DataType`.

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
    """Return the Arrow schema of Spark DDL text such as "auction long, price double", or of a pyspark `StructType`.

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
            raise SchemaError(f"the column {field.name!r} is in the schema twice: {ddl_of(schema)}")
    return schema


def ddl_of(declared: pa.Schema | pa.DataType) -> str:
    """Return Spark DDL text for a schema or a type. A type that Spark has no name for keeps Arrow's name, for messages."""
    if isinstance(declared, pa.Schema):
        return ", ".join(_ddl_of_field(field, separator=" ") for field in declared)
    return _spark_name(declared) or str(declared)


def _spark_name(arrow: pa.DataType) -> str | None:
    """Return Spark's name for the type, None if Spark has no such type."""
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
    """Read what pyspark's `DataType.jsonValue()` returns; its `simpleString()` would lose quoting and nullability."""
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
    """A recursive-descent parser of DDL text. Every error quotes the text and points at the position."""

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
            self._fail("quoted text" if wanted == "text" else repr(wanted.upper()))

    def _take_if(self, wanted: str) -> bool:
        """Skip `wanted`, which is a mark, a keyword in lower case, or "text" for any quoted text."""
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
