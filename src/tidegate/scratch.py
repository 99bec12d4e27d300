"""Folders for files that a process needs while it runs: a database, or files that it has downloaded.

A process that was killed can't remove its folders. So each folder holds a file that its process has locked, and a process
that makes a new folder removes the folders beside it whose lock is free. The lock is released when the process ends, even if
another container reuses its process id.

Where a file system is shared by hosts, a lock may be invisible to the other hosts. So the locked file names the host and its
boot, and folders of other hosts are left alone. One of the two suffices: the name stays when the host is booted again, and
the boot is the same in all containers of a host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_LOCK = "lock"
# A folder younger than this may have been made and not locked yet.
_YOUNG_S = 60.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ScratchFolder:
    """A new folder under `under`, by default the system's folder for temporary files. `prefix` says what it is for; the
    folders of ended processes with this prefix are removed. It is removed at the end of a `with` block, by `remove`, or when
    this object is garbage."""

    def __init__(self, prefix: str, *, under: str | None) -> None:
        above = Path(under or tempfile.gettempdir())
        above.mkdir(parents=True, exist_ok=True)
        remove_left_behind(prefix, above)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
        lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, "\n".join(_here()).encode())
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        self._finalizer()

    def __enter__(self) -> ScratchFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def remove_left_behind(prefix: str, above: Path) -> None:
    """Remove the folders of this prefix whose process has ended on this host."""
    for folder in above.glob(f"{prefix}*"):
        with suppress(OSError):  # it belongs to another user, or was just removed
            lock = folder / _LOCK
            is_locked = lock.exists()
            if time.time() - (lock if is_locked else folder).stat().st_mtime < _YOUNG_S:
                continue
            if not is_locked:
                folder.rmdir()  # its process ended before it locked the folder; if there is more in it, it isn't ours
                continue
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            if _is_free(handle):
                _remove(folder, handle)
            else:
                os.close(handle)


def _is_free(handle: int) -> bool:
    """Lock the file, and return whether that has succeeded and the file was written on this host."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    owner = os.pread(handle, 1024, 0).decode(errors="replace").split("\n")
    return owner == [""] or any(one and one == other for one, other in zip(owner, _here(), strict=False))


def _here() -> tuple[str, str]:
    """Return the name of this host, and the id of its boot, empty if the system has none."""
    with suppress(OSError):
        return socket.gethostname(), _BOOT.read_text().strip()
    return socket.gethostname(), ""


def _remove(path: Path, lock: int) -> None:
    """Remove the lock last: if this process is killed meanwhile, another one finds what is left."""
    with suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                with suppress(OSError):
                    os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
