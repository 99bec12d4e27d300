"""What the tests of channels share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_is_left_behind() -> Iterator[None]:
    files, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert set(os.listdir("/proc/self/fd")) <= files
    assert set(threading.enumerate()) <= threads
