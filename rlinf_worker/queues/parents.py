"""Which items have children that the next consumer does not hold yet. Pure. One per worker, over all of its queues.

add(child, parents) ... held(child) ──► a parent whose children are all held, and which is sealed, is acknowledged:
                                        everything made from it is safe with the next consumer
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


class Parents(Generic[ItemT]):
    def __init__(self) -> None:
        self._waiting: dict[ItemT, set[Hashable]] = {}
        self._sealed: set[ItemT] = set()
        self._parents_of: dict[Hashable, tuple[ItemT, ...]] = {}

    def add(self, child: Hashable, parents: Sequence[ItemT]) -> None:
        self._parents_of[child] = tuple(parents)
        for parent in parents:
            self._waiting.setdefault(parent, set()).add(child)

    def seal(self, parent: ItemT) -> bool:
        """Nothing more is made from it. True: and all that was is held, so that it may be acknowledged now."""
        if self._waiting.get(parent):
            self._sealed.add(parent)
            return False
        self.forget(parent)
        return True

    def held(self, child: Hashable) -> list[ItemT]:
        """The parents that this completes."""
        complete = []
        for parent in self._parents_of.pop(child, ()):
            waiting = self._waiting.get(parent)
            if waiting is None:
                continue
            waiting.discard(child)
            if not waiting:
                if parent in self._sealed:
                    complete.append(parent)
                self.forget(parent)  # one that is not sealed may be of a cycle, which seals none
        return complete

    def forget(self, parent: ItemT) -> None:
        """It is finished with, or dropped."""
        self._waiting.pop(parent, None)
        self._sealed.discard(parent)

    def __len__(self) -> int:
        return len(self._waiting)
