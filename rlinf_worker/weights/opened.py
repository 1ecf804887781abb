"""Bytes on the host of the tensors that are being published, each as long as a part of it is still to be copied.

For: edition, whose filling threads share them. Of a tensor on the host they are a view, of one on a device a copy: of a
whole model at once that would be its size once more, beside the arena.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_worker.weights import tensors


class Opened:
    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._here: dict[int, memoryview] = {}
        self._left_bytes: dict[int, int] = {}  # what of these is not copied yet
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self._here.values())

    def open(self, number: int) -> memoryview:
        source = self._here.get(number)
        if source is not None:
            return source
        with self._lock:  # two threads come to the same tensor
            source = self._here.get(number)
            if source is None:
                source = self._here[number] = tensors.bytes_of(self._values[number])
                self._left_bytes[number] = source.nbytes
            return source

    def copied(self, nbytes: Mapping[int, int]) -> None:
        """So much of each has been copied."""
        with self._lock:
            for number, size in nbytes.items():
                self._left_bytes[number] -= size
                if not self._left_bytes[number]:
                    self._here.pop(number, None)
