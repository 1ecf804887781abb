"""The process that every trial is forked from: it has imported what all tests import, and nothing of the product.

    python -P warm.py       in the root of a tree; a line of JSON in, a line out

    {"arguments": ["-x", "tests/unit/a.py"], "within_s": 60, "grace_s": 40}
    {"code": 1, "red": "tests/unit/a.py::test_it", "over": false, "said": ""}

`code` is pytest's; `over`: the time was, and no further test was begun; code null: a test did not end in its grace.

A fork takes milliseconds where imports take seconds, and whatever a mistake does to its process is gone with it: what a
trial has left running is this process's to end, as it is the reaper of its orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import sys
import tempfile
import time
import traceback
from typing import Any, Final

import psutil
import pytest

WARM: Final = (
    "aiohttp", "google.protobuf.json_format", "grpc.aio", "hypothesis.stateful", "kopf", "numpy", "pydantic",
    "torch.distributed", "torch.nn", "yaml",
)  # fmt: skip
IMPORTED: Final = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""pytest would rather import its plugins itself, and warnings are errors."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_SAID: Final = 300
"""Characters of what pytest said last: enough for why nothing ran."""


class _First:
    """The first test that fails, or the file that cannot be imported. None is begun after the time."""

    def __init__(self, within_s: float) -> None:
        self.red, self.over = "", False
        self._until = time.monotonic() + within_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() <= self._until:
            return None
        self.over = True
        item.session.shouldstop = "the time is over"
        return True  # nobody is to run it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.red = self.red or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.red = self.red or report.nodeid


def _trial(arguments: list[str], within_s: float, answer: int, output: int) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(here, there)
    first = _First(within_s)
    code = -1
    try:
        code = int(pytest.main([*IMPORTED, *arguments], plugins=[first]))
    except BaseException:  # noqa: BLE001  # the process ends here, and this is why
        traceback.print_exc()
    os.write(answer, json.dumps({"code": code, "red": first.red, "over": first.over}).encode())


def tried(arguments: list[str], within_s: float, grace_s: float) -> dict[str, Any]:
    """pytest with these arguments, in a process of its own that ends here with all that it has started."""
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _trial(arguments, within_s, writer, output.fileno())
            finally:
                os._exit(0)  # no handler of this process, no cleaning up: a mistake may have been made there
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            is_through = bool(select.select([answer], [], [], max(0.0, within_s) + grace_s)[0])
            found = answer.read(1 << 16) if is_through else b""
        _end_all()
        output.seek(0)
        said = output.read().decode(errors="replace")[-_SAID:]
    if not is_through:
        return {"code": None, "red": "", "over": False, "said": said}
    return {"code": -1, "red": "", "over": False, **json.loads(found or b"{}"), "said": said}


def _end_all() -> None:
    """Those that came to be while the others ended are seen in the next round."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def main() -> None:
    os.nice(19)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in WARM if "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a trial is of what the trial has made
    for line in sys.stdin:
        print(json.dumps(tried(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
