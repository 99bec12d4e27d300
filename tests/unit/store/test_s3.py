"""The S3 store behind a network and a server that fail. docs/promises.md, rows 5, 9 and 13."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.s3 import KEY, SECRET, Fault, FaultyProxy, S3Server
from tidegate.errors import AlreadyExists, JobError, NotFound, StoreError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.store import layout, s3_bucket, s3_upload
from tidegate.store.s3 import S3Store

LARGE = [bytes([number]) * (3 << 20) for number in range(7)]  # three parts


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.port, lambda request: None, stall_s=0.02) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between two tries."""
    monkeypatch.setattr(s3_bucket, "_FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(s3_bucket, "_LAST_PAUSE_S", 0.01)


class Bench:
    """A folder of its own in the bucket, seen directly and through faults."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, folder: str) -> None:
        self.store = S3Store(server.address(f"bucket/{folder}"))
        self.proxy = proxy
        self.faulty = S3Store(proxy.address(f"bucket/{folder}"))
        self.client = server.client()
        self.folder = folder

    def suffer(self, *faults: Fault | None, method: str = "PUT") -> None:
        """The next requests of this method get these faults; later ones get none."""
        left = list(faults)
        self.proxy.faults = lambda request: left.pop(0) if left and request.method == method else None

    def always(self, fault: Fault, method: str) -> None:
        self.proxy.faults = lambda request: fault if request.method == method else None

    def uploads(self) -> list[str]:
        found = self.client.list_multipart_uploads(Bucket="bucket", Prefix=f"{self.folder}/").get("Uploads", [])
        return sorted(upload["Key"] for upload in found)


@pytest.fixture
def bench(server: S3Server, proxy: FaultyProxy, request: pytest.FixtureRequest) -> Bench:
    proxy.faults = lambda request: None
    proxy.requests.clear()
    return Bench(server, proxy, f"t{zlib.crc32(request.node.name.encode())}")


# Conditional creates.

LOST = [Fault.LOSE_ANSWER, Fault.FAIL_ANSWER]


@pytest.mark.parametrize("fault", LOST)
def test_a_create_whose_answer_was_lost_succeeds_although_the_repeated_request_is_refused(
    bench: Bench, fault: Fault
) -> None:
    bench.suffer(fault)
    bench.faulty.create("manifests/1", b"mine")
    assert [request.condition for request in bench.proxy.requests if request.method == "PUT"] == ["*", "*"]
    assert bench.store.read("manifests/1") == b"mine"


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.ERROR, Fault.RESET, Fault.TEAR_REQUEST, Fault.CONFLICT])
def test_a_create_that_didnt_reach_the_server_is_repeated(bench: Bench, fault: Fault) -> None:
    bench.suffer(fault)
    bench.faulty.create("manifests/1", b"mine")
    assert bench.store.read("manifests/1") == b"mine"


@pytest.mark.parametrize("fault", [*LOST, Fault.SLOW_DOWN, Fault.RESET, Fault.CONFLICT])
@pytest.mark.parametrize("content", [b"theirs", b"mine"])
def test_a_name_that_another_process_took_is_taken_also_with_equal_content(
    bench: Bench, fault: Fault, content: bytes
) -> None:
    bench.store.create("manifests/1", content)
    bench.suffer(fault)
    with pytest.raises(AlreadyExists):
        bench.faulty.create("manifests/1", b"mine")
    assert bench.store.read("manifests/1") == content


@pytest.mark.parametrize("fault", LOST)
def test_a_create_whose_answers_are_all_lost_is_a_success_if_the_object_can_be_seen(bench: Bench, fault: Fault) -> None:
    bench.always(fault, "PUT")
    bench.faulty.create("manifests/1", b"mine")
    assert bench.store.read("manifests/1") == b"mine"


def test_an_outcome_that_cant_be_found_out_is_an_error_and_neither_success_nor_already_exists(bench: Bench) -> None:
    bench.proxy.faults = lambda request: Fault.LOSE_ANSWER
    with pytest.raises(StoreError) as unknown:
        bench.faulty.create("manifests/1", b"mine")
    assert type(unknown.value) is StoreError
    assert bench.store.read("manifests/1") == b"mine"


def test_a_create_that_never_reached_the_server_is_an_error_too(bench: Bench) -> None:
    bench.always(Fault.RESET, "PUT")
    with pytest.raises(StoreError) as failed:
        bench.faulty.create("manifests/1", b"mine")
    assert type(failed.value) is StoreError
    assert bench.store.list("") == []


def test_a_create_that_is_always_told_of_a_conflict_gives_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.store.s3._CREATE_PAUSE_S", 0)
    bench.always(Fault.CONFLICT, "PUT")
    with pytest.raises(StoreError, match="refused 8 times") as failed:
        bench.faulty.create("manifests/1", b"mine")
    assert type(failed.value) is StoreError


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 100))])
def test_two_creators_on_a_bad_network_never_both_win(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    bench.proxy.faults = lambda request: rng.choice([None, None, *Fault]) if request.method != "GET" else None
    won: dict[str, list[int]] = {}
    for number in range(5):
        for creator in rng.sample((0, 1), 2):
            name = f"attempts/{number}"
            try:
                bench.faulty.create(name, str(creator).encode())
                won.setdefault(name, []).append(creator)
            except StoreError:
                pass
    for name, creators in won.items():
        assert len(creators) == 1, f"seed {seed}"
        assert bench.store.read(name) == str(creators[0]).encode(), f"seed {seed}"


def test_a_server_that_doesnt_know_conditional_writes_is_refused_at_the_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.check()
    assert bench.store.list("") == []
    ask = s3_bucket.S3Bucket.ask

    def unconditional(self: Any, operation: str, **arguments: Any) -> Any:
        arguments.pop("IfNoneMatch", None)
        return ask(self, operation, **arguments)

    monkeypatch.setattr(s3_bucket.S3Bucket, "ask", unconditional)
    with pytest.raises(JobError, match="If-None-Match"):
        bench.store.check()
    assert bench.store.list("") == []


# Large files.


@pytest.mark.parametrize(
    "faults",
    [(None, fault) for fault in Fault if fault not in (Fault.CONFLICT, Fault.TEAR_ANSWER, Fault.STALL)]
    + [(Fault.LOSE_ANSWER, None, Fault.TEAR_REQUEST, Fault.SLOW_DOWN)],
)
def test_a_large_file_is_written_whole_in_parts_also_if_parts_are_lost(
    bench: Bench, faults: tuple[Fault | None, ...]
) -> None:
    bench.suffer(*faults)
    assert bench.faulty.write("state/large", LARGE) == sum(map(len, LARGE))
    assert bench.store.read("state/large") == b"".join(LARGE)
    assert bench.uploads() == []


@pytest.mark.parametrize("fault", [*LOST, Fault.SLOW_DOWN, Fault.ERROR, Fault.RESET])
@pytest.mark.parametrize("which", [0, 1])  # of the two POST requests: the first begins an upload, the second completes it
def test_a_large_file_appears_although_the_answer_that_completes_it_is_lost(bench: Bench, fault: Fault, which: int) -> None:
    bench.suffer(*[None] * which, fault, method="POST")
    bench.faulty.write("state/large", LARGE)
    assert bench.store.read("state/large") == b"".join(LARGE)


def test_a_write_that_fails_leaves_no_parts_and_no_file(bench: Bench) -> None:
    def chunks() -> Iterator[bytes]:
        yield from LARGE
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.store.write("state/large", chunks())
    bench.proxy.faults = lambda request: Fault.RESET if "partNumber=2" in request.query else None
    with pytest.raises(StoreError, match="write state/large"):
        bench.faulty.write("state/large", LARGE)
    assert bench.uploads() == []
    assert bench.store.list("") == []


def test_the_parts_that_a_killed_process_left_are_removed_when_a_newer_attempt_sweeps(bench: Bench) -> None:
    catalog = SnapshotCatalog(bench.store)
    attempts = [catalog.claim_attempt() for _ in range(2)]
    names = [layout.state_file_name(attempt=attempt, operator="n", subtask=0, epoch=1) for attempt in attempts]
    for name in [*names, "not/ours"]:
        begun = s3_upload.Upload(s3_bucket.S3Bucket.at(bench.store.address), name, token="t")
        for chunk in LARGE:
            begun.write(chunk)
        begun.finish()
    assert len(bench.uploads()) == 3
    catalog.sweep(attempts[1])
    assert bench.uploads() == sorted(f"{bench.folder}/{name}" for name in ("not/ours", names[1]))
    assert bench.store.list("state") == []


def test_parts_grow_with_the_file_because_their_number_is_limited() -> None:
    size, parts = 0, 0
    while size < 5 * 10**12:
        size += max(s3_upload.PART_BYTES, size // s3_upload._EVEN_PARTS)
        parts += 1
    assert parts < 10_000


# Reading.


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.CONFLICT])
def test_a_read_that_breaks_off_is_repeated(bench: Bench, fault: Fault) -> None:
    bench.store.write("state/a", [b"0123456789" * 1000])
    bench.suffer(fault, fault, method="GET")
    assert bench.faulty.read("state/a") == b"0123456789" * 1000
    bench.suffer(fault, method="GET")
    assert bench.faulty.read("state/a", 10, 5) == b"01234"
    bench.suffer(fault, method="GET")
    assert bench.faulty.list("") == ["state/a"]


def test_a_read_that_always_breaks_off_is_an_error_and_not_fewer_bytes(bench: Bench) -> None:
    bench.store.write("state/a", [b"0123456789" * 1000])
    bench.always(Fault.TEAR_ANSWER, "GET")
    with pytest.raises(StoreError, match="read state/a"):
        bench.faulty.read("state/a")


def test_a_server_that_doesnt_answer_is_given_up_after_a_time(
    bench: Bench, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bucket, "_READ_TIMEOUT_S", 0.1)
    with FaultyProxy(server.port, lambda request: None, stall_s=0.3) as bench.proxy:
        hanging = S3Store(bench.proxy.address(f"bucket/{bench.folder}"))
        bench.suffer(Fault.STALL)
        hanging.create("manifests/1", b"mine")  # the first request succeeded, after its time
        bench.always(Fault.STALL, "HEAD")
        with pytest.raises(StoreError, match="size manifests/1"):
            hanging.size("manifests/1")


def test_listings_of_many_pages_are_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = s3_bucket.S3Bucket.ask

    def in_short_pages(self: Any, operation: str, **arguments: Any) -> Any:
        sizes = {"list_objects_v2": {"MaxKeys": 3}, "list_multipart_uploads": {"MaxUploads": 3}}
        return ask(self, operation, **arguments, **sizes.get(operation, {}))

    monkeypatch.setattr(s3_bucket.S3Bucket, "ask", in_short_pages)
    names = [f"state/{number}" for number in range(8)]
    for name in names:
        bench.store.write(name, [b"x"])
        s3_upload.Upload(s3_bucket.S3Bucket.at(bench.store.address), f"up-{name}", token="t")
    assert bench.store.list("") == names
    assert sorted(bench.store.remove_uploads(lambda name: True)) == [f"up-{name}" for name in names]
    assert bench.uploads() == []


# Addresses and messages.


def test_a_bucket_that_isnt_there_is_an_error_that_names_it(server: S3Server) -> None:
    server.address("bucket")
    store = S3Store(server.address("bucket/x").replace("@bucket/", "@another/"))
    for call in (store.check, lambda: store.list(""), lambda: store.read("state/a")):
        with pytest.raises(StoreError, match=r"s3://another/x: NoSuchBucket") as failed:
            call()
        assert not isinstance(failed.value, NotFound)


def test_no_message_shows_a_key(bench: Bench) -> None:
    bench.proxy.faults = lambda request: Fault.RESET
    for call in (lambda: bench.faulty.read("a"), lambda: bench.faulty.create("a", b""), bench.faulty.check):
        with pytest.raises(StoreError) as failed:
            call()
        assert KEY not in str(failed.value) and SECRET not in str(failed.value)
    assert SECRET not in repr(bench.faulty) and SECRET not in repr(s3_bucket.S3Bucket.at(bench.store.address))


def test_credentials_come_from_the_environment_or_a_profile(
    server: S3Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = profile-key\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    rest = server.address("bucket/x").partition("@")[2]

    def key_at(address: str) -> str:
        key: str = S3Store(address)._bucket.client._request_signer._credentials.access_key
        return key

    s3_bucket._client.cache_clear()
    assert key_at(f"s3://{rest}") == "environment-key"
    assert key_at(f"s3://{rest}&profile=mine") == "profile-key"
    assert key_at(f"s3a://given:secret@{rest}") == "given"
    with pytest.raises(StoreError, match="nobodys"):
        S3Store(f"s3://{rest}&profile=nobodys")
    s3_bucket._client.cache_clear()


def test_an_endpoint_may_be_set_in_the_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.address("bucket")
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    s3_bucket._client.cache_clear()
    S3Store("s3://bucket/by-environment").create("a", b"x")
    s3_bucket._client.cache_clear()
    assert S3Store(server.address("bucket/by-environment")).read("a") == b"x"
