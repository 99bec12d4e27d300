"""Receipts: durable evidence that the commit of pending files was begun while all of them existed.

A commit renames pending files. Before the first rename it creates a receipt beside them, an empty file:

    <owner>-<attempt>-<subtask>-<token>-<number>.receipt

It shows that the files of this writer up to that number existed when their commit was begun. When the commit is repeated,
a missing pending file with a receipt was therefore renamed, even if consumers have moved or deleted the committed file
since. A missing pending file without a receipt is lost output.

A receipt covers all lower numbers, because the output of a writer is committed in the order of its epochs, and so of its
numbers (protocol/commit.py). That holds after a restore, too: a writer's committables stay together
(protocol/recovery.py, "whole").

There is one receipt for each writer that has committed anything, so receipts grow with attempts and not with output. They
outlive the attempt, because an exported snapshot may list output whose commit was never confirmed. Only the receipts of
the newest `KEPT_ATTEMPTS` attempts are kept, so that their number is bounded: a commit that is repeated after that finds
the committed file, or fails.

This module does no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from tidegate.dataflow.contracts import Committable
from tidegate.errors import CommitError

PENDING_FOLDER = "_tidegate"
KEPT_ATTEMPTS = 100

_PENDING = re.compile(r"([0-9a-f]{12})-(\d+)-(\d+)-(\d+)-([0-9a-f]{8})\.parquet")
_RECEIPT = re.compile(r"([0-9a-f]{12})-(\d+)-(\d+)-([0-9a-f]{8})-(\d+)\.receipt")


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer of pending files. `owner` identifies the job, its snapshots and its sink; `token` is the writer's own."""

    owner: str
    attempt: int
    subtask: int
    token: str

    def pending_name(self, number: int) -> str:
        return f"{self.owner}-{self.attempt}-{self.subtask}-{number}-{self.token}.parquet"

    def receipt_name(self, number: int) -> str:
        return f"{self.owner}-{self.attempt}-{self.subtask}-{self.token}-{number}.receipt"


def parse_pending(name: str) -> tuple[Writer, int] | None:
    match = _PENDING.fullmatch(name)
    return None if match is None else (Writer(match[1], int(match[2]), int(match[3]), match[5]), int(match[4]))


def parse_receipt(name: str) -> tuple[Writer, int] | None:
    match = _RECEIPT.fullmatch(name)
    return None if match is None else (Writer(match[1], int(match[2]), int(match[3]), match[4]), int(match[5]))


def highest(parsed: Iterable[tuple[Writer, int] | None]) -> dict[Writer, int]:
    """Return the highest number of each writer."""
    found: dict[Writer, int] = {}
    for each in parsed:
        if each is not None:
            found[each[0]] = max(each[1], found.get(each[0], 0))
    return found


def superseded(names: Iterable[str], *, owner: str, attempt: int) -> list[str]:
    """Return the receipts of this owner that are no longer needed in this attempt."""
    receipts = {name: receipt for name in names if (receipt := parse_receipt(name)) is not None}
    newest = highest(receipts.values())
    return [
        name
        for name, (writer, number) in receipts.items()
        if writer.owner == owner and (number < newest[writer] or writer.attempt <= attempt - KEPT_ATTEMPTS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A committable of a Parquet sink. Both names are relative to `folder`, the output folder without secrets, so that a
    sink with another folder can commit the output. None in snapshots of older versions."""

    pending: str
    final: str
    size: int
    folder: str | None

    def to_committable(self) -> Committable:
        return json.dumps(asdict(self))

    @classmethod
    def from_committable(cls, committable: Committable) -> Promise:
        try:
            content = json.loads(committable)
            folder = content.get("folder")
            promise = cls(
                pending=str(content["pending"]),
                final=str(content["final"]),
                size=int(content["size"]),
                folder=None if folder is None else str(folder),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommitError(
                f"not a committable of a Parquet sink: {committable[:200]!r}. If the job had another kind of sink under "
                f"this name, give the new sink another name",
                final=True,
            ) from error
        folder_of, _, name = promise.pending.rpartition("/")
        if "/" in promise.final or folder_of != PENDING_FOLDER or parse_pending(name) is None:
            raise CommitError(f"not a committable of a Parquet sink: {committable[:200]!r}", final=True)
        return promise
