from __future__ import annotations

import pytest

from tidegate.errors import CorruptFile, NotFound, StoreError
from tidegate.store.memory import Access, Fail, Fault, Flip, LoseReply, MemoryStore, Operation, Tear


def _store(fault: Fault | None, *, at: Operation) -> MemoryStore:
    return MemoryStore(faults=lambda access: fault if access.operation is at else None)


def test_a_torn_write_leaves_its_prefix_and_raises() -> None:
    store = _store(Tear(kept_bytes=3), at=Operation.WRITE)
    with pytest.raises(StoreError, match="torn"):
        store.write("state/a", [b"ab", b"cdef"])
    assert store.read("state/a") == b"abc"


def test_a_silently_torn_write_leaves_its_prefix_and_says_nothing() -> None:
    store = _store(Tear(kept_bytes=3, silent=True), at=Operation.WRITE)
    assert store.write("state/a", [b"ab", b"cdef"]) == 6
    assert store.read("state/a") == b"abc"


def test_a_failed_operation_did_nothing() -> None:
    store = MemoryStore()
    store.create("a", b"x")
    store.faults = lambda _: Fail()
    for operation in (
        lambda: store.write("b", [b"x"]),
        lambda: store.create("b", b"x"),
        lambda: store.read("a"),
        lambda: store.list(""),
        lambda: store.delete("a"),
        lambda: store.size("a"),
    ):
        with pytest.raises(StoreError):
            operation()
    assert store.files == {"a": b"x"}


def test_a_lost_reply_hides_that_all_was_done() -> None:
    store = MemoryStore(faults=lambda _: LoseReply())
    for operation in (lambda: store.write("a", [b"x"]), lambda: store.create("b", b"y"), lambda: store.read("a")):
        with pytest.raises(StoreError, match="no reply"):
            operation()
    assert store.files == {"a": b"x", "b": b"y"}
    with pytest.raises(StoreError, match="no reply"):
        store.delete("a")
    assert store.files == {"b": b"y"}


def test_a_flipped_bit_is_in_what_is_read_and_not_in_what_is_stored() -> None:
    store = MemoryStore()
    store.write("a", [b"\x00\x00\x00"])
    store.faults = lambda _: Flip(bit_index=9)
    assert store.read("a", 1) == b"\x00\x02"
    store.faults = None
    assert store.read("a") == b"\x00\x00\x00"


def test_the_hook_is_told_what_is_about_to_happen() -> None:
    seen: list[Access] = []
    store = MemoryStore(faults=lambda access: seen.append(access))
    store.write("a", [b"xyz"])
    store.create("b", b"xy")
    store.read("a", 1)
    store.read("a", 0, 2)
    store.list("")
    store.size("a")
    store.delete("a")
    assert [(access.operation.value, access.name, access.byte_count) for access in seen] == [
        ("write", "a", 3),
        ("create", "b", 2),
        ("read", "a", 2),
        ("read", "a", 2),
        ("list", "", 0),
        ("size", "a", 0),
        ("delete", "a", 0),
    ]


def test_a_hook_that_raises_ends_the_caller_and_nothing_is_done() -> None:
    class ProcessDiedError(BaseException):
        pass

    def die(_: Access) -> None:
        raise ProcessDiedError

    store = MemoryStore(faults=die)
    with pytest.raises(ProcessDiedError):
        store.write("a", [b"x"])
    assert store.files == {}


def test_damage_at_rest_is_seen_by_everyone() -> None:
    store = MemoryStore()
    store.write("a", [b"xyz"])
    store.files["a"] = b"xy"
    with pytest.raises(CorruptFile):
        store.read("a", 0, 3)
    del store.files["a"]
    with pytest.raises(NotFound):
        store.read("a")
