"""The check, before anything is deployed, that the store is writable.

On a local disk a file is created, and in S3 an object. Other stores raise an error when the job's first attempt is claimed.
"""

from __future__ import annotations

import socket

from tidegate.errors import JobError
from tidegate.store.base import ObjectStore, Store
from tidegate.store.layout import shown
from tidegate.store.local import LocalStore
from tidegate.system_errors import user_here, what_to_do


def check_writable(store: Store) -> None:
    """`JobError` or `StoreError` if nothing can be written to the store."""
    if isinstance(store, LocalStore):
        try:
            store.try_writing()
        except OSError as error:
            raise JobError(unwritable(store.address, error)) from error
    elif isinstance(store, ObjectStore):
        store.check()


def unwritable(address: str, error: Exception) -> str:
    return (
        f"snapshots can't be kept in {shown(address)}: user {user_here()} on host {socket.gethostname()} can't write "
        f"there ({error}). {what_to_do(error, made=True)}, Snapshots(to=…)"
    )
