"""What the S3 store relies on is true of the server that the tests run: otherwise they would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.servers.s3 import S3Server


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with S3Server() as server:
        server.address("bucket")
        yield server.client()


def status_of(call: Callable[[], Any]) -> int:
    try:
        status: int = call()["ResponseMetadata"]["HTTPStatusCode"]
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return status


def test_a_put_with_if_none_match_is_refused_if_the_key_exists(client: Any) -> None:
    def put(body: bytes, **condition: str) -> Any:
        return client.put_object(Bucket="bucket", Key="once", Body=body, **condition)

    assert status_of(lambda: put(b"first", IfNoneMatch="*")) == 200
    assert status_of(lambda: put(b"second", IfNoneMatch="*")) == 412
    assert client.get_object(Bucket="bucket", Key="once")["Body"].read() == b"first"
    assert status_of(lambda: put(b"third")) == 200
    client.delete_object(Bucket="bucket", Key="once")
    assert status_of(lambda: put(b"fourth", IfNoneMatch="*")) == 200


def test_of_many_conditional_puts_at_one_time_one_succeeds(client: Any) -> None:
    def put(number: int) -> int:
        body = str(number).encode()
        return status_of(lambda: client.put_object(Bucket="bucket", Key=f"r{number % 10}", Body=body, IfNoneMatch="*"))

    with ThreadPoolExecutor(8) as threads:
        statuses = sorted(threads.map(put, range(80)))
    assert statuses == [200] * 10 + [412] * 70


def test_the_metadata_of_the_winner_stays(client: Any) -> None:
    def put(owner: str) -> Any:
        return client.put_object(Bucket="bucket", Key="owned", Body=b"x", IfNoneMatch="*", Metadata={"owner": owner})

    assert [status_of(lambda: put("first")), status_of(lambda: put("second"))] == [200, 412]
    assert client.head_object(Bucket="bucket", Key="owned")["Metadata"] == {"owner": "first"}


def test_an_upload_is_invisible_and_listed_until_it_is_completed_or_aborted(client: Any) -> None:
    def begin(key: str) -> tuple[str, str]:
        upload = client.create_multipart_upload(Bucket="bucket", Key=key, Metadata={"owner": "me"})["UploadId"]
        part = client.upload_part(Bucket="bucket", Key=key, UploadId=upload, PartNumber=1, Body=b"part")
        return upload, part["ETag"]

    kept, tag = begin("up/kept")
    gone, _ = begin("up/gone")
    listed = client.list_multipart_uploads(Bucket="bucket", Prefix="up/")["Uploads"]
    assert {(each["Key"], each["UploadId"]) for each in listed} == {("up/kept", kept), ("up/gone", gone)}
    assert "Contents" not in client.list_objects_v2(Bucket="bucket", Prefix="up/")
    client.abort_multipart_upload(Bucket="bucket", Key="up/gone", UploadId=gone)
    parts = {"Parts": [{"ETag": tag, "PartNumber": 1}]}
    client.complete_multipart_upload(Bucket="bucket", Key="up/kept", UploadId=kept, MultipartUpload=parts)
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket", Prefix="up/")
    assert client.head_object(Bucket="bucket", Key="up/kept")["Metadata"] == {"owner": "me"}
    assert (
        status_of(
            lambda: client.complete_multipart_upload(Bucket="bucket", Key="up/gone", UploadId=gone, MultipartUpload=parts)
        )
        == 404
    )
