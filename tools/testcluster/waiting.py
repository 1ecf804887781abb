"""Waiting for something outside this process, always with a deadline and a name. Used by the whole package."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tools.testcluster.errors import Overdue

T = TypeVar("T")


def until(probe: Callable[[], T | None], *, what: str, timeout_s: float, every_s: float = 0.05) -> T:
    """The first true value of `probe`; Overdue names `what` when there is none in time.

    >>> until(lambda: "ready", what="a word", timeout_s=1)
    'ready'
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise Overdue(f"waited {timeout_s:g} s for {what}, and it did not come")
        time.sleep(every_s)
