"""A real S3 server on the loopback interface, moto's, in a thread of this process, and a proxy that injects faults.

    with S3Server() as server:
        address = server.address("bucket/folder")           # straight to the server
        with FaultyProxy(server.port, faults) as proxy:      # the same bucket through faults
            address = proxy.address("bucket/folder")

The server honours conditional writes (tests/contract/test_s3_server.py). moto checks the condition and stores the object in
two steps, so writes are let in one after the other. No pytest in here.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import boto3
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

KEY, SECRET = "tests-key", "tests-secret"


def address_at(port: int, folder: str) -> str:
    return f"s3://{KEY}:{SECRET}@{folder}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


class S3Server:
    def __init__(self) -> None:
        application = DomainDispatcherApplication(create_backend_app)
        writing = threading.Lock()

        def one_write_at_a_time(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            body: Iterable[bytes]
            if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
                body = application(environ, start_response)
            elif environ["REQUEST_METHOD"] == "POST" and _is_of_no_upload(environ):
                start_response("404 Not Found", [("Content-Type", "application/xml")])
                body = [_error("NoSuchUpload")]
            else:
                with writing:
                    body = application(environ, start_response)
            return body

        self._server = make_server("127.0.0.1", 0, one_write_at_a_time, threaded=True, request_handler=_Silent)
        self._client: Any = None
        self._buckets: set[str] = set()
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def client(self) -> Any:
        if self._client is None:
            self._client = boto3.client(
                "s3",
                endpoint_url=f"http://127.0.0.1:{self.port}",
                region_name="us-east-1",
                aws_access_key_id=KEY,
                aws_secret_access_key=SECRET,
            )
        return self._client

    def address(self, folder: str) -> str:
        """Return the address of a folder in a bucket, which is created if it isn't there."""
        bucket = folder.partition("/")[0]
        if bucket not in self._buckets:
            self.client().create_bucket(Bucket=bucket)
            self._buckets.add(bucket)
        return address_at(self.port, folder)


def _is_of_no_upload(environ: dict[str, Any]) -> bool:
    """moto answers 500 if an upload is to be completed that was aborted."""
    wanted = parse_qs(environ["QUERY_STRING"]).get("uploadId", [])
    buckets = get_backend("s3")["123456789012"]["global"].buckets.values()
    return any(all(upload not in bucket.multiparts for bucket in buckets) for upload in wanted)


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test asked</Message></Error>".encode()


class _Silent(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class Fault(Enum):
    """What happens to one request."""

    SLOW_DOWN = "answered with 503 SlowDown; it doesn't reach the server"
    ERROR = "answered with 500 InternalError; it doesn't reach the server"
    CONFLICT = "answered with 409 ConditionalRequestConflict; it doesn't reach the server"
    RESET = "the connection is reset before the request reaches the server"
    LOSE_ANSWER = "the server does it, and the connection is reset before the answer"
    FAIL_ANSWER = "the server does it, and the answer is 500 InternalError"
    TEAR_REQUEST = "half of the body reaches the server, then the connection is reset"
    TEAR_ANSWER = "half of the answer's body arrives, then the connection is reset"
    STALL = "the server does it, and the answer comes late"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: str
    condition: str | None
    body_bytes: int


FaultHook = Callable[[Request], Fault | None]
_ANSWERS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.ERROR: (500, "InternalError"),
    Fault.FAIL_ANSWER: (500, "InternalError"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
}


class FaultyProxy:
    """Forwards requests to the server at `port`, except for what `faults` says. `requests` are those that came."""

    def __init__(self, port: int, faults: FaultHook, *, stall_s: float = 0.5) -> None:
        self.faults = faults
        self.requests: list[Request] = []
        proxy = self

        class Handler(_Handler):
            server_port = port
            stalls_s = stall_s

            def fault_of(self, request: Request) -> Fault | None:
                proxy.requests.append(request)
                return proxy.faults(request)

        self._server = _Silently(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def address(self, folder: str) -> str:
        return address_at(self.port, folder)


class _Silently(ThreadingHTTPServer):
    """Ends its connections with it. A client that has given up and resets a connection is no error."""

    daemon_threads = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # it answers `Expect: 100-continue`
    server_port: int
    stalls_s: float

    def fault_of(self, request: Request) -> Fault | None:
        raise NotImplementedError

    def _serve(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, path, query, self.headers.get("If-None-Match"), len(body))
        fault = self.fault_of(request)
        if fault in (Fault.SLOW_DOWN, Fault.ERROR, Fault.CONFLICT):
            self._refuse(fault)
        elif fault is Fault.RESET:
            self._reset()
        elif fault is Fault.TEAR_REQUEST:
            self._tear(body)
            self._reset()
        else:
            self._forward_with(fault, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _forward_with(self, fault: Fault | None, body: bytes) -> None:
        answer, content = self._forward(body)
        if fault is Fault.LOSE_ANSWER:
            self._reset()
        elif fault is Fault.FAIL_ANSWER:
            self._refuse(fault)
        elif fault is Fault.TEAR_ANSWER:
            self._answer(answer, content[: len(content) // 2])
            self._reset()
        else:
            time.sleep(self.stalls_s if fault is Fault.STALL else 0)
            self._answer(answer, content)

    def _headers(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name not in ("Expect", "Connection")}

    def _forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body or None, self._headers())
            answer = connection.getresponse()
            return answer, answer.read()

    def _tear(self, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self._headers().items():
                connection.putheader(name, value)
            connection.endheaders(body[: len(body) // 2])

    def _answer(self, answer: http.client.HTTPResponse, content: bytes) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if answer.getheader("Content-Length") is None:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, fault: Fault) -> None:
        status, code = _ANSWERS[fault]
        content = _error(code)
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        pass
