"""How state of an earlier declaration is taken in: what is possible, that it is exact, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import declaring as tg
from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.state.descriptors import Descriptor
from tidegate.state.evolution import Changes, DeclaredState, Evolved, described, evolve
from tidegate.state.sections import StateInfo, StateKind
from tidegate.types import from_list, parse_type, to_list

LONG = pa.int64()


def conversion(
    old: pa.DataType, new: pa.DataType, *, changes: Changes | None = None
) -> Callable[[pa.Array], pa.Array] | None:
    """Return how arrays of one type become arrays of another in a state that isn't keyed; None if they stay as they are."""
    was, now = (StateInfo("s", StateKind.SPLIT, "list", pa.schema([pa.field("value", kind)])) for kind in (old, new))
    convert = evolve(was, DeclaredState(now, changes=changes or Changes())).convert
    if convert is None:
        return None
    return lambda array: convert(pa.RecordBatch.from_arrays([array], schema=was.schema)).column("value")


def converted(old: str, new: str, *values: Any, **changes: Any) -> list[Any]:
    convert = conversion(parse_type(old), parse_type(new), changes=Changes(**changes))
    assert convert is not None, f"{old} and {new} are no different types"
    array = convert(from_list(values, parse_type(old)))
    array.validate(full=True)
    assert array.type == parse_type(new)
    return to_list(array)


def refused(old: str, new: str, **changes: Any) -> str:
    with pytest.raises(RestoreError) as caught:
        conversion(parse_type(old), parse_type(new), changes=Changes(**changes))
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ what is possible


@pytest.mark.parametrize("same", ["long", "struct<a: long, b: array<map<string, decimal(5,2)>>>", "timestamp"])
def test_the_same_type_needs_no_conversion(same: str) -> None:
    assert conversion(parse_type(same), parse_type(same)) is None


INTEGERS = {"byte": 7, "short": 15, "int": 31, "long": 63}


@pytest.mark.parametrize(("old", "new"), [(old, new) for i, old in enumerate(INTEGERS) for new in list(INTEGERS)[i + 1 :]])
def test_an_integer_becomes_a_wider_one(old: str, new: str) -> None:
    ends = [-(2 ** INTEGERS[old]), -1, 0, None, 2 ** INTEGERS[old] - 1]
    assert converted(old, new, *ends) == ends


@pytest.mark.parametrize(
    ("old", "new"), [("byte", "float"), ("short", "float"), ("byte", "double"), ("short", "double"), ("int", "double")]
)
def test_an_integer_becomes_a_float_where_it_is_exact(old: str, new: str) -> None:
    ends = [-(2 ** INTEGERS[old]), None, 2 ** INTEGERS[old] - 1]
    assert repr(converted(old, new, *ends)) == repr([float(ends[0]), None, float(ends[2])])


def test_a_float_becomes_a_double() -> None:
    assert converted("float", "double", 0.5, float("inf"), None) == [0.5, float("inf"), None]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("decimal(5,2)", "decimal(7,2)"),
        ("decimal(5,2)", "decimal(7,4)"),
        ("decimal(5,2)", "decimal(38,20)"),
        ("decimal(37,0)", "decimal(38,1)"),
    ],
)
def test_a_decimal_becomes_a_wider_one(old: str, new: str) -> None:
    kind = parse_type(old)
    largest, least = (Decimal((sign, (9,) * kind.precision, -kind.scale)) for sign in (0, 1))
    assert converted(old, new, largest, least, None) == [largest, least, None]


def test_a_field_is_added_with_a_default_or_without() -> None:
    assert converted("struct<a: long>", "struct<a: long, b: string>", {"a": 1}, None) == [{"a": 1, "b": None}, None]
    assert converted("struct<a: long>", "struct<b: string, a: long>", {"a": 1}, None, added={"b": "x"}) == [
        {"b": "x", "a": 1},
        None,
    ]
    assert converted(
        "struct<a: long>",
        "struct<a: long, b: array<struct<c: int NOT NULL>> NOT NULL>",
        {"a": None},
        added={"b": [{"c": 1}]},
    ) == [{"a": None, "b": [{"c": 1}]}]


def test_a_field_is_dropped_and_fields_change_their_order() -> None:
    assert converted("struct<a: long, b: string, c: int>", "struct<c: int, a: long>", (1, "x", 2)) == [{"c": 2, "a": 1}]


def test_a_field_is_renamed_and_its_type_changed_at_once() -> None:
    assert converted("struct<a: int>", "struct<b: long>", (5,), None, renamed={"b": "a"}) == [{"b": 5}, None]


def test_a_rename_that_has_happened_is_no_matter() -> None:
    assert (
        conversion(parse_type("struct<b: long>"), parse_type("struct<b: long>"), changes=Changes(renamed={"b": "a"})) is None
    )
    assert converted("struct<b: int, a: long>", "struct<b: long, a: long>", (5, 6), renamed={"b": "a"}) == [{"b": 5, "a": 6}]


@pytest.mark.parametrize("renamed", [{"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}, {"in.x": "y", "in.y": "x"}])
def test_fields_that_take_each_other_s_names_are_refused(renamed: dict[str, str]) -> None:
    """By name they are what they were: nothing tells what was before the swap from what came after it."""
    with pytest.raises(JobError, match=r"take each other's names, .* Rename one of them to a third name"):
        tg.value("struct<a: long, b: long, c: long, in: struct<x: long, y: long>>", renamed=renamed)
    steps = {"a": "b", "b": "t"}  # what is left in the program when it was done in steps
    assert (
        conversion(
            parse_type("struct<a: long, b: long>"),
            parse_type("struct<a: long, b: long>"),
            changes=tg.value("struct<a: long, b: long>", renamed=steps).changes,
        )
        is None
    )


NEITHER = [
    (
        "struct<n: long>",
        "struct<amount: long>",
        {"amount": "m"},
        "value.amount: the snapshot has neither 'amount' nor 'm', "
        "its name in renamed=; it has 'n'. Give the name that the field had, or remove it from renamed= if it is new",
    ),
    ("struct<n: long>", "struct<n: long, amount: long NOT NULL>", {"amount": "N"}, "value.amount: the snapshot has neither"),
    (
        "struct<at: struct<x: int, y: int>>",
        "struct<place: struct<x: int, z: int>>",
        {"place": "at", "place.z": "at.y"},
        "value.place.z: the snapshot has neither 'z' nor 'at.y', its name in renamed=; it has 'x', 'y'.",
    ),
    ("array<struct<n: long>>", "array<struct<amount: long>>", {"amount": "m"}, "value.amount: the snapshot has neither"),
    ("map<string, struct<n: long>>", "map<string, struct<amount: long>>", {"amount": "m"}, "value.amount: the snapshot has"),
    (
        "array<map<string, struct<at: struct<x: int>>>>",
        "array<map<string, struct<at: struct<y: int>>>>",
        {"at.y": "z"},
        "value.at.y: the snapshot has neither 'y' nor 'z', its name in renamed=; it has 'x'.",
    ),
]


@pytest.mark.parametrize(("old", "new", "renamed", "told"), NEITHER)
def test_a_renamed_field_that_the_snapshot_has_under_neither_name_is_refused(
    old: str, new: str, renamed: dict[str, str], told: str
) -> None:
    """It would be null, and the value under the real name dropped."""
    problem = refused(old, new, renamed=renamed)
    assert problem.startswith(told) and problem.count("value.") == 1, problem


def test_a_renamed_field_of_a_struct_that_is_new_or_null_is_no_matter() -> None:
    assert converted("struct<n: long>", "struct<n: long, at: struct<y: int>>", (1,), renamed={"at.y": "x"}) == [
        {"n": 1, "at": None}
    ]
    assert converted(
        "struct<n: long, at: struct<x: int>>",
        "struct<n: long, at: struct<y: int>>",
        (1, None),
        (2, (3,)),
        renamed={"at.y": "x"},
    ) == [{"n": 1, "at": None}, {"n": 2, "at": {"y": 3}}]


@pytest.mark.parametrize(
    "make",
    [
        tg.value,
        tg.list_,
        tg.operator_list,
        lambda kind, **more: tg.map_("int", kind, **more),
        lambda kind, **more: tg.broadcast_map("int", kind, **more),
    ],
)
def test_no_shape_of_state_loses_a_field_by_a_wrong_name(make: Any) -> None:
    with pytest.raises(RestoreError, match=r"value\.b: the snapshot has neither 'b' nor 'c', .* it has 'a'\."):
        evolved(make("struct<a: int>"), make("struct<b: int>", renamed={"b": "c"}))
    renamed = evolved(make("struct<a: int>"), make("struct<b: int>", renamed={"b": "a"}))
    assert renamed.convert is not None and renamed.dropped == ()
    dropping = evolved(make("struct<a: int, b: struct<c: int, d: int>>"), make("struct<b: struct<d: long>>"))
    assert dropping.dropped == ("value.b.c", "value.a"), "what is let go is named"


def test_fields_inside_lists_maps_and_structs_are_reached_by_a_path() -> None:
    old = "array<map<string, struct<at: struct<x: int>, gone: string>>>"
    new = "array<map<string, struct<place: struct<x: long, y: long NOT NULL>>>>"
    assert converted(
        old,
        new,
        [{"k": {"at": {"x": 1}, "gone": "?"}, "null": None}, None],
        [],
        None,
        added={"place.y": 7},
        renamed={"place": "at"},
    ) == [[{"k": {"place": {"x": 1, "y": 7}}, "null": None}, None], [], None]


def test_the_number_that_is_a_map_s_key_becomes_wider() -> None:
    assert converted("map<int, float>", "map<long, double>", {1: 0.5, -1: None}, {}, None) == [{1: 0.5, -1: None}, {}, None]


def test_what_could_not_be_null_may_be() -> None:
    assert converted("struct<a: long NOT NULL>", "struct<a: long>", (1,)) == [{"a": 1}]


def test_a_part_of_an_array_is_converted_like_a_whole() -> None:
    old, new = (parse_type(f"array<struct<a: {number}, b: map<string, {number}>>>") for number in ("int", "long"))
    values = [[{"a": i, "b": {str(i): i}}, None] if i % 3 else None for i in range(20)]
    convert = conversion(old, new)
    assert convert is not None
    array = from_list(values, old)
    for start, stop in ((0, 20), (1, 5), (7, 7), (3, 20), (19, 20), (20, 20)):
        part = convert(array[start:stop])
        part.validate(full=True)
        assert to_list(part) == values[start:stop]


# ------------------------------------------------------------------------------------- random types, row by row


@dataclass
class Case:
    """Two types, what the declaration says, and what becomes of a Python value."""

    old: pa.DataType
    new: pa.DataType
    expected: Callable[[Any], Any]
    values: st.SearchStrategy[Any]
    added: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def ints(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2**bits), 2**bits - 1)


LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any], list[tuple[pa.DataType, Callable[[Any], Any]]]]] = [
    (pa.int8(), ints(7), [(pa.int16(), int), (pa.int64(), int), (pa.float32(), float)]),
    (pa.int16(), ints(15), [(pa.int32(), int), (pa.float64(), float)]),
    (pa.int32(), ints(31), [(pa.int64(), int), (pa.float64(), float)]),
    (pa.int64(), ints(63), []),
    (pa.float32(), st.floats(width=32, allow_nan=False), [(pa.float64(), float)]),
    (pa.decimal128(6, 2), st.decimals(-9999, 9999, places=2), [(pa.decimal128(9, 3), Decimal)]),
    (pa.string(), st.text(max_size=3), [(pa.large_string(), str)]),
    (pa.bool_(), st.booleans(), []),
    (pa.date32(), st.dates(), []),
]


@st.composite
def leaf_cases(draw: Any, path: str) -> Case:
    old, values, wider = draw(st.sampled_from(LEAVES))
    new, expected = draw(st.sampled_from([(old, lambda value: value), *wider]))
    return Case(old, new, lambda value: None if value is None else expected(value), values)


@st.composite
def cases(draw: Any, path: str = "", depth: int = 3) -> Case:
    kind = draw(st.sampled_from(["leaf", "list", "map", "struct", "struct"] if depth else ["leaf"]))
    if kind == "leaf":
        leaf: Case = draw(leaf_cases(path))
        return leaf
    if kind == "struct":
        struct: Case = draw(struct_cases(path, depth))
        return struct
    inner: Case = draw(cases(path, depth - 1))
    items = st.none() | inner.values
    if kind == "list":
        return Case(
            pa.list_(inner.old),
            pa.list_(inner.new),
            lambda value: None if value is None else [inner.expected(item) for item in value],
            st.lists(items, max_size=3),
            inner.added,
            inner.renamed,
        )
    wider = draw(st.booleans())
    return Case(
        pa.map_(pa.int32(), inner.old),
        pa.map_(pa.int64() if wider else pa.int32(), inner.new),
        lambda value: None if value is None else {key: inner.expected(item) for key, item in value.items()},
        st.dictionaries(ints(31), items, max_size=3),
        inner.added,
        inner.renamed,
    )


@st.composite
def struct_cases(draw: Any, path: str, depth: int) -> Case:
    old: list[pa.Field] = []
    new: list[pa.Field] = []
    added: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    values: dict[str, st.SearchStrategy[Any]] = {}
    parts: list[tuple[str, Callable[..., Any]]] = []  # the first argument is the old row
    for index in range(draw(st.integers(1, 4))):
        fate = draw(st.sampled_from(["kept", "kept", "renamed", "dropped", "added", "added with a default"]))
        before, after = f"f{index}", f"new{index}" if fate == "renamed" else f"f{index}"
        at = f"{path}.{after}" if path else after
        inner: Case = draw(cases(at, depth - 1))
        if not fate.startswith("added"):
            required = draw(st.booleans())
            old.append(pa.field(before, inner.old, nullable=not required))
            values[before] = inner.values if required else st.none() | inner.values
        if fate == "added":
            new.append(pa.field(after, inner.new))
            parts.append((after, lambda value: None))
        elif fate == "added with a default":
            default = to_list(from_list([inner.expected(draw(inner.values))], inner.new))[0]
            new.append(pa.field(after, inner.new, nullable=draw(st.booleans()) or default is None))
            added[at] = default
            parts.append((after, lambda value, default=default: default))
        elif fate != "dropped":
            new.append(pa.field(after, inner.new, nullable=old[-1].nullable or draw(st.booleans())))
            added |= inner.added
            renamed |= inner.renamed | ({at: before} if fate == "renamed" else {})
            parts.append((after, lambda value, before=before, inner=inner: inner.expected(value[before])))
    if not old:
        old, values = [pa.field("only", pa.int8())], {"only": ints(7)}
    order = draw(st.permutations(range(len(new))))
    return Case(
        pa.struct(old),
        pa.struct([new[index] for index in order]),
        lambda value: None if value is None else {parts[index][0]: parts[index][1](value) for index in order},
        st.fixed_dictionaries(values),
        added,
        renamed,
    )


@settings(max_examples=300)
@given(cases(), st.data())
def test_rows_are_what_python_would_make_of_them(case: Case, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | case.values, max_size=6))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(values)), st.integers(0, len(values)))))
    convert = conversion(case.old, case.new, changes=Changes(case.added, case.renamed))
    assert (convert is None) == case.old.equals(case.new)
    array = from_list(values, case.old)[start:stop]
    after = array if convert is None else convert(array)
    after.validate(full=True)
    assert after.type == case.new
    assert to_list(after) == [case.expected(value) for value in values[start:stop]]


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("long", "int"),
        ("int", "float"),
        ("long", "double"),
        ("long", "float"),
        ("double", "float"),
        ("double", "long"),
        ("float", "int"),
        ("decimal(5,2)", "decimal(5,3)"),
        ("decimal(5,2)", "decimal(6,4)"),
        ("decimal(5,2)", "decimal(5,1)"),
        ("int", "decimal(20,0)"),
        ("decimal(5,0)", "long"),
    ],
)
def test_a_number_that_could_lose_something_is_refused(old: str, new: str) -> None:
    assert refused(old, new) == f"value: {old} can't become {new}, which can't hold all of its numbers"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("long", "string"),
        ("string", "long"),
        ("date", "timestamp"),
        ("timestamp", "timestamp_ntz"),
        ("string", "binary"),
        ("boolean", "int"),
        ("array<long>", "long"),
        ("long", "array<long>"),
        ("array<long>", "map<long,long>"),
        ("struct<a: long>", "long"),
        ("map<string,long>", "struct<a: long>"),
    ],
)
def test_another_kind_of_type_is_refused(old: str, new: str) -> None:
    assert refused(old, new) == f"value: {old} can't become {new}"


def test_types_that_differ_for_arrow_alone_are_shown_as_arrow_does() -> None:
    with pytest.raises(RestoreError, match=r"value: large_string can't become string"):
        conversion(pa.large_string(), pa.string())
    with pytest.raises(RestoreError, match=r"timestamp\[us, tz=UTC\] can't become timestamp\[ms, tz=UTC\]"):
        conversion(pa.timestamp("us", tz="UTC"), pa.timestamp("ms", tz="UTC"))


def test_a_refusal_says_where_and_tells_all() -> None:
    told = refused(
        "struct<items: array<struct<price: long, n: int>>, at: map<long, string>>",
        "struct<items: array<struct<price: int, n: string>>, at: map<int, string>>",
    )
    assert told.split("; ") == [
        "value.items.price: long can't become int, which can't hold all of its numbers",
        "value.items.n: int can't become string",
        "value.at: long can't become int, which can't hold all of its numbers",
    ]


def test_what_could_be_null_may_not_be_required() -> None:
    assert refused("struct<a: long>", "struct<a: long NOT NULL>") == "value.a: it could be null, and is NOT NULL now"
    required = pa.list_(pa.field("item", pa.int64(), nullable=False))
    with pytest.raises(RestoreError, match="value: an item could be null"):
        conversion(pa.list_(pa.int64()), required)
    with pytest.raises(RestoreError, match="value: a value could be null"):
        conversion(pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)))


def test_a_new_field_that_can_t_be_null_needs_a_default() -> None:
    told = refused("struct<a: struct<x: long>>", "struct<a: struct<x: long, b: long NOT NULL>>")
    assert told == "value.a.b: it is new and NOT NULL: give it a default, added={'a.b': …}"


def test_a_field_and_its_old_name_can_t_both_be_it() -> None:
    assert "the snapshot has both 'b' and its old name 'a'" in refused(
        "struct<a: long, b: long>", "struct<b: long>", renamed={"b": "a"}
    )
    assert refused("struct<a: long>", "struct<a: long, b: long>", renamed={"b": "a"}) == (
        "value.b: two fields are to be the old 'a'"
    )


def test_the_key_of_a_map_keeps_its_fields() -> None:
    assert refused("map<struct<a: int>, long>", "map<struct<a: int, b: int>, long>").endswith("as the key of a map")


# --------------------------------------------------------------------------------------------------- whole states


def evolved(old: Descriptor, new: Descriptor, *, key: pa.DataType = LONG, new_key: pa.DataType | None = None) -> Evolved:
    for declared in (old, new):
        declared.name = declared.name or "s"
    old_key = key if old.kind is StateKind.KEYED else None
    now = new.info((new_key or key) if new.kind is StateKind.KEYED else None)
    return evolve(old.info(old_key), DeclaredState(now, new.aliases, new.changes, new.pickled))


def rows_of(declared: Descriptor, *values: Any, key: pa.DataType = LONG, keys: Any = None) -> pa.RecordBatch:
    declared.name = declared.name or "s"
    keyed = declared.kind is StateKind.KEYED
    info = declared.info(key if keyed else None)
    columns = [from_list(keys or list(range(len(values))), key)] if keyed else []
    return pa.RecordBatch.from_arrays([*columns, from_list(values, declared.type)], schema=info.schema)


@pytest.mark.parametrize(
    ("old", "new", "before", "after", "notes"),
    [
        (tg.value("int"), tg.value("long"), 1, 1, ("value int → long",)),
        (
            tg.value("struct<a: int>"),
            tg.value("struct<a: int, b: string>", added={"b": "x"}),
            {"a": 1},
            {"a": 1, "b": "x"},
            ("value.b added ('x')",),
        ),
        (
            tg.list_("struct<a: int>"),
            tg.list_("struct<b: long>", renamed={"b": "a"}),
            [{"a": 1}],
            [{"b": 1}],
            ("value.b was 'a'", "value.b int → long"),
        ),
        (
            tg.map_("int", "struct<a: int, c: int>"),
            tg.map_("long", "struct<a: int>"),
            {1: {"a": 1, "c": 2}},
            {1: {"a": 1}},
            ("value int → long", "value.c dropped"),
        ),
        (tg.reducing("int", max), tg.reducing("double", max), 3, 3.0, ("value int → double",)),
        (
            tg.aggregating("struct<n: int>", create=dict, add=max),
            tg.aggregating("struct<n: long>", create=dict, add=max),
            {"n": 1},
            {"n": 1},
            ("value.n int → long",),
        ),
        (
            tg.operator_list("struct<a: int>"),
            tg.operator_list("struct<a: int, b: int>", added={"b": 2}),
            {"a": 1},
            {"a": 1, "b": 2},
            ("value.b added (2)",),
        ),
        (
            tg.operator_list("struct<a: int>", redistribute="union"),
            tg.operator_list("struct<b: int, c: int>", redistribute="union", renamed={"b": "a"}, added={"c": 2}),
            {"id": "1-0-0", "item": {"a": 1}},
            {"id": "1-0-0", "item": {"b": 1, "c": 2}},
            ("value.b was 'a'", "value.c added (2)"),
        ),
        (
            tg.broadcast_map("int", "struct<a: int>"),
            tg.broadcast_map("long", "struct<a: long, c: int>", added={"c": 2}),
            {"key": 5, "value": {"a": 1}},
            {"key": 5, "value": {"a": 1, "c": 2}},
            ("value.key int → long", "value.a int → long", "value.c added (2)"),
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, Descriptor) else "",
)
def test_every_shape_evolves(old: Descriptor, new: Descriptor, before: Any, after: Any, notes: tuple[str, ...]) -> None:
    found = evolved(old, new)
    assert found.convert is not None and found.notes == notes
    rows = found.convert(rows_of(old, before, before))
    rows.validate(full=True)
    assert to_list(rows.column("value")) == [after, after]
    assert rows.schema == new.info(pa.int64() if new.kind is StateKind.KEYED else None).schema


def test_a_refusal_inside_operator_state_names_the_user_s_own_fields() -> None:
    shapes: list[Callable[[str], Descriptor]] = [
        lambda item: tg.operator_list(item, redistribute="union"),
        lambda item: tg.broadcast_map("string", item),
    ]
    for declare in shapes:
        with pytest.raises(RestoreError, match=r"^value\.a: long can't become int"):
            evolved(declare("struct<a: long>"), declare("struct<a: int>"))
        with pytest.raises(RestoreError, match=r"^value: long can't become int"):
            evolved(declare("long"), declare("int"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (tg.value("long"), tg.list_("long"), "a keyed value can't become a keyed list"),
        (tg.value("long"), tg.reducing("long", max), "a keyed value can't become a keyed reducing"),
        (tg.list_("long"), tg.operator_list("long"), "a keyed list can't become a split list"),
        (tg.operator_list("long"), tg.operator_list("long", redistribute="union"), "a split list can't become a union list"),
    ],
)
def test_a_state_keeps_its_shape_and_kind(old: Descriptor, new: Descriptor, told: str) -> None:
    with pytest.raises(RestoreError, match=told):
        evolved(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int", "long"),
        ("string", "long"),
        ("struct<a: int, b: int>", "struct<a: int>"),
        ("struct<a: int>", "struct<a: long>"),
    ],
)
def test_a_key_keeps_its_type(old: str, new: str) -> None:
    with pytest.raises(RestoreError, match=r"its key was .* and is now .*not even to a wider one.*its hash"):
        evolved(tg.value("long"), tg.value("long"), key=parse_type(old), new_key=parse_type(new))


def test_the_columns_of_a_key_may_be_renamed_and_not_swapped() -> None:
    old, new = parse_type("struct<a: long, b: long NOT NULL>"), parse_type("struct<x: long, b: long>")
    found = evolved(tg.value("long"), tg.value("long"), key=old, new_key=new)
    assert found.notes == ("key columns a, b → x, b",) and found.convert is not None
    rows = found.convert(rows_of(tg.value("long"), 5, key=old, keys=[{"a": 1, "b": 2}]))
    assert to_list(rows.column("key")) == [{"x": 1, "b": 2}] and rows.schema.field("key").type == new
    with pytest.raises(RestoreError, match=r"in the order \['a', 'b'\] and are now in the order \['b', 'a'\]"):
        evolved(
            tg.value("long"),
            tg.value("long"),
            key=parse_type("struct<a: long, b: long>"),
            new_key=parse_type("struct<b: long, a: long>"),
        )


def test_when_values_expire_is_passed_on_as_the_snapshot_has_it() -> None:
    plain, mortal = tg.value("int", name="s"), tg.value("int", name="s", ttl="1 day")
    wider, wider_mortal = tg.value("long", name="s"), tg.value("long", name="s", ttl="1 day")
    rows = {False: [{"key": 1, "value": 2}], True: [{"key": 1, "value": 2, "expires": 5}]}
    for old, new, notes in (
        (plain, wider, ()),
        (mortal, wider_mortal, ()),
        (plain, wider_mortal, ("has a ttl now",)),
        (mortal, wider, ("has no ttl any more",)),
    ):
        found = evolved(old, new)
        assert found.convert is not None and found.notes == ("value int → long", *notes)
        before = pa.RecordBatch.from_pylist(rows[old is mortal], schema=old.info(LONG).schema)
        assert found.convert(before).to_pylist() == rows[old is mortal]
        assert found.convert(before).schema.field("value").type == LONG
    assert evolved(plain, mortal) == Evolved(notes=("has a ttl now",))


def test_states_are_described_for_people() -> None:
    assert described("keyed", "map", tg.map_("string", "int", name="s").info(pa.int64()).schema) == (
        "keyed map map<string,int> by long"
    )
    assert described("split", "list", pa.schema([("value", pa.string())])) == "split list string"


# ----------------------------------------------------------------------------------------- what a user declares


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (dict(added={"c": 1}), r"added=\{'c': …\}.* has no such field; it has 'a', 'b', 'b\.x'"),
        (dict(renamed={"b.y": "z"}), r"renamed=\{'b\.y': …\}.* has no such field"),
        (dict(added={"a": 1}, renamed={"a": "z"}), "'a' is both in added= and in renamed="),
        (dict(added={"a": "one"}), r"added=\{'a': 'one'\}.*'long'.*'one'"),
        (dict(added={"b.x": None}), "NOT NULL, so None can't be its default"),
        (dict(renamed={"a": "a"}), "give the name that the field had before"),
        (dict(renamed={"a": 5}), "give the name that the field had before"),
    ],
)
def test_what_is_said_of_fields_is_checked_where_it_is_written(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        tg.value("struct<a: long, b: array<struct<x: int NOT NULL>>>", **arguments)


def test_a_type_without_fields_has_none_to_add() -> None:
    with pytest.raises(JobError, match=r"the type long has no such field; it has no fields"):
        tg.operator_list("long", added={"a": 1})
    assert issubclass(SchemaError, JobError)


def test_the_info_of_a_snapshot_is_not_touched_by_what_is_said_of_fields() -> None:
    plain = tg.value("struct<a: long>", name="s")
    evolving = tg.value("struct<a: long>", name="s", added={"a": 1}, alias="t")
    assert (
        plain.info(pa.int64())
        == evolving.info(pa.int64())
        == StateInfo(
            "s", StateKind.KEYED, "value", pa.schema([("key", pa.int64()), ("value", parse_type("struct<a: long>"))])
        )
    )
