"""What a plan is to be good at, and what it may not do: price of slots, pods that open and close, pins, modes; what it
says of those that lost, and of more capacity."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_api.job import Objective, PlacementMode
from rlinf_scheduler.planner import candidate as candidates
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import (
    Cost,
    InBatches,
    InRounds,
    Option,
    PlanProblem,
    Pool,
    QueueEdge,
    RoleCosts,
    resampled,
)
from rlinf_scheduler.planner.search import Found, plan
from rlinf_scheduler.planner.what_if import what_if_more
from tools.bench import planner as bench


def role(name, per_item, *, peak=0.0, **more):
    return RoleCosts(name=name, options=(Option(per_item_ms=Cost(float(per_item)), peak_mib=peak),), **more)


def chain(*roles, slots, memory=0.0, items=8, pool=None, **more):
    names = tuple(r.name for r in roles)
    edges = tuple(QueueEdge(a, b) for a, b in pairwise(names))
    pools = (Pool(name="gpu", slots=slots, memory_mib=memory, roles=names, **(pool or {})),)
    return PlanProblem(roles=roles, edges=edges, items=items, pools=pools, **more)


def found(problem, **more):
    answer = plan(problem, **more)
    assert isinstance(answer, Found), answer
    return answer


def layout(answer):
    return {frozenset(t.role for t in r.turns) for r in answer.best.candidate.regions}


# --- modes and pins ---------------------------------------------------------------------------------------------------
def test_disaggregated_gives_nobody_turns_and_collocated_all():
    roles = (role("roll", 6), role("reward", 1), role("train", 5, service=InRounds()))
    problem = chain(*roles, slots=4)
    alone = {frozenset({name}) for name in ("roll", "reward", "train")}
    for slots in (3, 4, 9):
        asked = replace(problem, pools=(replace(problem.pools[0], slots=slots),))
        assert layout(found(replace(asked, mode=PlacementMode.DISAGGREGATED))) == alone
        assert layout(found(replace(asked, mode=PlacementMode.COLLOCATED))) == {frozenset().union(*alone)}
        best = min(
            found(replace(asked, mode=mode)).best.prediction.period_ms
            for mode in (PlacementMode.DISAGGREGATED, PlacementMode.COLLOCATED)
        )
        assert found(asked).best.prediction.period_ms <= best


def test_collocated_pools_that_have_no_role_in_common_stay_apart():
    roles = (role("env", 1), role("roll", 1), role("train", 1, service=InRounds()))
    edges = (QueueEdge("env", "roll"), QueueEdge("roll", "train"))
    pools = (Pool(name="cpu", slots=2, roles=("env",)), Pool(name="gpu", slots=2, roles=("roll", "train")))
    problem = PlanProblem(roles=roles, edges=edges, items=4, pools=pools, mode=PlacementMode.COLLOCATED)
    assert layout(found(problem)) == {frozenset({"env"}), frozenset({"roll", "train"})}


def test_too_few_slots_side_by_side_are_refused_with_their_sum():
    roles = (role("roll", 1, slots_per_worker=2), role("train", 1, service=InRounds(ranks=(2, 4))))
    assert str(plan(chain(*roles, slots=3, mode=PlacementMode.DISAGGREGATED))) == (
        "side by side the roles need 2 (roll) + 2 (train) = 4 slots, pools gpu have 3; raise spec.pools[*].pods or "
        "write spec.placement.mode: Auto, so that roles may take turns"
    )
    assert isinstance(plan(chain(*roles, slots=3)), Found)


@pytest.mark.parametrize("pinned", [1, 2, 3])
def test_a_pinned_role_has_so_many_workers(pinned):
    problem = chain(role("roll", 6), role("train", 5, service=InRounds()), slots=6)
    free = found(problem)
    for name in ("roll", "train"):
        answer = found(replace(problem, pins={name: pinned}))
        assert answer.best.candidate.workers(name) == pinned
        assert answer.best.prediction.period_ms >= free.best.prediction.period_ms


def test_a_pin_of_nobody_is_a_mistake():
    with pytest.raises(InvariantBroken, match="pins of actor, and the roles are roll, train"):
        plan(chain(role("roll", 6), role("train", 5), slots=6, pins={"actor": 1}))


def test_a_role_has_no_more_workers_than_it_may():
    """In turns on 4 slots a reward of at most one worker takes one of them."""
    roles = (role("roll", 6), role("reward", 1, most=1), role("train", 5, service=InRounds()))
    answer = found(chain(*roles, slots=4, mode=PlacementMode.COLLOCATED))
    assert [answer.best.candidate.workers(name) for name in ("roll", "reward", "train")] == [4, 1, 4]


# --- the price of slots -----------------------------------------------------------------------------------------------
def test_the_price_of_a_slot_is_its_share_or_what_it_must_save():
    def price(slots, gain):
        asked = PlanProblem(
            roles=(), edges=(), pools=(), items=1, objective=Objective.COST_PER_STEP, min_gain_per_slot=gain
        )
        return 2.718281828459045 ** asked.price(slots)

    assert [price(n, 0.0) for n in (1, 2, 8)] == pytest.approx([1, 2, 8])
    # Up to the fifth a slot costs more than a fifth of the step; the sixth and later ones must save one each.
    assert [price(n, 0.2) for n in (4, 5, 6, 7)] == pytest.approx([4, 5, 5 / 0.8, 5 / 0.64])
    assert PlanProblem(roles=(), edges=(), pools=(), items=1).price(100) == 0


PODS = {"slots_per_pod": 2, "fewest_pods": 1}


def test_a_pool_grows_only_where_pods_are_worth_it():
    """16 equal units of 10 ms in turns: 8 slots would take a fourth of the time of 2 and cost as much, were it not for
    the loads, which every size waits for."""
    roles = (role("roll", 10, load_ms=Cost(10.0)), role("train", 10, service=InRounds(), load_ms=Cost(10.0)))
    problem = chain(*roles, slots=8, items=16, pool=PODS)
    quick = found(problem).best
    cheap = found(replace(problem, objective=Objective.COST_PER_STEP)).best
    assert (quick.pods, quick.paid) == ((4,), 8)
    assert (cheap.pods, cheap.paid) == ((1,), 2)
    assert cheap.prediction.period_ms > quick.prediction.period_ms
    assert cheap.paid * cheap.prediction.period_ms < quick.paid * quick.prediction.period_ms


def test_pods_that_are_there_anyway_are_used():
    roles = (role("roll", 10, load_ms=Cost(10.0)), role("train", 10, service=InRounds(), load_ms=Cost(10.0)))
    problem = chain(*roles, slots=8, items=16, pool={"slots_per_pod": 2}, objective=Objective.COST_PER_STEP)
    best = found(problem).best
    assert (best.pods, best.paid) == ((4,), 8)
    assert best.prediction.period_ms == found(replace(problem, objective=Objective.STEP_TIME)).best.prediction.period_ms


def test_pods_are_as_many_as_hold_the_slots():
    """A rollout of one worker at most and a gang of one: two slots, one pod of two; of three slots per pod one, too."""
    roles = (role("roll", 10, most=1), role("train", 10, service=InRounds(ranks=(1,))))
    for per_pod, pods in ((1, 2), (2, 1), (3, 1)):
        problem = chain(*roles, slots=6, pool={"slots_per_pod": per_pod, "fewest_pods": 0})
        assert found(problem).best.pods == (pods,)
    assert candidates.paid(problem, found(problem).best.candidate) == 3


# --- what is said -----------------------------------------------------------------------------------------------------
def test_runners_up_say_by_what_they_lost():
    answer = found(bench.problem(8))
    assert len(answer.runners_up) == len(answer.others) > 2
    mine = {(role, kind): ms for role, kind, ms in answer.best.prediction.critical}
    for one, other in zip(answer.runners_up, answer.others, strict=True):
        lost, its = one.lost_because, {(role, kind): ms for role, kind, ms in other.prediction.critical}
        key = (lost.role, lost.kind)
        assert lost.slower == pytest.approx(other.prediction.period_ms / answer.best.prediction.period_ms - 1)
        assert lost.more_ms == pytest.approx(its[key] - mine.get(key, 0.0))
        assert lost.more_ms == pytest.approx(max(ms - mine.get(part, 0.0) for part, ms in its.items()))
        assert one.pods == (1,)


def test_more_of_what_binds_is_said_and_nothing_where_it_brings_nothing():
    """One rollout worker of two may not grow, a slot more for the trainer saves; memory binds nobody."""
    roles = (role("roll", 1, most=1), role("train", 12, service=InRounds()))
    problem = chain(*roles, slots=2, memory=100, items=4)
    answer = found(problem)
    slot, memory = what_if_more(problem, answer)
    assert (slot.pool, slot.slots, memory.memory) == ("gpu", 1, 0.1)
    better = found(replace(problem, pools=(replace(problem.pools[0], slots=3),))).best.prediction.period_ms
    assert slot.period_ms == pytest.approx(better)
    assert slot.saves == pytest.approx(1 - better / answer.best.prediction.period_ms)
    assert slot.saves is not None
    assert slot.saves > 0.05
    assert memory.saves == 0
    assert str(memory) == "10% more memory of pool gpu's slots: no gain"


def test_what_more_would_make_a_plan_possible_is_said():
    problem = chain(role("roll", 1, peak=10), role("train", 1, peak=105), slots=1, memory=100)
    answer = plan(problem)
    assert isinstance(answer, Infeasible)
    gains = {(gain.slots, gain.memory): gain for gain in what_if_more(problem, answer)}
    assert gains[1, 0.0].period_ms is None
    assert gains[0, 0.1].period_ms is not None
    assert "where there is none today" in str(gains[0, 0.1])


def test_the_plan_in_force_is_where_a_search_begins():
    """With hardly any effort the answer is still no worse than what runs."""
    problem = bench.problem(64)
    best = found(problem).best
    again = found(problem, effort=1, start=[best.candidate])
    assert again.best.prediction.period_ms <= best.prediction.period_ms
    small = bench.problem(8)
    assert found(small, start=[best.candidate]).best.candidate.slots <= 8, "what has no room any more is no start"


# --- many slots -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("slots", "most_moves"), [(8, 36_000), (64, 58_000), (512, 58_000), (10_000, 58_000)])
def test_a_plan_of_many_slots_takes_no_more_moves_than_one_of_few(slots, most_moves):
    """The bench's problem has as many units as slots, so that a good plan takes as long on 64 as on 10,000."""
    answer = found(bench.problem(slots))
    assert answer.effort <= most_moves
    if slots >= 64:
        assert answer.best.prediction.period_ms < 80


def test_the_answer_is_the_same_each_time():
    one, two = found(bench.problem(512)), found(bench.problem(512))
    assert one.best.candidate == two.best.candidate
    assert (one.runs, one.effort) == (two.runs, two.effort)


# --- long tails -------------------------------------------------------------------------------------------------------
def test_sizes_are_drawn_alike_for_a_name_and_keep_their_mean():
    seen = [0.5 + n / 10 for n in range(9)] + [10.9]
    drawn = resampled(seen, items=16, steps=4, name="roll")
    assert drawn == resampled(seen, items=16, steps=4, name="roll")
    assert drawn != resampled(seen, items=16, steps=4, name="train")
    assert len(set(drawn)) == 4
    assert sum(map(sum, drawn)) / 64 == pytest.approx(sum(seen) / 10)


def test_a_plan_is_chosen_for_the_mean_step_and_not_for_the_first_one():
    """The first step's units are light for roll, later ones are heavy: it gets most of the slots."""
    roll = role("roll", 10, service=InBatches(), sizes=(0.1,), later_sizes=((1.9,),))
    train = role("train", 4, service=InRounds())
    problem = chain(roll, train, slots=6, items=24, mode=PlacementMode.DISAGGREGATED)
    first_only = replace(problem, roles=(replace(roll, later_sizes=()), train))
    assert found(problem).best.candidate.workers("roll") > found(first_only).best.candidate.workers("roll")
