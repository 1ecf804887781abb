"""ProcessGroupNCCL of two ranks, without GPUs: it has NCCL's rules, and notes what was called and what was broken.

send, recv    return work at once, which is done when both ends have called for the same message
one comm      one rank per GPU; a key makes one pair; the n-th send meets the n-th recv, of one size and tag
abort         ends all work of this end, without data; nothing may be called afterwards
"""

from __future__ import annotations

import threading
import types
from typing import Any


class Work:
    def __init__(self, tensor: Any, tag: int) -> None:
        self.tensor, self.tag, self.done = tensor, tag, threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()


class World:
    """All communicators of a test. `broken` has to be empty at its end."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pairs: dict[str, dict[int, Group]] = {}
        self.calls: list[tuple[str, str, int, int]] = []
        self.broken: list[str] = []
        self.held = threading.Event()
        """Set: nothing moves, as if the other GPU were busy."""

    def new_group(self, store: Any, key: str, rank: int) -> Group:
        with self.lock:
            ranks = self.pairs.setdefault(key, {})
            if rank in ranks:
                self.rule(f"key {key} twice as rank {rank}")
            group = ranks[rank] = Group(self, key, rank)
            return group

    def rule(self, text: str) -> None:
        self.broken.append(text)
        raise RuntimeError(text)

    def move(self) -> None:
        with self.lock:
            for ranks in self.pairs.values():
                if self.held.is_set() or len(ranks) < 2:
                    continue
                for a, b in ((ranks[0], ranks[1]), (ranks[1], ranks[0])):
                    while a.sends and b.recvs and not a.aborted and not b.aborted:
                        out, into = a.sends.pop(0), b.recvs.pop(0)
                        if (out.tensor.nbytes, out.tag) != (into.tensor.nbytes, into.tag):
                            self.rule(f"another order at both ends of {a.key}: {out.tag} met {into.tag}")
                        into.tensor.copy_(out.tensor)
                        out.done.set()
                        into.done.set()


class Group:
    def __init__(self, world: World, key: str, rank: int) -> None:
        self.world, self.key, self.rank = world, key, rank
        self.sends: list[Work] = []
        self.recvs: list[Work] = []
        self.aborted = False

    def _call(self, name: str, queue: list[Work], tensors: list[Any], peer: int, tag: int) -> Work:
        with self.world.lock:
            if self.aborted:
                self.world.rule(f"{name} after abort")
            if peer != 1 - self.rank or len(tensors) != 1:
                self.world.rule(f"{name} of {len(tensors)} tensors with rank {peer}")
            self.world.calls.append((name, self.key, self.rank, tag))
            work = Work(tensors[0], tag)
            queue.append(work)
            self.world.move()
            return work

    def send(self, tensors: list[Any], dstRank: int, tag: int) -> Work:
        return self._call("send", self.sends, tensors, dstRank, tag)

    def recv(self, tensors: list[Any], srcRank: int, tag: int) -> Work:
        return self._call("recv", self.recvs, tensors, srcRank, tag)

    def get_error(self) -> Any:
        return types.SimpleNamespace(name="SUCCESS")

    def abort(self) -> None:
        with self.world.lock:
            self.world.calls.append(("abort", self.key, self.rank, -1))
            self.aborted = True
            for work in [*self.sends, *self.recvs]:
                work.done.set()
