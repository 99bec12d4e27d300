"""Expressions in Spark's SQL dialect over Arrow record batches.

    compile_expression("price * 0.9 AS euros", schema)(batch)

    parsing      text to sqlglot's tree
    compiling    the tree to typed parts, by way of columns, literals, arithmetic, comparing, conditions, casts, times
    functions    what can be called by name
    compiled     the whole, which can be pickled

Types are known when an expression is compiled, and so are its errors. The values are Spark's, in ANSI mode and with UTC as
the time zone of the session; what can't be as in Spark is refused (docs/columns.md has the differences).

Not here: aggregates and window functions, whose values depend on more than one row.
"""

from __future__ import annotations

from tidegate.expressions.compiled import Compiled, compile_expression

__all__ = ["Compiled", "compile_expression"]
