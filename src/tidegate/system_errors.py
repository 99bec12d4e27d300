"""Errors of the operating system: which of them last, and what to do about them.

An error lasts if it comes from how things are set up: who may write where, what a path names. It comes again at every try,
so no restart cures it, and the job ends at once. Everything else may be over at the next attempt: a disk that is full or
slow (`ENOSPC`, `EIO`), a network, a service, a file that isn't there yet (`ENOENT`).

There is this one rule for sources, sinks, snapshots and users' functions. On object stores it doesn't help: Arrow's errors
have no number there. It is about paths, so it isn't followed through errors of connections: a route that is forbidden for a
moment gives `EACCES`, too. Nor are errors of TLS and of host names, whose numbers are other lists'.
"""

from __future__ import annotations

import errno
import getpass
import os
import socket
import ssl

from tidegate.errors import CommitError, JobError, SourceError, StoreError

_NO_RIGHT = {errno.EACCES, errno.EPERM}
_OF_OTHER_LISTS = (ssl.SSLError, socket.herror, socket.gaierror)
LASTING = frozenset({*_NO_RIGHT, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})


def lasts(error: BaseException) -> bool:
    """Whether it is such an error, or one of Tidegate's that such an error led to."""
    cause = _beneath(error)
    if not isinstance(cause, OSError) or isinstance(cause, _OF_OTHER_LISTS) or _in_safe_mode(cause):
        return False
    # A socket may get EPERM from a packet filter that is full.
    return cause.errno in LASTING and (cause.errno != errno.EPERM or cause.filename is not None)


def advice(error: BaseException) -> str:
    """Who met an error, and what to do about it; for whoever reads of it on another machine."""
    return f"This was user {user_here()} on host {socket.gethostname()}. {what_to_do(error)}, and start again."


def what_to_do(error: BaseException, *, made: bool = False) -> str:
    """A sentence without its full stop. `made`: missing folders were to be made, so something else prevented that."""
    match getattr(_beneath(error), "errno", None):
        case errno.EROFS:
            return "The file system there is mounted read-only: mount it for writing, or give another path"
        case errno.ENOTDIR:
            return "A part of the path is a file and not a folder: give another path, or move that file away"
        case errno.EISDIR:
            return "There is a folder of that name, where a file was expected: give another path, or move the folder away"
        case errno.ENAMETOOLONG:
            return "The path, or a name in it, is longer than the file system takes: give a shorter one"
        case errno.ELOOP:
            return "Symbolic links in the path lead in a circle: mend them, or give another path"
        case errno.ENOENT if made:
            return "No folder can be made in that place: give another path"
        case errno.ENOSPC | errno.EDQUOT:
            return "There is no space left: make some, or give another path"
    return "Give that user the right to use the path, or give another path"


def user_here() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):        # a container may run as a user who has no name
        return str(os.getuid())


def _in_safe_mode(error: OSError) -> bool:
    """Hadoop's library gives `EROFS` for a name node that has just been started, and will soon take writes."""
    return error.errno == errno.EROFS and "HDFS" in str(error)


def _beneath(error: BaseException) -> BaseException:
    while isinstance(error, StoreError | CommitError | SourceError | JobError) and error.__cause__ is not None:
        error = error.__cause__
    return error
