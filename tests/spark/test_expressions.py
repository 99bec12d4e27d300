"""Expressions against Spark SQL itself: the same texts over the same data, in ANSI mode and with UTC as the time zone.

`EQUAL` is computed by both, and names, types and values are the same. `FAILING` has no value for some record, in both.
`NEAR` may differ in the last digit, since Java and C compute these functions separately.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tidegate.errors import ExpressionError, SchemaError
from tidegate.expressions import compile_expression
from tidegate.expressions.functions import names
from tidegate.types import ddl_of, parse_schema

SCHEMA = parse_schema(
    "n int, m int, l long, b byte, sh short, f float, d double, e double, flag boolean, dec decimal(10,2), "
    "wide decimal(30,10), s string, t string, num string, day date, day2 date, ts timestamp, ts2 timestamp, "
    "a array<int>, sa array<string>, st struct<x:int,y:struct<z:string>>, bin binary"
)
NAN, INF = math.nan, math.inf
MIN, MAX = -(2**63), 2**63 - 1


def numbers(text: str) -> list[Decimal | None]:
    """Read values with spaces between them; - is null."""
    return [None if each == "-" else Decimal(each) for each in text.split()]


def days(text: str) -> list[date | None]:
    return [None if each == "-" else date.fromisoformat(each) for each in text.split()]


def times(text: str) -> list[datetime | None]:
    return [None if each == "-" else datetime.fromisoformat(each).replace(tzinfo=UTC) for each in text.split()]


_ROWS: dict[str, list[Any]] = {
    "n": [0, 1, -1, 7, -7, 3, 100, 2, None, 5, -100, 12],
    "m": [1, 2, 3, -2, 5, None, 7, 3, 4, -3, 9, 12],
    "l": [MIN, MAX, 0, 1, -1, 10**15, -(10**15), 2**53 + 1, None, 86_400, -1_500, 7],
    "b": [-128, 127, 0, 1, None, 5, -5, 2, 3, 4, 5, 6],
    "sh": [-32768, 32767, 0, 1, 2, None, -5, 2, 3, 4, 5, 6],
    "f": [0.0, -0.0, NAN, INF, -INF, 1.5, -2.5, 3.4e38, 1e-45, None, 0.1, 16777216.0],
    "d": [NAN, 0.0, -0.0, INF, -INF, 2.5, -2.5, 1e300, 5e-324, 0.1, None, 123456.789],
    "e": [NAN, -0.0, 1.0, -INF, 2.0, 2.675, 1.005, -1.005, 0.5, -0.5, 1e15, None],
    "flag": [True, False, None, True, False, True, False, None, True, True, False, True],
    "dec": numbers("0.00 1.25 -1.25 99999999.99 -99999999.99 0.05 -0.05 2.50 3.5 - 10.15 -0.01"),
    "wide": numbers(
        "0 1.0000000001 -1.5 12345678901234567890.1234567890 0.5 -0.5 1.5 2.5 - 0.0000000001 "
        "-99999999999999999999.9999999999 7"
    ),
    "s": ["", "abc", "Straße", "日本語", "😀 x😀", "a,b,,c", "ABC abc", None, "a%b_c", "line1\nline2\n", "  pad  ", "İıŞß"],
    "t": ["abc", "b", "ß", "本", "😀", ",", "abc", "x", None, "line", " ", "i"],
    "num": ["0", " 12 ", "+7", "-7", "007", "127", "-128", "99", None, "1", "42", "\t5\n"],
    "day": days(
        "1970-01-01 1969-12-31 2024-02-29 2023-12-31 0001-01-01 9999-12-31 2000-01-31 - 1900-02-28 2021-01-03 2020-12-28 "
        "1582-10-04"
    ),
    "day2": days(
        "2024-05-06 2020-01-01 1999-12-31 2023-12-31 0002-03-04 9998-01-01 - 2000-01-01 1900-03-01 2021-01-04 2020-12-28 "
        "1582-10-15"
    ),
    "ts": times(
        "1970-01-01T00:00:00 1969-12-31T23:59:59.999999 2024-02-29T12:34:56.789000 2023-12-31T23:00:00.000001 "
        "0001-01-01T00:00:00 9999-12-31T23:59:59.999999 - 2000-01-31T01:02:03.120000 1900-03-01T00:00:00 "
        "2021-01-03T05:00:00.000100 1582-10-04T23:59:59 1234-05-06T07:08:09"
    ),
    "ts2": [*[datetime(2024, 2, 29, 12, 34, 56, 788_999, tzinfo=UTC)] * 11, None],
    "a": [[1, 2, 3], [], None, [None], [1, None], [5, 5], [7], [3], [100], [5, 6], [-100], [0]],
    "sa": [["x", "y"], [], None, [None], ["", None], ["abc"], ["é"], ["x"], ["x"], ["x"], ["y"], ["z"]],
    "st": [
        *({"x": index, "y": {"z": str(index)}} for index in range(8)),
        *(None, {"x": None, "y": None}, {"x": 1, "y": {"z": None}}, {"x": 1, "y": {"z": ""}}),
    ],
    "bin": [b"", b"abc", b"\xff\x00", None, b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"],
}
BATCH = pa.record_batch([pa.array(_ROWS[field.name], field.type) for field in SCHEMA], schema=SCHEMA)

EQUAL = r"""
n
st.x
st.y.z
s AS `an alias`
n + m
n - 1
n * m
n / 4
n div 4
n % 3
-n
+n
n % -3
mod(n, 4)
pmod(n, 4)
pmod(n, 3)
b + n
sh + n
b * n
l % 1000
n + 1L
n + 1.5
n * 0.908
d + 1
d - d
d * 2.5
d / 3
d / 0.1D
f + 1
f * d
f + n
f + f
d % 2
f % 2
-d
-f
dec + 1
dec + n
dec - 0.125
dec * 2
dec * 0.9
dec + dec
dec * dec
-dec
dec + d
dec / 3
n / 2.5
1.5 / nullif(dec, 0)
wide / 7
1 / nullif(wide, 0)
dec / nullif(wide, 0)
wide * dec
wide + CAST(dec AS decimal(38,1))
wide - CAST(n AS decimal(38,18))
dec % 0.3
wide % 7
n % 1.5
mod(dec, 3)
dec / 0.3D
wide + 1
1 + 2 * 3
1.50
1e3
2147483648
-2147483648
99999999999999999999
.5
1L
1.5D
2BD
7S
7Y
TRUE
CAST(NULL AS int)
n + NULL
n > 1
n >= m
n < m
n <= 0
n = m
n <> m
n != 1
n == 1
n <=> NULL
n <=> m
d = e
d > e
d >= e
d < e
d <= e
d = d
d <=> e
d > 0
d >= 0
d < 0
d <= 0
d = 0
d > f
f = 0.1
f > 1
d > n
l > d
l > 1.5
dec > 1
dec = 1.25
dec > d
wide > dec
s > t
s = 'abc'
s < 'b'
'abc' = s
bin = bin
bin > bin
flag = TRUE
flag > FALSE
day > day2
day = '2023-12-31'
day >= DATE '1970-01-01'
ts > '2000-01-01'
ts = TIMESTAMP '1970-01-01 00:00:00'
ts >= ts2
ts > day
n > 1 AND m > 1
n > 1 OR m > 1
NOT n > 1
NOT flag
flag AND NULL
flag OR NULL
flag AND n > 0 OR m > 3
n > 0 AND (m > 3 OR flag)
n <> 0 AND 10 / n > 1
n = 0 OR 10 / n > 1
flag AND n IS NULL
NOT n IS NULL
n > 1 IS NULL
n = m IS NOT NULL OR flag
n + 1 IS NOT NULL
NOT flag OR n > 1 AND flag
n BETWEEN 1 AND 2 AND flag
n BETWEEN 1 AND 1 + 1 OR flag
s || t LIKE 'a%'
2 - 1 - 1
8 / 4 / 2
7 * 3 div 2 % 4
-n + m * -2
n IN (1, 2, 3)
n IN (1, NULL)
n NOT IN (1, 7)
n IN (m, 7)
n IN (1, 1.5, 7)
s IN ('abc', '')
d IN (2.5D, CAST('NaN' AS double), 0.0D)
day IN (DATE '1970-01-01')
n BETWEEN 1 AND 7
n NOT BETWEEN m AND 7
d BETWEEN 0 AND 3
s BETWEEN 'a' AND 'b'
day BETWEEN '1970-01-01' AND '2000-12-31'
s LIKE 'a%'
s LIKE '%c'
s LIKE '%b%'
s LIKE 'abc'
s LIKE ''
s LIKE '%'
s LIKE 'a_c'
s LIKE 'a\\%b\\_c'
s LIKE 'a/%b%' ESCAPE '/'
s LIKE '_'
s LIKE '%x_'
s LIKE '%\n%'
s LIKE 'a%,%c'
s NOT LIKE 'a%'
s NOT LIKE 'a_%' ESCAPE '/'
s NOT RLIKE 'a'
s RLIKE '^a'
s RLIKE 'c$'
s RLIKE '2$'
s RLIKE 'b.c'
s RLIKE '[a-c]{3}'
s RLIKE '1.l'
s RLIKE '\\s'
s RLIKE '\\d+|ß'
s RLIKE '^[^\\s]+$'
s REGEXP 'a.?b'
n IS NULL
n IS NOT NULL
flag IS TRUE
flag IS NOT FALSE
isnull(s)
isnotnull(s)
isnan(d)
CASE WHEN n > 1 THEN 'big' WHEN n = 0 THEN 'zero' ELSE 'other' END
CASE n WHEN 1 THEN 'one' WHEN 7 THEN 'seven' END
CASE WHEN n = 0 THEN 0 ELSE 100 / n END
CASE WHEN flag THEN n ELSE l END
CASE WHEN flag THEN n ELSE 1.5 END
CASE WHEN flag THEN f ELSE n END
CASE WHEN flag THEN day ELSE ts END
CASE WHEN flag THEN dec ELSE wide END
if(n > 1, n, m)
if(flag, s, t)
if(flag, NULL, a)
coalesce(n, m, 0)
coalesce(n, 10 div m)
coalesce(s, t)
nvl(n, 0)
ifnull(d, 1)
nullif(n, 7)
nullif(d, CAST('NaN' AS double))
10 / nullif(n, 0)
greatest(n, m)
greatest(n, m, 5)
greatest(d, e)
greatest(d, 0)
greatest(s, t)
least(n, m, 5)
least(d, e)
least(d, n)
least(day, day2)
CAST(n AS long)
CAST(n AS string)
CAST(n AS double)
CAST(n AS float)
CAST(l AS double)
CAST(l AS float)
CAST(n AS boolean)
CAST(d AS boolean)
CAST(dec AS boolean)
CAST(n AS decimal(10,2))
CAST(l AS decimal(25,2))
CAST(n AS short)
CAST(n AS tinyint)
CAST(e AS decimal(20,2))
try_cast(d AS int)
try_cast(d AS long)
try_cast(f AS int)
try_cast(d AS byte)
try_cast(d AS decimal(10,1))
try_cast(f AS decimal(10,1))
try_cast(l AS int)
try_cast(l AS byte)
try_cast(s AS int)
try_cast(s AS double)
try_cast(s AS boolean)
try_cast(s AS date)
try_cast(s AS timestamp)
try_cast(s AS decimal(10,2))
CAST(d AS float)
CAST(f AS double)
CAST(dec AS int)
CAST(dec AS long)
CAST(dec AS double)
CAST(wide AS double)
CAST(wide AS float)
CAST(dec AS string)
CAST(wide AS string)
CAST(dec AS decimal(10,1))
CAST(dec AS decimal(12,4))
CAST(wide AS decimal(38,2))
try_cast(wide AS decimal(10,2))
try_cast(wide AS int)
CAST(-0.3 AS int)
CAST(0.9 AS boolean)
floor(-0.3)
ceil(0.3)
round(0.75, 1)
CAST(flag AS int)
CAST(flag AS double)
CAST(flag AS string)
CAST(num AS int)
CAST(num AS long)
CAST(num AS byte)
CAST(num AS double)
CAST(num AS decimal(10,3))
CAST('1e3' AS double)
CAST('-Infinity' AS double)
CAST('nan' AS float)
CAST(' .5 ' AS double)
CAST('5.' AS double)
CAST('1.005' AS decimal(10,2))
CAST('yes' AS boolean)
CAST(' F ' AS boolean)
CAST('2024-2-9' AS date)
CAST('2024-02-09 1:02:03.4' AS timestamp)
CAST('2024-02-09T01:02:03.123456+02:30' AS timestamp)
CAST('2024-02-09 01:02:03Z' AS timestamp)
CAST('2024-02-09' AS timestamp)
CAST(day AS string)
CAST(ts AS string)
CAST(day AS timestamp)
CAST(ts AS date)
CAST(ts AS long)
CAST(n AS timestamp)
CAST(ts AS timestamp_ntz)
CAST(CAST(ts AS timestamp_ntz) AS timestamp)
CAST(CAST(ts AS timestamp_ntz) AS date)
CAST(CAST(ts AS timestamp_ntz) AS string)
CAST(s AS binary)
DATE '2024-02-29'
TIMESTAMP '2024-02-29 12:34:56.789'
concat(s, t)
concat(s, '-', t)
concat(s)
s || t || '!'
concat_ws(',', s, t)
concat_ws('', s, 'x')
substring(s, 1, 2)
substring(s, 2, 2)
substring(s, 0, 2)
substring(s, 2)
substring(s, -2)
substring(s, -3, 2)
substring(s, -5, 3)
substring(s, -100, 98)
substring(s, 1, 0)
substring(s, 1, -1)
substr(s, 2, 1000)
left(s, 2)
left(s, 0)
right(s, 2)
right(s, 0)
right(s, 100)
upper(s)
lower(s)
ucase(t)
lcase(t)
trim(s)
ltrim(s)
rtrim(s)
trim(BOTH 'a ' FROM s)
trim(LEADING 'a' FROM s)
trim(TRAILING 'c' FROM s)
length(s)
length(bin)
len(s)
char_length(s)
character_length(s)
octet_length(s)
octet_length(bin)
replace(s, 'a', 'XY')
replace(s, 'b')
replace(s, '', 'x')
split(s, ',')
split(s, ',', 2)
split(s, ',', 1)
split(s, '[ ,]')
split(s, 'b|c')
split(s, '\\.')
split_part(s, ',', 1)
split_part(s, ',', 3)
split_part(s, ',', -1)
split_part(s, ',', -2)
split_part(s, ',', 10)
split_part(s, 'bc', 1)
regexp_extract(s, '([a-z])([a-z])', 1)
regexp_extract(s, '([a-z])([a-z])', 2)
regexp_extract(s, '([a-z])([a-z])', 0)
regexp_extract(s, '(a)|(b)', 2)
regexp_extract(s, '([0-9])')
regexp_extract(s, '(?:x)?(b)', 1)
regexp_replace(s, '[abc]', '<$0>')
regexp_replace(s, '(a)(.)', '$2$1')
regexp_replace(s, 'b', '\\$')
regexp_replace(s, '\\s+', ' ')
startswith(s, 'a')
endswith(s, 'c')
contains(s, 'b')
contains(s, '')
lpad(s, 5, '*')
lpad(s, 2, '*')
lpad(s, 5)
lpad(s, 5, '')
rpad(s, 5, 'é')
rpad(s, 0, 'x')
repeat(t, 2)
repeat(t, 0)
reverse(s)
'a\tb\'c\\d'
'\u00e9'
r'a\d'
"double quoted"
abs(n)
abs(d)
abs(dec)
round(d)
round(e)
round(e, 1)
round(e, 2)
round(f, 1)
round(d, 3)
round(n, 2)
round(n)
round(dec)
round(dec, 1)
round(dec, 5)
round(wide, 3)
floor(dec / 3.0D)
floor(CAST('NaN' AS double))
floor(n)
floor(dec)
ceil(dec * 1.5D)
ceil(dec)
ceiling(n)
sqrt(e)
sqrt(n)
sign(d)
signum(n)
xxhash64(n)
xxhash64(s, n, d)
xxhash64(l, day, ts, flag, dec)
pmod(xxhash64(s), 128)
year(day)
year(ts)
quarter(day)
month(ts)
day(ts)
dayofmonth(day)
dayofweek(day)
dayofyear(day)
weekday(day)
weekofyear(day)
hour(ts)
minute(ts)
second(ts)
extract(YEAR FROM ts)
extract(MONTH FROM day)
extract(DAY FROM ts)
extract(HOUR FROM ts)
extract(MINUTE FROM ts)
extract(SECOND FROM ts)
extract(DOW FROM day)
extract(DOY FROM day)
extract(WEEK FROM day)
extract(QUARTER FROM ts)
date_trunc('year', ts)
date_trunc('QUARTER', ts)
date_trunc('month', ts)
date_trunc('week', ts)
date_trunc('day', ts)
date_trunc('hour', ts)
date_trunc('MINUTE', ts)
date_trunc('second', ts)
date_trunc('millisecond', ts)
date_trunc('microsecond', ts)
date_trunc('hour', day)
trunc(day, 'year')
trunc(day, 'quarter')
trunc(day, 'MM')
trunc(day, 'week')
date_add(day, n)
date_add(day, 30)
date_sub(day, 1)
date_add('2024-02-28', n)
add_months(day, 1)
add_months(day, -12)
add_months(day, n)
datediff(day, day2)
date_diff(ts, day2)
last_day(day)
make_date(2024, 2, n * 0 + 29)
day + 1
day - 1
day + INTERVAL 1 DAY
day - INTERVAL '2' DAYS
day + INTERVAL 1 MONTH
day - INTERVAL 1 YEAR
day2 + INTERVAL 3 HOURS
ts2 + INTERVAL 1 DAY
ts2 - INTERVAL 90 MINUTES
ts2 + INTERVAL 1.5 SECONDS
ts2 + INTERVAL 1 WEEK
ts + INTERVAL -1 MONTH
ts2 - INTERVAL 250 MILLISECONDS
ts2 + n * INTERVAL 1 DAY
ts2 - ts > INTERVAL 1 DAY
ts - ts2 < INTERVAL 10 HOURS
day - day2 > INTERVAL 3 DAYS
unix_seconds(ts)
unix_millis(ts)
unix_micros(ts)
unix_timestamp(ts)
unix_date(day)
timestamp_seconds(n)
timestamp_millis(n)
timestamp_micros(l)
date_from_unix_date(n)
to_date('2024-02-09')
to_date(ts)
to_timestamp('2024-02-09 01:02:03')
to_timestamp(day)
date_format(ts, 'yyyy-MM-dd HH:mm:ss')
date_format(ts, 'yyyyMMdd')
date_format(ts, "dd.MM.yyyy 'at' HH:mm:ss.SSS")
date_format(ts, 'ss.SSSSSS')
date_format(day, 'yyyy/MM')
size(a)
cardinality(sa)
array_size(a)
array_contains(a, 5)
array_contains(a, n)
array_contains(sa, 'x')
CASE WHEN size(a) > 0 THEN a[0] END
CASE WHEN size(a) > 1 THEN a[size(a) - 1] END
if(size(sa) > 0, element_at(sa, 1), 'none')
if(size(sa) > 0, element_at(sa, -1), 'none')
array(n, m)
array(1, 2.5)
array(s, 'x', NULL)
split(s, ',')[0]
struct(n, s)
struct(n AS first, m * 2 AS second)
struct(n + 1)
named_struct('n', n, 'twice', n * 2)
named_struct('n', n).n
struct(1, 'x')
struct(st, a)
st
ts2 - INTERVAL 1 DAY 2 HOURS
'a\%b\_c'
'\n\z'
"""

NEAR = """
exp(e / 1000)
ln(e)
ln(n)
log10(d)
log2(n)
power(e, 2)
power(n, 3)
pow(2, m)
power(d, 0.5)
"""

FAILING = """
floor(d)
ceil(f)
n / 0
n / (n - 1)
n % 0
n div 0
dec / 0
dec % 0.0
wide / dec
wide * wide * wide
d / 0
d % 0
pmod(n, 0)
l + 1
l - 1
l * 2
-l
abs(l)
b + b
sh * sh
2147483647 + n
l div (m - m - 1)
CAST(l AS int)
CAST(d AS int)
CAST(d AS long)
CAST(dec AS byte)
CAST(dec AS decimal(3,2))
CAST(d AS decimal(10,2))
CAST(s AS int)
CAST(s AS double)
CAST('1.5' AS int)
CAST('' AS int)
CAST('300' AS byte)
CAST(s AS boolean)
CAST(s AS date)
CAST(s AS timestamp)
CAST(CAST(day AS string) || 'x' AS date)
CAST('2023-02-29' AS date)
a[0]
a[-1]
element_at(a, 1)
element_at(a, 0)
make_date(2023, 2, 29)
timestamp_seconds(l)
ts + 200000000 * INTERVAL 1 DAY
"""


def texts(table: str) -> list[str]:
    return [line for line in table.strip().splitlines() if line]


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set("spark.sql.ansi.enabled", "true")
    # Else `10 / n`, found in two columns, is computed for all rows, also where a CASE guards it.
    session.conf.set("spark.sql.subexpressionElimination.enabled", "false")
    return session.createDataFrame(pa.Table.from_batches([BATCH])).repartition(1).sortWithinPartitions("n").cache()


@pytest.fixture(scope="module")
def batch(frame: DataFrame) -> pa.RecordBatch:
    """The data as Spark has it, in its order."""
    return frame.toArrow().cast(SCHEMA).combine_chunks().to_batches()[0]


def shown(column: pa.Array | pa.ChunkedArray) -> list[str]:
    """Values that are equal if they are the same: NaN equals NaN, and 0.0 isn't -0.0. Times are numbers: Python has too few
    years."""
    if pa.types.is_date(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return list(map(repr, column.to_pylist()))


@pytest.fixture(scope="module")
def theirs(frame: DataFrame) -> pa.Table:
    table = texts(EQUAL) + texts(NEAR)
    columns = [f"{text.split(' AS `')[0]} AS e{index}" for index, text in enumerate(table)]
    pieces = [frame.selectExpr(*columns[at : at + 60]).toArrow() for at in range(0, len(columns), 60)]
    return pa.Table.from_arrays([column for piece in pieces for column in piece.columns], names=table)


@pytest.mark.parametrize("text", texts(EQUAL))
def test_an_expression_has_sparks_values_and_type(text: str, theirs: pa.Table, batch: pa.RecordBatch) -> None:
    compiled = compile_expression(text, batch.schema)
    values = compiled(batch)
    expected = theirs[text]
    assert nullable(ddl_of(compiled.type)) == nullable(ddl_of(expected.type))
    assert shown(values) == shown(expected)
    assert values.type == compiled.type
    assert compiled.nullable or not values.null_count


@pytest.mark.parametrize("text", texts(NEAR))
def test_a_transcendental_function_is_sparks_but_for_the_last_digit(
    text: str, theirs: pa.Table, batch: pa.RecordBatch
) -> None:
    values = compile_expression(text, batch.schema)(batch).to_pylist()
    for ours, expected in zip(values, theirs[text].to_pylist(), strict=True):
        if expected is None or math.isnan(expected):
            assert repr(ours) == repr(expected)
        else:
            assert ours == expected or abs(ours - expected) <= 2 * math.ulp(expected)


def nullable(type: str) -> str:
    """A type without what it says of nulls in arrays and structs."""
    return type.replace(" NOT NULL", "")


@pytest.mark.parametrize("text", texts(FAILING))
def test_what_has_no_value_is_an_error_in_both(text: str, frame: DataFrame, batch: pa.RecordBatch) -> None:
    with pytest.raises((ExpressionError, SchemaError)):  # the latter for a constant
        compile_expression(text, batch.schema)(batch)
    with pytest.raises(PySparkException):
        frame.selectExpr(text).collect()


# Spark's names for these are of no use to anybody who has to write them.
NAMED_OTHERWISE = r"""
NOT n IS NULL
+n
1e3
l > 1.5
2BD
substring(s, 2)
substring(s, -2)
day + INTERVAL 1 DAY
day - INTERVAL '2' DAYS
day2 + INTERVAL 3 HOURS
ts2 + INTERVAL 1.5 SECONDS
ts2 + INTERVAL 1 WEEK
ts2 - INTERVAL 250 MILLISECONDS
ts2 + n * INTERVAL 1 DAY
named_struct('n', n).n
ts2 - INTERVAL 1 DAY 2 HOURS
"""


def test_columns_have_the_names_that_spark_gives_them(frame: DataFrame, batch: pa.RecordBatch) -> None:
    table = texts(EQUAL)
    expected = frame.selectExpr(*table).columns
    different = {
        text: f"{ours}, in Spark {name}"
        for text, name in zip(table, expected, strict=True)
        if (ours := compile_expression(text, batch.schema).name) != name
    }
    others = set(texts(NAMED_OTHERWISE))
    assert {text: name for text, name in different.items() if text not in others} == {}
    assert sorted(others - different.keys()) == []


def test_every_function_is_in_the_tables() -> None:
    tables = (EQUAL + NEAR + FAILING).lower()
    assert [name for name in names() if not re.search(rf"\b{name}\(", tables)] == []


def test_every_function_is_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/columns.md").read_text()
    assert [name for name in names() if f"`{name}`" not in page] == []
