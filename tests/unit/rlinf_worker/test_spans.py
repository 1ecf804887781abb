"""Recorder: spans bounded and counted; the account of a step has each moment once and adds up to the step."""

import time
import tracemalloc
from itertools import count, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlinf_worker.spans import (
    CLOCK_S,
    COMPRESS_AT,
    KEPT_S,
    KINDS,
    MAX_ENDS,
    RANK,
    SAMPLE,
    STRETCHES,
    Recorder,
    Span,
    exclusive,
    stretches,
)
from rlinf_worker.sums import Amount, End


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_work_counts_before_waiting_and_what_nothing_covers_is_other():
    clock = Clock()
    recorder = Recorder(clock=clock)
    recorder.add("wait_data", 100.0, 104.0)
    recorder.add("compute", 101.0, 102.0)
    recorder.add("load", 101.5, 102.5)
    account = recorder.close_step(1, branch=0, at=105.0)
    assert account.window_s == 5.0
    found = {kind: seconds for kind, seconds in account.seconds.items() if seconds}
    assert found == {"compute": 1.0, "load": 0.5, "wait_data": 2.5, "other": 1.0}
    assert recorder.exclusive["wait_data"] == 2.5


def test_a_span_that_is_open_counts_in_both_steps():
    clock = Clock()
    recorder = Recorder(clock=clock)
    waiting = recorder.begin("wait_data")
    clock.now = 103.0
    first = recorder.close_step(1, branch=0, at=102.0)
    clock.now = 105.0
    assert waiting.end() == 5.0
    second = recorder.close_step(2, branch=0, at=105.0)
    assert (first.seconds["wait_data"], second.seconds["wait_data"]) == (2.0, 3.0)
    assert (first.seconds["other"], second.seconds["other"]) == (0.0, 0.0)
    assert not recorder.open


def test_what_was_before_a_step_began_is_of_no_step():
    recorder = Recorder(clock=Clock())
    recorder.add("load", 100.0, 140.0)
    recorder.add("compute", 141.0, 142.0)
    account = recorder.close_step(1, branch=0, at=142.0, lasted_s=2.0)
    assert account.window_s == 2.0
    assert (account.seconds["load"], account.seconds["compute"], account.seconds["other"]) == (0.0, 1.0, 1.0)


def test_waiting_between_two_steps_is_told_beside_the_account():
    recorder = Recorder(clock=Clock())
    recorder.add("wait_data", 100.0, 101.0)
    assert recorder.close_step(1, branch=0, at=102.0, lasted_s=0.5).between_s == 0.0, "nothing is lost before the first"
    recorder.add("wait_data", 102.0, 109.0)
    account = recorder.close_step(1, branch=1, at=110.0, lasted_s=2.0)
    assert (account.window_s, account.seconds["wait_data"], account.between_s) == (2.0, 1.0, 6.0)
    assert recorder.close_step(2, branch=1, at=111.0, lasted_s=1.0).between_s == 0.0


def test_a_long_step_keeps_few_spans_and_loses_no_time():
    clock = Clock()
    recorder = Recorder(clock=clock)
    for _ in range(5 * COMPRESS_AT):
        begun, clock.now = clock.now, clock.now + 0.01
        recorder.add("compute", begun, begun + 0.004)
        recorder.add("wait_data", begun + 0.004, clock.now)
        recorder.flush()
    assert len(recorder._window.spans) < COMPRESS_AT
    account = recorder.close_step(1, branch=0, at=clock.now)
    assert account.seconds["compute"] == pytest.approx(0.4 * account.window_s)
    assert sum(account.seconds.values()) == pytest.approx(account.window_s)
    assert account.seconds["other"] == pytest.approx(0.0, abs=1e-6)


def test_spans_beyond_the_capacity_are_counted_and_their_seconds_kept():
    recorder = Recorder(capacity=2, clock=Clock())
    for _ in range(5):
        recorder.add("comm", 100.0, 101.0)
    assert (len(recorder.flush()), recorder.dropped, recorder.seconds["comm"]) == (2, 3, 5.0)


def test_the_recorder_counts_its_own_cpu():
    recorder = Recorder()
    for _ in range(10_000):
        recorder.add("compute", 0.0, 0.0)
    assert 0.0 < recorder.instrument_s < 1.0
    account = recorder.close_step(1, branch=0, at=recorder.now())
    assert account.instrument_s == pytest.approx(recorder.instrument_s)
    assert recorder.close_step(2, branch=0, at=recorder.now()).instrument_s < account.instrument_s


SPAN = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, len(KINDS) - 1))


@given(st.lists(SPAN, max_size=30))
def test_pieces_cover_what_spans_cover_once_and_the_lowest_rank_has_it(raw):
    spans = [(float(min(a, b)), float(max(a, b)), rank) for a, b, rank in raw]
    pieces = list(exclusive(spans))
    for (t0, seconds, _), (after, _, _) in pairwise(pieces):
        assert t0 + seconds <= after
    for moment in (n + 0.5 for n in range(50)):
        wanted = min((rank for t0, t1, rank in spans if t0 < moment < t1), default=None)
        assert next((rank for t0, s, rank in pieces if t0 < moment < t0 + s), None) == wanted


def test_every_kind_has_a_rank():
    assert sorted(RANK.values()) == list(range(len(KINDS)))


def test_an_account_says_when_its_worker_was_busy_and_that_adds_up():
    now = [100.0]
    recorder = Recorder(clock=lambda: now[0])
    recorder.add("wait_data", 100.0, 104.0)
    recorder.add("compute", 101.0, 102.0)
    recorder.add("comm", 102.0, 103.0)
    now[0] = 106.0
    loading = recorder.begin("load")
    now[0] = 110.0
    account = recorder.close_step(1, branch=0, at=108.0)
    assert account.busy == ((1.0, 3.0), (6.0, 8.0)), "what touches is one stretch, and what goes on counts as far"
    assert account.busy_s == pytest.approx(sum(t1 - t0 for t0, t1 in account.busy))
    loading.end()
    following = recorder.close_step(2, branch=0, at=112.0)
    assert following.busy == ((0.0, 2.0),), "the rest is of the next step"


def test_of_very_many_stretches_the_shortest_gaps_are_closed_and_the_sum_stays_exact():
    now = [0.0]
    recorder = Recorder(clock=lambda: now[0])
    for n in range(3 * STRETCHES):
        recorder.add("compute", float(n), n + (0.5 if n % 10 == 0 else 0.9))
    now[0] = 3.0 * STRETCHES
    account = recorder.close_step(1, branch=0, at=now[0])
    assert len(account.busy) == STRETCHES
    assert account.busy_s == pytest.approx(3 * STRETCHES * 0.86, rel=0.01)
    covered = sum(t1 - t0 for t0, t1 in account.busy)
    assert account.busy_s <= covered <= account.window_s


def test_a_span_is_flushed_once_with_all_that_was_said_of_it():
    clock = Clock()
    recorder = Recorder(clock=clock)
    ended: list[int] = []
    recorder.on_end = lambda: ended.append(len(recorder.open))
    opened = recorder.begin("load", step=4)
    clock.now = 101.5
    recorder.add("compute", 100.0, 101.0, step=3, version=2)
    recorder.add("comm", 100.0, 101.0)
    assert opened.end(version=7) == 1.5
    assert recorder.flush() == [
        Span("compute", 3, 2, 100.0, 101.0), Span("comm", -1, -1, 100.0, 101.0), Span("load", 4, 7, 100.0, 101.5),
    ]  # fmt: skip
    assert (recorder.flush(), ended) == ([], [0])
    assert recorder.seconds == dict.fromkeys(KINDS, 0.0) | {"compute": 1.0, "comm": 1.0, "load": 1.5}


def test_an_account_is_told_whole(monkeypatch):
    cpu = count(0.0, 0.25)
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    recorder = Recorder(clock=Clock())
    recorder.add("compute", 101.0, 102.0)
    account = recorder.close_step(3, branch=2, at=105.0)
    assert (account.step, account.branch, account.window_s, account.busy_s) == (3, 2, 5.0, 1.0)
    assert (account.instrument_s, account.busy, account.between_s) == (0.25, ((1.0, 2.0),), 0.0)
    assert recorder.close_step(4, branch=2, at=105.0).instrument_s == 0.25
    assert recorder.instrument_s == 0.5


def test_a_step_that_ends_before_the_last_one_did_lasts_nothing():
    recorder = Recorder(clock=Clock())
    recorder.close_step(1, branch=0, at=110.0)
    account = recorder.close_step(2, branch=0, at=105.0)
    assert (account.window_s, account.seconds["other"]) == (0.0, 0.0)
    assert recorder.close_step(3, branch=0, at=111.0).window_s == 1.0


def test_one_add_in_so_many_is_timed_and_counts_for_all(monkeypatch):
    cpu = count(0.0, 0.5)
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    recorder = Recorder(clock=Clock())
    told = []
    for _ in range(2 * SAMPLE):
        recorder.add("comm", 100.0, 100.0)
        told.append(recorder.instrument_s)
    once = SAMPLE * (0.5 - CLOCK_S) + 2 * CLOCK_S
    assert told == pytest.approx([0.0] * (SAMPLE - 1) + [once] * SAMPLE + [2 * once])


def test_a_step_of_hours_takes_no_more_memory_than_one_of_minutes():
    """However often work and waiting change."""
    clock = Clock()
    recorder = Recorder(clock=clock)

    def grown(changes: int) -> int:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(changes):
            clock.now += 2 * KEPT_S / COMPRESS_AT
            recorder.add("compute", clock.now - 1e-3, clock.now)
        recorder.flush()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        first, later = grown(2 * COMPRESS_AT), grown(4 * COMPRESS_AT)
    finally:
        tracemalloc.stop()
    assert later < first / 2, (first, later)
    assert len(recorder.close_step(1, branch=0, at=clock.now).busy) == STRETCHES


def test_of_spans_that_all_are_of_the_last_seconds_the_oldest_are_given_up_and_counted():
    clock = Clock()
    recorder = Recorder(clock=clock)
    clock.now = 100.0 + KEPT_S + 1.0
    for _ in range(COMPRESS_AT):
        recorder.add("comm", clock.now - 0.5, clock.now)
    assert (len(recorder._window.spans), recorder.dropped) == (COMPRESS_AT // 2, COMPRESS_AT // 2)


def test_pieces_that_touch_but_for_rounding_are_one_stretch_of_work():
    recorder = Recorder(clock=Clock())
    for t0, t1 in ((100.0, 101.0), (101.0 + 5e-7, 102.0), (102.1, 103.0)):
        recorder.add("compute", t0, t1)
    busy = recorder.close_step(1, branch=0, at=104.0).busy
    assert [(round(t0, 3), round(t1, 3)) for t0, t1 in busy] == [(0.0, 2.0), (2.1, 3.0)]


def test_the_longest_gaps_stay():
    busy = [(0.0, 1.0), (1.1, 2.0), (5.0, 6.0), (6.5, 7.0)]
    assert stretches(busy, 4) == busy
    assert stretches(busy, 3) == [(0.0, 2.0), (5.0, 6.0), (6.5, 7.0)]
    assert stretches(busy, 2) == [(0.0, 2.0), (5.0, 7.0)]
    assert stretches(busy, 1) == [(0.0, 7.0)]


TICKETS, ANSWERS, ROOM = End("tickets", "consumer"), End("actions", "consumer"), End("tickets", "producer")


def waits_of(*spans, at, opened=()):
    """`spans`: (end, t0, t1), in the order in which they end."""
    clock = Clock()
    recorder = Recorder(clock=clock)
    for on, t0, t1 in spans:
        recorder.add("wait_data", t0, t1, on=on)
    for on, t0 in opened:
        clock.now = t0
        recorder.begin("wait_data", on=on)
    account = recorder.close_step(1, branch=0, at=at)
    assert sum(account.waits.values()) == pytest.approx(account.seconds["wait_data"])
    return account.waits


def test_a_moment_of_waiting_is_of_the_channel_whose_wait_ended_first():
    """A role waits for tickets all the time, and for answers in between: what ends the standing still is what came."""
    assert waits_of((ANSWERS, 102.0, 103.0), (ANSWERS, 104.0, 106.0), (TICKETS, 100.0, 108.0), at=109.0) == {
        ANSWERS: 3.0, TICKETS: 5.0,
    }  # fmt: skip
    assert waits_of((TICKETS, 103.0, 104.0), (ANSWERS, 100.0, 106.0), at=106.0) == {TICKETS: 1.0, ANSWERS: 5.0}
    assert waits_of((ROOM, 100.0, 101.0), (TICKETS, 101.0, 103.0), at=103.0) == {ROOM: 1.0, TICKETS: 2.0}
    assert waits_of((End(), 100.0, 101.0), (TICKETS, 100.0, 102.0), at=102.0) == {End(): 1.0, TICKETS: 1.0}


def test_work_is_no_waiting_whatever_is_waited_for_meanwhile():
    clock = Clock()
    recorder = Recorder(clock=clock)
    recorder.add("compute", 101.0, 103.0)
    recorder.add("wait_data", 100.0, 104.0, on=TICKETS)
    account = recorder.close_step(1, branch=0, at=104.0)
    assert (account.waits, account.seconds["compute"]) == ({TICKETS: 2.0}, 2.0)


def test_a_wait_that_is_open_counts_as_far_as_it_has_come():
    assert waits_of((ANSWERS, 101.0, 102.0), at=104.0, opened=[(TICKETS, 100.0)]) == {ANSWERS: 1.0, TICKETS: 3.0}
    clock = Clock()
    recorder = Recorder(clock=clock)
    waiting = recorder.begin("wait_data", on=TICKETS)
    assert recorder.close_step(1, branch=0, at=102.0).waits == {TICKETS: 2.0}
    clock.now = 105.0
    waiting.end()
    assert recorder.close_step(2, branch=0, at=106.0).waits == {TICKETS: 3.0}


def test_ends_beyond_the_bound_count_as_waits_for_no_channel():
    recorder = Recorder(clock=Clock())
    for n in range(MAX_ENDS + 3):
        recorder.add("wait_data", 100.0 + n, 101.0 + n, on=End(str(n), "consumer"))
    waits = recorder.close_step(1, branch=0, at=100.0 + MAX_ENDS + 3).waits
    assert (len(waits), waits[End()], sum(waits.values())) == (MAX_ENDS, 4.0, MAX_ENDS + 3.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)), max_size=12))
def test_each_moment_of_waiting_is_of_the_wait_that_ended_first_of_those_that_cover_it(raw):
    spans = sorted(((max(a, b), min(a, b), n) for a, b, n in raw), key=lambda span: span[0])
    ends = (End(), TICKETS, ANSWERS, ROOM)
    wanted: dict[End, float] = {}
    found = waits_of(*((ends[n], 100.0 + t0, 100.0 + t1) for t1, t0, n in spans), at=121.0)
    for moment in (n + 0.5 for n in range(20)):
        if (first := next((ends[n] for t1, t0, n in spans if t0 < moment < t1), None)) is not None:
            wanted[first] = wanted.get(first, 0.0) + 1.0
    assert found == pytest.approx(wanted)


def test_sums_of_compute_go_with_the_step_and_other_kinds_are_in_none():
    clock = Clock()
    recorder = Recorder(clock=clock)
    recorder.took(1, 0, End("tickets", "consumer"))
    recorder.add("compute", 100.0, 100.5, amount=Amount(units=8, tokens=64))
    recorder.add("compute", 100.5, 100.75)
    recorder.add("comm", 100.5, 102.0, amount=Amount(units=8))
    clock.now = 103.0
    recorder.released("samples", 1, 0)
    sums = recorder.sums.take(1, 0)
    assert {size: (found.count, found.seconds) for size, found in sums.batches.items()} == {8: (1, 0.5), 0: (1, 0.25)}
    assert sums.releases["samples"].evenly() == [3.0]


def test_what_is_taken_of_two_steps_in_turn_begins_each_of_them_once():
    clock = Clock()
    recorder = Recorder(clock=clock)
    into = End("tickets", "consumer")
    for step in (1, 2, 1, 2, 2):
        recorder.took(step, 0, into)
        clock.now += 1.0
    for step in (1, 2):
        recorder.released("samples", step, 0)
    sums = [recorder.sums.take(step, 0) for step in (1, 2)]
    assert [found.releases["samples"].evenly() for found in sums] == [[5.0], [4.0]]
    assert [found.went[into] for found in sums] == [2, 3]


def test_one_release_in_so_many_is_timed_with_the_spans(monkeypatch):
    cpu = count(0.0, 0.5)
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    recorder = Recorder(clock=Clock())
    for _ in range(SAMPLE - 1):
        recorder.add("comm", 100.0, 100.0)
    assert recorder.instrument_s == 0.0
    recorder.released("samples", 1, 0)
    assert recorder.instrument_s == pytest.approx(SAMPLE * (0.5 - CLOCK_S) + 2 * CLOCK_S)


def test_the_clocks_own_call_is_not_counted_for_those_that_it_did_not_time(monkeypatch):
    cpu = count(0.0, CLOCK_S)
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
    recorder = Recorder(clock=Clock())
    for _ in range(SAMPLE):
        recorder.add("comm", 100.0, 100.0)
    assert 0.0 < CLOCK_S < 1e-3
    assert recorder.instrument_s == pytest.approx(2 * CLOCK_S)


def test_a_unit_of_a_step_of_which_nothing_was_taken_counts_from_the_windows_begin():
    clock = Clock()
    recorder = Recorder(clock=clock)
    recorder.close_step(1, branch=0, at=101.0)
    clock.now = 104.0
    recorder.released("samples", 2, 0)
    assert recorder.sums.take(2, 0).releases["samples"].evenly() == [3.0]
