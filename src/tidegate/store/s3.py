"""Snapshots in an S3 bucket, on AWS or on any server that has conditional writes.

- `create` is a PUT with `If-None-Match: *`: the server refuses it if the key exists, so of several creators exactly one
  succeeds. Each create gives its object a random token. If an answer is lost, and the repeated request is refused, the token
  tells whether the object is ours. If that can't be found out either, the outcome is unknown: StoreError, never success.
- `write` sends small files with one PUT and larger ones as multipart uploads, a few parts at a time. An object appears whole
  or not at all. A write that fails removes its parts; the parts of a killed process are removed by `remove_uploads`.
- Content that arrives damaged is refused: boto3 sends a checksum with each request, which the server verifies.
- Listings are consistent, as they are on AWS since 2020.

`check` tests at the start of a job whether the server honours the condition, because a server that doesn't know it
overwrites. Permissions are the bucket's.
"""

from __future__ import annotations

import builtins
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from os.path import commonprefix
from typing import Any

from tidegate.errors import AlreadyExists, CorruptFile, JobError, NotFound, StoreError
from tidegate.store.layout import check_name
from tidegate.store.s3_bucket import REQUEST_ERRORS, S3Bucket, status_of
from tidegate.store.s3_upload import PART_BYTES, TOKEN, Upload, abort, token_of, unfinished

_CREATE_TRIES = 8
_CREATE_PAUSE_S = 0.05
_HEADS_AT_ONCE = 16
_MOST_HEADS = 64  # for the sizes of more names, the folder is listed


class S3Store:
    def __init__(self, address: str) -> None:
        self.address = address
        self._bucket = S3Bucket.at(address)
        if not self._bucket.folder:
            raise StoreError(f"{self._bucket.shown} names no folder: snapshots need one, as in s3://bucket/folder")

    def __repr__(self) -> str:
        return f"S3Store({self._bucket.shown!r})"

    def __reduce__(self) -> tuple[type[S3Store], tuple[str]]:
        return S3Store, (self.address,)

    def check(self) -> None:
        """Create a trial object twice. JobError if the second create succeeds, StoreError if nothing can be written."""
        name = f"trial-{uuid.uuid4().hex}"
        self.create(name, b"first")
        try:
            self.create(name, b"second")
        except AlreadyExists:
            return
        finally:
            self.delete(name)
        raise JobError(
            f"snapshots can't be kept in {self._bucket.shown}: the server has overwritten an object although the request "
            f"forbade it (If-None-Match), so two drivers could run one job without noticing. Use AWS S3, or a version of "
            f"the server with conditional writes"
        )

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        key = check_name(name)
        head = bytearray()
        upload: Upload | None = None
        with self._bucket.errors("write", name):
            try:
                for chunk in chunks:
                    if upload is not None:
                        upload.write(chunk)
                        continue
                    head += chunk
                    if len(head) > PART_BYTES:
                        upload = Upload(self._bucket, key, token=uuid.uuid4().hex)
                        upload.write(bytes(head))
                        head.clear()
                if upload is None:
                    self._bucket.ask("put_object", Key=key, Body=bytes(head))
                    return len(head)
                upload.complete()
            except BaseException:
                if upload is not None:
                    _abort_after_error(upload)
                raise
        return upload.bytes

    def create(self, name: str, content: bytes) -> None:
        key, token = check_name(name), uuid.uuid4().hex
        with self._bucket.errors("create", name):
            for _ in range(_CREATE_TRIES):
                try:
                    self._bucket.ask("put_object", Key=key, Body=content, IfNoneMatch="*", Metadata={TOKEN: token})
                    return
                except REQUEST_ERRORS as error:
                    found = token_of(self._bucket, key)
                    if found == token:
                        return  # an earlier request succeeded, and its answer was lost
                    if status_of(error) not in (409, 412):
                        raise  # the request may still succeed, whatever is there now
                    if found is not None:
                        raise AlreadyExists(f"{name} is already in {self._bucket.shown}") from None
                # Refused, and not there: another request was under way (409), or the object was deleted since.
                time.sleep(_CREATE_PAUSE_S)
        raise StoreError(f"create {name} in {self._bucket.shown}: refused {_CREATE_TRIES} times, although it isn't there")

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or length >= 0)
        key = check_name(name)
        if length == 0:
            return self._nothing(name, offset)
        wanted: dict[str, Any] = {}
        if offset or length is not None:
            wanted["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        with self._bucket.errors("read", name):
            try:
                answer = self._bucket.ask("get_object", Key=key, **wanted)
            except REQUEST_ERRORS as error:
                if status_of(error) != 416:
                    raise
                answer = {}
        content: bytes = answer.get("content", b"")
        if not content and offset and length is None:
            return self._nothing(name, offset)
        if length is not None and len(content) != length:
            size = answer.get("ContentRange", "").rpartition("/")[2] or self.size(name)
            raise CorruptFile(f"{name} in {self._bucket.shown} has {size} bytes, not {offset + length}")
        return content

    def _nothing(self, name: str, offset: int) -> bytes:
        size_bytes = self.size(name)
        if offset > size_bytes:
            raise CorruptFile(f"{name} in {self._bucket.shown} has {size_bytes} bytes, not {offset}")
        return b""

    def list(self, folder: str) -> builtins.list[str]:
        prefix = check_name(folder) + "/" if folder else ""
        return sorted(self._sizes_under(prefix))

    def delete(self, name: str) -> None:
        with self._bucket.errors("delete", name):
            self._bucket.ask("delete_object", Key=check_name(name))

    def size(self, name: str) -> int:
        key = check_name(name)
        with self._bucket.errors("size", name):
            return int(self._bucket.ask("head_object", Key=key)["ContentLength"])

    def sizes(self, names: Sequence[str]) -> builtins.list[int | None]:
        keys = [check_name(name) for name in names]
        if len(keys) > _MOST_HEADS:
            found = self._sizes_under(commonprefix(keys))  # noqa: RUF071  (a prefix of keys, not a folder)
            return [found.get(key) for key in keys]
        if not keys:
            return []
        with ThreadPoolExecutor(min(len(keys), _HEADS_AT_ONCE), thread_name_prefix="tidegate-sizes") as threads:
            return [*threads.map(self._size_if_there, names)]

    def remove_uploads(self, unwanted: Callable[[str], bool]) -> builtins.list[str]:
        """Remove the parts of unfinished writes to unwanted names, and return these names."""
        with self._bucket.errors("remove the unfinished uploads", ""):
            doomed = [upload for upload in unfinished(self._bucket, "") if unwanted(upload.key)]
            for upload in doomed:
                abort(self._bucket, upload)
        return [upload.key for upload in doomed]

    def _size_if_there(self, name: str) -> int | None:
        try:
            return self.size(name)
        except NotFound:
            return None

    def _sizes_under(self, prefix: str) -> dict[str, int]:
        with self._bucket.errors("list", prefix):
            found = self._bucket.pages(
                "list_objects_v2", prefix, found="Contents", markers={"ContinuationToken": "NextContinuationToken"}
            )
            sizes = {self._bucket.key_of(each["Key"]): int(each["Size"]) for each in found}
        # Consoles and Hadoop mark folders with objects whose keys end in a slash.
        return {name: size for name, size in sizes.items() if not name.endswith("/")}


def _abort_after_error(upload: Upload) -> None:
    with suppress(*REQUEST_ERRORS):  # a sweep removes the parts
        upload.abort()
