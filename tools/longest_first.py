"""The pytest plugin that has xdist begin with the files that take longest, by what their tests took the last time.

`--dist loadfile` gives whole files to processes, those of the most tests first, and a job of half a minute is one test:
it came last, and the other process had nothing left to do. What tests took is in pytest's cache, so a first run goes by
the order of its arguments. A file counts for the tests that this run has chosen of it. One process keeps its order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest

TAKEN = "rlinf/seconds_of_tests"
LEAST_S = 0.01
"""What is shorter is not kept: nine tests of ten, and a twentieth of the time."""


def in_order(tests: Sequence[str], took_s: Mapping[str, float]) -> list[int]:
    """Where each of them stood: files by what their tests took, the longest first, and within a file as it was.

    >>> in_order(["a.py::one", "b.py::one", "b.py::two"], {"b.py::two": 3.0})
    [1, 2, 0]
    """
    of_file: dict[str, float] = defaultdict(float)
    for name in tests:
        of_file[file_of(name)] += took_s.get(name, 0.0)
    return sorted(range(len(tests)), key=lambda at: -of_file[file_of(tests[at])])


def file_of(test: str) -> str:
    return test.partition("::")[0]


class LongestFirst:
    """One in each process: xdist's collect and sort, and the one that has started them hears what tests took."""

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._took_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if is_one_of_several(config):
            items[:] = [items[at] for at in in_order([item.nodeid for item in items], self._cache.get(TAKEN, {}))]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if is_one_of_several(session.config) or not self._took_s:
            return  # all of them read it before the first test, and have to read the same
        kept = {name: took_s for name, took_s in self._cache.get(TAKEN, {}).items() if name not in self._took_s}
        root = session.config.rootpath
        kept = {name: took_s for name, took_s in kept.items() if (root / file_of(name)).exists()}
        new = {name: round(took_s, 2) for name, took_s in self._took_s.items() if took_s >= LEAST_S}
        self._cache.set(TAKEN, kept | new)


def is_one_of_several(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if (cache := getattr(config, "cache", None)) is None:
        return  # -p no:cacheprovider
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # else xdist puts the files with the most tests first
    config.pluginmanager.register(LongestFirst(cache), "rlinf-longest-first")
