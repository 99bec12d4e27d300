"""Functions of arrays and structs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import ExpressionError
from tidegate.expressions.casts import implicitly
from tidegate.expressions.coercion import common_type, is_float, is_integer
from tidegate.expressions.comparing import comparable
from tidegate.expressions.functions.calls import Call
from tidegate.expressions.typed import BOOLEAN, INT, LONG, Text, Typed, apply, type_name


def _is_list(type: pa.DataType) -> bool:
    return bool(pa.types.is_list(type) or pa.types.is_large_list(type))


def _list(call: Call) -> Typed:
    part = call.parts[0]
    if not _is_list(part.type):
        call.fail(f"it takes an array, and {part.sql} is of type {type_name(part.type)}")
    return part


def _size(call: Call) -> Typed:
    call.takes(1, 1)
    return apply(lambda value: pc.list_value_length(value).cast(INT), [_list(call)], INT, call.sql)


# Elements.


def element(part: Typed, index: Typed, source: Text, at: int | None) -> Typed:
    """Return `part[index]`, which counts from 0. In ANSI mode an index outside of the array is an error."""
    sql = f"{part.sql}[{index.sql}]"
    if pa.types.is_struct(part.type) or not _is_list(part.type):
        source.fail(f"{part.sql} is of type {type_name(part.type)}, and [ ] takes an element of an array", at)
    if not is_integer(index.type):
        source.fail(f"an index is an integer, and {index.sql} is of type {type_name(index.type)}", at)
    return _pick(part, implicitly(index, LONG, source, at), sql, from_one=False)


def _element_at(call: Call) -> Typed:
    call.takes(2, 2)
    return _pick(_list(call), call.whole(1), call.sql, from_one=True)


def _pick(part: Typed, index: Typed, sql: str, *, from_one: bool) -> Typed:
    def pick(lists: pa.Array, indices: pa.Array) -> pa.Array:
        offsets = lists.offsets.to_numpy()
        starts, lengths = offsets[:-1], np.diff(offsets)
        wanted = indices.fill_null(0).to_numpy()
        valid = pc.and_(lists.is_valid(), indices.is_valid()).to_numpy(zero_copy_only=False)
        if from_one:
            wanted = np.where(wanted > 0, wanted - 1, np.where(wanted < 0, lengths + wanted, -1))
        outside = valid & ((wanted < 0) | (wanted >= lengths))
        if outside.any():
            row = int(np.flatnonzero(outside)[0])
            raise ExpressionError(f"an array of {lengths[row]} elements has none at {indices[row].as_py()}, in {sql}")
        return lists.values.take(pa.array(np.where(valid, starts + wanted, 0), mask=~valid))

    type = part.type.value_type
    return apply(pick, [part, index], type, sql, nullable=True, fails="the index is outside of the array", on_arrays=True)


def _array_contains(call: Call) -> Typed:
    call.takes(2, 2)
    part, wanted = _list(call), call.parts[1]
    item = part.type.value_type
    type = common_type(item, wanted.type)
    if type != item and not (type is not None and is_integer(item)):
        call.fail(f"an {type_name(part.type)} doesn't hold values of type {type_name(wanted.type)}; use CAST")
    probe = Typed(item, part.run, part.sql)
    _, wanted = comparable(probe, wanted, call.source, call.at)
    if is_float(item):
        call.fail("arrays of float and double aren't supported, since NaN is a value like others there")
    return apply(_contains, [part, wanted], BOOLEAN, call.sql, nullable=True, on_arrays=True)


def _contains(lists: pa.Array, wanted: pa.Array) -> pa.Array:
    offsets = lists.offsets.to_numpy()
    values = lists.values[int(offsets[0]) : int(offsets[-1])]
    lengths = np.diff(offsets)
    rows = np.repeat(np.arange(len(lists)), lengths)
    same = pc.equal(values, wanted.take(pa.array(rows)))
    found = np.zeros(len(lists), dtype=bool)
    found[rows[pc.fill_null(same, False).to_numpy(zero_copy_only=False)]] = True
    unknown = np.zeros(len(lists), dtype=bool)
    unknown[rows[values.is_null().to_numpy(zero_copy_only=False)]] = True
    null = pc.or_(lists.is_null(), wanted.is_null()).to_numpy(zero_copy_only=False)
    return pa.array(found, mask=null | (unknown & ~found))


def _array(call: Call) -> Typed:
    call.takes(1)
    type = call.parts[0].type
    for part in call.parts[1:]:
        found = common_type(type, part.type)
        if found is None:
            call.fail(f"{type_name(type)} and {type_name(part.type)} have no type in common; use CAST")
        type = found
    parts = [implicitly(part, type, call.source, call.at) for part in call.parts]
    count = len(parts)

    def make(*columns: pa.Array) -> pa.Array:
        rows = len(columns[0])
        order = np.arange(rows * count).reshape(count, rows).T.ravel()
        values = pa.concat_arrays(columns).take(pa.array(order))
        return pa.ListArray.from_arrays(np.arange(0, rows * count + 1, count, dtype=np.int32), values)

    return apply(make, parts, pa.list_(type), call.sql, nullable=False, on_arrays=True)


# Structs.


def _struct(call: Call) -> Typed:
    call.takes(1)
    names = [name or f"col{index + 1}" for index, name in enumerate(call.fields)]
    parts = [
        part.sql if name is None or part.sql == name else f"{part.sql} AS {name}"
        for name, part in zip(call.fields, call.parts, strict=True)
    ]
    return _made(call, names, list(call.parts)).named(f"struct({', '.join(parts)})")


def _named_struct(call: Call) -> Typed:
    call.takes(2)
    if len(call.parts) % 2:
        call.fail("it takes pairs of a name and a value")
    names = [call.constant_text(index) for index in range(0, len(call.parts), 2)]
    return _made(call, names, list(call.parts[1::2]))


def _made(call: Call, names: list[str], parts: list[Typed]) -> Typed:
    if len(set(names)) < len(names):
        call.fail(f"a field is there twice: {', '.join(names)}")
    fields = [pa.field(name, part.type, part.nullable) for name, part in zip(names, parts, strict=True)]

    def make(*columns: Any) -> pa.Array:
        return pa.StructArray.from_arrays(list(columns), fields=fields)

    return apply(make, parts, pa.struct(fields), call.sql, nullable=False, on_arrays=True)


FUNCTIONS: dict[str, Callable[[Call], Typed]] = {
    "size": _size,
    "cardinality": _size,
    "array_size": _size,
    "element_at": _element_at,
    "array_contains": _array_contains,
    "array": _array,
    "struct": _struct,
    "named_struct": _named_struct,
}
