"""What a candidate is guessed to take before anybody simulates it, and the bound under it, where hands can tell."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rlinf_scheduler.planner.bounds import Bounds
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.estimate import Estimate
from rlinf_scheduler.planner.problem import Cost, CycleEdge, Option, PlanProblem, Pool, QueueEdge, RoleCosts
from rlinf_scheduler.planner.simulate import simulate


def ms(value):
    return Cost(float(value))


def role(name, per_item, **more):
    return RoleCosts(name=name, options=(Option(per_item_ms=ms(per_item), peak_mib=0.0),), **more)


def job(*roles, speed=1.0, slots=4, items=8, **more):
    names = tuple(r.name for r in roles)
    pool = Pool(name="gpu", slots=slots, memory_mib=0.0, roles=names, speed=speed)
    edges = tuple(QueueEdge(a, b) for a, b in pairwise(names))
    return PlanProblem(roles=roles, edges=edges, items=items, pools=(pool,), **more)


def candidate(*regions, **stays):
    """Regions as the names in the order of their turns, of a slot and a worker each."""
    turns = [tuple(PlannedTurn(name, (1,)) for name in names) for names in regions]
    names = {name for region in regions for name in region}
    choices = {name: Choice(stays=stays.get(name, False)) for name in names}
    return Candidate(regions=tuple(Region((1,), turns=t) for t in turns), choices=choices)


def estimated(problem, planned):
    return Estimate(problem, Bounds(problem)).period_ms(planned)


MAKE, LEARN = role("make", 10), role("learn", 20)
MOVING = (role("make", 10, load_ms=ms(300), offload_ms=ms(50)), role("learn", 20, load_ms=ms(70), offload_ms=ms(500)))


def test_roles_on_slots_of_their_own_never_pay_for_moving():
    planned = candidate(["make"], ["learn"])
    assert estimated(job(*MOVING), planned) == estimated(job(MAKE, LEARN), planned)
    assert estimated(job(MAKE, LEARN), planned) == simulate(job(MAKE, LEARN), planned).period_ms == 170.0


@pytest.mark.parametrize(
    ("stays", "moves"), [({}, 50 + 70 + 500 + 300), ({"make": True}, 70 + 500), ({"make": True, "learn": True}, 0)]
)
def test_roles_in_turns_are_guessed_to_pay_for_their_moves_and_not_for_those_of_who_stays(stays, moves):
    """To the next role, and back to the first; each comes and leaves once."""
    planned, work = candidate(["make", "learn"], **stays), 8 * (10 + 20)
    assert estimated(job(MAKE, LEARN), planned) == work
    assert estimated(job(*MOVING), planned) == simulate(job(*MOVING), planned).period_ms == work + moves


def test_a_change_of_turn_counts_where_nobody_moves():
    planned, work = candidate(["make", "learn"], make=True, learn=True), 8 * (10 + 20)
    changing = job(*MOVING, turn_ms=ms(5))
    assert estimated(changing, planned) == simulate(changing, planned).period_ms == work + 2 * 5


def test_who_works_on_groups_is_guessed_to_begin_with_the_first_of_them():
    """8 units of 10 ms make 2 groups, there at 40 and at 80: of 20 ms the second waits for its units, of 60 for the
    first."""
    roles = (MAKE, replace(LEARN, items=2))
    problem, planned = job(*roles), candidate(["make"], ["learn"])
    assert estimated(problem, planned) == simulate(problem, planned).period_ms == 80 + 20
    long = job(MAKE, replace(LEARN, items=2, options=(Option(per_item_ms=ms(60), peak_mib=0.0),)))
    assert estimated(long, planned) == simulate(long, planned).period_ms == 40 + 2 * 60


@pytest.mark.parametrize(("each_ms", "guessed", "really"), [(1, 80 + 4, 84), (10, 10 + 8 * 40, 300)])
def test_a_cycle_that_a_role_feeds_is_guessed_to_begin_and_end_behind_it(each_ms, guessed, really):
    """8 units of 10 ms, 2 trips of as much at both ends, one unit at once: the last unit's way, or all one by one,
    though an asker works on the next unit meanwhile."""
    roles = (MAKE, role("ask", each_ms), role("answer", each_ms))
    cycle = CycleEdge(front="ask", back="answer", round_trips=2, is_single=True)
    problem = replace(job(*roles), edges=(QueueEdge("make", "ask"),), cycles=(cycle,))
    planned = candidate(["make"], ["ask"], ["answer"])
    assert (estimated(problem, planned), simulate(problem, planned).period_ms) == (guessed, really)


@pytest.mark.parametrize("speed", [1.0, 2.0])
@pytest.mark.parametrize("trips", [1, 4])
def test_the_bound_of_a_role_in_two_places_is_what_it_has_to_do_beside_the_others(speed, trips):
    """Asker and answerer of as many round trips, the answerer on a slot of its own and on one that it shares."""
    cycle = CycleEdge(front="ask", back="answer", round_trips=trips, hop_ms=ms(0))
    problem = job(role("ask", 0.1), role("answer", 10), LEARN, speed=speed)
    problem = replace(problem, edges=(QueueEdge("answer", "learn"),), cycles=(cycle,))
    planned = candidate(["ask"], ["answer"], ["answer", "learn"])
    bound = Bounds(problem).period_ms(planned)
    work, learning = 8 * 10 * trips / speed, 8 * 20 / speed
    assert bound >= (work + learning) / 2 * 0.999, "two slots share both"
    assert bound <= simulate(problem, planned).period_ms
