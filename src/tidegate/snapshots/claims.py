"""Claims: the content of the file that claims an attempt.

A claim is JSON: the attempt, a random text that identifies the claimant, and the program, for the messages of a driver that
was fenced off. Only the first two decide anything; claims of older versions have no more. A claim contains no secrets.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from tidegate.system_errors import user_here


@dataclass(frozen=True, slots=True)
class Program:
    """A driver's process, and the job that it runs."""

    job: str
    host: str
    process: int
    user: str

    @classmethod
    def this(cls, job: str) -> Program:
        return cls(job=job, host=socket.gethostname(), process=os.getpid(), user=user_here())

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}, user {self.user}"

    def appears_alive(self) -> bool:
        """Return whether it is another, running process on this host. Processes on other hosts are unknown: False."""
        if self.host != socket.gethostname() or self.process == os.getpid():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # somebody else's
        return True


@dataclass(frozen=True, slots=True)
class Claim:
    attempt: int
    claimant: str
    program: Program | None = None
    at: str | None = None  # UTC

    @classmethod
    def now(cls, attempt: int, claimant: str, program: Program | None) -> Claim:
        at = None if program is None else datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(attempt, claimant, program, at)

    def to_bytes(self) -> bytes:
        known = {} if self.program is None else {**asdict(self.program), "at": self.at}
        return json.dumps({"attempt": self.attempt, "claimant": self.claimant, **known}).encode("utf-8")

    @classmethod
    def from_bytes(cls, content: bytes) -> Claim | None:
        """Return the claim; None if the content can't be parsed, which doesn't make the claim invalid."""
        try:
            found = json.loads(content)
            claim = cls(int(found["attempt"]), str(found["claimant"]))
            if "host" not in found:
                return claim
            program = Program(
                job=str(found["job"]), host=str(found["host"]), process=int(found["process"]), user=str(found["user"])
            )
            return cls(claim.attempt, claim.claimant, program, str(found["at"]))
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def described(self) -> str:
        return "a program of an older version" if self.program is None else f"{self.program}, at {self.at}"
