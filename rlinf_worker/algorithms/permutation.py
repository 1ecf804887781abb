"""The order of a pass over data: a seeded permutation that is asked index by index, and kept nowhere.

For: the flow, whose tickets are indices. Not for: the rows (roles/rollout/rows.py). A list of a million indices would
be shuffled in the driver's event loop, and again in each life of it; here a place costs some microseconds, whatever
the number of rows. Standard library only: the driver has no numpy.

A Feistel network permutes the numbers below the next power of four; one that falls outside is permuted again until it
is inside ("cycle walking": Black and Rogaway, 2002, section 3), at most four times on average.
"""

from __future__ import annotations

import hashlib
from typing import Final

ROUNDS: Final = 4  # Luby and Rackoff (1988): as good as random to who sees both directions


def row_at(place: int, *, count: int, seed: int, data_pass: int) -> int:
    """Which of `count` rows stands at `place` of a pass.

    >>> [row_at(place, count=5, seed=7, data_pass=0) for place in range(5)]
    [4, 2, 3, 0, 1]
    >>> sorted(row_at(place, count=1000, seed=7, data_pass=1) for place in range(1000)) == list(range(1000))
    True
    """
    half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    found = place
    while True:
        found = _permuted(found, half=half, key=f"{seed}/{data_pass}")
        if found < count:
            return found


def _permuted(number: int, *, half: int, key: str) -> int:
    left, right = number >> half, number & ((1 << half) - 1)
    for turn in range(ROUNDS):
        digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & ((1 << half) - 1))
    return left << half | right
