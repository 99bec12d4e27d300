"""What went wrong is told in the user's terms."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from tidegate.dataflow.operators import user_code
from tidegate.dataflow.operators.user_code import blame, blaming
from tidegate.errors import CommitError, UserFunctionError
from tidegate.types import parse_type


def blamed(error: Exception, record: Any = None, **more: Any) -> UserFunctionError:
    with pytest.raises(UserFunctionError) as failed:
        blame("pay", error, record, **more)
    return failed.value


def raised(function: Any) -> Exception:
    try:
        function()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def test_frames_of_the_engine_are_left_out() -> None:
    error = blamed(raised(lambda: parse_type("lomg")))
    assert "test_user_code.py" in error.user_traceback and "ddl.py" not in error.user_traceback
    assert error.user_traceback.startswith("Traceback (most recent call last):\n")
    assert "did you mean 'long'" in error.user_traceback


def test_frames_of_a_package_with_a_name_like_the_engine_s_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = user_code._ENGINE
    assert engine.endswith("tidegate/")
    assert not "/x/site-packages/tidegate_rules/code.py".startswith("/x/site-packages/tidegate/")
    error = raised(lambda: int("x"))
    monkeypatch.setattr(user_code, "_ENGINE", __file__[: -len("code.py")] + "/")
    assert "test_user_code.py" in blamed(error).user_traceback


def test_an_error_from_the_engine_alone_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(lambda: int("x"))
    monkeypatch.setattr(user_code, "_ENGINE", "/")
    assert "test_user_code.py" in blamed(error).user_traceback


def test_what_led_to_an_error_is_told_too() -> None:
    def translate() -> None:
        try:
            parse_type("lomg")
        except Exception as error:
            raise KeyError("rule 5") from error

    told = blamed(raised(translate)).user_traceback
    assert "direct cause" in told and "did you mean 'long'" in told and "ddl.py" not in told


def test_errors_that_refer_to_each_other_are_told_once() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert "one" in blamed(first).user_traceback


def test_a_long_record_is_cut() -> None:
    record = blamed(ValueError(), ["x" * 1000]).record
    assert record is not None and len(record) == 500 and record.endswith("…")


def test_a_record_that_can_t_be_shown_doesn_t_hide_the_error() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    error = blamed(ValueError("the error"), Odd())
    assert "the error" in str(error) and error.record == "<a Odd that can't be shown: RuntimeError('no')>"


def test_where_there_is_no_record_something_else_is_told() -> None:
    assert blamed(ValueError(), at="the timer at 5").record == "the timer at 5"
    assert blamed(ValueError()).record is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"record": (1, "x")}, "raised at record (1, 'x'):"),
        ({"at": "the timer at 5 of key 'a'"}, "raised at the timer at 5 of key 'a':"),
        ({"at": "a batch of 2 records"}, "raised at a batch of 2 records:"),
        ({"at": "key 'a'"}, "raised at key 'a':"),
        ({"at": "aggregates of a window"}, "raised at aggregates of a window:"),
        ({"at": "a trigger of a window"}, "raised at a trigger of a window:"),
        (
            {"at": "the records of key ('1',), the first of them Row(n=1)"},
            "raised at the records of key ('1',), the first of them Row(n=1):",
        ),
        ({}, "raised:"),
    ],
)
def test_where_it_came_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    told = str(blamed(ValueError(), **given))
    assert sentence in told.splitlines()[0]


def test_a_connector_s_error_is_the_user_s_and_the_engine_s_stays_as_it_is() -> None:
    with pytest.raises(UserFunctionError, match="operator 'out' raised") as failed, blaming("out"):
        raise OSError("disk full")
    assert isinstance(failed.value.__cause__, OSError)
    with pytest.raises(CommitError, match="unknown"), blaming("out"):
        raise CommitError("unknown outcome")


def test_the_python_traceback_has_everything() -> None:
    error = blamed(raised(lambda: parse_type("lomg")))
    assert "ddl.py" in "".join(traceback.format_exception(error))


class PanicException(BaseException):
    """What libraries written in Rust raise."""


def test_a_panic_is_told_and_known_again_like_any_error() -> None:
    with pytest.raises(UserFunctionError) as failed:
        blame("pay", PanicException("index out of bounds"), (7,))
    assert "PanicException: index out of bounds" in failed.value.user_traceback
    assert failed.value.record == "(7,)" and failed.value.signature is not None and not failed.value.final


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
def test_what_comes_from_outside_passes_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)):
        blame("pay", error, (7,))
