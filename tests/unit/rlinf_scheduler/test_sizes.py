"""What a worker takes at once: its share, how much of it in a micro-batch, and what is worth a look."""

from dataclasses import replace
from typing import Any

import pytest

from rlinf_scheduler.planner.candidate import MAX_STAGES, Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import (
    Cost,
    CycleEdge,
    InLanes,
    InRounds,
    Option,
    PlanProblem,
    Pool,
    QueueEdge,
    RoleCosts,
)
from rlinf_scheduler.planner.searching import sizes


def role(name: str, **more: Any) -> RoleCosts:
    return RoleCosts(name=name, options=(Option(per_item_ms=Cost(1.0)),), **more)


def problem(*, items: int = 32, is_single: bool = False, staleness: int = 0, rounds: InRounds | None = None):
    """env asks policy, an engine and a judge work on what comes of it, a gang ends the step."""
    roles = (
        role("env"), role("policy"), role("engine", service=InLanes(lanes=20)), role("judge"),
        role("train", service=rounds or InRounds()),
    )  # fmt: skip
    edges = (QueueEdge("policy", "engine"), QueueEdge("engine", "judge"), QueueEdge("judge", "train"))
    return PlanProblem(
        roles=roles, edges=edges, items=items, staleness=staleness,
        cycles=(CycleEdge("env", "policy", 4, is_single=is_single),),
        pools=(Pool(name="gpu", slots=64, roles=tuple(r.name for r in roles)),),
    )  # fmt: skip


def draft(**workers: int) -> Candidate:
    counts = dict.fromkeys(("env", "policy", "engine", "judge", "train"), 1) | workers
    regions = tuple(Region((n,), (PlannedTurn(name, (n,)),)) for name, n in counts.items())
    return Candidate(regions=regions, choices={name: Choice() for name in counts})


@pytest.mark.parametrize(("items", "workers", "wanted"), [(32, 1, 32), (32, 2, 16), (32, 3, 11), (32, 40, 1)])
def test_a_share_is_what_a_worker_has_of_a_step_rounded_up(items, workers, wanted):
    asked = problem(items=items)
    assert sizes.share(asked, draft(judge=workers), asked.role("judge")) == wanted


@pytest.mark.parametrize(
    ("is_single", "staleness", "envs", "wanted"),
    [(False, 3, 4, 8), (True, 0, 4, 8), (True, 3, 4, 32), (True, 0, 1, 32), (True, 3, 1, MAX_STAGES)],
)
def test_a_front_has_as_many_stages_as_it_has_units(is_single, staleness, envs, wanted):
    asked = problem(is_single=is_single, staleness=staleness)
    assert sizes.most_stages(asked, asked.cycles[0], draft(env=envs)) == wanted


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(
    ("name", "items", "wanted"),
    [
        ("env", 32, Choice(micro_batch=1, depth=32)),
        ("env", 1, Choice(micro_batch=1, depth=2)),
        ("policy", 32, Choice(micro_batch=1, depth=32)),
        ("engine", 32, Choice(micro_batch=1, depth=5)),
        ("judge", 32, Choice(micro_batch=16)),
        ("train", 31, Choice(micro_batch=16)),
    ],
)
def test_a_choice_begins_with_the_largest_micro_batch(name, items, wanted, stays):
    asked = problem(items=items)
    found = sizes.choice(asked, draft(judge=2, train=2), asked.role(name), option=3, stays=stays)
    assert found == replace(wanted, option=3, stays=stays)


def test_an_engine_of_few_lanes_has_two_units_for_each_worker_all_the_same():
    few = role("engine", service=InLanes(lanes=4))
    assert sizes.choice(problem(), draft(), few, option=0, stays=False).depth == 2


@pytest.mark.parametrize(
    ("name", "workers", "every", "wanted"),
    [
        ("env", 1, True, []),
        ("policy", 1, True, []),
        ("engine", 1, True, []),
        ("judge", 1, False, [4, 8, 16, 32]),
        ("judge", 1, True, [4, 8, 16, 32]),  # 32 units are too many for small ones to matter
        ("judge", 2, False, [2, 4, 8, 16]),
        ("judge", 2, True, [1, 2, 3, 4, 8, 16, 32]),  # and all of the step: then one has everything
        ("judge", 16, True, [1, 2, 32]),
        ("train", 2, False, [2, 4, 8, 16]),
        ("train", 2, True, [1, 2, 3, 4, 8, 16]),
        ("train", 3, False, [2, 3, 6, 11]),
    ],
)
def test_which_micro_batches_are_worth_a_look(name, workers, every, wanted):
    asked = problem()
    assert sizes.ladder(asked, draft(**{name: workers}), asked.role(name), every=every) == wanted


def test_a_gang_that_trains_at_once_has_its_share_whatever_it_is_given():
    asked = problem(rounds=InRounds(at_once=True))
    assert sizes.ladder(asked, draft(), asked.role("train"), every=True) == []


@pytest.mark.parametrize(("is_single", "stages"), [(False, 2), (True, 16)])
def test_a_streamed_plan_takes_a_quarter_at_once_and_its_cycle_goes_in_parts(is_single, stages):
    before = draft(env=2, judge=2)
    found = sizes.streamed(problem(is_single=is_single), before)
    assert found == replace(
        before,
        choices={
            "env": Choice(stages=stages), "policy": Choice(), "engine": Choice(), "judge": Choice(micro_batch=4),
            "train": Choice(micro_batch=8),
        },
    )  # fmt: skip
