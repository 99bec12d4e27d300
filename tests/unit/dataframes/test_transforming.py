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
    job = TransformJob(
        "t",
        {"input": pa.schema([("n", pa.int64())])},
        slots=1,
        tuning=tuning,
        writes_state=False,
        snapshots=tg.Snapshots(to="memory://t", every=None),
    )
    job.take_outputs(job.inputs["input"])
    settings = job.launch().settings
    assert settings.tuning.heartbeat_timeout_ms == expected_ms
    assert tuning is None or settings.tuning.max_batch_rows == tuning.max_batch_rows
