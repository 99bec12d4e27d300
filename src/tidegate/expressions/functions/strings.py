"""Functions of text. Positions and lengths are in code points, as in Spark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.functions.calls import Call
from tidegate.expressions.functions.regexes import matches_nothing, translated
from tidegate.expressions.typed import BINARY, BOOLEAN, INT, STRING, Text, Typed, apply, type_name


def _same_type(function: Callable[..., Any], call: Call, *options: Any) -> Typed:
    call.takes(1, 1)
    return apply(lambda value: function(value, *options), [call.text(0)], STRING, call.sql)


# Joining.


def concat(parts: Sequence[Typed], source: Text, at: int | None) -> Typed:
    """Return `a || b`."""
    return _concat(Call("concat", parts, source, at))


def _concat(call: Call) -> Typed:
    call.takes(1)
    parts = [call.text(index) for index in range(len(call.parts))]
    return apply(lambda *values: pc.binary_join_element_wise(*values, ""), parts, STRING, call.sql)


def _concat_ws(call: Call) -> Typed:
    call.takes(2)
    separator = call.constant_text(0)
    parts = [call.text(index) for index in range(1, len(call.parts))]
    return apply(
        lambda *values: pc.binary_join_element_wise(*values, separator, null_handling="skip"),
        parts,
        STRING,
        call.sql,
        nullable=False,
    )


# Cutting.


def _substring(call: Call) -> Typed:
    call.takes(2, 3)
    start = call.constant_int(1)
    length = call.constant_int(2) if len(call.parts) == 3 else None
    return _slice(call, start, length)


def _slice(call: Call, start: int, length: int | None) -> Typed:
    """`start` counts from 1, from the end if it is negative."""
    first = start - 1 if start > 0 else start
    stop: int | None = None
    if length is not None:
        if length <= 0:
            return _same(call, lambda value: pc.utf8_slice_codeunits(value, 0, 0))
        stop = first + length
        if first < 0 <= stop:
            stop = None
    return _same(call, lambda value: pc.utf8_slice_codeunits(value, first, stop))


def _same(call: Call, function: Callable[[Any], Any], sql: str | None = None) -> Typed:
    return apply(function, [call.text(0)], STRING, sql or call.sql)


def _left(call: Call) -> Typed:
    call.takes(2, 2)
    return _slice(call, 1, call.constant_int(1))


def _right(call: Call) -> Typed:
    call.takes(2, 2)
    count = call.constant_int(1)
    return _slice(call, -count, None) if count > 0 else _slice(call, 1, 0)


def _trim(function: Callable[..., Any], call: Call) -> Typed:
    call.takes(1, 2)
    characters = call.constant_text(1) if len(call.parts) == 2 else " "
    if not characters:
        return call.text(0)
    name = {pc.utf8_trim: "BOTH", pc.utf8_ltrim: "LEADING", pc.utf8_rtrim: "TRAILING"}[function]
    sql = call.sql if len(call.parts) == 1 else f"TRIM({name} {characters} FROM {call.parts[0].sql})"
    return apply(lambda value: function(value, characters), [call.text(0)], STRING, sql)


def _pad(function: Callable[..., Any], call: Call) -> Typed:
    call.takes(2, 3)
    width = max(call.constant_int(1), 0)
    padding = call.constant_text(2) if len(call.parts) == 3 else " "
    if len(padding) > 1:
        call.fail("the padding has to be one character")

    def pad(value: Any) -> Any:
        padded = function(value, width, padding) if padding else value
        return pc.utf8_slice_codeunits(padded, 0, width)

    return _same(call, pad, None if len(call.parts) == 3 else f"{call.sql[:-1]},  )")


def _repeat(call: Call) -> Typed:
    call.takes(2, 2)
    count = max(call.constant_int(1), 0)
    return _same(call, lambda value: pc.binary_repeat(value, count))


# Upper and lower case: Arrow maps one character to one, Java "ß" to "SS", as Python does.


def _cased(kernel: Callable[..., Any], python: Callable[[str], str], array: pa.Array) -> pa.Array:
    if pc.all(pc.string_is_ascii(array)).as_py() is not False:
        return kernel(array)
    return pa.array([None if text is None else python(text) for text in array.to_pylist()], STRING)


def _case(kernel: Callable[..., Any], python: Callable[[str], str], call: Call) -> Typed:
    call.takes(1, 1)
    return apply(partial(_cased, kernel, python), [call.text(0)], STRING, call.sql, on_arrays=True)


# Searching.


def _search(kernel: Callable[..., Any], call: Call) -> Typed:
    call.takes(2, 2)
    wanted = call.constant_text(1)
    return apply(lambda value: kernel(value, wanted), [call.text(0)], BOOLEAN, call.sql)


def like(part: Typed, pattern: Typed, escape: str, source: Text, at: int | None) -> Typed:
    """Return `part LIKE pattern`."""
    call = Call("like", [part, pattern], source, at)
    wanted = call.constant_text(1)
    pieces: list[str | None] = []  # literal text, None for %
    regex, index, plain = "", 0, ""
    is_simple = True
    while index < len(wanted):
        char = wanted[index]
        if char == escape:
            index += 1
            if index == len(wanted) or wanted[index] not in ("%", "_", escape):
                call.fail(f"in the pattern {wanted!r}, {escape!r} has to be before %, _ or itself")
            plain += wanted[index]
            regex += pc_escaped(wanted[index])
        elif char == "%":
            pieces += [plain, None] if plain else [None]
            regex, plain = regex + ".*", ""
        elif char == "_":
            is_simple = False
            regex += "."
        else:
            plain += char
            regex += pc_escaped(char)
        index += 1
    if plain:
        pieces.append(plain)
    test = _simple_like(pieces) if is_simple else None
    if test is None:
        full = rf"(?s)\A(?:{regex})\z"
        test = partial(pc.match_substring_regex, pattern=full)
    return apply(test, [call.text(0)], BOOLEAN, f"{part.sql} LIKE {wanted}{_escape_sql(escape)}")


def _escape_sql(escape: str) -> str:
    return "" if escape == "\\" else f" ESCAPE '{escape}'"


def _simple_like(pieces: list[str | None]) -> Callable[[Any], Any] | None:
    """Return a kernel that is faster than a regular expression, if there is one."""
    match pieces:
        case []:
            return lambda value: pc.equal(value, "")
        case [str() as text]:
            return lambda value: pc.equal(value, text)
        case [str() as text, None]:
            return partial(pc.starts_with, pattern=text)
        case [None, str() as text]:
            return partial(pc.ends_with, pattern=text)
        case [None, str() as text, None]:
            return partial(pc.match_substring, pattern=text)
    return None


def pc_escaped(char: str) -> str:
    """Return a character as RE2 reads it literally."""
    return char if char.isalnum() or ord(char) > 127 or char in " \n\t\r\"'" else f"\\{char}"


def rlike(part: Typed, pattern: Typed, source: Text, at: int | None) -> Typed:
    """Return `part RLIKE pattern`."""
    call = Call("RLIKE", [part, pattern], source, at)
    made = translated(call, call.constant_text(1))
    return apply(partial(pc.match_substring_regex, pattern=made), [call.text(0)], BOOLEAN, call.sql)


# Replacing and taking apart.


def _replace(call: Call) -> Typed:
    call.takes(2, 3)
    wanted = call.constant_text(1)
    instead = call.constant_text(2) if len(call.parts) == 3 else ""
    if not wanted:
        return call.text(0).named(call.sql)
    return _same(
        call,
        lambda value: pc.replace_substring(value, wanted, instead),
        None if len(call.parts) == 3 else f"{call.sql[:-1]}, )",
    )


def _regexp_replace(call: Call) -> Typed:
    call.takes(3, 3)
    made = translated(call, call.constant_text(1))
    if matches_nothing(made):
        call.fail(f"the pattern {call.constant_text(1)!r} matches the empty text, which Java and RE2 replace differently")
    instead, text = "", call.constant_text(2)
    index = 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 1
            char = text[index : index + 1]
            instead += "\\\\" if char == "\\" else char
        elif char == "$":
            index += 1
            if not text[index : index + 1].isdigit() or text[index + 1 : index + 2].isdigit():
                call.fail(f"in the replacement {text!r}, $ has to be before the number of a group, from 0 to 9")
            instead += f"\\{text[index]}"
        else:
            instead += char
        index += 1
    return _same(call, lambda value: pc.replace_substring_regex(value, made, instead), f"{call.sql[:-1]}, 1)")


def _regexp_extract(call: Call) -> Typed:
    call.takes(2, 3)
    group = call.constant_int(2) if len(call.parts) == 3 else 1
    made = translated(call, call.constant_text(1), group=group)

    def extract(value: pa.Array) -> pa.Array:
        found = pc.struct_field(pc.extract_regex(value, made), "found")
        return pc.if_else(pc.is_null(value), pa.scalar(None, STRING), pc.fill_null(found, ""))

    sql = call.sql if len(call.parts) == 3 else f"{call.sql[:-1]}, 1)"
    return apply(extract, [call.text(0)], STRING, sql, on_arrays=True)


def _split(call: Call) -> Typed:
    call.takes(2, 3)
    pattern = call.constant_text(1)
    limit = call.constant_int(2) if len(call.parts) == 3 else -1
    made = translated(call, pattern)
    if matches_nothing(made):
        call.fail(f"the pattern {pattern!r} matches the empty text, at which Java and RE2 split differently")
    splits = limit - 1 if limit > 0 else None
    plain = not any(char in r"\.[]{}()*+?^$|" for char in pattern)

    def split(value: pa.Array) -> pa.Array:
        if splits == 0:
            lists = pa.ListArray.from_arrays(np.arange(len(value) + 1, dtype=np.int32), value, mask=value.is_null())
        elif plain:
            lists = pc.split_pattern(value, pattern, max_splits=splits)
        else:
            lists = pc.split_pattern_regex(value, made, max_splits=splits)
        return lists.cast(_TEXTS)

    sql = call.sql if len(call.parts) == 3 else f"{call.sql[:-1]}, -1)"
    return apply(split, [call.text(0)], _TEXTS, sql, on_arrays=True)


_TEXTS = pa.list_(STRING)


def _split_part(call: Call) -> Typed:
    call.takes(3, 3)
    delimiter, number = call.constant_text(1), call.constant_int(2)
    if number == 0:
        call.fail("parts are counted from 1, or from -1 at the end; there is no part 0")

    def part(value: pa.Array) -> pa.Array:
        if not delimiter:
            return value if number in (1, -1) else pc.if_else(pc.is_valid(value), "", value)
        # Behind the part that is wanted, nothing is split.
        lists = pc.split_pattern(value, delimiter, max_splits=number if number > 0 else None)
        starts, stops = lists.offsets.to_numpy()[:-1], lists.offsets.to_numpy()[1:]
        at = starts + number - 1 if number > 0 else stops + number
        outside = (at < starts) | (at >= stops)
        picked = lists.values.take(pa.array(np.where(outside, 0, at), mask=outside))
        return pc.if_else(pc.is_null(value), pa.scalar(None, STRING), pc.fill_null(picked, ""))

    return apply(part, [call.text(0)], STRING, call.sql, on_arrays=True)


# Measuring.


def _length(call: Call) -> Typed:
    call.takes(1, 1)
    if call.parts[0].type == BINARY:
        return apply(pc.binary_length, [call.parts[0]], INT, call.sql)
    return apply(pc.utf8_length, [call.text(0)], INT, call.sql)


def _octet_length(call: Call) -> Typed:
    call.takes(1, 1)
    part = call.parts[0]
    if part.type not in (STRING, BINARY):
        call.fail(f"it takes text or binary values, and {part.sql} is of type {type_name(part.type)}")
    return apply(pc.binary_length, [part], INT, call.sql)


FUNCTIONS: dict[str, Callable[[Call], Typed]] = {
    "concat": _concat,
    "concat_ws": _concat_ws,
    "substring": _substring,
    "substr": _substring,
    "left": _left,
    "right": _right,
    "trim": partial(_trim, pc.utf8_trim),
    "ltrim": partial(_trim, pc.utf8_ltrim),
    "rtrim": partial(_trim, pc.utf8_rtrim),
    "lpad": partial(_pad, pc.utf8_lpad),
    "rpad": partial(_pad, pc.utf8_rpad),
    "repeat": _repeat,
    "reverse": partial(_same_type, pc.utf8_reverse),
    "upper": partial(_case, pc.ascii_upper, str.upper),
    "ucase": partial(_case, pc.ascii_upper, str.upper),
    "lower": partial(_case, pc.ascii_lower, str.lower),
    "lcase": partial(_case, pc.ascii_lower, str.lower),
    "startswith": partial(_search, pc.starts_with),
    "endswith": partial(_search, pc.ends_with),
    "contains": partial(_search, pc.match_substring),
    "replace": _replace,
    "regexp_replace": _regexp_replace,
    "regexp_extract": _regexp_extract,
    "split": _split,
    "split_part": _split_part,
    "length": _length,
    "len": _length,
    "char_length": _length,
    "character_length": _length,
    "octet_length": _octet_length,
}
