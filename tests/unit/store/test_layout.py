from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import StoreError
from tidegate.store import layout
from tidegate.store.layout import ManifestName, OriginName, StateFileName

NUMBERS = st.integers(1, 10**13)


@given(attempt=NUMBERS, operator=st.text(), subtask=st.integers(0, 10**7), epoch=NUMBERS)
def test_a_state_file_name_says_what_it_is_of(attempt: int, operator: str, subtask: int, epoch: int) -> None:
    name = layout.state_file_name(attempt=attempt, operator=operator, subtask=subtask, epoch=epoch)
    assert layout.check_name(name) == name
    assert layout.parse_state_file_name(name) == StateFileName(attempt, epoch, subtask, layout.slug(operator))


@given(attempt=NUMBERS, epoch=NUMBERS, back=st.integers(1, 10**13))
def test_the_other_names_are_parsed_back(attempt: int, epoch: int, back: int) -> None:
    assert layout.parse_attempt_name(layout.attempt_name(attempt)) == attempt
    manifest = layout.manifest_name(epoch=epoch, attempt=attempt)
    assert layout.parse_manifest_name(manifest) == ManifestName(epoch, attempt)
    origin = OriginName(attempt, max(attempt - back, 0), epoch)
    assert layout.parse_origin_name(layout.origin_name(origin)) == origin
    committed = layout.committed_name(ManifestName(epoch, attempt))
    assert layout.parse_committed_name(committed) == ManifestName(epoch, attempt)
    for name in (layout.attempt_name(attempt), manifest, layout.origin_name(origin), committed):
        assert layout.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "attempts/7",
        "attempts/0000000000",
        "attempts/00000000007",
        "attempts/0000000007.json",
        "attempts/000000000٧",
        "origins/0000000005-from-0000000001-a0000000005",
        "origins/0000000005-from-0000000001-a0000000009",
        "manifests/0000000001.json",
        "manifests/0000000000-a0000000001.json",
        "manifests/0000000001-a0000000001.json~",
        "committed/0000000001",
        "committed/0000000000-a0000000001",
        "committed/00000000001-a0000000001",
        "state/a0000000001-e0000000001-s00000-.tgs",
        "state/a0000000001-e0000000001-s00000-a b.tgs",
        "state/a0000000000-e0000000001-s00000-x.tgs",
        "state/a0000000001-e0000000001-s000000-x.tgs",
        "x/state/a0000000001-e0000000001-s00000-x.tgs",
        "state/a0000000001-e0000000001-s00000-x.tgs\n",
    ],
)
def test_what_tidegate_did_not_name_is_nothing_to_it(name: str) -> None:
    for parse in (
        layout.parse_attempt_name,
        layout.parse_origin_name,
        layout.parse_manifest_name,
        layout.parse_committed_name,
        layout.parse_state_file_name,
    ):
        assert parse(name) is None


def test_names_of_two_attempts_never_meet() -> None:
    names = [
        name
        for attempt in (1, 2)
        for name in (
            layout.state_file_name(attempt=attempt, operator="count", subtask=0, epoch=5),
            layout.manifest_name(epoch=5, attempt=attempt),
            layout.attempt_name(attempt),
        )
    ]
    assert len(set(names)) == len(names)


def test_manifests_sort_by_epoch() -> None:
    names = [layout.manifest_name(epoch=epoch, attempt=20 - epoch) for epoch in range(1, 20)]
    assert names == sorted(names)


@pytest.mark.parametrize("text", ["count", "Bid_counts-2", "x" * 64, "0"])
def test_a_text_that_is_a_slug_stays_itself(text: str) -> None:
    assert layout.slug(text) == text


@given(st.text())
def test_every_text_has_a_slug(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", layout.slug(text))


@given(st.lists(st.text(alphabet="aB-_ /.é\n0", max_size=5), unique=True, max_size=50))
def test_texts_that_differ_have_slugs_that_differ(texts: list[str]) -> None:
    slugs = {layout.slug(text) for text in texts}
    assert len(slugs) == len(texts)


def test_a_text_that_looks_like_the_slug_of_another_does_not_take_its_place() -> None:
    taken = layout.slug("bid counts")
    assert taken.startswith("bid-counts-")
    assert layout.slug(taken) != taken


@pytest.mark.parametrize("text", ["../../etc/passwd", "/", "..", "", "\0", "a/b", "日本", "\ud800"])
def test_no_user_text_can_leave_the_store(text: str) -> None:
    name = layout.state_file_name(attempt=1, operator=text, subtask=0, epoch=1)
    assert layout.check_name(name).count("/") == 1


def test_long_texts_that_begin_alike_are_told_apart() -> None:
    first, second = layout.slug("x" * 65), layout.slug("x" * 66)
    assert len(first) == len(second) == 64
    assert first != second


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("/data/snapshots", "/data/snapshots/clicks"),
        ("/data/snapshots/", "/data/snapshots/clicks"),
        ("file:///data", "file:///data/clicks"),
        ("memory://test", "memory://test/clicks"),
        ("s3://bucket/x?region=eu&scheme=http", "s3://bucket/x/clicks?region=eu&scheme=http"),
        ("/odd?folder", "/odd?folder/clicks"),
    ],
)
def test_a_job_has_a_store_of_its_own(where: str, expected: str) -> None:
    assert layout.job_address(where, "clicks") == expected


@pytest.mark.parametrize("name", ["/a", "a/../b", "..", "a/./b", "a//b", "", "a b", "a~", "x" * 256])
def test_a_bad_name_is_a_store_error(name: str) -> None:
    with pytest.raises(StoreError):
        layout.check_name(name)


def test_requests_and_answers_are_told_apart_and_nothing_else_is_one() -> None:
    request = "0123456789abcdef" * 2
    assert layout.parse_request_name(layout.request_name(request)) == request
    assert layout.parse_answer_name(layout.answer_name(request)) == request
    for name in (layout.answer_name(request), "requests/x.json", f"requests/{request}", f"requests/{request.upper()}.json"):
        assert layout.parse_request_name(name) is None
    assert layout.parse_answer_name(layout.request_name(request)) is None
