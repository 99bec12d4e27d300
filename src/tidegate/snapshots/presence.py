"""The check that the files of a snapshot are where others can read them, before its manifest is created.

A slot acknowledges a file when its own write has returned. That doesn't mean that any other process sees the file: a local
folder on a cluster of several hosts is a different folder on each host. So the coordinator looks at every new file from
where it runs. It doesn't read them: a restore checks every byte.
"""

from __future__ import annotations

import socket
from collections.abc import Collection

from tidegate.errors import CorruptFile, JobError, NotFound, TidegateError
from tidegate.snapshots.manifest import Manifest
from tidegate.store.base import Store
from tidegate.store.layout import parse_state_file_name, shown
from tidegate.store.local import LocalStore


def require_present(store: Store, manifest: Manifest, *, known: Collection[str]) -> None:
    """Raise an error that names the first file that isn't there or has another length. `known` files are not looked at."""
    files = [file for file in manifest.files() if file.name not in known]
    for file, size_bytes in zip(files, store.sizes([file.name for file in files]), strict=True):
        if size_bytes is None:
            raise _missing(store, file.name, epoch=manifest.epoch)
        if size_bytes != file.bytes:
            raise CorruptFile(
                f"{file.name} in {shown(store.address)} has {size_bytes} bytes, but the slot that wrote it reported "
                f"{file.bytes}: epoch {manifest.epoch} is not complete"
            )


def _missing(store: Store, name: str, *, epoch: int) -> TidegateError:
    written = parse_state_file_name(name)
    by = "a slot" if written is None else f"subtask {written.subtask} of {written.operator!r}"
    where = f"{name}, which {by} has written, is not in {shown(store.address)}"
    if not isinstance(store, LocalStore):
        return NotFound(f"{where}: epoch {epoch} is not complete. Does something else delete files there?")
    return JobError(
        f"{where} on the driver's host {socket.gethostname()}: epoch {epoch} can't be completed, and no other host could "
        f"restore it. Slots on other hosts have a folder of that name on their own disks. Give a place that all hosts "
        f"share: Snapshots(to='s3://…'), 'hdfs://…', or a folder that is mounted on all of them"
    )
