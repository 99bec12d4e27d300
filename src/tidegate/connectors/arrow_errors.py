"""Arrow's errors about input that can't be parsed, with Spark's names of types, in which users declare schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa

from tidegate.types import ddl_of

_CHANGED = re.compile(r"(?:JSON parse error: )?Column\(/([^)]*)\) changed from \w+ to (\w+) in row \d+")


def in_spark_types(message: str, schema: pa.Schema) -> str:
    """Return what Arrow says about a line of this schema, in the words of the schema's declaration."""
    if (found := _CHANGED.search(message)) is not None:
        path = found[1].split("/")
        declared = _type_at(path, schema)
        if declared is not None:
            column = ".".join(step for step in path if step != "[]")
            element = "an element of " if "[]" in path else ""
            return f"column {column!r}: {element}the value is a JSON {found[2]}, declared is {ddl_of(declared)}"
    for arrow in sorted(set(_types(schema)), key=lambda each: -len(str(each))):
        message = re.sub(rf"(?<!\w){re.escape(str(arrow))}(?!\w)", ddl_of(arrow), message)
    return message


def _type_at(path: list[str], schema: pa.Schema) -> pa.DataType | None:
    """Return the type of the value at a path of Arrow's, such as ["tags", "[]", "name"]; None if there is none."""
    if path[0] not in schema.names:
        return None
    found = schema.field(path[0]).type
    for step in path[1:]:
        if step == "[]" and (pa.types.is_list(found) or pa.types.is_large_list(found)):
            found = found.value_type
        elif pa.types.is_struct(found) and found.get_field_index(step) >= 0:
            found = found.field(step).type
        else:
            return None
    return found


def _types(schema: pa.Schema) -> Iterator[pa.DataType]:
    waiting = [field.type for field in schema]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += [found.field(index).type for index in range(found.num_fields)]
