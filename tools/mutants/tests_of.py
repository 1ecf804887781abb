"""Which unit tests a mutated module should be seen by: those that import it, in few steps. Reads files, runs nothing.

    imports = Imports.of(root, files)
    imports.tests_of("rlinf_worker/turns/rule.py")      # the nearest first: tests/unit/rlinf_worker/turns/test_rule.py

A test also has what the conftest.py files above it import. What is found by a name in a string (roles, flows) is not
seen here: such modules have tests that import them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SOURCE_ROOTS = ("operator/", "")
TESTS = "tests/unit/"
REACH = 3
"""Steps of import. Behind three a test is about something else, and nearly every test reaches rlinf_api."""


@dataclass(frozen=True, slots=True)
class Imports:
    edges: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, root: Path, files: Iterable[str]) -> Imports:
        python = sorted(name for name in files if name.endswith(".py"))
        modules = {_module(name): name for name in python}
        return cls({name: frozenset(_imported(root / name, modules)) for name in python})

    def tests_of(self, path: str, *, most: int) -> list[str]:
        """At most so many files: first those that are called like the module, then those beside it, then by steps."""
        stem, package = PurePosixPath(path).stem, PurePosixPath(_module(path).replace(".", "/")).parent
        found = []
        for test in (name for name in self.edges if _is_test(name)):
            steps = self._steps(test, path)
            if steps is None:
                continue
            name = PurePosixPath(test).stem.removeprefix("test_")
            own = steps <= 2 and (stem in name or name in stem)
            beside = PurePosixPath(test).parent.as_posix().endswith(package.as_posix())
            found.append((not own, not beside, steps, test))
        return [test for *_, test in sorted(found)][:most]

    def _steps(self, test: str, wanted: str) -> int | None:
        reached = {test, *self._conftests(test)}
        frontier = set(reached)
        for steps in range(1, REACH + 1):
            frontier = {there for name in frontier for there in self.edges[name]} - reached
            if wanted in frontier:
                return steps
            reached |= frontier
        return None

    def _conftests(self, test: str) -> list[str]:
        folders = PurePosixPath(test).parents
        return [name for folder in folders if (name := (folder / "conftest.py").as_posix()) in self.edges]


def _is_test(name: str) -> bool:
    return name.startswith(TESTS) and PurePosixPath(name).name.startswith("test_")


def _module(name: str) -> str:
    for root in SOURCE_ROOTS:
        if name.startswith(root):
            name = name[len(root) :]
            break
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(path: Path, modules: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]
        else:
            continue
        yield from (modules[name] for name in names if name in modules)
