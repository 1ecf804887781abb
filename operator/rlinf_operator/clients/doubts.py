"""Own writes that failed and may be done all the same: what the copy says of these objects is not believed. Pure.

An answer that is lost says nothing of the write. A pod that was made so, and that no watch has brought yet, would pass
for one that vanished: it would be replaced, and counted as a loss. So the object is looked at before it is read again.
For cache.py; nobody else sees it.

    doubts.add("Pod", "team", "math-driver-a1", of="uid-1")
    doubts.of("Pod", "team", "uid-1")              # {"math-driver-a1"}: ask for it before listing this job's pods
    doubts.settle("Pod", "team", "math-driver-a1")
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MOST: Final = 16_384  # objects: all pods of a thousand jobs and half as many. The oldest is of a job that nobody reads


class Doubts:
    def __init__(self) -> None:
        self._about: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._names: dict[tuple[str, str, str], set[str]] = {}

    def add(self, kind: str, namespace: str, name: str, *, of: str) -> None:
        """`of`: the value of the label by which it is listed; empty where it is only asked for by name."""
        self.settle(kind, namespace, name)
        self._about[kind, namespace, name] = of
        self._names.setdefault((kind, namespace, of), set()).add(name)
        while len(self._about) > MOST:
            self.settle(*next(iter(self._about)))

    def settle(self, kind: str, namespace: str, name: str) -> None:
        of = self._about.pop((kind, namespace, name), None)
        if of is None:
            return
        names = self._names[kind, namespace, of]
        names.discard(name)
        if not names:
            del self._names[kind, namespace, of]

    def has(self, kind: str, namespace: str, name: str) -> bool:
        return (kind, namespace, name) in self._about

    def of(self, kind: str, namespace: str, value: str) -> frozenset[str]:
        return frozenset(self._names.get((kind, namespace, value), ()))

    def __len__(self) -> int:
        return len(self._about)
