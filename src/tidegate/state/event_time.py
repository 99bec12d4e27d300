"""Event time in snapshots: the watermarks of operators and sources."""

from __future__ import annotations

import pyarrow as pa

from tidegate.state.sections import StateInfo, StateKind

# The watermark of the key-groups (of the subtasks, if the operator isn't keyed) `first` to `stop - 1`, of `of` in all. Those
# without a row have had none.
_REACHED = pa.struct([*(pa.field(name, pa.int32()) for name in ("first", "stop", "of")), pa.field("at_ms", pa.int64())])
WATERMARK = StateInfo("__watermark", StateKind.UNION, "watermark", pa.schema([pa.field("value", _REACHED)]))

# `of` describes what the watermark is computed from. A stream that is one split has a row for each subtask, without `split`.
_LATEST = pa.struct(
    [
        pa.field("of", pa.string()),
        pa.field("split", pa.string()),
        pa.field("subtask", pa.int32()),
        pa.field("parallelism", pa.int32()),
        pa.field("latest_ms", pa.int64()),
    ]
)
SPLIT_WATERMARKS = StateInfo(
    "__split_watermarks", StateKind.UNION, "split watermarks", pa.schema([pa.field("value", _LATEST)])
)
