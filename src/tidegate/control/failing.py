"""An error that ended a slot, as the message for the coordinator: what to do about it, and whether a restart could help."""

from __future__ import annotations

from tidegate.control.messages import Failed
from tidegate.dataflow.operators.user_code import final_advice
from tidegate.errors import CommitError, JobError, RestoreError, SourceError, UserFunctionError
from tidegate.system_errors import lasts


def failed(slot: int, error: Exception) -> Failed:
    """The message about an error that ended this slot."""
    if isinstance(error, UserFunctionError):
        return Failed(slot, str(error), error.operator, error.user_traceback, error.record, error.final, error.signature)
    return Failed(slot, described(error), permanent=is_final(error))


def described(error: BaseException) -> str:
    """With what to do about it, if no restart cures it and it doesn't say so itself."""
    text, what_to_do = f"{type(error).__name__}: {error}", final_advice(error)
    return text if what_to_do is None else f"{text}. {what_to_do.rstrip()}"


def is_final(error: BaseException) -> bool:
    """Whether any other attempt would end in the same way: the program, its input or its surroundings are wrong."""
    return (
        isinstance(error, JobError | SourceError | RestoreError | ImportError)
        or lasts(error)
        or (isinstance(error, CommitError | UserFunctionError) and error.final)
    )
