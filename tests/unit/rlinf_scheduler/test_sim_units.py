"""Who is given a unit in the simulator: the rule of the runtime, tests/unit/rlinf_worker/queues/test_matching.py."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_scheduler.planner.simulation.clock import SimClock
from rlinf_scheduler.planner.simulation.units import SimUnits


def handed_out(*has: tuple[int, int], waiting: int, window: int = 4) -> list[int]:
    """`has`: of each worker the units in its inbox, and those that it works on. How many more each is given."""
    role: Any = SimpleNamespace(waiting=deque(range(waiting)), heap=[], window=window, bundle=1)
    role.workers = [
        SimpleNamespace(role=role, number=n, inbox=deque([-1] * inbox), working=working)
        for n, (inbox, working) in enumerate(has)
    ]
    units = SimUnits(
        SimClock(), hand_over_ms=0.0, kick=lambda _: None, to_front=lambda _, __: None, made=lambda _: None
    )
    for worker in role.workers:
        units.changed(worker)
    units.hand_out(role)
    assert len(role.waiting) == waiting - sum(len(w.inbox) for w in role.workers) + sum(inbox for inbox, _ in has)
    return [len(worker.inbox) - inbox for worker, (inbox, _) in zip(role.workers, has, strict=True)]


@pytest.mark.parametrize(
    ("has", "waiting", "given"),
    [
        (((0, 3), (1, 0)), 1, [0, 1]),  # the first works on three: the second has less to do, and less room
        (((0, 3), (1, 0)), 3, [1, 2]),  # of two that have as much, who has more room
        (((4, 0), (0, 5)), 2, [0, 2]),  # the first has least to do, and no room
        (((4, 1), (4, 0)), 2, [0, 0]),
        (((0, 0), (0, 0), (0, 0)), 4, [2, 1, 1]),
    ],
)
def test_a_unit_goes_to_who_has_least_to_do_of_those_that_have_room(has, waiting, given):
    assert handed_out(*has, waiting=waiting) == given


def test_who_had_no_room_is_given_units_once_it_takes_some():
    assert handed_out((4, 0), (4, 0), waiting=1) == [0, 0]
    assert handed_out((1, 3), (4, 0), waiting=1) == [1, 0]
