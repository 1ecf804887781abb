"""The two ends of one conversation as values: numbers, bounds, what is said again on another link. Pure, no I/O.

For: asker.py and answerer.py, which move what these decide. A conversation belongs to one life of an asker and one of
an answerer, is opened by the asker, and never comes back once it has ended: its number is not given again.

    Asked.ask() ──► Heard.is_new() ──► in hand ──► Heard.answer() ──► Asked.answered() ──► Asked.got(), told by the next
    kept until it is answered                      kept until it is known to have come

A link keeps order and may die at any point: what it had accepted may or may not have arrived. Questions come again on
the next link until they are answered; answers, until they are known to have come. Either end drops what it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from rlinf_api.errors import InvariantBroken

T = TypeVar("T")


class Asked(Generic[T]):
    """What is asked. It owns the bound of unanswered questions: charged by ask(), freed by answered() or
    take_back()."""

    __slots__ = ("_got", "_next", "_unanswered", "credit", "load", "number")

    def __init__(self, number: int, *, credit: int) -> None:
        self.number, self.credit = number, credit
        self.load = 0  # questions that the answerer has in hand, of whomever: as told last, and what was asked since
        self._next = 0
        self._unanswered: dict[int, T] = {}  # in the order in which they were asked
        self._got: list[int] = []  # answers that have come and of which the answerer does not know

    @property
    def room(self) -> int:
        return self.credit - len(self._unanswered)

    @property
    def unanswered(self) -> list[T]:
        return list(self._unanswered.values())

    def ask(self, question: T) -> int:
        """Its number. The caller has seen `room`."""
        if self.room <= 0:
            got = f"{len(self._unanswered)} unanswered"
            raise InvariantBroken(
                f"conversation {self.number} took a question without room", got=got, wanted=f"below {self.credit}"
            )
        number, self._next = self._next, self._next + 1
        self._unanswered[number] = question
        self.load += 1
        return number

    def got(self) -> list[int]:
        """Numbers of answers that have come, to be told with the next question."""
        told, self._got = self._got, []
        return told

    def answered(self, number: int, *, load: int) -> T | None:
        """The question of this answer; None: it has come before."""
        if number >= self._next:
            raise InvariantBroken(
                f"conversation {self.number} was answered beyond its end", got=str(number), wanted=f"below {self._next}"
            )
        question = self._unanswered.pop(number, None)
        if question is not None:
            self.load = load
            self._got.append(number)
        return question

    def opened(self) -> list[tuple[int, T]]:
        """A link is new: all that is unanswered is asked again, and the answerer is told what that is."""
        self._got.clear()
        return list(self._unanswered.items())

    def take_back(self) -> list[T]:
        """The conversation is over: what it leaves unanswered, in order."""
        left = self.unanswered
        self._unanswered.clear()
        return left


class Heard(Generic[T]):
    """What is heard, and what was answered of it."""

    __slots__ = ("_answers", "_expected", "in_hand", "is_over")

    def __init__(self) -> None:
        self.in_hand: set[int] = set()
        self.is_over = False
        self._expected = 0
        self._answers: dict[int, T] = {}  # that may not have come: at most twice the credit, as each was asked for

    @property
    def answers(self) -> list[T]:
        """Those that may not have come."""
        return list(self._answers.values())

    def is_new(self, number: int, got: Sequence[int]) -> bool:
        """A question has come, and with it the word of answers that have. False: it has come before."""
        for answered in got:
            self._answers.pop(answered, None)
        if number > self._expected:
            wanted = str(self._expected)
            raise InvariantBroken("a question is missing in a conversation", got=str(number), wanted=wanted)
        if number < self._expected:
            return False
        self._expected = number + 1
        self.in_hand.add(number)
        return True

    def answer(self, number: int, answer: T) -> bool:
        """False: it is not waited for."""
        if number not in self.in_hand:
            return False
        self.in_hand.remove(number)
        self._answers[number] = answer
        return True

    def opened(self, unanswered: Sequence[int]) -> list[tuple[int, T]]:
        """A link is new. The answers that are to be said again: the others have come."""
        self._answers = {number: self._answers[number] for number in unanswered if number in self._answers}
        return list(self._answers.items())

    def end(self) -> int:
        """Nobody waits for an answer of it any more. How many questions were in hand."""
        left, self.is_over = len(self.in_hand), True
        self.in_hand.clear()
        self._answers.clear()
        return left
