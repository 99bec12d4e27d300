"""Spark's daemon for Python processes, which has imported what each of them would import: then a process takes a tenth of a
second, and not more than one. The tests' Spark runs it in the place of `pyspark.daemon` (quick.py).

What is imported keeps to what a fork can do with, as in `tidegate.testing.nursery`. No test module is imported.
"""

from __future__ import annotations

import contextlib
import gc

from pyspark.daemon import manager

with contextlib.suppress(ImportError):  # where something is missing, the process that needs it tells so
    import hypothesis  # noqa: F401
    import pandas as pd  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pyspark.worker  # noqa: F401
    import pytest  # noqa: F401

    import tidegate.slot.hosting
    import tidegate.spark.transform  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
