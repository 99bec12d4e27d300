"""Opening the store at the URI that a user gives.

Slots receive the address of a store. `open_store(store.address)` reaches the same files in any process, except for
`memory://`, which is a dictionary for each name in each process, for tests.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs as pafs

from tidegate.errors import StoreError
from tidegate.store.arrow import ArrowStore
from tidegate.store.base import Store
from tidegate.store.layout import shown
from tidegate.store.local import LocalStore
from tidegate.store.memory import MemoryStore

_URI = re.compile(r"file:|[A-Za-z][A-Za-z0-9+.-]+://")
_memory_stores: dict[str, MemoryStore] = {}


def open_store(uri: str) -> Store:
    """Open a plain path, file:///folder, s3://bucket/folder, gs://…, abfss://…, hdfs://…, or memory://name."""
    if not uri:
        raise StoreError("the address of the snapshot store is empty: give a path or a URI such as s3://bucket/folder")
    if not _URI.match(uri):
        return LocalStore(uri)
    parts = urlsplit(uri)
    if parts.scheme == "memory":
        name = (parts.netloc + parts.path).rstrip("/")
        if not name:
            raise StoreError("memory:// needs a name: memory://my-test")
        return _memory_stores.setdefault(name, MemoryStore(name))
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise StoreError(f"{uri!r}: a file URI has three slashes and an absolute path, as in file:///data/snapshots")
        return LocalStore(unquote(parts.path))
    if parts.scheme in ("s3", "s3a", "s3n"):  # the last two are Hadoop's names
        from tidegate.store.s3 import S3Store  # boto3 is an extra

        return S3Store(uri)
    if parts.scheme == "hdfs":
        from tidegate.store.hdfs import HdfsStore  # hdfs-native is an extra

        return HdfsStore(uri)
    return _open_arrow_store(uri)


def forget_memory_store(name: str) -> None:
    """Forget a memory store, so that the next one of that name begins empty."""
    _memory_stores.pop(name, None)


def _open_arrow_store(uri: str) -> ArrowStore:
    try:
        filesystem, root = pafs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).replace(uri, shown(uri))
        raise StoreError(f"can't open {shown(uri)} as a snapshot store: {reason}") from None
    if not root.strip("/"):
        raise StoreError(f"{shown(uri)} names no folder: snapshots need one, as in gs://bucket/folder")
    return ArrowStore(filesystem, root, address=uri)
