"""One mistake after the other, in a copy of the tree: who sees it. The checkout is read and never written.

    with Tree.copied(ROOT) as tree:
        tree.tried(mutation, tests, within_s=180)       # Verdict("killed", by="tests/unit/...::test_...")

| verdict | means |
|---|---|
| killed | a test failed, and passes without the mistake |
| survived | all tests passed, or there are none |
| unfinished | the tests were not through in time: neither |
| void | the test that failed fails without the mistake too, or the tests did not run: neither |
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.mutants.mutations import Mutation

PASSED, FAILED, ERRORS = 0, 1, 2  # pytest's exit codes; others say that nothing was tested
OPTIONS: Final = (
    "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", "--no-header",
    # Without the plugin that holds folders against their budgets: a slow machine is no mistake.
    "-o", "addopts=--import-mode=importlib --strict-markers --strict-config",
)  # fmt: skip
NEAREST: Final = 2
"""Files that are run before the others are even imported: most mistakes are seen there, and imports take the time."""
_RED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    verdict: str
    by: str = ""
    """The test that failed, or why there is no answer."""


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._green: dict[str, bool] = {}
        self._written = 0

    @classmethod
    @contextlib.contextmanager
    def copied(cls, source: Path) -> Iterator[Tree]:
        folder = Path(tempfile.mkdtemp(prefix="rlinf-mutants-"))
        try:
            for name in files_of(source):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, folder / name, follow_symlinks=False)
            yield cls(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def tried(self, mutation: Mutation, tests: Sequence[str], *, within_s: float) -> Verdict:
        if not tests:
            return Verdict("survived", "no unit test imports it")
        code: int | None = PASSED
        deadline = time.monotonic() + within_s
        with self._mutated(mutation):
            for some in (tests[:NEAREST], tests[NEAREST:]):
                if some and code == PASSED:
                    code, said = self._pytest(some, deadline - time.monotonic())
        if code == PASSED:
            return Verdict("survived")
        if code is None:
            return Verdict("unfinished", f"after {within_s:g} s")
        red = _RED.search(said)
        if code not in (FAILED, ERRORS) or red is None:
            return Verdict("void", f"pytest ended with {code}: {said[-300:]}")
        by = red[1]
        return Verdict("killed", by) if self._is_green(by, within_s) else Verdict("void", f"{by} fails without it")

    @contextlib.contextmanager
    def _mutated(self, mutation: Mutation) -> Iterator[None]:
        path = self.root / mutation.path
        source = path.read_bytes()
        made = mutation.applied(source)
        assert made is not None, f"{mutation.said()} is no mistake"
        try:
            self._write(path, made)
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, content: bytes) -> None:
        """With a second of its own: compiled files are told apart by it, and by a size that is often the same."""
        path.write_bytes(content)
        self._written += 1
        now = int(path.stat().st_mtime) + self._written
        os.utime(path, (now, now))

    def _is_green(self, test: str, within_s: float) -> bool:
        if test not in self._green:
            self._green[test] = self._pytest([test], within_s)[0] == PASSED
        return self._green[test]

    def _pytest(self, tests: Sequence[str], within_s: float) -> tuple[int | None, str]:
        """(exit code or None where it was not through in time, what it said)."""
        paths = os.pathsep.join(str(self.root / folder) for folder in ("operator", "."))
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS, *tests], cwd=self.root, env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        said: str | None = None
        with process:
            try:
                said, _ = process.communicate(timeout=max(0.0, within_s))
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):  # with all that a test has left behind
                    os.killpg(process.pid, signal.SIGKILL)
        return (None, "") if said is None else (process.returncode, said)


def files_of(root: Path) -> list[str]:
    """What a commit of this tree would have, as relative paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (root / name).is_file())
