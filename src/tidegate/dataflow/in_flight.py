"""Records in flight as state: logged in a snapshot, and fed into the operator again after a restore.

A snapshot that cuts through channels holds the records that were before the marker and not yet processed. They are
operator state of the operator that they were sent to, with a row for each record, which is a struct of its columns. Records
of a loop's feedback stay with one subtask of the loop's head. Records on their way into a port are offered to every
subtask, which takes those that would be routed to it now.

Snapshots hold no dictionary encoding: columns are decoded before they are written and encoded again when they are read. The
slot decides when records are logged and fed in again (slot/in_flight.py). The places where they wait: places.py.
"""

from __future__ import annotations

import pyarrow as pa

from tidegate.state.sections import StateInfo, StateKind

FEEDBACK = "__feedback"
_SHAPE = "records"


def feedback_state(schema: pa.Schema) -> StateInfo:
    """Return the state of the records on their way back to the head of a loop; `schema` is the loop's."""
    return StateInfo(FEEDBACK, StateKind.WHOLE, _SHAPE, _state_schema(schema))


def in_flight_name(port: int) -> str:
    return f"__in_flight_{port}"


def in_flight_state(port: int, schema: pa.Schema) -> StateInfo:
    """Return the state of the records on their way into a port; `schema` is the port's (`Node.input_schemas[port]`)."""
    return StateInfo(in_flight_name(port), StateKind.UNION, _SHAPE, _state_schema(schema))


def rows_to_value(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return records as rows of the state for `schema`. The batch's columns may be less nullable, if the batch is of one of
    several united streams."""
    state = _state_schema(schema)
    fields = list(state.field("value").type)
    columns = [_as(column, field.type) for column, field in zip(batch.columns, fields, strict=True)]
    return pa.record_batch([pa.StructArray.from_arrays(columns, fields=fields)], schema=state)


def value_to_rows(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the records in rows of the state for `schema`: the inverse of `rows_to_value`."""
    columns = rows.column("value").flatten()
    return pa.record_batch([_as(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)


def _state_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field("value", pa.struct([field.with_type(_decoded(field.type)) for field in schema]))])


def _decoded(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries at any depth."""
    if pa.types.is_dictionary(kind):
        return _decoded(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_decoded(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_decoded(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_decoded(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_decoded(kind.key_type), kind.item_field.with_type(_decoded(kind.item_type)))
    return kind


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)
