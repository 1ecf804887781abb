"""What the arbiter adds to the rule: time, and the numbers of orders. Under a clock that the test turns on."""

from collections.abc import Callable
from typing import Any

import pytest

from rlinf_worker.settings import Settings
from rlinf_worker.turns import rule
from rlinf_worker.turns.arbiter import STALLED_EVERY_S, Arbiter, Report
from rlinf_worker.turns.rule import Kind, LeaseSet, Order, Standing, Turn

RELEASE_S, PATIENCE_S, MOST_S = 20.0, 7.0, 500.0
SETTINGS = Settings(turn_release_s=RELEASE_S, turn_patience_s=PATIENCE_S, turn_most_s=MOST_S)
PAIR = Turn(role="env", workers=("env/0", "env/1"))
ROLLOUT = Turn(role="rollout", workers=("rollout/0",))


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    def __init__(self) -> None:
        self.now, self.timers = 1000.0, list[Timer]()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Timer:
        self.timers.append(Timer(self.now + delay, lambda: callback(*args)))
        return self.timers[-1]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [t for t in self.timers if t.at <= until and not t.cancelled]:
            timer = min(due, key=lambda t: t.at)
            self.now = timer.at
            self.timers.remove(timer)
            timer.call()
        self.now = until

    @property
    def waiting(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)


class Played:
    """An arbiter, its hands and its clock. Each report obeys the last order to its worker, unless `seen` is given,
    and has no further item, unless `items` is."""

    def __init__(self, *turns: Turn, first_number: int = 1) -> None:
        self.clock, self.said = Clock(), list[str]()
        self.last, self.items = dict[str, int](), dict[str, int]()
        self.arbiter = Arbiter(
            LeaseSet(name="all", turns=turns), self, SETTINGS, timers=self.clock, first_number=first_number
        )

    def order(self, lease: LeaseSet, order: Order, *, number: int) -> None:
        assert lease is self.arbiter.lease
        self.last[order.worker] = number
        self.said.append(f"{number} {order.kind} {order.worker}")

    def kill(self, lease: LeaseSet, worker: str, *, why: str) -> None:
        assert why == f"lease set {lease.name!r} not released within 20 s"
        self.said.append(f"kill {worker}")

    def overdue(self, lease: LeaseSet, why: str) -> None:
        self.said.append(f"overdue: {why}")

    def stalled(self, lease: LeaseSet, why: str) -> None:
        self.said.append(f"stalled {lease.name}: {why}")

    def reports(self, worker: str, standing: Standing, **fields: Any) -> list[str]:
        """What the arbiter said on this."""
        before = len(self.said)
        self.items[worker] = fields.pop("items", self.items.get(worker, 0))
        known = {"seen": self.last.get(worker, 0), "items": self.items[worker]}
        self.arbiter.said(Report(worker=worker, standing=standing, **{**known, **fields}))
        return self.said[before:]

    def after(self, seconds: float) -> list[str]:
        before = len(self.said)
        self.clock.run(seconds)
        return self.said[before:]


def holding(*turns: Turn) -> Played:
    """The first worker of the first turn holds, and everybody else is off the slots."""
    played = Played(*turns)
    first = turns[0].workers[0]
    for turn in turns:
        for worker in turn.workers:
            played.reports(worker, Standing.WANTS if worker == first else Standing.CONTENT)
    played.reports(first, Standing.HOLDS)
    played.said.clear()
    return played


# --- turns without an end ---------------------------------------------------------------------------------------------
def test_who_works_on_while_another_waits_is_told_to_end_and_then_killed():
    played = holding(PAIR, ROLLOUT)
    assert played.after(2 * MOST_S) == [], "nobody waits"
    assert played.reports("rollout/0", Standing.WANTS) == ["3 finish env/0"]
    played.reports("env/0", Standing.HOLDS)
    assert played.after(MOST_S - 0.1) == []
    assert played.after(0.1) == [
        "overdue: worker env/0 has worked on for 500 s in a turn of lease set 'all' that others wait for: it is to end",
        "4 end env/0",
    ]
    played.reports("env/0", Standing.HOLDS)
    assert played.after(RELEASE_S - 0.1) == []
    assert played.after(0.1) == ["kill env/0"]
    played.arbiter.gone("env/0")
    assert played.said[-1] == "5 grant rollout/0"


@pytest.mark.parametrize("turn", [PAIR, ROLLOUT])
def test_who_never_answers_that_somebody_waits_has_no_more_time_than_one_that_does(turn):
    holder, other = turn.workers[0], (ROLLOUT if turn is PAIR else PAIR).workers[0]
    played = holding(turn, ROLLOUT if turn is PAIR else PAIR)
    [word] = played.reports(other, Standing.WANTS)
    assert word.endswith(("finish env/0", "leave rollout/0"))
    [overdue, end] = played.after(MOST_S)
    assert f"worker {holder} has worked on for 500 s" in overdue
    assert end.endswith(f" end {holder}")
    assert played.after(RELEASE_S) == [f"kill {holder}"]


def test_who_ends_its_turn_in_time_is_not_told_to_and_one_that_is_told_may_still_do_so():
    played = holding(PAIR, ROLLOUT)
    played.reports("rollout/0", Standing.WANTS)
    played.reports("env/0", Standing.HOLDS)
    played.after(MOST_S - 1.0)
    played.reports("env/0", Standing.IDLE)
    played.reports("env/0", Standing.CONTENT)
    played.reports("rollout/0", Standing.HOLDS)
    played.said.clear()
    played.reports("env/0", Standing.WANTS)
    played.reports("rollout/0", Standing.HOLDS)
    assert played.after(MOST_S)[1:] == ["7 end rollout/0"], "its own time, from when somebody waited"
    played.reports("rollout/0", Standing.HOLDS)
    played.reports("rollout/0", Standing.LEAVES)
    assert played.reports("rollout/0", Standing.CONTENT) == ["8 grant env/0"]
    assert not [word for word in played.said if word.startswith("kill")]


# --- numbers -------------------------------------------------------------------------------------------------------
def test_orders_are_numbered_on_from_the_first_number():
    played = Played(PAIR, ROLLOUT, first_number=40)
    assert played.reports("env/0", Standing.WANTS) == ["41 grant env/0"]
    assert played.reports("env/1", Standing.WANTS) == ["42 grant env/1"]
    assert played.arbiter.sent == {
        "env/0": (41, Order("env/0", Kind.GRANT)), "env/1": (42, Order("env/1", Kind.GRANT)),
    }  # fmt: skip


def test_a_word_from_before_the_order_is_of_the_past():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    played.reports("env/0", Standing.CONTENT, seen=1)
    assert played.arbiter.state["env/0"].asked is Kind.GRANT
    played.reports("env/0", Standing.HOLDS, seen=2)
    assert played.arbiter.state["env/0"].asked is None


def test_who_has_gone_begins_anew_and_owes_nothing():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    played.arbiter.gone("env/0")
    assert played.arbiter.sent == {}
    assert played.arbiter.state["env/0"] == rule.Member()
    assert played.reports("env/0", Standing.WANTS, seen=0, items=0) == ["3 grant env/0"]


def test_what_was_not_answered_is_sent_again_with_its_number_and_nothing_else_is():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    played.said.clear()
    played.arbiter.again("env/0")
    played.arbiter.again("env/1")  # was asked nothing
    assert played.said == ["2 grant env/0"]
    played.reports("env/0", Standing.HOLDS)
    played.arbiter.again("env/0")  # has answered
    assert played.said == ["2 grant env/0"]


def test_who_is_to_be_killed_is_said_again_too():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    assert played.after(RELEASE_S) == ["kill env/0"]
    played.arbiter.again("env/0")
    assert played.said[-2:] == ["kill env/0", "kill env/0"]


# --- the deadline of a release -------------------------------------------------------------------------------------
def test_one_of_several_that_answers_gives_the_others_no_more_time():
    played = Played(PAIR)
    played.reports("env/0", Standing.WANTS)
    assert played.after(RELEASE_S - 2) == []
    played.reports("env/1", Standing.WANTS)  # owes anew, and so the time runs anew
    assert played.after(RELEASE_S - 5) == []
    played.reports("env/0", Standing.HOLDS)
    assert played.after(4) == []
    assert played.after(1) == ["kill env/1"]


def test_who_answers_in_time_is_left_alone():
    played = Played(PAIR)
    played.reports("env/0", Standing.WANTS)
    played.after(RELEASE_S - 0.1)
    played.reports("env/0", Standing.HOLDS)
    assert played.clock.waiting == 0
    assert played.after(10 * RELEASE_S) == []


def test_what_others_say_gives_who_owes_no_more_time():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    for _ in range(3):
        assert played.after(RELEASE_S / 4) == []
        played.reports("rollout/0", Standing.CONTENT)
    assert played.after(RELEASE_S / 4) == ["kill env/0"]


def test_where_nobody_owes_and_nobody_waits_no_timer_runs():
    played = Played(PAIR, ROLLOUT)
    for worker in ("env/0", "env/1", "rollout/0"):
        played.reports(worker, Standing.CONTENT)
        assert played.clock.waiting == 0
        played.arbiter.gone(worker)
        assert played.clock.waiting == 0


def test_after_a_kill_the_next_who_owes_has_its_whole_time():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    assert played.after(RELEASE_S) == ["kill env/0"]
    played.arbiter.gone("env/0")
    played.said.clear()
    played.reports("rollout/0", Standing.WANTS)
    assert played.after(RELEASE_S - 0.1) == []
    assert played.after(0.1) == ["kill rollout/0"]


def test_a_closed_arbiter_kills_nobody_and_grants_nothing():
    played = Played(PAIR, ROLLOUT)
    played.reports("env/0", Standing.WANTS)
    played.arbiter.close()
    assert played.after(10 * RELEASE_S) == []
    other = Played(PAIR, ROLLOUT)
    other.reports("env/0", Standing.WANTS, ripe=False)
    other.arbiter.close()
    assert other.after(10 * PATIENCE_S) == []


# --- patience ------------------------------------------------------------------------------------------------------
def test_who_is_unripe_is_granted_when_patience_is_over():
    played = Played(PAIR, ROLLOUT)
    assert played.reports("rollout/0", Standing.WANTS, ripe=False) == []
    assert played.after(PATIENCE_S - 1) == []
    assert played.reports("env/1", Standing.CONTENT) == [], "somebody's word gives no more patience"
    assert played.after(1) == ["2 grant rollout/0"]


def test_who_has_become_ripe_needs_no_patience():
    played = Played(PAIR, ROLLOUT)
    played.reports("rollout/0", Standing.WANTS, ripe=False)
    assert played.reports("rollout/0", Standing.CONTENT) == []
    assert played.clock.waiting == 0
    played.after(PATIENCE_S)
    played.reports("rollout/0", Standing.WANTS, ripe=False)
    assert played.after(PATIENCE_S - 0.1) == [], "it waits its whole time"
    assert played.after(0.1) == ["2 grant rollout/0"]


# --- turns without an item -----------------------------------------------------------------------------------------
def empty_turn(played: Played, of: str, other: str) -> list[str]:
    """`of` holds, does nothing and goes; `other` is granted."""
    before = len(played.said)
    played.reports(other, Standing.WANTS)
    played.reports(of, Standing.IDLE)
    played.reports(of, Standing.CONTENT)
    played.reports(other, Standing.HOLDS)
    return [said for said in played.said[before:] if said.startswith("stalled")]


def stalled() -> tuple[Played, str]:
    """Two turns have gone without an item, after one that had some; what was said of it."""
    env = Turn(role="env", workers=("env/0",))
    played = holding(env, ROLLOUT)
    played.reports("env/0", Standing.HOLDS, items=3)
    assert empty_turn(played, "env/0", "rollout/0") == []
    assert empty_turn(played, "rollout/0", "env/0") == [], "one empty turn is a role that had nothing to do"
    [said] = empty_turn(played, "env/0", "rollout/0")
    assert said.startswith("stalled all: two turns in a row of lease set 'all' passed without an item: env/0 ")
    return played, said


def test_a_standstill_is_said_again_while_it_lasts_and_its_end_is_said_once():
    played, said = stalled()
    assert played.reports("rollout/0", Standing.HOLDS) == []
    played.after(STALLED_EVERY_S - 0.1)
    assert played.reports("rollout/0", Standing.HOLDS) == []
    played.after(0.1)
    assert played.reports("rollout/0", Standing.HOLDS) == [said]
    assert played.reports("rollout/0", Standing.HOLDS) == []
    assert played.reports("rollout/0", Standing.HOLDS, items=1) == ["stalled all: "]
    played.after(2 * STALLED_EVERY_S)
    assert played.reports("rollout/0", Standing.HOLDS, items=2) == []


def test_items_are_counted_from_a_workers_last_word():
    """`items` is a count since its start: the same count twice is no item."""
    played, said = stalled()
    played.after(STALLED_EVERY_S)
    assert played.reports("rollout/0", Standing.HOLDS, items=0) == [said]
    assert played.reports("env/0", Standing.CONTENT, items=3) == [], "it has had those three"
    assert played.reports("env/0", Standing.CONTENT, items=4) == ["stalled all: "]


def test_the_first_item_of_a_life_is_one():
    played = Played(PAIR, ROLLOUT)
    assert played.reports("env/0", Standing.WANTS, items=0) == ["2 grant env/0"]
    assert not played.arbiter.state.items
    played.reports("env/0", Standing.HOLDS, items=3)
    played.arbiter.gone("env/0")
    assert not played.arbiter.state.items
    played.reports("env/0", Standing.HOLDS, items=1)
    assert played.arbiter.state.items, "of its next life, which counts from none"


def test_what_a_report_leaves_out_is_nothing():
    report = Report(worker="env/0", standing=Standing.WANTS)
    assert (report.ripe, report.seen, report.items, report.memory_bytes) == (True, 0, 0, 0)
    assert STALLED_EVERY_S == 10.0
    played = Played(PAIR)
    Arbiter(played.arbiter.lease, played, SETTINGS, timers=played.clock).said(report)
    assert played.said == ["2 grant env/0"]


def test_the_changes_of_a_set_are_counted():
    env = Turn(role="env", workers=("env/0",))
    played = Played(env, ROLLOUT)
    assert played.arbiter.changes == 0
    played.reports("env/0", Standing.WANTS)
    played.reports("env/0", Standing.HOLDS)
    assert played.arbiter.changes == 1
    empty_turn(played, "env/0", "rollout/0")
    assert played.arbiter.changes == 2


# --- an arbiter that follows another ----------------------------------------------------------------------------
def following(reports: list[Report], sent: dict[str, tuple[int, Order]]) -> Played:
    played = Played(Turn(role="env", workers=("env/0",)), ROLLOUT, first_number=3)
    played.arbiter.rebuild({report.worker: report for report in reports}, sent)
    return played


def test_a_follower_numbers_on_above_all_that_was_seen_or_sent():
    content, wants = (Report(worker="env/0", standing=s, seen=8) for s in (Standing.CONTENT, Standing.WANTS))
    assert following([wants], {}).said == ["9 grant env/0"]
    gone = {"elsewhere/0": (11, Order("elsewhere/0", Kind.GRANT))}
    played = following([content], gone)
    assert played.reports("env/0", Standing.WANTS, seen=8) == ["12 grant env/0"]
    assert "elsewhere/0" not in played.arbiter.sent
    assert following([Report(worker="env/0", standing=Standing.WANTS)], {}).said == ["4 grant env/0"]


def test_a_follower_waits_for_an_order_that_is_on_its_way_and_not_for_one_that_was_obeyed():
    sent = {"env/0": (6, Order("env/0", Kind.GRANT))}
    open_still = following([Report(worker="env/0", standing=Standing.WANTS, seen=5)], sent)
    assert open_still.said == []
    assert open_still.arbiter.sent == sent
    assert open_still.after(RELEASE_S) == ["kill env/0"], "within the same time"
    obeyed = following([Report(worker="env/0", standing=Standing.HOLDS, seen=6)], sent)
    assert obeyed.arbiter.sent == {}
    assert obeyed.after(10 * RELEASE_S) == []
    unheard = following([], sent)
    assert unheard.arbiter.sent == sent
    assert unheard.reports("rollout/0", Standing.WANTS) == [], "the slots are another's as soon as it reads it"


def test_a_follower_takes_what_was_done_before_it_for_no_item():
    played = following([Report(worker="env/0", standing=Standing.HOLDS, items=9, seen=4)], {})
    assert played.arbiter.state.items is False
    played.reports("env/0", Standing.HOLDS, items=9, seen=4)
    assert played.arbiter.state.items is False
    played.reports("env/0", Standing.HOLDS, items=10, seen=4)
    assert played.arbiter.state.items is True


@pytest.mark.parametrize("kind", [Kind.YIELD, Kind.FINISH, Kind.LEAVE])
def test_a_follower_knows_what_a_holder_was_told(kind):
    """It would tell it again, and a worker has one order on its way."""
    sent = {"env/0": (6, Order("env/0", kind))}
    played = following([Report(worker="env/0", standing=Standing.HOLDS, seen=5)], sent)
    assert played.arbiter.state["env/0"].told is kind
    assert played.reports("rollout/0", Standing.WANTS) == []
