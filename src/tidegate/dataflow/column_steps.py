"""Make the steps of select, filter, with_columns and explode from what the user wrote, and derive their schemas.

A stream of upserts stays one if an operator keeps the columns of its key as they are. A filter and explode don't take
upserts: a row that is left out would not undo the one before. They take changes, since what they make of a deletion is the
deletion of what they have made of the insertion; `select` keeps the row kind in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa

from tidegate.dataflow.changelog import (
    APPEND_ONLY,
    APPEND_OR_RETRACT,
    Changelog,
    Meaning,
    check_no_row_kind,
    check_reads_no_row_kind,
)
from tidegate.dataflow.operators.columns import Explode, Filter, Select, WithColumns
from tidegate.dataflow.row_kinds import ROW_KIND
from tidegate.errors import SchemaError
from tidegate.expressions import Compiled, compile_expression
from tidegate.types import ddl_of

AnyStep: TypeAlias = Select | WithColumns | Filter | Explode


def compiled(operator: str, text: str, schema: pa.Schema) -> Compiled:
    """Return an expression over the records of an operator's input."""
    try:
        return compile_expression(text, schema)
    except SchemaError as error:
        raise SchemaError(f"operator {operator!r}: {error}") from None


def select(operator: str, texts: Sequence[str], schema: pa.Schema) -> Select:
    if not texts:
        raise SchemaError(f"operator {operator!r}: select takes at least one expression, such as 'price * 0.9 AS euros'")
    expressions = tuple(compiled(operator, text, schema) for text in texts)
    names: dict[str, str] = {}
    for each in expressions:
        if each.name in names:
            raise SchemaError(
                f"operator {operator!r}: {names[each.name]!r} and {each.text!r} are both called {each.name!r}; give one of "
                f"them another name with AS"
            )
        names[each.name] = each.text
    return Select(expressions, pa.schema([each.field for each in expressions]))


def filtered(operator: str, text: str, schema: pa.Schema) -> Filter:
    condition = compiled(operator, text, schema)
    if not pa.types.is_boolean(condition.type):
        raise SchemaError(
            f"operator {operator!r}: a filter takes a condition, and {text!r} is of type {ddl_of(condition.type)}; "
            f"compare it with something"
        )
    return Filter(condition)


def with_columns(operator: str, texts: Mapping[str, str], schema: pa.Schema) -> WithColumns:
    if not texts:
        raise SchemaError(f"operator {operator!r}: with_columns takes at least one column, such as euros='price * 0.9'")
    expressions = {name: compiled(operator, text, schema) for name, text in texts.items()}
    fields = {field.name: field for field in schema}
    fields |= {name: each.field.with_name(name) for name, each in expressions.items()}
    return WithColumns(tuple(expressions), tuple(expressions.values()), pa.schema(list(fields.values())))


def explode(operator: str, text: str, schema: pa.Schema, *, keep_empty: bool) -> Explode:
    lists = compiled(operator, text, schema)
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        raise SchemaError(
            f"operator {operator!r}: explode takes an array, and {text!r} is of type {ddl_of(lists.type)}; "
            f"split(…) makes an array of text"
        )
    item = lists.type.value_field
    made = pa.field(lists.name, item.type, nullable=item.nullable or keep_empty)
    # A column that is exploded as it is gives place to its elements, whatever they are called.
    column = lists.columns[0] if lists.is_column else None
    fields = [made if field.name == column else field for field in schema]
    if column is None:
        fields.append(made)
    names = [field.name for field in fields]
    if names.count(made.name) > 1:
        raise SchemaError(
            f"operator {operator!r}: there is a column {made.name!r} already; give the elements another name with AS"
        )
    return Explode(lists, made.name, pa.schema(fields), keep_empty)


def keeping(operator: str, step: AnyStep, given: Meaning) -> tuple[AnyStep, frozenset[Changelog], Meaning]:
    """Return the step for records that mean this, what records may mean for it, and what those of its output mean."""
    if given.retracts:
        for each in expressions_of(step):
            check_reads_no_row_kind(f"operator {operator!r}", given, each.columns, each.text)
        if isinstance(step, WithColumns):
            check_no_row_kind(f"operator {operator!r}", step.names)
        elif isinstance(step, Explode):
            check_no_row_kind(f"operator {operator!r}", [step.name])
        elif isinstance(step, Select):
            check_no_row_kind(f"operator {operator!r}", step.schema.names)
            kind = compile_expression(ROW_KIND, step.expressions[0].schema)
            step = Select((kind, *step.expressions), pa.schema([kind.field, *step.schema]))
    is_kept = bool(given.key) and kept(step, given.key)
    if given.changelog is Changelog.UPSERT:
        takes = frozenset(Changelog) if is_kept and isinstance(step, Select | WithColumns) else APPEND_OR_RETRACT
        return step, takes, given
    key = given.key if is_kept and not isinstance(step, Explode) else ()
    return step, APPEND_OR_RETRACT if given.retracts else APPEND_ONLY, Meaning(given.changelog, key)


def expressions_of(step: AnyStep) -> tuple[Compiled, ...]:
    match step:
        case Select() | WithColumns():
            return step.expressions
        case Filter():
            return (step.condition,)
        case Explode():
            return (step.expression,)


def kept(step: AnyStep, key: Sequence[str]) -> bool:
    """Return whether the columns of a key come out as they went in, under their names."""
    if isinstance(step, WithColumns):
        return not set(step.names) & set(key)
    if not isinstance(step, Select):
        return True
    plain = {each.name for each in step.expressions if each.is_column and each.columns == (each.name,)}
    return set(key) <= plain
