"""What `compile_expression` says before a record has come: types, names, columns, and errors with their position."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tidegate.errors import ExpressionError, SchemaError
from tidegate.expressions import compile_expression
from tidegate.types import ddl_of, parse_schema

SCHEMA = parse_schema(
    "auction long not null, price double, category string, day date, ts timestamp, tags array<string>, "
    "seller struct<id:long,city:string>, total decimal(10,2), small int"
)


@pytest.mark.parametrize(
    ("text", "name", "type"),
    [
        ("price", "price", "double"),
        ("PRICE", "PRICE", "double"),
        ("price * 0.9 AS euros", "euros", "double"),
        ("price * 0.9", "(price * 0.9)", "double"),
        ("seller.city", "city", "string"),
        ("auction / 2", "(auction / 2)", "double"),
        ("auction div 2", "(auction div 2)", "long"),
        ("small + 1", "(small + 1)", "int"),
        ("small + 1L", "(small + 1)", "long"),
        ("total * 2", "(total * 2)", "decimal(12,2)"),
        ("total / 3", "(total / 3)", "decimal(14,6)"),
        ("total * CAST(total AS decimal(30,2))", "(total * CAST(total AS DECIMAL(30,2)))", "decimal(38,4)"),
        ("total + 0.125", "(total + 0.125)", "decimal(12,3)"),
        ("price > 100 AND category = 'x'", "((price > 100) AND (category = x))", "boolean"),
        ("upper(category)", "upper(category)", "string"),
        ("day + 7", "date_add(day, 7)", "date"),
        ("day + INTERVAL 7 DAYS", "day + INTERVAL '7' DAY", "date"),
        ("day + INTERVAL 7 HOURS", "day + INTERVAL '7' HOUR", "timestamp"),
        ("CAST(auction AS string)", "auction", "string"),
        ("struct(auction, price * 2 AS twice) AS both", "both", "struct<auction: long NOT NULL, twice: double>"),
    ],
)
def test_a_column_has_sparks_name_and_type(text: str, name: str, type: str) -> None:
    compiled = compile_expression(text, SCHEMA)
    assert (compiled.name, ddl_of(compiled.type)) == (name, type)


def test_an_expression_says_which_columns_it_reads_and_whether_it_may_be_null() -> None:
    assert compile_expression("price > 1 AND seller.id = auction", SCHEMA).columns == ("auction", "price", "seller")
    assert not compile_expression("auction + 1", SCHEMA).nullable
    assert compile_expression("auction + small", SCHEMA).nullable
    assert not compile_expression("coalesce(price, 0)", SCHEMA).nullable


def test_names_that_differ_in_case_are_different_columns() -> None:
    schema = parse_schema("a long, A long, b long")
    assert compile_expression("a + B", schema).columns == ("a", "b")
    assert compile_expression("A", schema).columns == ("A",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prize > 1", r"unknown column 'prize' \(did you mean 'price'\?\); the columns are auction, .*position 0"),
        ("1 + prize", r"position 4\)\n    1 \+ prize\n        \^$"),
        ("seller.town", "unknown field 'town'; the fields are id, city"),
        ("price.x", "price is of type double and has no field 'x'"),
        ("foo(price)", r"function 'foo' is not supported; .*position 0"),
        ("uper(category)", "did you mean upper"),
        ("explode(array(1, 2))", r"function 'explode' is not supported; .* the operator .explode\(…\)"),
        ("from_unixtime(auction)", "use timestamp_seconds"),
        ("window(ts, '1 minute')", r"windows are operators: key_by\(…\).window\(tg.tumbling"),
        ("count(*)", r"for count\(\*\) use aggregate"),
        ("sum(price)", "an aggregate needs several records"),
        ("now()", "make it in the source"),
        ("price + category", r"\+ takes numbers, and category is of type string; use CAST"),
        ("auction = 'x'", "long can't be compared with string"),
        ("price >", "an operand of > is missing"),
        ("price 1", "there is '1' where the expression should end"),
        ("price, auction", "there is ','"),
        ("", "it is empty"),
        ("a = 'x", "left open"),
        ("NOT price", "a condition is needed, and price is of type double"),
        ("*", "write the names of the columns"),
        ("(SELECT 1)", "a subquery"),
        ("row_number() OVER (PARTITION BY price)", "a window function needs all rows"),
        ("filter(tags, x -> x > 1)", "functions with -> are not supported"),
        ("ts - ts", "an interval, which can't be a column"),
        ("NULL", "its type isn't known"),
        ("upper(price)", "argument 1 has to be string, and price is of type double"),
        ("substring(category, small)", "argument 2 has to be a constant, and it is small"),
        ("upper(category, category)", "it takes 1 arguments, and there are 2"),
        ("category RLIKE 'a(?=b)'", r"\(\?= in the pattern"),
        ("category RLIKE '('", "can't be used: .*missing"),
        ("DATE '2020-02-30'", "'2020-02-30' can't be cast to date"),
        ("CAST(tags AS int)", r"array<string> can't be cast to int"),
        ("'a' || 1 + 2", "put parentheses around the operands of ||"),
        ("price = auction < 3", "put parentheses around comparisons"),
        ("total div 3", "div takes integers, and total is of type"),
        ("seller:city", "a field is written seller.city"),
        ("category LIKE ANY ('a', 'b')", "LIKE ANY .* is not supported|Any|ANY"),
        ("price BETWEEN SYMMETRIC 1 AND 2", "is not supported"),
        ("upper(DISTINCT category)", "DISTINCT category is not supported"),
        ("'it''s'", "two texts side by side"),
    ],
)
def test_an_error_names_what_is_wrong_where_it_is_and_what_there_is_instead(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message) as raised:
        compile_expression(text, SCHEMA)
    assert text in str(raised.value)


def test_what_is_not_text_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"an expression is text in Spark's SQL dialect, .* not 7"):
        compile_expression(7, SCHEMA)  # type: ignore[arg-type]


def test_an_expression_travels_as_its_text_and_its_schema() -> None:
    batch = pa.record_batch({"n": [1, None, 3]})
    there = pickle.loads(pickle.dumps(compile_expression("n * 2 AS twice", batch.schema)))
    assert (there.name, there(batch).to_pylist()) == ("twice", [2, None, 6])


def test_a_value_that_does_not_exist_is_an_error_that_names_the_expression_and_the_row() -> None:
    batch = pa.record_batch({"n": [1, 2, 0, 4], "max": [2**63 - 1, 0, 0, 0], "s": list("abcd")})
    divided = compile_expression("10 / n", batch.schema)
    with pytest.raises(ExpressionError, match=r"division by zero, in \(10 / n\)"):
        divided(batch)
    assert divided.first_failing(batch) == 2
    with pytest.raises(ExpressionError, match=r"overflow of the type long, in \(max \+ n\)"):
        compile_expression("max + n", batch.schema)(batch)
    with pytest.raises(ExpressionError, match="'xa' can't be cast to int, in CAST"):
        compile_expression("CAST(concat('x', s) AS int)", batch.schema)(batch)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("CASE WHEN n = 0 THEN 0 ELSE 10 / n END", [5.0, 0.0, None]),
        ("CASE n WHEN 0 THEN 0 ELSE 10 / n END", [5.0, 0.0, None]),
        ("IF(n = 0, -1, 10 / n)", [5.0, -1.0, None]),
        ("n <> 0 AND 10 / n > 4", [True, False, None]),
        ("n = 0 OR 10 / n > 4", [True, True, None]),
        ("coalesce(nullif(n, 0), 10 div (n - 2))", [2, -5, None]),
    ],
)
def test_a_branch_is_computed_only_for_the_rows_that_take_it(text: str, values: list[object]) -> None:
    batch = pa.record_batch({"n": pa.array([2, 0, None], pa.int64())})
    assert compile_expression(text, batch.schema)(batch).to_pylist() == values


def test_encodings_of_arrow_are_read_as_sparks_types_and_a_column_as_it_is_keeps_its_own() -> None:
    words = pa.array(["x", None, "y"])
    batch = pa.record_batch(
        {
            "dictionary": words.dictionary_encode(),
            "large": words.cast(pa.large_string()),
            "seconds": pa.array([1, None, -1], pa.timestamp("s", "UTC")),
        }
    )
    assert compile_expression("dictionary", batch.schema)(batch).equals(batch["dictionary"])
    assert compile_expression("dictionary = 'x'", batch.schema)(batch).to_pylist() == [True, None, False]
    assert compile_expression("large || dictionary", batch.schema)(batch).to_pylist() == ["xx", None, "yy"]
    assert compile_expression("unix_micros(seconds)", batch.schema)(batch).to_pylist() == [10**6, None, -(10**6)]


def test_a_slice_of_a_batch_and_an_empty_one_are_computed_like_others() -> None:
    batch = pa.record_batch(
        {"n": pa.array([1, None, 3, 4]), "tags": pa.array([["a"], None, ["b", None], ["c"]]), "s": ["a", "b", "c", "d"]}
    )
    for text in ("n % 2", "tags[0]", "array_contains(tags, 'b')", "split_part(s, 'c', 1)", "round(n / 3, 1)", "10 / n"):
        compiled = compile_expression(text, batch.schema)
        whole = compiled(batch).to_pylist()
        assert compiled(batch.slice(2, 2)).to_pylist() == whole[2:]
        assert compiled(batch.slice(0, 0)).to_pylist() == []


@pytest.mark.parametrize(
    "text",
    [
        "s = 'x'",
        "s > 'x'",
        "s LIKE 'x%'",
        "s IN ('x', 'yy')",
        "s IN ('x', NULL)",
        "s IS NULL",
        "s <=> 'x'",
        "upper(s) || '!'",
        "length(s) + 1",
        "coalesce(s, 'none')",
        "split(s, 'y')",
        "CASE WHEN s = 'x' THEN 1 ELSE 2 END",
        "xxhash64(s)",
        "s || s",
        "try_cast(s AS int)",
    ],
)
def test_a_dictionary_has_the_values_of_its_texts(text: str) -> None:
    words = pa.array(["x", None, "yy", "7", "x", "x", None, "yy"] * 3)
    entries = pa.array(["7", "x", "unused", "yy", None])
    of_plain = pa.record_batch([words], names=["s"])
    encoded = pa.DictionaryArray.from_arrays(pc.index_in(words, entries.slice(0, 4)), entries)
    with_null_entry = pa.DictionaryArray.from_arrays(pc.index_in(words, entries), entries)
    expected = compile_expression(text, of_plain.schema)(of_plain)
    for column in (encoded, with_null_entry, encoded.slice(5), words.dictionary_encode()):
        batch = pa.record_batch([column], names=["s"])
        assert compile_expression(text, batch.schema)(batch).to_pylist() == expected.to_pylist()[-len(column) :]


def test_an_entry_of_a_dictionary_that_no_record_has_is_no_error() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([1, 1, 1], pa.int8()), pa.array(["no number", "7"]))
    batch = pa.record_batch([column], names=["s"])
    assert compile_expression("CAST(s AS int) + 1", batch.schema)(batch).to_pylist() == [8, 8, 8]
