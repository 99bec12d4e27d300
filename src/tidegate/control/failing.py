"""What an error that ends a slot or an attempt means: what to do about it, and whether a restart could help."""

from __future__ import annotations

from tidegate.control.messages import Failed
from tidegate.dataflow.operators.user_code import final_advice
from tidegate.errors import (
    CommitError,
    CorruptFile,
    FencedOff,
    JobError,
    ProtocolError,
    RestoreError,
    SourceError,
    StoreError,
    UserFunctionError,
)
from tidegate.system_errors import lasts

DAMAGED = (
    "The job doesn't step back to an older snapshot by itself, since its sinks may have committed what the newest one "
    "covers. `tidegate snapshots verify` finds all damaged files. Restore the file from a backup; or start the job with a "
    "new folder of snapshots and restore_from= a savepoint or an older manifest, and expect output since then to come again"
)


def failed(slot: int, error: Exception) -> Failed:
    """Return the message about an error that ended this slot."""
    outside = is_outside(error)
    if isinstance(error, UserFunctionError):
        return Failed(
            slot, str(error), error.operator, error.user_traceback, error.record, error.final, error.signature, outside
        )
    # A damaged file may have been damaged on its way, so it is read again once.
    signature = str(error) if isinstance(error, CorruptFile) else None
    return Failed(slot, described(error), permanent=is_final(error), signature=signature, is_outside=outside)


def described(error: BaseException) -> str:
    """Return the error's text, with what to do about it if a restart doesn't help and the error doesn't say what does."""
    text, what_to_do = f"{type(error).__name__}: {error}", final_advice(error)
    if isinstance(error, CorruptFile) and what_to_do is None:
        what_to_do = DAMAGED
    return text if what_to_do is None else f"{text}. {what_to_do.rstrip()}"


def is_final(error: BaseException) -> bool:
    """Return whether no other attempt should be made. It would fail in the same way, since the program, its input or its
    environment is wrong, or it would fence off a driver that has taken over."""
    return (
        isinstance(error, JobError | SourceError | RestoreError | FencedOff | ImportError)
        or lasts(error)
        or (isinstance(error, CommitError | UserFunctionError) and error.final)
    )


def is_outside(error: BaseException) -> bool:
    """Return whether the error is of the world outside, which somebody may repair while the job waits."""
    if isinstance(error, UserFunctionError):
        return error.signature is None and not error.final
    return isinstance(error, StoreError | CommitError | ProtocolError | OSError | MemoryError)
