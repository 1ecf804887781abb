"""Candidates that were run: each once, the best of them, and what it costs; classes of workers first, then each."""

import random
from typing import Any

import pytest

from rlinf_api.job import Objective
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import Cost, Option, PlanProblem, Pool, QueueEdge, RoleCosts
from rlinf_scheduler.planner.searching.runs import SET_UP, Runs
from rlinf_scheduler.planner.simulate import simulate
from tests.unit.rlinf_scheduler.test_predictions import grown
from tools.bench import planner as bench
from tools.prove import table


def job(*, use_ms: float = 1.0, **more: Any) -> PlanProblem:
    """8 units of 6 ms, then 1 ms each, on pods of two slots."""
    roles = tuple(
        RoleCosts(name=n, options=(Option(per_item_ms=Cost(ms)),)) for n, ms in (("make", 6.0), ("use", use_ms))
    )
    pools = (Pool(name="gpu", slots=8, roles=("make", "use"), slots_per_pod=2, fewest_pods=1),)
    return PlanProblem(roles=roles, edges=(QueueEdge("make", "use"),), items=8, pools=pools, **more)


def placed(make: int, use: int = 1, *, micro_batch: int = 1) -> Candidate:
    regions = tuple(Region((n,), (PlannedTurn(name, (n,)),)) for name, n in (("make", make), ("use", use)))
    return Candidate(regions=regions, choices={n: Choice(micro_batch=micro_batch) for n in ("make", "use")})


def runs(problem: PlanProblem, *, effort: int = 100_000, grain: int = 1, fewest: int = 0) -> Runs:
    return Runs(problem, effort=effort, grain=grain, fewest=fewest)


def test_a_candidate_is_run_once_and_the_best_is_known():
    done, problem = runs(job()), job()
    assert not done.has_run(placed(1))
    first = done.run(placed(1))
    assert first is not None
    assert (first.score, first.paid, first.pods) == (simulate(problem, placed(1)).period_ms, 2, (1,))
    assert done.has_run(placed(1))
    assert done.run(placed(1)) is None
    assert not done.has_run(placed(1, micro_batch=2))
    better = done.run(placed(4))
    assert better is not None
    assert better.score < first.score
    assert (done.best, done.count, done.ranked()) == (better, 2, [better])
    moves = sum(SET_UP + simulate(problem, placed(n)).effort for n in (1, 4))
    assert (done.spent, done.effort) == (moves, 100_000 - moves)


def test_what_is_worse_is_left_but_for_as_much_as_is_asked_for():
    done = runs(job())
    best, first = done.run(placed(4)), placed(1)
    assert best is not None
    assert done.run(first) is None
    assert (done.count, done.has_run(first), done.ranked()) == (2, True, [best])
    assert done.spent > SET_UP + best.prediction.effort
    assert done.run(placed(3), worse=10.0) is not None
    slow = runs(job())
    than = slow.run(first)
    assert than is not None
    assert slow.run(placed(4)) is not None
    assert slow.run(placed(1, 2), than=than) is not None, "no worse than another"
    assert slow.best is not than


def test_of_two_that_are_as_quick_the_one_with_fewer_slots_is_the_best():
    done = runs(job(use_ms=0.0))
    wide, narrow = done.run(placed(4, 3)), done.run(placed(4))
    assert wide is not None
    assert narrow is not None
    assert (wide.score, wide.paid, narrow.paid) == (narrow.score, 8, 6)
    assert (done.best, done.ranked()) == (narrow, [narrow])


def test_the_best_of_each_layout_is_told_of():
    done = runs(job())
    apart = [done.run(placed(2, micro_batch=n), worse=10.0) for n in (4, 1, 2)]
    region = Region((3,), tuple(PlannedTurn(name, (3,)) for name in ("make", "use")))
    in_turns = done.run(Candidate(regions=(region,), choices=placed(1).choices), worse=10.0)
    assert in_turns is not None
    best = min((one for one in apart if one is not None), key=lambda one: one.key)
    assert done.ranked() == sorted([best, in_turns], key=lambda one: one.key)


def test_effort_is_added_for_so_many_runs_once_it_is_known_how_long_one_is():
    asked = runs(job(), effort=0, fewest=10)
    one = asked.run(placed(1))
    assert one is not None
    moves = SET_UP + one.prediction.effort
    assert (asked.spent, asked.effort) == (moves, 9 * moves)
    asked.run(placed(4))
    assert asked.effort < 9 * moves


@pytest.mark.parametrize("objective", [Objective.STEP_TIME, Objective.COST_PER_STEP])
def test_a_score_has_its_period_again(objective):
    problem = job(objective=objective)
    done = runs(problem)
    found = done.run(placed(4))
    assert found is not None
    assert done.score(placed(4), found.prediction.period_ms) == found.score
    assert done.within(placed(4), found.score) == pytest.approx(found.prediction.period_ms)
    assert (done.within(placed(1), found.score) > found.prediction.period_ms) is problem.has_price


def test_finalists_of_many_slots_are_run_once_more_each_worker_by_itself():
    grain, small, problem = 4, bench.problem(8), bench.problem(32)
    rng, done = random.Random(5), runs(bench.problem(32), grain=4)
    tried = list[Candidate]()
    while len(tried) < 5:
        drawn = table.draw(small, rng)
        assert drawn is not None
        if done.run(grown(drawn, grain, items=problem.items), worse=100.0) is not None:
            tried.append(drawn)
    before = done.ranked()
    count, best = done.count, before[0]
    done.run_finalists()
    assert done.count == count + 3
    for scored in done.ranked()[:1]:
        assert scored.prediction == simulate(problem, scored.candidate)
    assert best.prediction.effort < simulate(problem, best.candidate).effort
    assert [s.key for s in done.ranked()] == sorted(s.key for s in done.ranked())
    alone = runs(problem)
    assert alone.run(best.candidate) is not None
    alone.run_finalists()
    assert alone.count == 1, "they are as fine as they can be"
