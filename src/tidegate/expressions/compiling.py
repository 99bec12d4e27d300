"""From sqlglot's tree to `Typed` parts: one function for each kind of node. Anything else is refused.

sqlglot reads much more than this. A node without an entry in `_KINDS` is an error when the expression is compiled: nothing
is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from tidegate.errors import SchemaError
from tidegate.expressions import arithmetic, columns, conditions, literals, times
from tidegate.expressions.casts import cast, implicitly
from tidegate.expressions.coercion import common_type
from tidegate.expressions.comparing import between, compare, is_in
from tidegate.expressions.functions import call
from tidegate.expressions.functions.nested import element
from tidegate.expressions.functions.strings import concat, like, rlike
from tidegate.expressions.parsing import parse, position
from tidegate.expressions.typed import BOOLEAN, NULL, STRING, Text, Typed, apply, constant, type_name
from tidegate.types import parse_type

_ARITHMETIC: dict[type[exp.Expr], str] = {
    exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%", exp.IntDiv: "div"
}  # fmt: skip
_COMPARISONS: dict[type[exp.Expr], str] = {
    exp.EQ: "=", exp.NEQ: "!=", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=", exp.NullSafeEQ: "<=>"
}  # fmt: skip
_INSTEAD: dict[type[exp.Expr], str] = {
    exp.Window: "a window function needs all rows; use key_by(…) and an aggregate",
    exp.Subquery: "a subquery can't be used in a stream",
    exp.Lambda: "functions with -> are not supported; use explode, or map_batches",
    exp.Star: "write the names of the columns (with_columns keeps all); for count(*) use aggregate(…, n=tg.count())",
}
# What a node may hold. sqlglot says by further arguments that it means something else, such as `negate`.
_UNDERSTOOD = {
    *("this", "expression", "expressions", "low", "high", "to", "position", "unit", "ifs", "true", "false", "default"),
    *("table", "db", "catalog", "is_string", "quoted"),
}
_MODIFIERS: frozenset[tuple[type[exp.Expr], str]] = frozenset(
    {(exp.Like, "negate"), (exp.Div, "safe"), (exp.DPipe, "safe"), (exp.TryCast, "safe"), (exp.Cast, "safe")}
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles the nodes of one text against one schema."""

    source: Text
    schema: pa.Schema

    def part(self, node: exp.Expr) -> Typed:
        """Return the part of a node."""
        kind = _KINDS.get(type(node))
        if kind is None:
            self.fail(_INSTEAD.get(type(node), f"{_called(node)} is not supported"), node)
        for name, value in node.args.items():
            if value and name not in _UNDERSTOOD and (type(node), name) not in _MODIFIERS:
                self.fail(f"{_called(node)} is not supported", node)
        return kind(self, node)

    def boolean(self, node: exp.Expr) -> Typed:
        part = self.part(node)
        if part.type == NULL:
            return constant(None, BOOLEAN, part.sql)
        if part.type != BOOLEAN:
            self.fail(f"a condition is needed, and {part.sql} is of type {type_name(part.type)}", node)
        return part

    def fail(self, message: str, node: exp.Expr) -> NoReturn:
        raise self.error(message, node)

    def error(self, message: str, node: exp.Expr) -> SchemaError:
        return self.source.error(message, position(node))


def _called(node: exp.Expr) -> str:
    try:
        return str(node.sql(dialect="spark"))
    except Exception:  # noqa: BLE001  (of sqlglot, while an error is described)
        return type(node).__name__


# Names, literals, operators.


def _column(to: Compiler, node: exp.Expr) -> Typed:
    parts = [node.args.get(key) for key in ("catalog", "db", "table", "this")]
    for each in parts:
        if isinstance(each, exp.Star):
            to.fail(_INSTEAD[exp.Star], node)
    return columns.column(to.schema, [str(each.this) for each in parts if each is not None], to.source, position(node))


def _dot(to: Compiler, node: exp.Expr) -> Typed:
    field = node.args["expression"]
    if not isinstance(field, exp.Identifier):
        to.fail(f"{_called(node)} is not supported", node)
    return columns.struct_field(to.part(node.this), str(field.this), to.source, position(node))


def _literal(to: Compiler, node: exp.Expr) -> Typed:
    assert isinstance(node, exp.Literal)
    return literals.literal(node, to.source, position(node))


def _negative(to: Compiler, node: exp.Expr) -> Typed:
    if isinstance(node.this, exp.Literal) and not node.this.is_string:
        return literals.literal(node.this, to.source, position(node), sign="-")
    if isinstance(node.this, exp.Interval):
        return literals.interval(node.this, to.source, position(node), sign=-1)
    return arithmetic.negative(to.part(node.this), to.source, position(node))


def _interval(to: Compiler, node: exp.Expr) -> Typed:
    assert isinstance(node, exp.Interval)
    return literals.interval(node, to.source, position(node))


def _arithmetic(to: Compiler, node: exp.Expr) -> Typed:
    sign = _ARITHMETIC[type(node)]
    left, right = to.part(node.this), to.part(node.args["expression"])
    if times.is_temporal(left) or times.is_temporal(right):
        return times.compute(sign, left, right, to.source, position(node))
    return arithmetic.compute(sign, left, right, to.source, position(node))


def _comparison(to: Compiler, node: exp.Expr) -> Typed:
    left, right = to.part(node.this), to.part(node.args["expression"])
    return compare(_COMPARISONS[type(node)], left, right, to.source, position(node))


def _is(to: Compiler, node: exp.Expr) -> Typed:
    other = node.args["expression"]
    if isinstance(other, exp.Null):
        part = to.part(node.this)
        return apply(pc.is_null, [part], BOOLEAN, f"({part.sql} IS NULL)", nullable=False)
    if isinstance(other, exp.Boolean):
        return compare("<=>", to.boolean(node.this), literals.boolean(bool(other.this)), to.source, position(node))
    raise to.error(f"{_called(node)} is not supported", node)


def _not(to: Compiler, node: exp.Expr) -> Typed:
    part = conditions.negation(to.boolean(node.this))
    if isinstance(node.this, exp.Is) and isinstance(node.this.args["expression"], exp.Null):
        return part.named(f"({part.sql.removeprefix('(NOT (').removesuffix(' IS NULL))')} IS NOT NULL)")
    return part


def _in(to: Compiler, node: exp.Expr) -> Typed:
    options = node.args.get("expressions")
    if not options:
        to.fail("IN takes a list of values in parentheses", node)
    return is_in(to.part(node.this), [to.part(option) for option in options], to.source, position(node))


def _between(to: Compiler, node: exp.Expr) -> Typed:
    low, high = to.part(node.args["low"]), to.part(node.args["high"])
    return between(to.part(node.this), low, high, to.source, position(node))


def _like(to: Compiler, node: exp.Expr, escape: str = "\\") -> Typed:
    made = like(to.part(node.this), to.part(node.args["expression"]), escape, to.source, position(node))
    return conditions.negation(made) if node.args.get("negate") else made


def _escape(to: Compiler, node: exp.Expr) -> Typed:
    escape = node.args["expression"]
    if not isinstance(node.this, exp.Like) or not isinstance(escape, exp.Literal) or len(str(escape.this)) != 1:
        to.fail("ESCAPE takes one character", node)
    return _like(to, node.this, str(escape.this))


def _case(to: Compiler, node: exp.Expr) -> Typed:
    subject = node.args.get("this")
    branches = []
    for each in node.args["ifs"]:
        if subject is None:
            condition = to.boolean(each.this)
        else:
            condition = compare("=", to.part(subject), to.part(each.this), to.source, position(each))
        branches.append((condition, to.part(each.args["true"])))
    default = node.args.get("default")
    otherwise = literals.null() if default is None else to.part(default)
    type = common(to.source, position(node), [*(value for _, value in branches), otherwise])
    whens = " ".join(f"WHEN {condition.sql} THEN {value.sql}" for condition, value in branches)
    sql = f"CASE {whens}{'' if default is None else f' ELSE {otherwise.sql}'} END"
    return _choice(to, node, branches, otherwise, type, sql)


def _if(to: Compiler, node: exp.Expr) -> Typed:
    default = node.args.get("false")
    if default is None:
        to.fail("if takes a condition and two values", node)
    condition, value, otherwise = to.boolean(node.this), to.part(node.args["true"]), to.part(default)
    type = common(to.source, position(node), [value, otherwise])
    sql = f"(IF({condition.sql}, {value.sql}, {otherwise.sql}))"
    return _choice(to, node, [(condition, value)], otherwise, type, sql)


def _choice(
    to: Compiler, node: exp.Expr, branches: list[tuple[Typed, Typed]], otherwise: Typed, type: pa.DataType, sql: str
) -> Typed:
    converted = [(condition, implicitly(value, type, to.source, position(node))) for condition, value in branches]
    return conditions.case(converted, implicitly(otherwise, type, to.source, position(node)), type, sql)


def common(source: Text, at: int | None, parts: Sequence[Typed]) -> pa.DataType:
    """Return the type that the values of branches have in common."""
    type = parts[0].type
    for part in parts[1:]:
        found = common_type(type, part.type)
        if found is None:
            source.fail(f"{type_name(type)} and {type_name(part.type)} have no type in common; use CAST", at)
        type = found
    return type


def _cast(to: Compiler, node: exp.Expr) -> Typed:
    target = _target(to, node)
    part = to.part(node.this)
    name = type_name(target).upper()
    names = {"LONG": "BIGINT", "SHORT": "SMALLINT", "BYTE": "TINYINT"}
    safely = bool(node.args.get("safe"))
    if _suffixed(node) and part.constant is not None and not safely:
        # sqlglot has one class for DATE '…', and another one, called TryCast in this dialect, for CAST('…' AS date).
        is_literal = not isinstance(node, exp.TryCast)
        sql = f"{type_name(target).upper()} '{part.sql}'" if is_literal else part.sql
        end = node.this.meta.get("end")
        has_suffix = end is not None and to.source.text[end].isalpha()
        if not is_literal and not has_suffix:
            sql = f"CAST({part.sql} AS {type_name(target).upper()})"
        made = cast(part, target, to.source, position(node), sql=sql)
        if made.constant is None:
            to.fail(f"{part.constant.as_py()!r} can't be cast to {type_name(target)}", node)
        return made
    word = "TRY_CAST" if safely else "CAST"
    sql = f"{word}({part.sql} AS {names.get(name, name)})"
    return cast(part, target, to.source, position(node), sql=sql, safely=safely)


def _suffixed(node: exp.Expr) -> bool:
    """Return whether it is a number with a suffix (10L) or a typed literal (DATE '…'), which sqlglot reads as casts."""
    return isinstance(node.this, exp.Literal)


def _target(to: Compiler, node: exp.Expr) -> pa.DataType:
    text = node.args["to"].sql(dialect="spark")
    try:
        return parse_type(text)
    except SchemaError:
        to.fail(f"{text.lower()} is no type of Spark's that can be cast to", node)


def _paren(to: Compiler, node: exp.Expr) -> Typed:
    return to.part(node.this)


def _bracket(to: Compiler, node: exp.Expr) -> Typed:
    indices = node.args["expressions"]
    if len(indices) != 1:
        to.fail("an element is taken by one index", node)
    return element(to.part(node.this), to.part(indices[0]), to.source, position(node))


def _concat(to: Compiler, node: exp.Expr) -> Typed:
    return concat([to.part(node.this), to.part(node.args["expression"])], to.source, position(node))


def _adjacent(to: Compiler, node: exp.Expr) -> Typed:
    to.fail("two texts side by side: write \\' for a quote in a text, and || between texts", node)


def _alias(to: Compiler, node: exp.Expr) -> Typed:
    to.fail("AS is for the whole expression and for the fields of struct(…)", node)


def _raw(to: Compiler, node: exp.Expr) -> Typed:
    return constant(str(node.this), STRING, str(node.this))


def _anonymous(to: Compiler, node: exp.Expr) -> Typed:
    name = node.this if isinstance(node.this, str) else str(node.this.this)
    arguments = node.args.get("expressions") or []
    aliases = [str(each.args["alias"].this) if isinstance(each, exp.Alias) else None for each in arguments]
    if any(aliases) and name.lower() != "struct":
        _alias(to, node)
    parts = [to.part(each.this if isinstance(each, exp.Alias) else each) for each in arguments]
    fields = [alias or _field_name(each) for alias, each in zip(aliases, arguments, strict=True)]
    return call(name.lower(), parts, to.source, position(node), fields=fields)


def _field_name(node: exp.Expr) -> str | None:
    return node.name if isinstance(node, exp.Column | exp.Dot) else None


def _extract(to: Compiler, node: exp.Expr) -> Typed:
    field = str(node.this.this)
    part = to.part(node.args["expression"])
    return times.extract(field, part, to.source, position(node))


def _trim(to: Compiler, node: exp.Expr) -> Typed:
    where = {"LEADING": "ltrim", "TRAILING": "rtrim"}.get(str(node.args.get("position") or "BOTH").upper(), "trim")
    characters = node.args.get("expression")
    parts = [to.part(node.this), *([] if characters is None else [to.part(characters)])]
    return call(where, parts, to.source, position(node))


_KINDS: dict[type[exp.Expr], Callable[[Compiler, exp.Expr], Typed]] = {
    exp.Column: _column,
    exp.Dot: _dot,
    exp.Literal: _literal,
    exp.RawString: _raw,
    exp.Null: lambda to, node: literals.null(),
    exp.Boolean: lambda to, node: literals.boolean(bool(node.this)),
    exp.Neg: _negative,
    exp.Interval: _interval,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    **dict.fromkeys(_COMPARISONS, _comparison),
    exp.And: lambda to, node: conditions.conjunction(to.boolean(node.this), to.boolean(node.args["expression"])),
    exp.Or: lambda to, node: conditions.disjunction(to.boolean(node.this), to.boolean(node.args["expression"])),
    exp.Not: _not,
    exp.Is: _is,
    exp.In: _in,
    exp.Between: _between,
    exp.Like: _like,
    exp.Escape: _escape,
    exp.RegexpLike: lambda to, node: rlike(to.part(node.this), to.part(node.args["expression"]), to.source, position(node)),
    exp.Case: _case,
    exp.If: _if,
    exp.Cast: _cast,
    exp.TryCast: _cast,
    exp.Paren: _paren,
    exp.Bracket: _bracket,
    exp.DPipe: _concat,
    exp.Concat: _adjacent,
    exp.Alias: _alias,
    exp.Anonymous: _anonymous,
    exp.Extract: _extract,
    exp.Trim: _trim,
}


# The whole.


@dataclass(frozen=True, slots=True)
class Whole:
    """An expression with what is known of its text: its name, the columns that it reads, whether it is just one of them."""

    part: Typed
    name: str
    columns: frozenset[str]
    is_column: bool


def compile_text(source: Text, schema: pa.Schema) -> Whole:
    tree = parse(source)
    alias = None
    if isinstance(tree, exp.Alias):
        given = tree.args["alias"]
        if not isinstance(given, exp.Identifier):
            source.fail("an alias is a name, such as price AS euros; a field is written seller.city")
        alias, tree = str(given.this), tree.this
    part = Compiler(source, schema).part(tree)
    roots = [_root(node) for node in tree.find_all(exp.Column)]
    in_lower_case = {name.lower(): name for name in schema.names}
    return Whole(
        part,
        alias or _column_name(tree) or part.sql,
        frozenset(root if root in schema.names else in_lower_case[root.lower()] for root in roots),
        is_column=isinstance(tree, exp.Column) and part.sql in schema.names and _root(tree) == part.sql,
    )


def _column_name(tree: exp.Expr) -> str | None:
    """Return the name of a column that is cast: Spark keeps it."""
    while isinstance(tree, exp.Cast):
        tree = tree.this
    return tree.name if isinstance(tree, exp.Column) else None


def _root(node: exp.Expr) -> str:
    """Return the name of the column of `a`, `a.b` or `a.b.c`."""
    parts = [node.args.get(key) for key in ("catalog", "db", "table", "this")]
    return next(str(part.this) for part in parts if part is not None)
