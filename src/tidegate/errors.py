"""Every error that Tidegate raises, as a tree. All are public, as `tg.JobError` and so on.

TidegateError
├── JobError                 the job as written can't run: fix the program
│   ├── SchemaError          a declared type or column doesn't fit
│   ├── RescaleFailed        the job couldn't run on another number of slots, and runs as before
│   └── GraphError           duplicate or missing name, unconnected stream, impossible parallelism
├── JobFailed                the job ran and gave up: has the user's traceback, the operator and the record
├── SourceError              input that can't be read as it is: fix or restore it, start again; nothing was lost
├── UserFunctionError        a user's function raised: operator, record and traceback
├── ExpressionError          an expression has no value for a record: overflow, division by zero, an invalid cast
├── StoreError               the snapshot store couldn't be read or written as requested
│   ├── NotFound             there is nothing under that name
│   ├── AlreadyExists        the name is taken
│   └── CorruptFile          a length or checksum doesn't match: nothing of it was used
├── RestoreError             a snapshot can't be restored into this job
├── CommitError              an external commit has an unknown or failed outcome
├── FencedOff                a newer attempt exists; this one must end itself
└── ProtocolError            a peer sent something that it must not send
    └── HandshakeError       wrong secret, job or attempt

When they are raised:

| where | which |
|---|---|
| building a job: settings, streams, declarations | `JobError`, `SchemaError`, `GraphError` |
| `job.start()`, `tg.transform(…)` | `JobError`, and `StoreError` if the folder of snapshots can't be used |
| `job.run()`, `handle.wait()` and the handle's other methods | `JobFailed` if the job has given up, whatever the cause |
| `handle.savepoint(…)`, `handle.rescale(…)` | also `JobError`, `RescaleFailed` and `StoreError`; the job continues to run |
| `tg.plan_restore(…)` and its `check()`, `tg.read_state(…)`, `tg.write_state` | `RestoreError`, `StoreError`, `JobError` |
| raised by a source of your own | `SourceError` ends the job; most other errors cause a restart |
| raised by a sink of your own | `CommitError`; `SchemaError` in `check` |
| an action or query of Spark on a transform | Spark's own error, with the text of `JobFailed` in it |

A call that waits longer than its `timeout` raises Python's `TimeoutError`; the job continues to run.
"""

from __future__ import annotations


class TidegateError(Exception):
    """The root of the tree above."""


class JobError(TidegateError):
    """The job as written can't run, or a call of its handle can't be done. The message says what to change."""


class SchemaError(JobError):
    """A declared type, a column or a function's output doesn't fit."""


class GraphError(JobError):
    """The dataflow graph can't be deployed."""


class RescaleFailed(JobError):
    """The job couldn't run on the slots that `handle.rescale()` asked for, and has gone back to those that it had."""


class UserFunctionError(TidegateError):
    """A user's function raised an exception. `user_traceback` omits the engine's frames.

    `signature` names the exception and the line that raised it, so that the error is recognised when it is repeated. It is
    None for errors of the outside world, which may be gone at the next attempt. `final`: no restart can cure the error.
    """

    def __init__(
        self,
        *,
        operator: str,
        user_traceback: str,
        record: str | None = None,
        signature: str | None = None,
        final: bool = False,
    ) -> None:
        self.operator = operator
        self.user_traceback = user_traceback
        self.record = record
        self.signature = signature
        self.final = final
        where = f"operator {operator!r} raised" + (f" {place(record)}" if record is not None else "")
        super().__init__(f"{where}:\n{user_traceback}")


def place(record: str) -> str:
    """Return where an error happened, as part of a sentence. `record` is a record's text, or such as "the timer at …"."""
    is_record = not record.startswith(("the ", "a batch of ", "a trigger of ", "aggregates of ", "key "))
    return f"at record {record}" if is_record else f"at {record}"


class ExpressionError(TidegateError):
    """An expression has no value for a record: an overflow, a division by zero, an invalid cast.

    Change the expression, or leave such records out before it: `try_cast`, `nullif(x, 0)`, `CASE WHEN … THEN … END`.
    """


class SourceError(TidegateError):
    """Input that can't be read as it is: a bad line, a missing column, a file that is truncated or gone.

    Fix or restore the input, then start the job again. Nothing was lost: it resumes from its last snapshot.
    """


class JobFailed(TidegateError):
    """The job ended because of a failure, and the restart strategy gave up. The message describes the last failure.

    `operator`, `record` and `user_traceback` show where a user's function failed; they are None for other failures.
    """

    def __init__(
        self, message: str, *, operator: str | None = None, record: str | None = None, user_traceback: str | None = None
    ) -> None:
        self.operator = operator
        self.record = record
        self.user_traceback = user_traceback
        super().__init__(message)


class ProtocolError(TidegateError):
    """A peer broke the protocol. It ends the connection, and appears in logs and as the cause of a failure."""


class HandshakeError(ProtocolError):
    """A peer did not prove that it belongs to this job and attempt."""


class StoreError(TidegateError):
    """The snapshot store couldn't be read or written as requested."""


class NotFound(StoreError):
    """There is no snapshot, savepoint, state or file of that name."""


class AlreadyExists(StoreError):
    """The name is taken: a file that must be new exists, or the folder of a savepoint isn't empty."""


class CorruptFile(StoreError):
    """A length or a checksum doesn't match what the manifest lists. Nothing of the file was used."""


class RestoreError(TidegateError):
    """A snapshot can't be restored into this job. The message names the state, and what the program can declare."""


class FencedOff(TidegateError):
    """A newer attempt of the job has started; the older one ends at once."""


class CommitError(TidegateError):
    """An external commit failed, or its outcome is unknown. Neither counts as success.

    `final`: the commit is no longer possible, by any attempt.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        self.final = final
        super().__init__(message)
