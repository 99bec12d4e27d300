"""A folder in an S3 bucket: its address, its client, and what its errors mean.

    s3://bucket/folder?region=…&endpoint_override=…&scheme=http&profile=…

The options are those that `pyarrow.fs` has for an S3 URI, so that one address serves snapshots and Parquet files, and
`profile`. Credentials come from where boto3 looks for them: the environment, a profile, a web identity, the instance. A user
and a password in the address are an access key and its secret; no message shows them, nor the options.

Requests that fail because of the network or the server (503 SlowDown, 500, a download that breaks off) are repeated here,
and not by boto3: it doesn't repeat downloads, and after an outage it repeats less and less, because requests share a quota
that only successes fill.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tidegate.errors import NotFound, StoreError
from tidegate.store.layout import shown

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        FlexibleChecksumError,
        HTTPClientError,
        IncompleteReadError,
    )
    from botocore.parsers import ResponseParserError
except ImportError as error:
    raise StoreError("s3:// needs boto3 on the driver and on every host with slots: pip install 'tidegate[s3]'") from error

REQUEST_ERRORS = (ClientError, BotoCoreError, ResponseParserError)

_PASSING = (ConnectionError, HTTPClientError, IncompleteReadError, FlexibleChecksumError, ResponseParserError)
_PASSING_STATUS = frozenset({429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 4.0  # each pause is twice as long as the one before
_GIVE_UP_AFTER_S = 60

_OPTIONS = frozenset(
    {"region", "scheme", "endpoint_override", "profile", "force_virtual_addressing", "connect_timeout", "request_timeout"}
)
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 30
_CONNECTIONS = 16

_making_clients = threading.Lock()


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """`folder` is a prefix of keys that ends with a slash, or empty."""

    address: str = field(repr=False)
    name: str
    folder: str
    client: Any = field(repr=False, compare=False)

    @classmethod
    def at(cls, address: str) -> S3Bucket:
        parts = urlsplit(address)
        bucket = parts.netloc.rpartition("@")[2]
        folder = parts.path.strip("/")
        if not bucket:
            raise StoreError(f"{shown(address)} names no bucket: give one, as in s3://bucket/folder")
        options = dict(parse_qsl(parts.query))
        if unknown := options.keys() - _OPTIONS:
            raise StoreError(f"{shown(address)}: unknown options {sorted(unknown)}; there are {sorted(_OPTIONS)}")
        user, password = parts.username, parts.password
        with _making_clients:
            client = _client(
                None if user is None else unquote(user),
                None if password is None else unquote(password),
                tuple(sorted(options.items())),
            )
        return cls(address, bucket, f"{folder}/" if folder else "", client)

    @property
    def shown(self) -> str:
        return shown(self.address)

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Call an operation of the S3 client, on an object or on the bucket. Return the answer; `content` is its content."""
        if "Key" in arguments:
            arguments["Key"] = self.folder + arguments["Key"]
        pause_s, give_up_s = _FIRST_PAUSE_S, time.monotonic() + _GIVE_UP_AFTER_S
        while True:
            try:
                answer = getattr(self.client, operation)(Bucket=self.name, **arguments)
                if "Body" in answer:
                    answer["content"] = answer["Body"].read()
            except REQUEST_ERRORS as error:
                if not passes(error) or pause_s > _LAST_PAUSE_S or time.monotonic() > give_up_s:
                    raise
            else:
                return answer
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s *= 2

    def pages(self, operation: str, prefix: str, *, found: str, markers: Mapping[str, str]) -> Iterator[Any]:
        """Yield what a listing has under `found`, for all keys with this prefix. `markers` are the arguments that ask for
        the next page, and where the answer has them."""
        arguments = {"Prefix": self.folder + prefix}
        while True:
            page = self.ask(operation, **arguments)
            yield from page.get(found, ())
            if not page.get("IsTruncated"):
                return
            arguments |= {argument: page[field] for argument, field in markers.items()}

    def key_of(self, full: str) -> str:
        return full.removeprefix(self.folder)

    @contextmanager
    def errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            if status_of(error) == 404 and code_of(error) != "NoSuchBucket":
                raise NotFound(f"{key} is not in {self.shown}") from error
            raise StoreError(f"{operation} {key} in {self.shown}: {described(error)}") from error
        except REQUEST_ERRORS as error:
            raise StoreError(f"{operation} {key} in {self.shown}: {described(error)}") from error


def passes(error: Exception) -> bool:
    """Return whether the same request may succeed a moment later."""
    return isinstance(error, _PASSING) or status_of(error) in _PASSING_STATUS or code_of(error) == "RequestTimeout"


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of an answer; None if there was none."""
    if not isinstance(error, ClientError):
        return None
    status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def code_of(error: Exception) -> str | None:
    code: str | None = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
    return code


def described(error: Exception) -> str:
    """Return what happened, without the fields of an answer that may hold keys."""
    if not isinstance(error, ClientError):
        return str(error)
    about = error.response.get("Error", {})
    return f"{about.get('Code', '?')} ({status_of(error)}): {about.get('Message', '')}".rstrip(": ")


@cache
def _client(user: str | None, password: str | None, given: tuple[tuple[str, str], ...]) -> Any:
    """Return a client. Clients are safe to use from several threads, and have a pool of connections each."""
    options = dict(given)
    endpoint = options.get("endpoint_override")
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    virtual = endpoint is None or options.get("force_virtual_addressing", "").lower() in ("true", "1")
    try:
        session = boto3.Session(
            aws_access_key_id=user,
            aws_secret_access_key=password,
            region_name=options.get("region"),
            profile_name=options.get("profile"),
        )
        return session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=session.region_name or "us-east-1",  # AWS redirects to the bucket's own
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 1},
                connect_timeout=float(options.get("connect_timeout", _CONNECT_TIMEOUT_S)),
                read_timeout=float(options.get("request_timeout", _READ_TIMEOUT_S)),
                max_pool_connections=_CONNECTIONS,
                tcp_keepalive=True,
                s3={"addressing_style": "auto" if virtual else "path"},
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise StoreError(f"no S3 client can be made: {error}") from error
