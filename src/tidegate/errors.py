"""Every error Tidegate raises, as a tree. All of them can be caught by these names, as `tg.JobError` and so on.

TidegateError
├── JobError                 the job as written can't run: fix the program
│   ├── SchemaError          a declared type or column doesn't fit
│   └── GraphError           duplicate or missing name, unconnected stream, impossible parallelism
├── JobFailed                the job ran and gave up: carries the user's traceback, the operator and the record
├── SourceError              input that can't be read as it is: fix it or bring it back, start again; nothing was lost
├── UserFunctionError        a user's function raised: operator, record and traceback
├── StoreError               the snapshot store did not do what was asked
│   ├── NotFound             there is nothing under that name
│   ├── AlreadyExists        the name is taken
│   └── CorruptFile          a length or checksum doesn't match: nothing of it was used
├── RestoreError             a snapshot can't be restored into this job
├── CommitError              an external commit has an unknown or failed outcome
├── FencedOff                a newer attempt exists; this one must end itself
└── ProtocolError            a peer said something that it must not say
    └── HandshakeError       wrong secret, job or attempt

When they are raised:

| where | what comes |
|---|---|
| building a job: settings, streams, declarations | `JobError`, `SchemaError`, `GraphError` |
| `job.start()`, `tg.transform(…)` | `JobError`, and `StoreError` if the folder of snapshots can't be used |
| `job.run()`, `handle.wait()` and the handle's other methods | `JobFailed` if the job has given up, whatever the cause |
| `handle.savepoint(…)`, `handle.rescale(…)` | also `JobError` and `StoreError`; the job runs on |
| `tg.plan_restore(…)` and its `check()`, `tg.read_state(…)`, `tg.write_state` | `RestoreError`, `StoreError`, `JobError` |
| raised by a source of yours | `SourceError` ends the job; anything else leads to a restart |
| raised by a sink of yours | `CommitError`; `SchemaError` in `check` |
| an action or query of Spark on a transform | Spark's own error, with the text of `JobFailed` in it |

A call that waits raises Python's `TimeoutError` when its time is up; the job runs on.
"""

from __future__ import annotations


class TidegateError(Exception):
    """The root of the tree above."""


class JobError(TidegateError):
    """The job as written can't run, or what was asked of it can't be done. The message says what to change."""


class SchemaError(JobError):
    """A declared type, a column or a function's output doesn't fit."""


class GraphError(JobError):
    """The dataflow graph isn't one that can be deployed."""


class UserFunctionError(TidegateError):
    """A user's function raised. `user_traceback` is theirs, without the engine's frames.

    `signature` names the exception and the line that raised it, by which the error is known when it comes again. It is None
    for errors of the world outside, which may be over at the next attempt. `final`: no restart can cure it.
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
    """Where an error came, within a sentence. `record` is a record as text, or what there was instead: "the timer at …"."""
    return f"at {record}" if record.startswith(("the ", "a batch of ")) else f"at record {record}"


class SourceError(TidegateError):
    """Input that can't be read as it is: a bad line, a column that isn't there, a file that was cut short or is gone.

    Fix or bring back the input, then start the job again. Nothing was lost: it resumes from its last snapshot.
    """


class JobFailed(TidegateError):
    """The job ended because of a failure, and the restart strategy gave up. The message carries the last failure.

    `operator`, `record` and `user_traceback` say where a user's function failed; they are None for failures of another kind.
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
    """A connection did not prove that it belongs to this job and attempt."""


class StoreError(TidegateError):
    """The snapshot store did not do what was asked."""


class NotFound(StoreError):
    """There is no snapshot, savepoint, state or file of that name."""


class AlreadyExists(StoreError):
    """The name is taken: a file that must be new is there already, or the folder of a savepoint isn't empty."""


class CorruptFile(StoreError):
    """A length or a checksum doesn't match what the manifest lists. Nothing of the file was used."""


class RestoreError(TidegateError):
    """A snapshot can't be restored into this job. The message names the state and what the program can say to go on."""


class FencedOff(TidegateError):
    """A newer attempt of the job has started; what belongs to an older one stops at once."""


class CommitError(TidegateError):
    """An external commit failed or its outcome is unknown. It is never taken for success.

    `final`: the commit can't be made any more, by any attempt.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        self.final = final
        super().__init__(message)
