"""When a change of parallelism counts as done, in a job that was restarting when it was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.driver.deployment import Layout, Rescaling
from tidegate.driver.rescaling import PROBATION_MS, Rescales


@pytest.fixture
def deployed() -> tuple[Rescales, Rescaling]:
    """All slots of the new layout are ready, of a job that has failed since its newest snapshot."""
    nothing: Any = None
    layout = Layout(nothing, nothing, "")
    rescales, rescaling = Rescales(), Rescaling(layout)
    rescales.on_failed("gone")
    assert rescales.ask(rescaling, at_its_end=False)
    rescales.on_ready(layout, 0)
    assert not rescaling.done
    return rescales, rescaling


def test_if_the_snapshot_that_it_waits_for_is_aborted_another_one_is_asked_for(deployed: tuple[Rescales, Rescaling]) -> None:
    rescales, rescaling = deployed
    assert rescales.wants_snapshot(PROBATION_MS, next_epoch=7)
    rescales.on_aborted(7, PROBATION_MS + 5)
    assert not rescales.wants_snapshot(PROBATION_MS + 5, next_epoch=8)
    assert rescales.wants_snapshot(2 * PROBATION_MS + 5, next_epoch=8)
    rescales.on_complete(8, final=False)
    assert rescaling.done and rescaling.error is None


def test_any_other_snapshot_that_is_aborted_changes_nothing(deployed: tuple[Rescales, Rescaling]) -> None:
    rescales, _ = deployed
    rescales.on_aborted(6, PROBATION_MS - 1)
    assert rescales.wants_snapshot(PROBATION_MS, next_epoch=7)
    rescales.on_aborted(6, PROBATION_MS + 1)
    assert not rescales.wants_snapshot(3 * PROBATION_MS, next_epoch=7), "it was triggered before; the next one is to come"


def test_a_snapshot_that_was_under_way_proves_nothing(deployed: tuple[Rescales, Rescaling]) -> None:
    rescales, rescaling = deployed
    assert rescales.wants_snapshot(PROBATION_MS, next_epoch=7)
    rescales.on_complete(6, final=False)
    assert not rescaling.done
    rescales.on_complete(7, final=False)
    assert rescaling.done


def test_a_layout_at_which_the_job_always_fails_can_be_left_again(deployed: tuple[Rescales, Rescaling]) -> None:
    rescales, rescaling = deployed
    rescales.on_failed("gone")
    back = Rescaling(rescaling.layout)
    assert rescales.ask(back, at_its_end=False)
    assert rescaling.done and rescaling.error == "it was rescaled again before it was known to run"
    assert rescales.wanted is back and not back.done


def test_a_job_that_comes_to_its_end_at_the_new_parallelism_was_rescaled(deployed: tuple[Rescales, Rescaling]) -> None:
    rescales, rescaling = deployed
    rescales.on_complete(1, final=False)
    assert not rescaling.done, "it was taken too early to prove anything"
    rescales.on_complete(2, final=True)
    rescales.give_up("it has finished before")
    assert rescaling.done and rescaling.error is None
