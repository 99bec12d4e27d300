"""Text in Spark's SQL dialect to sqlglot's tree, in which every function call keeps the name that the user wrote.

sqlglot gives many functions of Spark another name and another meaning, so that they can be written in other dialects.
Here its table of functions is empty: a call is a name and its arguments, and `functions/` decides what it means.

In two places sqlglot binds operators differently from Spark: `||` more loosely than `+`, and `<` more tightly than `=`.
`check_precedence` refuses texts in which that matters; parentheses decide.
"""

from __future__ import annotations

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser

from tidegate.expressions.typed import Text

_COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ)
_PREDICATES = (*_COMPARISONS, exp.Is, exp.In, exp.Between, exp.Like, exp.RegexpLike, exp.Escape)


class _Parser(SparkParser):
    FUNCTIONS = {}  # noqa: RUF012  (it is sqlglot's class attribute)
    FUNCTION_PARSERS = {  # noqa: RUF012
        name: SparkParser.FUNCTION_PARSERS[name] for name in ("CAST", "TRY_CAST", "EXTRACT", "TRIM")
    }
    NO_PAREN_FUNCTIONS = {}  # noqa: RUF012


def parse(source: Text) -> exp.Expr:
    """Return the tree of one expression, which may have an alias."""
    text = source.text
    if not text.strip():
        source.fail("it is empty; give text in Spark's SQL dialect, such as 'price * 0.9 AS euros'")
    dialect = Spark()
    try:
        trees = _Parser(dialect=dialect).parse_into(exp.Expr, dialect.tokenize(text), text)
    except ParseError as error:
        found = error.errors[0] if error.errors else {}
        description = found.get("description") or str(error)
        highlight = found.get("highlight")
        at = len(found.get("start_context") or "") if len(text) <= 100 else text.find(highlight or "")
        if description.startswith("Required keyword"):
            description = f"an operand of {highlight} is missing"
        elif description.startswith("Invalid expression"):
            description = f"there is {highlight!r} where the expression should end or go on with an operator"
        source.fail(description, at)
    except TokenError as error:
        source.fail(f"{error}; is a quote or a bracket left open?")
    if len(trees) != 1 or trees[0] is None:
        source.fail("it is more than one expression; give one text for each")
    tree = trees[0]
    check_precedence(tree, source)
    return tree


def position(node: exp.Expr) -> int | None:
    """Return where a part of the tree begins in the text, as far as sqlglot kept it."""
    starts = [start for each in node.walk() if (start := each.meta.get("start")) is not None]
    return min(starts, default=None)


def check_precedence(tree: exp.Expr, source: Text) -> None:
    for node in tree.walk():
        operands = (node.args.get("this"), node.args.get("expression"))
        if isinstance(node, exp.DPipe) and any(isinstance(each, exp.Add | exp.Sub) for each in operands):
            source.fail("put parentheses around the operands of ||, which binds as tightly as + in Spark", position(node))
        if isinstance(node, _COMPARISONS) and any(isinstance(each, _PREDICATES) for each in operands):
            source.fail("put parentheses around comparisons that are compared", position(node))
