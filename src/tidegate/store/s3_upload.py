"""Multipart uploads: an object of any length, sent in parts as it is made, that appears when the upload is completed.

Until then nobody sees the object, whoever has the upload's id and the tags of its parts can complete it, and its parts take
space. An upload that is neither completed nor aborted stays; `unfinished` finds those that a killed process left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tidegate.store.s3_bucket import REQUEST_ERRORS, S3Bucket, code_of

PART_BYTES = 8 << 20  # S3 asks for 5 MiB, except of the last part
PARTS_AT_ONCE = 4
TOKEN = "tidegate-token"
"""The name under which an object's metadata keeps the token of the write that made it."""

_EVEN_PARTS = 1000  # beyond these, parts grow with the object, since S3 allows 10,000 parts and 5 TB


@dataclass(frozen=True, slots=True)
class UploadId:
    """An upload that was begun: of which object, and S3's id."""

    key: str
    id: str


class Upload:
    """An upload that this process sends. Safe to use from one thread at a time."""

    def __init__(self, bucket: S3Bucket, key: str, *, token: str) -> None:
        self._bucket = bucket
        answer = bucket.ask("create_multipart_upload", Key=key, Metadata={TOKEN: token})
        self.id = UploadId(key, answer["UploadId"])
        self.bytes = 0
        self._token = token
        self._tail = bytearray()
        self._tags: list[Future[str]] = []
        self._sent: deque[Future[str]] = deque()
        self._threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="tidegate-upload")

    def write(self, chunk: bytes | memoryview) -> None:
        self._tail += chunk
        self.bytes += memoryview(chunk).nbytes
        if len(self._tail) >= max(PART_BYTES, self.bytes // _EVEN_PARTS):
            self._send_part()

    def finish(self) -> list[str]:
        """Send the rest, and return the parts' tags, with which the upload can be completed."""
        if self._tail or not self._tags:
            self._send_part()
        tags = [tag.result() for tag in self._tags]
        self._threads.shutdown()
        return tags

    def complete(self) -> None:
        complete(self._bucket, self.id, self.finish(), token=self._token)

    def abort(self) -> None:
        """Remove the parts. Parts that are being sent would stay, so they are waited for."""
        self._threads.shutdown(cancel_futures=True)
        abort(self._bucket, self.id)

    def _send_part(self) -> None:
        content, self._tail = bytes(self._tail), bytearray()
        while self._sent and (self._sent[0].done() or len(self._sent) >= PARTS_AT_ONCE):
            self._sent.popleft().result()
        self._sent.append(self._threads.submit(self._put, len(self._tags) + 1, content))
        self._tags.append(self._sent[-1])

    def _put(self, number: int, content: bytes) -> str:
        answer = self._bucket.ask("upload_part", Key=self.id.key, UploadId=self.id.id, PartNumber=number, Body=content)
        tag: str = answer["ETag"]
        return tag


def complete(bucket: S3Bucket, upload: UploadId, tags: Sequence[str], *, token: str) -> None:
    """Make the object appear. If a try succeeded and its answer was lost, S3 no longer has the upload."""
    parts = [{"ETag": tag, "PartNumber": number} for number, tag in enumerate(tags, start=1)]
    try:
        bucket.ask("complete_multipart_upload", Key=upload.key, UploadId=upload.id, MultipartUpload={"Parts": parts})
    except REQUEST_ERRORS as error:
        if token_of(bucket, upload.key) != token:
            raise error


def abort(bucket: S3Bucket, upload: UploadId) -> None:
    try:
        bucket.ask("abort_multipart_upload", Key=upload.key, UploadId=upload.id)
    except REQUEST_ERRORS as error:
        if code_of(error) != "NoSuchUpload":
            raise


def unfinished(bucket: S3Bucket, prefix: str) -> Iterator[UploadId]:
    """Yield the uploads that were begun and neither completed nor aborted."""
    markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
    for upload in bucket.pages("list_multipart_uploads", prefix, found="Uploads", markers=markers):
        yield UploadId(bucket.key_of(upload["Key"]), upload["UploadId"])


def token_of(bucket: S3Bucket, key: str) -> str | None:
    """Return the token of the write that made the object: empty if it has none, None if there is no object."""
    try:
        token: str = bucket.ask("head_object", Key=key)["Metadata"].get(TOKEN, "")
    except REQUEST_ERRORS as error:
        if code_of(error) in ("404", "NoSuchKey"):
            return None
        raise
    return token
