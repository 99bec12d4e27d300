"""The errors that a stateful processor may catch. Each is an error of Tidegate and an error of Spark.

Spark's handle and state variables raise `PySparkRuntimeError` without a condition (`getCondition()` is None); if Spark's
engine has a condition, the text has it in brackets. These errors do the same, so a processor that catches Spark's errors, or
looks for a condition in the text, works unchanged. docs/migrating.md lists what only one of the engines refuses.
"""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

from tidegate.errors import JobError, SchemaError

INVALID_TIME_MODE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"
INVALID_HANDLE_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
TTL_IN_WRONG_TIME_MODE = "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL"
TTL_NOT_POSITIVE = "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE"
WRONG_LENGTH = "STRUCT_ARRAY_LENGTH_MISMATCH"
INVALID_NAME = "STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME"
NO_KEY_HERE = "INTERNAL_ERROR_TWS"


class ProcessorError(JobError, PySparkRuntimeError):
    """A processor used its handle or a state variable wrongly."""


class ProcessorSchemaError(SchemaError, ProcessorError):
    """A schema that a processor declares for a state, or a value that it gives to one, doesn't fit."""


def refused(text: str, condition: str | None = None) -> ProcessorError:
    return ProcessorError(text if condition is None else f"[{condition}] {text}")


def misfit(text: str, condition: str | None = None) -> ProcessorSchemaError:
    return ProcessorSchemaError(text if condition is None else f"[{condition}] {text}")


class NoKey:
    """The cursor's key in `init` and `close`. It can't be hashed, so no table can look up a state for it."""

    def __hash__(self) -> int:
        raise refused(
            "a state was used in init or close, where there is no key: use it in handleInputRows, "
            "handleExpiredTimer or handleInitialState",
            NO_KEY_HERE,
        )
