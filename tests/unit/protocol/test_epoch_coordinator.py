"""The coordinator: its rules one by one, then any sequence of events against its invariants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidegate.protocol.epoch_coordinator import (
    REMEMBERED_ABORTS,
    AbortReason,
    CoordinatorSettings,
    CreateManifest,
    Discard,
    Effect,
    Ending,
    EndInput,
    EpochCoordinator,
    Event,
    FailJob,
    InputEnded,
    ManifestCreated,
    ManifestFailed,
    NotifyAborted,
    NotifyComplete,
    ReleaseSnapshots,
    SnapshotAcknowledged,
    SnapshotAdvanced,
    SnapshotDeclined,
    SnapshotRequested,
    StopRequested,
    TimePassed,
    TriggerEpoch,
)
from tidegate.protocol.ids import SubtaskId

S0, S1, T = SubtaskId(0, 0), SubtaskId(0, 1), SubtaskId(1, 0)
SUBTASKS, SOURCES = frozenset({S0, S1, T}), frozenset({S0, S1})
SETTINGS = CoordinatorSettings(interval_ms=1_000, timeout_ms=10_000, tolerable_failures=100)


def coordinator(
    settings: CoordinatorSettings = SETTINGS,
    *,
    next_epoch: int = 1,
    retained: tuple[int, ...] = (),
    now_ms: int = 0,
    enders: frozenset[SubtaskId] = SOURCES,
) -> EpochCoordinator:
    return EpochCoordinator(
        subtasks=SUBTASKS,
        sources=SOURCES,
        enders=enders,
        settings=settings,
        next_epoch=next_epoch,
        retained=retained,
        now_ms=now_ms,
    )


def handle_all(subject: EpochCoordinator, *events: Event) -> list[Effect]:
    return [effect for event in events for effect in subject.handle(event)]


def acknowledged(epoch: int, *subtasks: SubtaskId) -> list[Event]:
    return [SnapshotAcknowledged(subtask, epoch, f"{subtask}@{epoch}") for subtask in subtasks or sorted(SUBTASKS)]


def completed(epoch: int) -> list[Event]:
    return [*acknowledged(epoch), ManifestCreated(epoch)]


def triggers(epoch: int, ending: Ending | None, *, base: int = 0, full: bool = False) -> TriggerEpoch:
    return TriggerEpoch(epoch, ending, full or ending is not None, base)


def declined(epoch: int, subtask: SubtaskId = T) -> SnapshotDeclined:
    return SnapshotDeclined(subtask, epoch, AbortReason.DECLINED, "disk full")


def test_an_epoch_goes_from_trigger_over_acknowledgements_and_manifest_to_completion() -> None:
    subject = coordinator()
    assert subject.handle(TimePassed(999)) == []
    assert subject.handle(TimePassed(1_000)) == [triggers(1, None)]
    assert subject.active_epoch == 1
    assert subject.waiting_for == SUBTASKS
    assert handle_all(subject, *acknowledged(1, S0, S1)) == []
    assert subject.waiting_for == {T}
    assert handle_all(subject, *acknowledged(1, T)) == [CreateManifest(1, {S0: "v0[0]@1", S1: "v0[1]@1", T: "v1[0]@1"})]
    assert subject.handle(ManifestCreated(1)) == [NotifyComplete(1, None)]
    assert subject.active_epoch is None


def test_the_interval_counts_from_trigger_to_trigger() -> None:
    subject = coordinator()
    assert subject.deadline_ms() == 1_000
    handle_all(subject, TimePassed(1_000), TimePassed(1_700), *completed(1))
    assert subject.deadline_ms() == 2_000
    assert subject.handle(TimePassed(1_999)) == []
    assert subject.handle(TimePassed(2_000)) == [triggers(2, None, base=1)]


def test_the_next_epoch_is_triggered_at_once_where_the_last_took_longer_than_the_interval() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), TimePassed(2_500), *acknowledged(1))
    assert subject.handle(ManifestCreated(1)) == [NotifyComplete(1, None), triggers(2, None, base=1)]


@pytest.mark.parametrize("end", [completed(1), [declined(1)]])
def test_the_pause_counts_from_the_end_of_the_last_epoch_however_it_ended(end: list[Event]) -> None:
    subject = coordinator(replace(SETTINGS, min_pause_ms=700))
    handle_all(subject, TimePassed(1_000), TimePassed(1_500), *end)
    assert subject.deadline_ms() == 2_200
    assert subject.handle(TimePassed(2_199)) == []
    assert subject.handle(TimePassed(2_200)) == [triggers(2, None, base=1 if len(end) > 1 else 0)]


def test_time_never_goes_back() -> None:
    subject = coordinator(replace(SETTINGS, min_pause_ms=1_500), now_ms=5_000)
    assert handle_all(subject, TimePassed(6_000), TimePassed(0), *completed(1))[-1] == NotifyComplete(1, None)
    assert subject.handle(TimePassed(7_499)) == [], "the pause began at 6,000"
    assert subject.handle(TimePassed(7_500)) == [triggers(2, None, base=1)]


def test_without_an_interval_only_requested_epochs_are_triggered() -> None:
    subject = coordinator(replace(SETTINGS, interval_ms=None))
    assert subject.deadline_ms() is None
    assert subject.handle(TimePassed(10**9)) == []
    assert subject.handle(SnapshotRequested()) == [triggers(1, None)]
    handle_all(subject, *completed(1))
    assert subject.handle(TimePassed(10**9 + 1)) == []


def test_a_requested_snapshot_waits_for_the_active_epoch_but_not_for_the_pause() -> None:
    subject = coordinator(replace(SETTINGS, min_pause_ms=5_000))
    assert handle_all(subject, TimePassed(1_000), SnapshotRequested(), SnapshotRequested()) == [triggers(1, None)]
    assert handle_all(subject, *completed(1))[1:] == [NotifyComplete(1, None), triggers(2, None, base=1)]
    assert handle_all(subject, *completed(2))[1:] == [NotifyComplete(2, None), ReleaseSnapshots((1,))]


# ------------------------------------------------------------------------------------------------------------ aborts


def test_a_time_out_aborts_and_names_who_is_missing() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), *acknowledged(1, S0))
    assert subject.deadline_ms() == 11_000
    assert subject.handle(TimePassed(10_999)) == []
    message = "epoch 1: no acknowledgement from v0[1], v1[0] within 10000 ms"
    assert subject.handle(TimePassed(11_000)) == [
        NotifyAborted(1, AbortReason.TIMED_OUT, message),
        Discard(("v0[0]@1",)),
        triggers(2, None),
    ]


def test_the_time_out_counts_from_when_a_snapshot_was_last_written_to() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), TimePassed(9_000), SnapshotAdvanced(1))
    assert subject.deadline_ms() == 19_000
    handle_all(subject, TimePassed(12_000), SnapshotAdvanced(2))
    assert subject.deadline_ms() == 19_000, "there is no epoch 2"
    assert isinstance(subject.handle(TimePassed(19_000))[0], NotifyAborted)


def test_a_long_list_of_missing_subtasks_is_cut() -> None:
    many = frozenset(SubtaskId(0, subtask) for subtask in range(20))
    subject = EpochCoordinator(
        subtasks=many,
        sources=many,
        enders=many,
        settings=replace(SETTINGS, tolerable_failures=0),
        next_epoch=1,
        retained=(),
        now_ms=0,
    )
    subject.handle(TimePassed(1_000))
    assert "v0[7] and 12 more within" in subject.handle(TimePassed(11_000))[0].message  # type: ignore[union-attr]


def test_a_declined_epoch_is_aborted_and_its_number_is_not_used_again() -> None:
    subject = coordinator(next_epoch=8, retained=(7,))
    handle_all(subject, TimePassed(1_000), *acknowledged(8, S0))
    assert subject.handle(declined(8)) == [
        NotifyAborted(8, AbortReason.DECLINED, "epoch 8: v1[0]: disk full"),
        Discard(("v0[0]@8",)),
    ]
    assert subject.next_epoch == 9
    assert subject.handle(TimePassed(2_000)) == [triggers(9, None, base=7)]


def test_once_the_manifest_is_asked_for_nothing_but_its_outcome_ends_the_epoch() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), *acknowledged(1))
    assert subject.deadline_ms() is None
    assert handle_all(subject, TimePassed(10**9), declined(1)) == []
    assert subject.handle(ManifestCreated(1))[0] == NotifyComplete(1, None)


def test_a_failed_manifest_aborts_but_discards_nothing_since_it_may_exist() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), *acknowledged(1))
    assert subject.handle(ManifestFailed(1, "no answer")) == [NotifyAborted(1, AbortReason.STORE_FAILED, "no answer")]


def test_a_doubtful_snapshot_is_released_and_discarded_once_a_later_one_is_complete() -> None:
    subject = coordinator(replace(SETTINGS, retain=2), next_epoch=3, retained=(1, 2))
    handle_all(subject, TimePassed(1_000), *acknowledged(3), ManifestFailed(3, "no answer"))
    handle_all(subject, TimePassed(2_000), *acknowledged(4))
    assert subject.handle(ManifestCreated(4)) == [
        NotifyComplete(4, None),
        ReleaseSnapshots((1, 3)),
        Discard(("v0[0]@3", "v0[1]@3", "v1[0]@3")),
    ]
    handle_all(subject, TimePassed(3_000), *acknowledged(5))
    assert subject.handle(ManifestCreated(5)) == [NotifyComplete(5, None), ReleaseSnapshots((2,))]


def test_more_failures_in_a_row_than_tolerated_fail_the_job() -> None:
    subject = coordinator(replace(SETTINGS, tolerable_failures=1))
    effects = handle_all(subject, TimePassed(1_000), declined(1), TimePassed(2_000), *acknowledged(2, S0), declined(2))
    message = "epoch 2: v1[0]: disk full"
    assert effects[2:] == [
        triggers(2, None),
        NotifyAborted(2, AbortReason.DECLINED, message),
        Discard(("v0[0]@2",)),
        FailJob(AbortReason.DECLINED, message),
    ]
    assert subject.deadline_ms() is None
    assert handle_all(subject, TimePassed(10**9), SnapshotRequested(), StopRequested(drain=False)) == []


def test_a_completed_epoch_forgives_earlier_failures() -> None:
    subject = coordinator(replace(SETTINGS, tolerable_failures=1))
    effects = handle_all(
        subject, TimePassed(1_000), declined(1), TimePassed(2_000), *completed(2), TimePassed(3_000), declined(3)
    )
    assert not any(isinstance(effect, FailJob) for effect in effects)


# ------------------------------------------------------------------------------------- late and repeated messages


def test_a_late_piece_of_an_aborted_epoch_is_discarded_once() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), *acknowledged(1, S0), declined(1))
    assert handle_all(subject, *acknowledged(1, S1)) == [Discard(("v0[1]@1",))]
    assert handle_all(subject, *acknowledged(1, S1)) == []
    assert handle_all(subject, *acknowledged(1, S0)) == [], "it was discarded when the epoch was aborted"


def test_a_late_piece_is_discarded_while_the_next_epoch_is_active_too() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), declined(1), TimePassed(2_000))
    assert handle_all(subject, *acknowledged(1, S1)) == [Discard(("v0[1]@1",))]
    assert subject.waiting_for == SUBTASKS


def test_a_repeated_acknowledgement_neither_counts_nor_discards_what_counts() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000))
    assert handle_all(subject, *acknowledged(1, S0, S0, S0)) == []
    assert subject.waiting_for == {S1, T}
    handle_all(subject, *acknowledged(1, S1, T))
    assert handle_all(subject, *acknowledged(1)) == [], "the manifest is being written"
    subject.handle(ManifestCreated(1))
    assert handle_all(subject, *acknowledged(1)) == [], "the files belong to a complete snapshot"


def test_answers_to_epochs_that_this_attempt_knows_nothing_about_are_ignored() -> None:
    subject = coordinator(next_epoch=8, retained=(7,))
    for epoch in (3, 7, 8, 99):
        assert handle_all(subject, *acknowledged(epoch), declined(epoch)) == []


def test_repeated_and_late_declines_abort_nothing_else() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), declined(1), TimePassed(2_000))
    assert handle_all(subject, *acknowledged(1, T)) == [], "whoever declined has left nothing to discard"
    assert handle_all(subject, declined(1), declined(1, S0), *acknowledged(1, S0)) == []
    assert subject.active_epoch == 2


def test_the_memory_of_aborted_epochs_is_bounded() -> None:
    subject = coordinator(replace(SETTINGS, tolerable_failures=10**6))
    for epoch in range(1, REMEMBERED_ABORTS + 3):
        handle_all(subject, TimePassed(epoch * 1_000), declined(epoch))
    assert handle_all(subject, *acknowledged(2, S0)) == [], "too long ago: leave the file to the sweep"
    assert handle_all(subject, *acknowledged(3, S0)) == [Discard(("v0[0]@3",))]


# ------------------------------------------------------------------------------------------------------- retention


def test_all_but_the_newest_are_released_after_a_completion() -> None:
    subject = coordinator(replace(SETTINGS, retain=2), next_epoch=10, retained=(3, 5, 9))
    assert handle_all(subject, TimePassed(1_000), *completed(10))[-1] == ReleaseSnapshots((3, 5))
    assert handle_all(subject, TimePassed(2_000), *completed(11))[-1] == ReleaseSnapshots((9,))


def test_an_aborted_epoch_releases_nothing() -> None:
    subject = coordinator(next_epoch=10, retained=(3, 5, 9))
    effects = handle_all(subject, TimePassed(1_000), declined(10))
    assert not any(isinstance(effect, ReleaseSnapshots) for effect in effects)


# ---------------------------------------------------------------------------------------------------- final epochs


def test_when_all_sources_have_ended_a_final_epoch_is_triggered_at_once_and_nothing_after_it() -> None:
    subject = coordinator(replace(SETTINGS, min_pause_ms=10**6))
    assert handle_all(subject, InputEnded(S0), InputEnded(S0)) == []
    assert subject.handle(InputEnded(S1)) == [triggers(1, Ending.INPUT_ENDED)]
    assert handle_all(subject, *completed(1))[1:] == [NotifyComplete(1, Ending.INPUT_ENDED)]
    assert subject.deadline_ms() is None
    assert handle_all(subject, TimePassed(10**9), SnapshotRequested(), StopRequested(drain=True)) == []


def test_the_final_epoch_waits_for_the_active_one_but_not_for_the_pause() -> None:
    subject = coordinator(replace(SETTINGS, min_pause_ms=10**6))
    assert handle_all(subject, TimePassed(1_000), InputEnded(S0), InputEnded(S1)) == [triggers(1, None)]
    assert handle_all(subject, *completed(1))[1:] == [NotifyComplete(1, None), triggers(2, Ending.INPUT_ENDED, base=1)]


def test_an_aborted_final_epoch_is_tried_again_under_a_new_number() -> None:
    subject = coordinator(replace(SETTINGS, tolerable_failures=1))
    handle_all(subject, InputEnded(S0), InputEnded(S1))
    assert subject.handle(declined(1))[-1] == triggers(2, Ending.INPUT_ENDED)
    handle_all(subject, *acknowledged(2))
    assert subject.handle(ManifestFailed(2, "no answer")) == [
        NotifyAborted(2, AbortReason.STORE_FAILED, "no answer"),
        FailJob(AbortReason.STORE_FAILED, "no answer"),
    ]


def test_the_final_epoch_waits_for_loops_to_end() -> None:
    subject = coordinator(enders=SOURCES | {T})
    assert handle_all(subject, InputEnded(S0), InputEnded(S1)) == []
    assert subject.handle(TimePassed(1_000)) == [triggers(1, None)], "what goes round is snapshotted meanwhile"
    handle_all(subject, *completed(1))
    assert subject.handle(InputEnded(T)) == [triggers(2, Ending.INPUT_ENDED, base=1)]


def test_a_stop_ends_the_job_with_a_final_epoch_at_once() -> None:
    subject = coordinator(replace(SETTINGS, interval_ms=None), enders=SOURCES | {T})
    assert subject.handle(StopRequested(drain=False)) == [triggers(1, Ending.STOP)]
    assert subject.handle(declined(1))[-1] == triggers(2, Ending.STOP)
    assert handle_all(subject, *completed(2))[1:] == [NotifyComplete(2, Ending.STOP)]


def test_a_drain_ends_the_input_once_and_the_final_epoch_comes_when_all_has_ended() -> None:
    subject = coordinator(enders=SOURCES | {T})
    assert handle_all(subject, StopRequested(drain=True), StopRequested(drain=True)) == [EndInput()]
    assert handle_all(subject, InputEnded(S0), InputEnded(S1)) == []
    assert subject.handle(TimePassed(1_000)) == [triggers(1, None)], "until then epochs go on"
    assert subject.handle(InputEnded(T)) == []
    assert subject.handle(declined(1))[-1] == triggers(2, Ending.DRAIN)
    assert subject.handle(declined(2))[-1] == triggers(3, Ending.DRAIN)
    assert handle_all(subject, *completed(3))[1:] == [NotifyComplete(3, Ending.DRAIN)]


def test_a_drain_when_all_has_ended_or_failed_changes_nothing() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), InputEnded(S0), InputEnded(S1))
    assert subject.handle(StopRequested(drain=True)) == []
    assert handle_all(subject, *completed(1))[-1] == triggers(2, Ending.INPUT_ENDED, base=1)
    subject = coordinator(replace(SETTINGS, tolerable_failures=0))
    assert isinstance(handle_all(subject, TimePassed(1_000), declined(1))[-1], FailJob)
    assert subject.handle(StopRequested(drain=True)) == []


def test_a_drain_when_the_sources_have_ended_waits_for_the_loops() -> None:
    subject = coordinator(enders=SOURCES | {T})
    assert handle_all(subject, InputEnded(S0), InputEnded(S1), StopRequested(drain=True)) == [EndInput()]
    assert subject.handle(InputEnded(T)) == [triggers(1, Ending.DRAIN)]


def test_a_stop_after_the_end_of_the_input_changes_nothing() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), InputEnded(S0), InputEnded(S1), StopRequested(drain=False))
    assert handle_all(subject, *completed(1))[-1] == triggers(2, Ending.INPUT_ENDED, base=1)


def test_draining_overrides_stopping_and_not_the_other_way_round() -> None:
    for requests in ([False, True], [True, False]):
        subject = coordinator()
        subject.handle(TimePassed(1_000))
        assert handle_all(subject, *(StopRequested(drain=drain) for drain in requests)) == [EndInput()]
        assert handle_all(subject, *completed(1))[-1] == NotifyComplete(1, None)
        assert handle_all(subject, InputEnded(S0), InputEnded(S1)) == [triggers(2, Ending.DRAIN, base=1)]


# ----------------------------------------------------------------------------------------------------- full epochs


def test_an_epoch_that_is_asked_to_be_full_is_and_the_next_is_not() -> None:
    subject = coordinator()
    assert subject.handle(SnapshotRequested(full=True)) == [triggers(1, None, full=True)]
    handle_all(subject, *completed(1))
    assert subject.handle(TimePassed(1_000)) == [triggers(2, None, base=1)]


def test_a_full_request_is_not_met_by_the_epoch_that_was_under_way_but_by_the_next() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), SnapshotRequested(full=True))
    assert handle_all(subject, *completed(1))[-1] == triggers(2, None, full=True, base=1)


def test_a_full_request_outlives_aborted_epochs() -> None:
    subject = coordinator()
    handle_all(subject, SnapshotRequested(full=True), declined(1))
    assert subject.handle(TimePassed(999)) == [], "it is repeated with the next epoch, not at once"
    assert subject.handle(TimePassed(1_000)) == [triggers(2, None, full=True)]
    handle_all(subject, *acknowledged(2), ManifestFailed(2, "no answer"))
    assert subject.handle(TimePassed(2_000)) == [triggers(3, None, full=True)]
    handle_all(subject, *completed(3))
    assert subject.handle(TimePassed(3_000)) == [triggers(4, None, base=3)]


def test_without_an_interval_an_aborted_full_request_is_repeated_at_once() -> None:
    subject = coordinator(replace(SETTINGS, interval_ms=None, tolerable_failures=1))
    subject.handle(SnapshotRequested(full=True))
    assert subject.handle(declined(1))[-1] == triggers(2, None, full=True)
    assert isinstance(subject.handle(declined(2))[-1], FailJob), "not for ever"


def test_a_plain_request_is_not_repeated_and_not_made_full() -> None:
    subject = coordinator(replace(SETTINGS, interval_ms=None))
    assert subject.handle(SnapshotRequested()) == [triggers(1, None)]
    assert handle_all(subject, declined(1))[1:] == []


def test_a_final_epoch_is_full_and_takes_the_place_of_a_full_request() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), SnapshotRequested(full=True), StopRequested(drain=False))
    assert handle_all(subject, *completed(1))[-1] == triggers(2, Ending.STOP, full=True, base=1)
    assert handle_all(subject, *completed(2))[-2:] == [NotifyComplete(2, Ending.STOP), ReleaseSnapshots((1,))]


def test_increments_build_on_complete_epochs_only() -> None:
    subject = coordinator(next_epoch=8, retained=(5, 7))
    assert subject.handle(TimePassed(1_000)) == [triggers(8, None, base=7)]
    handle_all(subject, *acknowledged(8), ManifestFailed(8, "no answer"))
    assert subject.handle(TimePassed(2_000)) == [triggers(9, None, base=7)], "8 is doubtful"
    handle_all(subject, *completed(9))
    assert subject.handle(TimePassed(3_000)) == [triggers(10, None, base=9)]


# ---------------------------------------------------------------------------------------------------- illegal events


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (SnapshotAcknowledged(SubtaskId(9, 0), 1, None), "no such subtask"),
        (declined(1, SubtaskId(9, 0)), "no such subtask"),
        (InputEnded(T), "neither a source"),
        (ManifestCreated(1), "asked for"),
        (ManifestFailed(1, ""), "asked for"),
    ],
)
def test_an_illegal_event_tells_the_story(event: Event, complaint: str) -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), TimePassed(1_001), SnapshotAcknowledged(S0, 1, "a very long payload"))
    with pytest.raises(AssertionError, match=complaint) as caught:
        subject.handle(event)
    story = str(caught.value)
    assert "TimePassed(now_ms=1000) -> TriggerEpoch(epoch=1" in story
    assert "1001" not in story, "ticks without an effect are no story"
    assert "payload" not in story


def test_the_answer_is_about_the_manifest_that_was_asked_for() -> None:
    subject = coordinator(next_epoch=2)
    handle_all(subject, TimePassed(1_000), *acknowledged(2))
    with pytest.raises(AssertionError, match="asked for"):
        subject.handle(ManifestCreated(1))


def test_a_manifest_is_answered_once() -> None:
    subject = coordinator()
    handle_all(subject, TimePassed(1_000), *completed(1))
    with pytest.raises(AssertionError, match="answered before"):
        subject.handle(ManifestCreated(1))


@pytest.mark.parametrize(
    "change", [{"interval_ms": 0}, {"min_pause_ms": -1}, {"timeout_ms": 0}, {"tolerable_failures": -1}, {"retain": 0}]
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        replace(SETTINGS, **change)


@pytest.mark.parametrize("enders", [frozenset({S0}), SOURCES | {SubtaskId(9, 0)}])
def test_enders_are_the_sources_and_some_other_subtasks(enders: frozenset[SubtaskId]) -> None:
    with pytest.raises(AssertionError, match="sources are enders"):
        coordinator(enders=enders)


def test_an_epoch_that_is_not_newer_than_the_retained_ones_is_refused() -> None:
    with pytest.raises(AssertionError, match="newer"):
        coordinator(next_epoch=7, retained=(7,))
    with pytest.raises(AssertionError, match="grow"):
        coordinator(next_epoch=9, retained=(7, 6))


# --------------------------------------------------------------------------------------------- any sequence of events


class AnySequence(RuleBasedStateMachine):
    """Feeds events in any order, also late and repeated ones, and keeps its own account of what may happen."""

    @initialize(
        interval_ms=st.sampled_from([None, 1, 50]),
        min_pause_ms=st.sampled_from([0, 30]),
        timeout_ms=st.sampled_from([20, 200]),
        tolerable_failures=st.integers(0, 4),
        retain=st.integers(1, 3),
    )
    def start(self, **chosen: Any) -> None:
        self.settings = CoordinatorSettings(**chosen)
        self.subject = coordinator(self.settings, next_epoch=5, retained=(2, 4), enders=SUBTASKS)
        self.now_ms = 0
        self.triggered: dict[int, Ending | None] = {}
        self.acked: dict[int, set[SubtaskId]] = {}
        self.ended: dict[int, int] = {}  # epoch -> when, however it ended
        self.complete: list[int] = [2, 4]
        self.released: set[int] = set()
        self.discarded: list[str] = []
        self.manifest: int | None = None
        self.doubtful: set[int] = set()
        self.input_ended: set[SubtaskId] = set()
        self.stop: Ending | None = None
        self.told_to_end = False
        self.over = False
        self.failures = 0
        self.full_wanted = False
        self.full_epochs: set[int] = set()  # those that were asked to be
        self.urgent = False  # something other than the interval may trigger

    def feed(self, event: Event) -> None:
        if isinstance(event, SnapshotAcknowledged) and event.epoch == self.active():
            self.acked[event.epoch].add(event.subtask)
        effects = self.subject.handle(event)
        for effect in effects:
            self.check(effect, event)
        if not self.over and self.active() is None:
            assert self.final() is None, "the final epoch is overdue"
            deadline_ms = self.subject.deadline_ms()
            assert (deadline_ms is None) == (self.settings.interval_ms is None)
            assert deadline_ms is None or deadline_ms > self.now_ms

    def active(self) -> int | None:
        open_epochs = self.triggered.keys() - self.ended.keys()
        assert len(open_epochs) <= 1, "at most one epoch is active"
        return next(iter(open_epochs), None)

    def final(self) -> Ending | None:
        """Why the next epoch is the last, if it is."""
        all_ended = self.input_ended == SUBTASKS
        return (self.stop or Ending.INPUT_ENDED) if all_ended or self.stop is Ending.STOP else None

    def check(self, effect: Effect, cause: Event) -> None:
        match effect:
            case TriggerEpoch(epoch, ending, full, base):
                assert not self.over
                assert base == max(self.complete), "increments build on the newest complete epoch"
                assert full or (ending is None and not self.full_wanted)
                assert not full or ending is not None or self.full_wanted
                self.full_epochs |= {epoch} if self.full_wanted else set()
                self.full_wanted = False
                assert self.active() is None
                assert epoch > max([*self.triggered, 4]), "epochs grow strictly"
                assert ending is self.final()
                if ending is None and not self.urgent:
                    assert self.settings.interval_ms is not None
                    last_end_ms = max(self.ended.values(), default=None)
                    assert last_end_ms is None or self.now_ms >= last_end_ms + self.settings.min_pause_ms
                self.triggered[epoch], self.acked[epoch] = ending, set()
                self.urgent = False
            case EndInput():
                assert cause == StopRequested(drain=True) and not self.over
                assert self.input_ended != SUBTASKS and not self.told_to_end
                self.told_to_end = True
            case CreateManifest(epoch, payloads):
                assert epoch == self.active()
                assert self.acked[epoch] == SUBTASKS == payloads.keys()
                assert self.manifest is None
                self.manifest = epoch
            case NotifyComplete(epoch, ending):
                assert cause == ManifestCreated(epoch)
                assert ending == self.triggered[epoch]
                self.ended[epoch] = self.now_ms
                self.complete.append(epoch)
                self.over, self.failures = ending is not None, 0
            case NotifyAborted(epoch, _, _):
                assert epoch == self.active()
                assert self.manifest != epoch, "it may exist"
                self.ended[epoch] = self.now_ms
                self.failures += 1
                if epoch in self.full_epochs:
                    self.full_wanted = True
                    self.urgent |= self.settings.interval_ms is None
                assert self.failures <= self.settings.tolerable_failures + 1
            case ReleaseSnapshots(epochs):
                assert isinstance(cause, ManifestCreated)
                assert not set(epochs) & set(self.complete[-self.settings.retain :])
                assert not set(epochs) & self.released, "released twice"
                assert set(epochs) <= set(self.complete) | self.doubtful
                self.released |= set(epochs)
            case Discard(payloads):
                for payload in payloads:
                    epoch = int(payload.split("@")[1])
                    assert epoch in self.ended and epoch not in self.complete
                    assert epoch not in self.doubtful or epoch in self.released, "a manifest may still list it"
                    assert payload not in self.discarded
                    self.discarded.append(payload)
            case FailJob():
                assert self.failures == self.settings.tolerable_failures + 1
                self.over = True

    @rule(passed_ms=st.integers(-10, 60))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms = max(self.now_ms, self.now_ms + passed_ms)
        self.feed(TimePassed(self.now_ms if passed_ms >= 0 else self.now_ms + passed_ms))

    @precondition(lambda self: self.triggered)
    @rule(data=st.data(), subtask=st.sampled_from(sorted(SUBTASKS)))
    def subtask_answers_the_newest_epoch(self, data: st.DataObject, subtask: SubtaskId) -> None:
        self.answer(max(self.triggered), subtask, acknowledges=data.draw(st.integers(0, 9)) > 0)

    @precondition(lambda self: self.triggered)
    @rule(data=st.data(), subtask=st.sampled_from(sorted(SUBTASKS)))
    def subtask_answers_some_epoch(self, data: st.DataObject, subtask: SubtaskId) -> None:
        epoch = data.draw(st.sampled_from([1, 2, 4, *self.triggered]))
        self.answer(epoch, subtask, acknowledges=data.draw(st.booleans()))

    def answer(self, epoch: int, subtask: SubtaskId, *, acknowledges: bool) -> None:
        if acknowledges:
            self.feed(SnapshotAcknowledged(subtask, epoch, f"{subtask}@{epoch}"))
        else:
            self.feed(SnapshotDeclined(subtask, epoch, AbortReason.DECLINED, "no"))

    @precondition(lambda self: self.active() is not None and self.manifest is None)
    @rule()
    def everyone_acknowledges(self) -> None:
        epoch = max(self.triggered)
        for subtask in sorted(SUBTASKS):
            self.answer(epoch, subtask, acknowledges=True)

    @precondition(lambda self: self.manifest is not None)
    @rule(fails=st.sampled_from([False, False, True]))
    def manifest_is_answered(self, fails: bool) -> None:
        assert self.manifest is not None
        epoch, self.manifest = self.manifest, None
        if fails:
            self.doubtful.add(epoch)
        self.feed(ManifestFailed(epoch, "no answer") if fails else ManifestCreated(epoch))

    @rule(full=st.booleans())
    def snapshot_is_requested(self, full: bool) -> None:
        self.urgent = True
        self.full_wanted |= full
        self.feed(SnapshotRequested(full))

    @precondition(lambda self: len(self.triggered) > 4)
    @rule(subtask=st.sampled_from(sorted(SUBTASKS)))
    def source_or_loop_ends(self, subtask: SubtaskId) -> None:
        self.input_ended.add(subtask)
        self.feed(InputEnded(subtask))

    @precondition(lambda self: len(self.triggered) > 6)
    @rule(drain=st.booleans())
    def stop_is_requested(self, drain: bool) -> None:
        if not self.over and self.input_ended != SUBTASKS and self.stop is not Ending.DRAIN:
            self.stop = Ending.DRAIN if drain else Ending.STOP
        self.feed(StopRequested(drain=drain))
        assert self.told_to_end == (self.stop is Ending.DRAIN)

    @invariant()
    def the_newest_snapshots_are_there(self) -> None:
        if hasattr(self, "complete"):
            kept = [epoch for epoch in self.complete if epoch not in self.released]
            newly_complete = len(self.complete) > 2
            assert kept == (self.complete[-self.settings.retain :] if newly_complete else self.complete)
            assert self.subject.active_epoch == self.active()


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = hypothesis_settings(max_examples=150, stateful_step_count=50, deadline=None)
