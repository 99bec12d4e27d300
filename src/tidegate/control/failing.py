"""What an error that ends a slot or an attempt means: what to do about it, and whether a restart could help."""

from __future__ import annotations

from tidegate.control.messages import Failed
from tidegate.dataflow.operators.user_code import final_advice
from tidegate.errors import CommitError, FencedOff, JobError, RestoreError, SourceError, UserFunctionError
from tidegate.system_errors import lasts


def failed(slot: int, error: Exception) -> Failed:
    """Return the message about an error that ended this slot."""
    if isinstance(error, UserFunctionError):
        return Failed(slot, str(error), error.operator, error.user_traceback, error.record, error.final, error.signature)
    return Failed(slot, described(error), permanent=is_final(error))


def described(error: BaseException) -> str:
    """Return the error's text, with what to do about it if a restart doesn't help and the error doesn't say what does."""
    text, what_to_do = f"{type(error).__name__}: {error}", final_advice(error)
    return text if what_to_do is None else f"{text}. {what_to_do.rstrip()}"


def is_final(error: BaseException) -> bool:
    """Return whether no other attempt should be made. It would fail in the same way, since the program, its input or its
    environment is wrong, or it would fence off a driver that has taken over."""
    return (
        isinstance(error, JobError | SourceError | RestoreError | FencedOff | ImportError)
        or lasts(error)
        or (isinstance(error, CommitError | UserFunctionError) and error.final)
    )
