"""How many records a source reads at once: few while it keeps up, more under load.

A batch has a cost of its own (a dozen calls into Arrow and numpy for each operator, a message for each channel), which
large batches spread over more records. Where records are handled in columns, that is most of the cost. But a batch also
holds up everything behind it for as long as it takes.

So the size doubles after each batch that was full and took little time. It halves after one that took long. When a source
had fewer records than asked for, it keeps up, and the size falls back to the least: then a batch is what has arrived, and
waits for nothing. Sizes are between `least` and `most`; if both are equal, nothing grows.

Pure: whoever reads measures the time. Which chains may have larger batches is decided in assembly.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GROW_WITHIN_MS = 4
SHRINK_BEYOND_MS = 4 * GROW_WITHIN_MS


@dataclass(slots=True)
class BatchSize:
    """The size of the next batch, in `rows`."""

    least: int
    most: int
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        assert 0 < self.least <= self.most
        self.rows = self.least

    def on_batch(self, count: int, took_ms: int | None) -> None:
        """Take note that a batch of `count` records was read and handled in `took_ms`; None: it isn't finished yet."""
        if count < self.rows:
            self.rows = self.least
        elif took_ms is None or took_ms > SHRINK_BEYOND_MS:
            self.rows = max(self.rows // 2, self.least)
        elif took_ms <= GROW_WITHIN_MS:
            self.rows = min(self.rows * 2, self.most)
