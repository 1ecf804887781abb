"""How an engine's memory leaves its slots and comes back: what engine.py says of `bytes_now`, `empty` and `fill`.

For: generation.py and vllm_engine.py. No copy is kept: weights are loaded again, and the cache is computed anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlinf_worker.algorithms import offloading


class Emptied(ABC):
    def __init__(self) -> None:
        self._emptied: list[tuple[Any, int]] = []  # storages, and their bytes when they have memory

    @abstractmethod
    def _tensors(self) -> Sequence[Any]:
        """Parameters and cache."""

    @abstractmethod
    def _forget(self) -> None:
        """Requests stay, and what the cache has of them will not be used."""

    def bytes_now(self) -> int:
        return sum(storage.nbytes() for storage in offloading.storages_of(self._tensors()))

    def empty(self) -> None:
        if not self._emptied:
            self._forget()
            self._emptied = offloading.emptied(self._tensors())

    def fill(self) -> None:
        """With zeros: what attention masks in a block that is not full must be a number."""
        emptied, self._emptied = self._emptied, []
        offloading.filled(emptied)
