"""Versions that lie in the memory of other workers of the pod, mapped here. Each is said to be free, once.

For: receiver. Not for: the memory itself (arena), nor for what this worker lends (subscribers).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links import frames
from rlinf_worker.links.peers import Peer
from rlinf_worker.weights.arena import Arena, Arenas, Shared
from rlinf_worker.weights.feeds import say


class Borrowed:
    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._all: list[tuple[Peer, PolicyVersion, Arena]] = []
        self.works = True
        """False once a peer's memory could not be mapped: from then on versions are to be sent."""

    def of(self, peer: Peer) -> list[tuple[int, int]]:
        return [(v.branch, v.number) for p, v, _ in self._all if p is peer]

    def borrow(self, peer: Peer, version: PolicyVersion, shared: Shared) -> Arena | None:
        found = self._arenas.map(shared)
        if found is not None:
            self._all.append((peer, version, found))
        self.works = self.works and found is not None
        return found

    def give_back(self, current: Sequence[tuple[PolicyVersion, Arena | None]]) -> None:
        """All but what is `current`, and what something here still reads."""
        kept = []
        for peer, version, arena in self._all:
            if arena.viewed or (version, arena) in current:
                kept.append((peer, version, arena))
            else:
                free(peer, version)
        self._all = kept


def free(peer: Peer, version: PolicyVersion) -> None:
    say(peer, frames.WeightsFree(version.branch, version.number))
