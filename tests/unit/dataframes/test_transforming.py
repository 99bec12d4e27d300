"""The job that a transform is."""

from __future__ import annotations

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.dataframes.transforming import TransformJob


@pytest.mark.parametrize(
    ("tuning", "expected_ms"),
    [
        (None, 600_000),
        (tg.Tuning(max_batch_rows=100), 600_000),
        (tg.Tuning(heartbeat_timeout="7 s"), 7_000),
    ],
)
def test_a_transform_waits_long_for_a_heartbeat_unless_told_otherwise(tuning: tg.Tuning | None, expected_ms: int) -> None:
    job = transform(tuning)
    job.take_outputs(job.inputs["input"])
    settings = job.launch().settings
    assert settings.tuning.heartbeat_timeout_ms == expected_ms
    assert tuning is None or settings.tuning.max_batch_rows == tuning.max_batch_rows


def test_what_a_transform_returns_is_appended() -> None:
    job = transform()
    counts = job.inputs["input"].key_by("n").aggregate("counts", k=tg.count())
    with pytest.raises(tg.JobError, match=r"returned, as 'output', upserts by \(n\), and .*return stream.as_append\(\)"):
        job.take_outputs(counts)
    changes = counts.as_changelog("changes")
    with pytest.raises(tg.JobError, match=r"as 'x', changes, .*as_append\(\).* row_kind: \+I inserts a row"):
        job.take_outputs({"x": changes})
    assert job.take_outputs({"x": changes.as_append(), "y": counts.as_append()}) == ["x", "y"]


def test_what_is_no_stream_yet_is_named_with_the_call_that_is_missing() -> None:
    keyed = transform().inputs["input"].key_by("n")
    with pytest.raises(tg.GraphError, match=r"as 'output', records in windows; return what .aggregate\(…\) or"):
        transform().take_outputs(keyed.window(tg.global_window(count=3)))
    with pytest.raises(tg.GraphError, match=r"as 'output', two connected streams; return what .process\(…\) makes of them"):
        transform().take_outputs(keyed.connect(keyed))


def transform(tuning: tg.Tuning | None = None) -> TransformJob:
    return TransformJob(
        "t",
        {"input": pa.schema([("n", pa.int64())])},
        slots=1,
        tuning=tuning,
        writes_state=False,
        snapshots=tg.Snapshots(to="memory://t", every=None),
    )
