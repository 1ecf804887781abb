"""The pytest plugin that prints each test folder's time against tests/budget.yaml.

A folder's time is the time of its tests, set-up and tear-down included, and of importing its files; a folder without an
entry of its own counts for the nearest folder above it that has one. Under xdist the times of tests in all processes
add up, as they would on one core; of importing, which every process does, the longest counts. At more than its budget
the table warns; at more than twice its budget the run fails. The factor of two is room for a machine that is busy with
something else; what a benchmark measures is no matter for a test. `--no-budget` leaves the table out, for a run under a
debugger.

tests/budget.yaml has a line per folder:

    tests/unit/rlinf_api: {budget_s: 20, measured_s: [7.9, 8.3]}
"""

import time
from collections import defaultdict
from collections.abc import Container, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

FAIL_AT = 2.0
OUTPUT = "rlinf_imported_s"
"""Where a process of xdist leaves its times of importing for the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    folder: str
    took_s: float
    budget_s: float | None

    @property
    def verdict(self) -> str:
        if self.budget_s is None:
            return "no budget: add a line to tests/budget.yaml"
        if self.took_s > FAIL_AT * self.budget_s:
            return f"FAILED: more than {FAIL_AT:g} times its budget; make it faster, or raise the budget and say why"
        if self.took_s > self.budget_s:
            return "WARNING: over its budget"
        return ""


def read_budgets(path: Path) -> dict[str, float]:
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return {folder: float(entry["budget_s"]) for folder, entry in entries.items()}


def lines(took_s: dict[str, float], budgets: dict[str, float]) -> list[Line]:
    return [Line(folder=f, took_s=took_s[f], budget_s=budgets.get(f)) for f in sorted(took_s)]


def table(rows: Iterable[Line]) -> list[str]:
    text = []
    for row in rows:
        budget = "-" if row.budget_s is None else f"{row.budget_s:.0f}"
        text.append(f"{row.folder:<36} {row.took_s:>8.1f} s of {budget:>5} s  {row.verdict}".rstrip())
    return text


class Budget:
    def __init__(self, budgets: dict[str, float]) -> None:
        self.budgets = budgets
        self.took_s: dict[str, float] = defaultdict(float)
        """Seconds that tests took, by entry: in a process of xdist its own tests, in the one that has them all every
        test."""
        self.imported_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, object, object]:
        started = time.perf_counter()
        try:
            return (yield)
        finally:
            if isinstance(collector, pytest.File):
                self.imported_s[entry_of(folder_of(collector.nodeid), self.budgets)] += time.perf_counter() - started

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took_s[entry_of(folder_of(report.nodeid), self.budgets)] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """One of xdist's processes has ended; one that crashed has no output, and its tests have failed."""
        told = getattr(node, "workeroutput", {}).get(OUTPUT, {})
        for folder, seconds in told.items():
            self.imported_s[folder] = max(self.imported_s[folder], seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[OUTPUT] = dict(self.imported_s)  # whose table is the controller's
            return
        if session.exitstatus == pytest.ExitCode.OK and any("FAILED" in row.verdict for row in self.rows()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.rows():
            terminalreporter.section("time of each folder against tests/budget.yaml")
            for text in table(self.rows()):
                terminalreporter.write_line(text)

    def rows(self) -> list[Line]:
        folders = self.took_s.keys() | self.imported_s.keys()
        return lines({f: self.took_s.get(f, 0.0) + self.imported_s.get(f, 0.0) for f in folders}, self.budgets)


def folder_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0].rpartition("/")[0]


def entry_of(folder: str, entries: Container[str]) -> str:
    """The nearest folder with an entry, or the folder itself where there is none."""
    return next((str(f) for f in [PurePosixPath(folder), *PurePosixPath(folder).parents] if str(f) in entries), folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-budget", action="store_true", help="leave out the table of tests/budget.yaml")


def pytest_configure(config: pytest.Config) -> None:
    path = config.rootpath / "tests" / "budget.yaml"
    if path.exists() and not config.getoption("--no-budget"):
        config.pluginmanager.register(Budget(read_budgets(path)), "rlinf-budget")
