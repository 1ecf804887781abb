"""One conversation under links that break anywhere: every question is answered once, nothing is kept for long."""

import random
from collections import deque
from typing import Any

import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_worker.cycles.conversation import Asked, Heard


def asked(credit: int = 4) -> Asked[str]:
    return Asked(7, credit=credit)


def test_questions_are_numbered_in_their_order_and_bounded_until_they_are_answered():
    one = asked(credit=2)
    assert [one.ask("a"), one.ask("b"), one.room] == [0, 1, 0]
    with pytest.raises(InvariantBroken, match="conversation 7 took a question without room: got 2 unanswered"):
        one.ask("c")
    assert one.answered(1, load=0) == "b"
    assert (one.room, one.unanswered) == (1, ["a"])
    assert one.ask("c") == 2


def test_an_answer_that_comes_again_is_told_apart_and_one_of_nothing_is_a_defect():
    one = asked()
    one.ask("a")
    assert one.answered(0, load=0) == "a"
    assert one.answered(0, load=0) is None
    with pytest.raises(InvariantBroken, match="conversation 7 was answered beyond its end: got 1, wanted below 1"):
        one.answered(1, load=0)


def test_what_has_come_is_told_once_and_after_a_break_by_what_has_not():
    one = asked()
    for question in "abc":
        one.ask(question)
    one.answered(1, load=0)
    one.answered(0, load=0)
    assert (one.got(), one.got()) == ([1, 0], [])
    one.answered(2, load=0)
    one.ask("d")
    assert one.opened() == [(3, "d")]
    assert one.got() == [], "said by what is unanswered"


def test_the_load_is_what_was_told_last_and_what_was_asked_since():
    one = asked()
    one.ask("a")
    one.ask("b")
    assert one.load == 2
    one.answered(0, load=9)
    one.ask("c")
    assert one.load == 10


def test_a_conversation_that_is_over_gives_back_what_it_leaves_in_order():
    one = asked()
    for question in "abc":
        one.ask(question)
    one.answered(1, load=0)
    assert (one.take_back(), one.unanswered) == (["a", "c"], [])


def test_a_question_is_heard_once_and_a_gap_is_a_defect():
    one = Heard[str]()
    assert [one.is_new(0, []), one.is_new(0, []), one.is_new(1, [])] == [True, False, True]
    assert one.answer(0, "A")
    assert not one.is_new(0, [0]), "answered, and its answer has come: it is late, from a link before"
    with pytest.raises(InvariantBroken, match="a question is missing in a conversation: got 3, wanted 2"):
        one.is_new(3, [])


def test_answers_are_kept_until_they_have_come_and_said_again_only_where_they_have_not():
    one = Heard[str]()
    for number in range(4):
        one.is_new(number, [])
    for number in (2, 0, 1):
        one.answer(number, f"A{number}")
    one.is_new(4, [2])
    assert one.answers == ["A0", "A1"]
    assert one.opened([1, 3, 4]) == [(1, "A1")]
    assert (one.answers, one.in_hand) == (["A1"], {3, 4})


def test_a_question_is_answered_once_and_not_after_the_end():
    one = Heard[str]()
    one.is_new(0, [])
    one.is_new(1, [])
    assert (one.answer(0, "A"), one.answer(0, "B")) == (True, False)
    assert (one.end(), one.is_over, one.in_hand, one.answers) == (1, True, set(), [])
    assert not one.answer(1, "C")


@pytest.mark.parametrize("seed", range(200))
def test_every_question_is_answered_once_whatever_links_lose(seed):
    """Two links may be under way at once, as when both ends dial: what is left of the old one comes late."""
    chance = random.Random(seed)
    one, other = asked(credit=3), Heard[str]()
    there, back = deque[Any]([]), deque[Any]([])
    late_there, late_back = deque[Any]([]), deque[Any]([])
    heard, answered, left = list[str](), list[str](), [f"q{n}" for n in range(12)]

    def hear(frame):
        if frame[0] == "open":
            back.extend((number, answer) for number, answer in other.opened(frame[1]))
        elif other.is_new(frame[1], frame[3]):
            heard.append(frame[2])

    def get(frame):
        if (question := one.answered(frame[0], load=0)) is not None:
            assert frame[1] == f"answer to {question}"
            answered.append(question)

    for _ in range(2000):
        move = chance.randrange(8)
        if move == 0 and left and one.room:
            question = left.pop(0)
            number = one.ask(question)
            there.append(("ask", number, question, one.got()))
        elif move in (1, 2) and there:
            hear(there.popleft())
        elif move in (3, 4) and back:
            get(back.popleft())
        elif move == 5 and other.in_hand:
            number = chance.choice(sorted(other.in_hand))
            answer = f"answer to q{number}"
            other.answer(number, answer)
            back.append((number, answer))
        elif move == 6 and chance.random() < 0.3:
            keep = chance.random() < 0.5
            late_there, late_back = (there, back) if keep else (deque(), deque())
            again = one.opened()
            there, back = deque([("open", [number for number, _ in again])]), deque()
            there.extend(("ask", number, question, []) for number, question in again)
        elif move == 7:
            if late_there:
                hear(late_there.popleft())
            if late_back:
                get(late_back.popleft())
        assert len(other.answers) <= 6, "twice the credit"
    while there or back or other.in_hand:
        while there:
            hear(there.popleft())
        for number in sorted(other.in_hand):
            other.answer(number, f"answer to q{number}")
            back.append((number, f"answer to q{number}"))
        while back:
            get(back.popleft())
    assert heard == sorted(heard, key=lambda q: int(q[1:])), "in order"
    assert sorted(answered) == sorted(set(heard)) == sorted(set(answered))
    assert len(heard) == len(set(heard)) == 12 - len(left)
