"""Errors of the operating system: which of them are lasting, and what to do about them.

An error is lasting if its cause is the set-up: permissions, or what a path names. No restart cures it, so the job ends at
once. Everything else may be gone at the next attempt: a disk that is full or broken (`ENOSPC`, `EIO`), a network, a
service, a file that doesn't exist yet (`ENOENT`).

This rule holds for sources, sinks, snapshots and users' functions. It doesn't cover object stores, where Arrow's errors have
no number. Causes of connection errors are not examined, because a route that is forbidden for a moment gives `EACCES`,
too. Errors of TLS and of host names are not lasting either: their numbers come from other lists.
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
    """Whether this is a lasting error, or an error of Tidegate's that a lasting error caused."""
    cause = _beneath(error)
    if not isinstance(cause, OSError) or isinstance(cause, _OF_OTHER_LISTS) or _in_safe_mode(cause):
        return False
    # A socket may get EPERM from a packet filter that is full.
    return cause.errno in LASTING and (cause.errno != errno.EPERM or cause.filename is not None)


def advice(error: BaseException) -> str:
    """Return which user on which host had the error, and what to do about it. The reader may be on another machine."""
    return f"This was user {user_here()} on host {socket.gethostname()}. {what_to_do(error)}, and start again."


def what_to_do(error: BaseException, *, made: bool = False) -> str:
    """Return a sentence without its full stop. `made`: missing folders were to be created, and that failed."""
    match getattr(_beneath(error), "errno", None):
        case errno.EROFS:
            return "The file system there is mounted read-only: mount it for writing, or give another path"
        case errno.ENOTDIR:
            return "A part of the path is a file and not a folder: give another path, or move that file away"
        case errno.EISDIR:
            return "There is a folder of that name, where a file was expected: give another path, or move the folder away"
        case errno.ENAMETOOLONG:
            return "The path, or a name in it, is longer than the file system allows: give a shorter one"
        case errno.ELOOP:
            return "Symbolic links in the path form a loop: fix them, or give another path"
        case errno.ENOENT if made:
            return "No folder can be created there: give another path"
        case errno.ENOSPC | errno.EDQUOT:
            return "There is no space left: free some, or give another path"
    return "Give that user the right to use the path, or give another path"


def user_here() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may run as a user who has no name
        return str(os.getuid())


def _in_safe_mode(error: OSError) -> bool:
    """Whether HDFS's name node has just been started: Hadoop's library gives `EROFS` until it accepts writes."""
    return error.errno == errno.EROFS and "HDFS" in str(error)


def _beneath(error: BaseException) -> BaseException:
    while isinstance(error, StoreError | CommitError | SourceError | JobError) and error.__cause__ is not None:
        error = error.__cause__
    return error
