"""One mistake after the other, in a copy of the tree: who sees it. The checkout is read and never written.

    with Tree.copied(ROOT) as tree:
        tree.tried(mutation, tests, within_s=180)       # Verdict("killed", by="tests/unit/...::test_...")

| verdict | means |
|---|---|
| killed | a test failed, and passes without the mistake |
| survived | all tests passed, or there are none |
| unfinished | a test hangs, and pytest could not end it: neither |
| void | pytest itself did not run, or its process was ended from within: neither |
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.mutants.mutations import Mutation

PASSED, NOTHING = 0, 5  # pytest's exit codes for what is not red
OPTIONS: Final = (
    "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--no-header",
    # Without the plugin that holds folders against their budgets: a slow machine is no mistake.
    "-o", "addopts=--import-mode=importlib --strict-markers --strict-config",
)  # fmt: skip
GRACE_S: Final = 70.0
"""For a test that has begun: more than pytest gives it, so that a test that hangs is one that fails."""


@dataclass(frozen=True, slots=True)
class Verdict:
    verdict: str
    by: str = ""
    """The test that failed, or why there is no answer."""


class Tree:
    def __init__(self, root: Path, warm: subprocess.Popen[str], *, grace_s: float, files: Sequence[str]) -> None:
        self.root, self.files = root, files
        self._warm, self._grace_s = warm, grace_s
        self._green: dict[str, bool] = {}
        self._written = 0

    @classmethod
    @contextlib.contextmanager
    def copied(cls, source: Path, *, grace_s: float = GRACE_S) -> Iterator[Tree]:
        folder = Path(tempfile.mkdtemp(prefix="rlinf-mutants-"))
        try:
            files = files_of(source)
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, folder / name, follow_symlinks=False)
            paths = os.pathsep.join(str(folder / name) for name in ("operator", "."))
            # What is compiled is kept, in the copy, whatever this machine says of it: each trial imports it anew.
            environ = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""}
            with subprocess.Popen(
                [sys.executable, "-P", Path(__file__).with_name("warm.py")], env=environ, cwd=folder,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            ) as warm:  # fmt: skip
                yield cls(folder, warm, grace_s=grace_s, files=files)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def tried(self, mutation: Mutation, tests: Sequence[str], *, within_s: float) -> Verdict:
        """The nearest file alone first, then twice as many each time. No test is begun when the time is over."""
        if not tests:
            return Verdict("survived", "no unit test imports it")
        deadline, at = time.monotonic() + within_s, 0
        while at < len(tests) and time.monotonic() < deadline:
            files = tests[at : 2 * at + 1]
            with self._mutated(mutation):
                found = self._asked(files, deadline - time.monotonic())
            code, red = found["code"], found["red"]
            if code is None:
                return Verdict("unfinished", f"{files[0]} or one after it hangs")
            if red:  # whatever became of pytest afterwards
                if self._is_green(red, within_s):
                    return Verdict("killed", red)
                continue  # once more, and without that test
            if found["over"]:
                break
            if code not in (PASSED, NOTHING):
                return Verdict("void", f"pytest ended with {code}: {found['said']}")
            at += len(files)
        return Verdict("survived", f"{at} of {len(tests)} files asked whole")

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
            self._green[test] = self._pytest(test, within_s=within_s)["code"] == PASSED
        return self._green[test]

    def _asked(self, files: Sequence[str], within_s: float) -> dict[str, Any]:
        """Without those that are red without any mistake: they say nothing about one."""
        red = [name for name, is_green in self._green.items() if not is_green]
        asked = [name for name in files if name not in red]
        if not asked:
            return {"code": NOTHING, "red": "", "over": False}
        return self._pytest(*asked, *(f"--deselect={name}" for name in red if "::" in name), within_s=within_s)

    def _pytest(self, *arguments: str, within_s: float) -> dict[str, Any]:
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        asked = {"arguments": [*OPTIONS, *arguments], "within_s": within_s, "grace_s": self._grace_s}
        self._warm.stdin.write(json.dumps(asked) + "\n")
        self._warm.stdin.flush()
        answer: dict[str, Any] = json.loads(self._warm.stdout.readline())
        return answer


def files_of(root: Path) -> list[str]:
    """What a commit of this tree would have, as relative paths."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (root / name).is_file())
