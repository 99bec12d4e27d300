"""Slots' processes that start with Tidegate already imported, since the imports take longer than many tests.

A nursery is a process that has imported the engine and does nothing but fork, like Spark's Python daemon. A slot gets its
job through a pipe, and the path, environment, working folder and outputs of the process that asked for it. A nursery ends
when the process that opened it ends; its slots then lose their coordinator, and end as slots do.

Texts have the same hashes in all processes of one nursery. A test that must notice code relying on that uses two nurseries.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pyarrow.parquet  # noqa: F401  (many jobs need it, and each slot would import it)

from tidegate.slot.hosting import run_slot

_NURSERY = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tidegate.testing.nursery import serve
serve(int(sys.argv[1]))
"""
_FORK = b"fork"


class SlotProcess:
    """A process that a nursery has forked. Its exit code isn't known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = None

    def ended(self) -> bool:
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if poll.poll(0):
                os.close(self._handle)
                self._handle = None
        return self._handle is None

    def kill(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Nursery:
    """Forks processes. Its own process starts when the first one is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def start(self, index: int, payload: bytes, attempt: int, coordinator: tuple[str, int]) -> SlotProcess:
        """Return a new process that runs `run_slot` with these arguments."""
        here = {
            "path": sys.path,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "index": index,
            "attempt": attempt,
            "coordinator": coordinator,
        }
        read, write = os.pipe()
        with os.fdopen(read, "rb"), self._lock:
            ours = self._opened()
            socket.send_fds(ours, [_FORK], [read, 1, 2])
            process = SlotProcess(int(ours.recv(16)))
        # If the process was killed meanwhile, its deployment notices.
        with contextlib.suppress(BrokenPipeError), os.fdopen(write, "wb") as to_slot:
            to_slot.write(json.dumps(here).encode() + b"\n" + payload)
        return process

    def close(self) -> None:
        if self._owner == os.getpid() and self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
            self._owner = None

    def _opened(self) -> socket.socket:
        """Return the socket of a live nursery. Start another one if it was killed, or if this process is a fork: two
        processes must not share a socket."""
        if self._socket is None or self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            if self._socket is not None:
                self._socket.close()
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _NURSERY, str(theirs.fileno()), json.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._owner = os.getpid()
        return self._socket


def serve(number: int) -> None:
    """Run in the nursery's own process: fork for every request, until the other end of the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended processes don't remain as zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=number) as requests:
        while True:
            request, (*handles,), _, _ = socket.recv_fds(requests, len(_FORK), 3)
            if not request:
                return
            forked = os.fork()
            if not forked:
                break
            requests.send(str(forked).encode())
            for handle in handles:
                os.close(handle)
    _run_forked(*handles)


def _run_forked(job: int, output: int, errors: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for handle, number in ((output, 1), (errors, 2)):
        os.dup2(handle, number)
        os.close(handle)
    with os.fdopen(job, "rb") as pipe:
        there = json.loads(pipe.readline())
        payload = pipe.read()
    sys.path[:] = there["path"]
    os.environ.clear()
    os.environ.update(there["environment"])
    os.chdir(there["folder"])
    host, port = there["coordinator"]
    run_slot(there["index"], payload, there["attempt"], (host, port))
