"""Asking a running job for a savepoint, from another process.

A request is a file in the job's store. The running coordinator finds it (driver/savepoints.py), and writes its answer into a
file beside it. The process that asked removes both.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from tidegate.errors import AlreadyExists, NotFound, StoreError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import resolved
from tidegate.snapshots.savepoints import SavepointInfo, check_empty
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.opening import open_store

REQUEST_TIMEOUT_S = 600.0

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    to: str
    expires_ms: int


def request_savepoint(job: str | Store, to: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> str:
    """Ask the job whose snapshots are in this folder for a savepoint at `to`, and return the request's id. A job that
    isn't running doesn't answer; after the time-out, no job does."""
    store = _job_store(job)
    if not SnapshotCatalog(store).attempts():
        raise NotFound(f"{layout.shown(store.address)} is not the folder of a job that ever ran")
    request, now_ms = uuid.uuid4().hex, round(time.time() * 1000)
    target = resolved(to)
    check_empty(open_store(target))
    content = {"to": target, "asked_ms": now_ms, "expires_ms": now_ms + round(timeout_s * 1000)}
    store.create(layout.request_name(request), json.dumps(content).encode("utf-8"))
    return request


def wait_for_savepoint(job: str | Store, request: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> SavepointInfo:
    """Wait for the answer. StoreError if the savepoint failed, TimeoutError if there is no answer in time; the request is
    withdrawn in any case."""
    store = _job_store(job)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            with suppress(NotFound):
                answer = json.loads(store.read(layout.answer_name(request)))
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"the job in {layout.shown(store.address)} gave no answer within {timeout_s} s: does it run?"
                )
            time.sleep(_POLL_S)
    finally:
        for name in (layout.request_name(request), layout.answer_name(request)):
            with suppress(StoreError):
                store.delete(name)
    if "failed" in answer:
        raise StoreError(f"no savepoint was taken: {answer['failed']}")
    return SavepointInfo(path=answer["path"], epoch=answer["epoch"], bytes=answer["bytes"])


def open_requests(store: Store, *, now_ms: int, known: Collection[str] = ()) -> list[Request]:
    """Return the unanswered requests that are not `known`. Remove requests that have expired or can't be read."""
    names = store.list(layout.REQUESTS)
    answered = {layout.parse_answer_name(name) for name in names}
    found = []
    for name in names:
        request = layout.parse_request_name(name)
        if request is None or request in answered or request in known:
            continue
        try:
            content = json.loads(store.read(name))
            asked = Request(id=request, to=str(content["to"]), expires_ms=int(content["expires_ms"]))
        except NotFound:
            continue  # withdrawn meanwhile
        except (ValueError, KeyError, TypeError):
            store.delete(name)
            continue
        if asked.expires_ms < now_ms:
            store.delete(name)
        else:
            found.append(asked)
    return found


def answer_request(store: Store, request: str, outcome: SavepointInfo | str) -> None:
    """Answer with the savepoint, or with the reason why there is none. A withdrawn request gets no answer."""
    content = (
        {"failed": outcome}
        if isinstance(outcome, str)
        else {"path": outcome.path, "epoch": outcome.epoch, "bytes": outcome.bytes}
    )
    if layout.request_name(request) in store.list(layout.REQUESTS):
        with suppress(AlreadyExists):
            store.create(layout.answer_name(request), json.dumps(content).encode("utf-8"))


def _job_store(job: str | Store) -> Store:
    return open_store(job) if isinstance(job, str) else job
