"""Lineage keys: what makes a unit the same unit, whoever made it and however often. Pure.

An environment's segment is (slice of environments, step): the same key when it is made again by another worker or on a
new branch. A sample of a data source is (source, pass, index, sample number).

>>> segment(3, step=17)
'env:3@17'
>>> sample("train", 0, index=512, sample=7)
'train:0/512/7'
"""

from __future__ import annotations

from rlinf_worker.channels.protocol import LineageKey


def segment(slice_index: int, *, step: int) -> LineageKey:
    return LineageKey(f"env:{slice_index}@{step}")


def sample(source: str, data_pass: int, *, index: int, sample: int) -> LineageKey:
    return LineageKey(f"{source}:{data_pass}/{index}/{sample}")


def sort_key(key: str) -> tuple[str, tuple[int, ...]]:
    """Orders keys by their numbers, so that env:10@3 comes after env:9@3 (order: lineage)."""
    name, _, numbers = key.partition(":")
    return name, tuple(int(n) if n.isdigit() else -1 for n in numbers.replace("@", "/").split("/"))
