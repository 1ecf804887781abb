"""The simulator against what it said of many kinds of plans before it was made faster, and classes of workers that do
alike against every worker by itself."""

import json
import random
from dataclasses import replace

import pytest

from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import Cost, InLanes, InRounds, Option, PlanProblem, Pool, QueueEdge, RoleCosts
from rlinf_scheduler.planner.search import Found, plan
from rlinf_scheduler.planner.simulate import alike, simulate
from rlinf_scheduler.planner.simulation.clock import Aborted
from tools.bench import planner as bench
from tools.prove import table

MANY = 512
MEMBERS = 16
"""Workers that one stands for."""


def test_every_prediction_of_the_table_is_the_same():
    saved = json.loads(table.FILE.read_text(encoding="utf-8"))
    said = {name: table.predicted(problem, candidate) for name, problem, candidate in table.rows()}
    assert said.keys() == saved.keys()
    assert {name for name in said if said[name] != saved[name]} == set()


def grown(candidate: Candidate, times: int, *, items: int) -> Candidate:
    regions = tuple(
        replace(
            region,
            slots=tuple(times * n for n in region.slots),
            turns=tuple(replace(t, workers=tuple(times * n for n in t.workers), until=0) for t in region.turns),
        )
        for region in candidate.regions
    )
    choices = {name: replace(c, depth=items) if c.depth > 4 else c for name, c in candidate.choices.items()}
    return replace(candidate, regions=regions, choices=choices)


def test_classes_of_workers_that_do_alike_are_within_two_per_cent_of_all_of_them():
    """Of 20 plans of 512 slots at most one may be off by more than a hair: where what waits is handed out unevenly."""
    rng, big = random.Random(5), bench.problem(MANY)
    off = []
    for _ in range(20):
        drawn = table.draw(bench.problem(MANY // MEMBERS), rng)
        assert drawn is not None
        candidate = grown(drawn, MEMBERS, items=big.items)
        classes = alike(big, candidate, at_least=MEMBERS, at_most=MEMBERS)
        assert classes == MEMBERS
        of_all, of_classes = simulate(big, candidate), simulate(big, candidate, classes=classes)
        assert of_classes.effort < of_all.effort / 4
        off.append(abs(of_classes.period_ms / of_all.period_ms - 1))
    assert sum(share > 1e-9 for share in off) <= 1
    assert max(off) <= 0.02


def test_one_worker_beside_many_stands_for_itself_and_is_as_much_slower():
    """64 units through one worker of 1 ms, then 16 workers of 2 ms: 64 + 2. A class of 8: one unit of 8 ms each."""
    roles = (
        RoleCosts(name="a", options=(Option(per_item_ms=Cost(1.0)),)),
        RoleCosts(name="b", options=(Option(per_item_ms=Cost(2.0)),)),
    )
    pool = Pool(name="gpu", slots=32, roles=("a", "b"))
    problem = PlanProblem(roles=roles, edges=(QueueEdge("a", "b"),), items=64, pools=(pool,))
    candidate = _side_by_side(a=1, b=16)
    assert simulate(problem, candidate).period_ms == pytest.approx(66)
    assert alike(problem, candidate, at_least=8, at_most=8) == 8
    assert simulate(problem, candidate, classes=8).period_ms == pytest.approx(66)


def test_a_class_of_a_gang_pays_the_sync_of_all_its_ranks():
    gang = RoleCosts(name="b", options=(Option(per_item_ms=Cost(1.0)),), service=InRounds(sync_ms=Cost(16.0)))
    pool = Pool(name="gpu", slots=32, roles=("a", "b"))
    first = RoleCosts(name="a", options=(Option(per_item_ms=Cost(0.0)),))
    problem = PlanProblem(roles=(first, gang), edges=(QueueEdge("a", "b"),), items=16, pools=(pool,))
    for classes in (1, 4, 8):
        assert simulate(problem, _side_by_side(a=8, b=16), classes=classes).period_ms == pytest.approx(1 + 15)


def test_sizes_of_classes_keep_their_sum():
    """32 units of sizes 1 to 32 on an engine of one lane for each of 8 workers: within a tenth of all."""
    sizes = tuple(float(n) for n in range(1, 33))
    engine = RoleCosts(name="a", options=(Option(per_item_ms=Cost(1.0)),), service=InLanes(lanes=1), sizes=sizes)
    gang = RoleCosts(name="b", options=(Option(per_item_ms=Cost(0.0)),), service=InRounds())
    pool = Pool(name="gpu", slots=32, roles=("a", "b"))
    problem = PlanProblem(roles=(engine, gang), edges=(QueueEdge("a", "b"),), items=32, pools=(pool,))
    candidate = _side_by_side(a=8, b=8)
    whole, classes = simulate(problem, candidate), simulate(problem, candidate, classes=4)
    assert classes.period_ms == pytest.approx(whole.period_ms, rel=0.15)
    assert classes.busy["a"] * classes.period_ms == pytest.approx(whole.busy["a"] * whole.period_ms)


def test_sizes_of_several_steps_make_the_mean_step():
    """A worker of 1 ms a unit: steps of 4, 8 and 12 ms follow each other, and the period is their mean."""
    work = RoleCosts(name="a", options=(Option(per_item_ms=Cost(1.0)),), later_sizes=((2.0,), (3.0,)))
    problem = PlanProblem(roles=(work,), edges=(), items=4, pools=(Pool(name="gpu", slots=1, roles=("a",)),))
    found = simulate(problem, _side_by_side(a=1))
    assert found.period_ms == pytest.approx(8)
    assert sum(ms for _, _, ms in found.critical) == pytest.approx(8)
    for staleness in (1, 2):
        assert simulate(replace(problem, staleness=staleness), _side_by_side(a=1)).period_ms == pytest.approx(8)


def test_a_run_is_left_as_soon_as_it_lasts_too_long():
    problem = bench.problem(8)
    candidate = table.draw(problem, random.Random(1))
    assert candidate is not None
    whole = simulate(problem, candidate)
    assert simulate(problem, candidate, limit_ms=whole.period_ms * 1.001) == whole
    with pytest.raises(Aborted) as left:
        simulate(problem, candidate, limit_ms=whole.period_ms * 0.5)
    assert left.value.args[0] < whole.effort


def _side_by_side(**workers: int) -> Candidate:
    regions = tuple(Region((n,), (PlannedTurn(name, (n,)),)) for name, n in workers.items())
    return Candidate(regions=regions, choices={name: Choice(micro_batch=1) for name in workers})


def test_a_plan_of_many_slots_is_predicted_as_by_all_of_its_workers():
    """The finalists of 1,024 slots are run with one for two; the bar is 1%."""
    problem = bench.problem(1024)
    answer = plan(problem)
    assert isinstance(answer, Found)
    of_all = simulate(problem, answer.best.candidate)
    assert answer.best.prediction.effort < of_all.effort
    assert answer.best.prediction.period_ms == pytest.approx(of_all.period_ms, rel=0.01)
