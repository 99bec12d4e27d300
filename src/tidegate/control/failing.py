"""An error that ended a slot, as the message for the coordinator: what to do about it, and whether a restart could help."""

from __future__ import annotations

from tidegate.control.messages import Failed
from tidegate.dataflow.operators.user_code import final_advice
from tidegate.errors import CommitError, FencedOff, JobError, RestoreError, SourceError, UserFunctionError
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
    """Whether no other attempt should be made: it would end in the same way, since the program, its input or its
    surroundings are wrong, or it would fence off a driver that has taken over."""
    return (
        isinstance(error, JobError | SourceError | RestoreError | FencedOff | ImportError)
        or lasts(error)
        or (isinstance(error, CommitError | UserFunctionError) and error.final)
    )
