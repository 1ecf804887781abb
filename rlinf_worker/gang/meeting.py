"""Where the ranks of one roster meet, as a value: who has come how far, what is owed to whom. Pure.

For: runtime.gang, which carries the words. Not for: how a word travels, how long a rank waits.

    rank 1   -- place, value -->        rank 0      the same word again is no news: a link that was made anew repeats it
    rank 2   -- place, value -->        rank 0
    rank 1,2 <-- place, all values --   rank 0      as soon as every rank has come so far

A word is the last thing that a rank has said, and not an event: only the newest counts, so nothing piles up and nothing
is lost with a link. A rank cannot be further than the place that it waits at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_worker.roles.protocol import Place


@dataclass(frozen=True, slots=True)
class Word:
    """`values`: what this rank has brought or, of rank 0's answer, what all ranks have, in the order of ranks."""

    place: Place
    values: list[Any]


class Meeting:
    """One per roster and rank.

    >>> first, second = Meeting(rank=0, world=2), Meeting(rank=1, world=2)
    >>> second.come((0, 1, 0), "b")
    Word(place=(0, 1, 0), values=['b'])
    >>> first.hear(1, second.word)
    >>> first.come((0, 1, 0), "a")
    Word(place=(0, 1, 0), values=['a', 'b'])
    >>> first.met((0, 1, 0))
    ['a', 'b']
    """

    def __init__(self, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._words: dict[int, Word] = {}
        self._answer: Word | None = None

    @property
    def word(self) -> Word | None:
        """What is to be said: of rank 0 its answer to all, of the others their word to rank 0."""
        return self._answer if self.rank == 0 else self._words.get(self.rank)

    def come(self, place: Place, value: Any) -> Word | None:
        """This rank has come to `place`. Returns what it has to say now."""
        self._words[self.rank] = Word(place, [value])
        self._settle()
        return self.word

    def hear(self, rank: int, word: Word | None) -> None:
        """Another rank's last word."""
        if word is None:
            return
        if self.rank != 0:
            if rank == 0:
                self._answer = word
            return
        self._words[rank] = word
        self._settle()

    def _settle(self) -> None:
        if self.rank != 0 or len(self._words) < self.world:
            return
        place = min(word.place for word in self._words.values())
        if self._answer is None or place > self._answer.place:
            self._answer = Word(place, [self._words[rank].values[0] for rank in range(self.world)])

    def met(self, place: Place) -> list[Any] | None:
        """The values of all ranks, where all have come to `place`, or further."""
        answer = self._answer
        return list(answer.values) if answer is not None and answer.place >= place else None

    def away(self, place: Place) -> list[int]:
        """Ranks that have not come so far, as far as this rank knows: it hears of others by rank 0 alone."""
        if self.rank != 0:
            return [0]
        return [rank for rank in range(self.world) if rank not in self._words or self._words[rank].place < place]
