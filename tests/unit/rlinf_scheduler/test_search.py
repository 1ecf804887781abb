"""The search against brute force, its reasons, and what it writes down."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rlinf_api import declared, plan_rules
from rlinf_api.job import PlacementMode, RLJobSpec, RoleSpec
from rlinf_api.plan import JobRef, PlanReason, PlanReasonModel, WorkerMemory, WorkerPlan
from rlinf_scheduler.planner import spec
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import Cost, CycleEdge, InRounds, Option, PlanProblem, Pool, QueueEdge, RoleCosts
from rlinf_scheduler.planner.search import Found, plan
from rlinf_scheduler.planner.searching.layouts import layouts
from tests.builders import UID
from tools import workloads
from tools.prove import exact, problems

LONG = pytest.mark.long("simulates some hundred plans, as quicker ones of its kind do")
QUICK = (
    0, 2, 3, pytest.param(4, marks=LONG), 5, pytest.param(7, marks=LONG), 8, 9, 10, 12, 14, 15, 16, 17, 19, 20, 21, 22,
    pytest.param(23, marks=LONG), 24,
)  # fmt: skip
"""Of 3 slots, with less than a thousand plans each; `python -m tools.prove exact` tries the others, too."""
MOST_LOSS = 0.05
ASKING = (4, 5, 6, 8, 9, 11, 13, pytest.param(38, marks=LONG))
"""Against all plans, those that no nested cut gives among them, such as a slot for the trainer alone and the others'
roles on all."""


SHAPES = (
    *(("two-cycles", 2, seed) for seed in (1, 6, 8, 13)),
    *(("groups", 3, seed) for seed in (0, 5, 8, 11, 14, 19)),
    *(("tokens", 3, seed) for seed in (0, 3, 5)),
)
"""Those that take a moment."""


def role(name, per_item, *, peak=0.0, **more):
    return RoleCosts(name=name, options=(Option(per_item_ms=Cost(float(per_item)), peak_mib=peak),), **more)


def chain(*roles, slots, memory=0.0, items=8, **more):
    names = tuple(r.name for r in roles)
    edges = tuple(QueueEdge(a, b) for a, b in pairwise(names))
    pool = Pool(name="gpu", slots=slots, memory_mib=memory, roles=names)
    return PlanProblem(roles=roles, edges=edges, items=items, pools=(pool,), **more)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", QUICK)
def test_the_best_nested_plan_is_found(seed):
    one = exact.one(seed, slots=3)
    assert one["ok"], one
    assert one["loss"] <= MOST_LOSS


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", ASKING)
def test_the_best_nested_plan_is_found_where_the_asker_of_a_cycle_feeds_the_next_role(seed):
    one = exact.one(seed, slots=3, kind="like-ppo")
    assert one["ok"], one
    assert one["loss"] <= MOST_LOSS


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "slots", "seed"), SHAPES)
def test_the_best_nested_plan_of_other_shapes_is_found(kind, slots, seed):
    one = exact.one(seed, slots=slots, kind=kind)
    assert one["ok"], one
    assert one["loss"] <= MOST_LOSS


def test_a_slot_more_never_predicts_slower():
    periods = []
    for slots in (1, 2, 3):
        problem = problems.tiny(4)
        found = plan(replace(problem, pools=(replace(problem.pools[0], slots=slots),)))
        assert isinstance(found, Found)
        periods.append(found.best.prediction.period_ms)
    assert periods == sorted(periods, reverse=True)


def test_slots_stay_unused_where_more_bring_nothing():
    """A gang of 4 or none on 4 of 7 slots; a rollout that one slot serves as well."""
    problem = chain(role("roll", 0.1), role("train", 10, service=InRounds(ranks=(4,))), slots=7, items=4)
    found = plan(problem)
    assert isinstance(found, Found)
    assert found.best.candidate.workers("train") == 4
    assert found.best.candidate.slots < 7


def test_what_fits_no_slot_is_refused_alone():
    found = plan(chain(role("roll", 1, peak=10), role("train", 1, peak=90 * 1024), slots=4, memory=80 * 1024))
    assert isinstance(found, Infeasible)
    said = "role 'train' peaks at 90.0 GiB on a slot of 80.0 GiB in pool gpu, alone; raise spec.pools"
    assert said in str(found)
    assert "roll'" not in str(found)
    assert [reason.role for reason in found.reasons] == ["train"]


def test_what_does_not_fit_beside_what_others_keep_is_refused_with_a_sum():
    roles = (role("rollout", 1, offloaded_mib=819.2), role("actor", 1, peak=51 * 1024, service=InRounds()))
    found = plan(chain(*roles, slots=1, memory=51.5 * 1024))
    assert str(found) == (
        "actor peaks at 51.0 GiB and rollout keeps 0.8 GiB on a slot of 51.5 GiB in pool gpu, which lacks 0.3 GiB; "
        "give it 2 slots"
    )
    assert isinstance(plan(chain(*roles, slots=2, memory=51.5 * 1024)), Found)


def test_a_cache_that_a_plan_gives_is_named_where_it_does_not_fit():
    rollout = role("rollout", 1, peak=60 * 1024, resident_mib=50 * 1024, kv_mib=40 * 1024)
    alone = plan(chain(rollout, role("actor", 1, peak=10), slots=1, memory=48 * 1024))
    assert str(alone) == (
        "role 'rollout' peaks at 60.0 GiB, 40.0 GiB of it for keys and values, on a slot of 48.0 GiB in pool gpu, "
        "alone; raise spec.pools[gpu].slots.memory or lower its memory.kv in the plan"
    )
    beside = plan(chain(rollout, role("actor", 1, offloaded_mib=1024), slots=1, memory=60.5 * 1024))
    assert str(beside) == (
        "rollout peaks at 60.0 GiB, 40.0 GiB of it for keys and values, and actor keeps 1.0 GiB on a slot of 60.5 GiB "
        "in pool gpu, which lacks 0.5 GiB; give it 2 slots"
    )


def test_an_option_that_fits_is_chosen_where_the_faster_one_does_not():
    fast_and_slow = (Option(per_item_ms=Cost(1.0), peak_mib=90), Option(per_item_ms=Cost(5.0), peak_mib=40))
    train = RoleCosts(name="train", service=InRounds(), options=fast_and_slow)
    for memory, option in ((80, 1), (100, 0)):
        found = plan(chain(role("roll", 1, peak=10), train, slots=2, memory=memory))
        assert isinstance(found, Found)
        assert found.best.candidate.choices["train"].option == option


@pytest.mark.parametrize(
    ("pools", "wanted"),
    [
        ((("env", "reward"), ("train", "rollout")), {("env", "reward"), ("rollout", "train")}),
        ((("env", "rollout"), ("reward", "rollout", "train")), {("env", "reward", "rollout", "train")}),
        ((("env",), ("rollout",), ("reward", "train")), {("env",), ("rollout",), ("reward", "train")}),
    ],
    ids=["two pairs", "by way of a role of both", "two by themselves"],
)
def test_collocated_roles_take_turns_with_all_that_share_a_pool_with_them_and_with_no_others(pools, wanted):
    problem = chain(*(role(name, 10) for name in ("env", "rollout", "reward", "train")), slots=2)
    each = tuple(Pool(name=f"p{n}", slots=2, memory_mib=0.0, roles=names) for n, names in enumerate(pools))
    found = plan(replace(problem, pools=each, mode=PlacementMode.COLLOCATED))
    assert isinstance(found, Found)
    assert {tuple(sorted(t.role for t in region.turns)) for region in found.best.candidate.regions} == wanted


def test_the_ends_of_a_cycle_say_themselves_what_travels_together():
    """What is largest is chosen of the others: fewest costs of a batch, fewest changes of turn."""
    roles = (role("ask", 1), role("answer", 10), role("learn", 20, per_batch_ms=Cost(5.0)))
    cycle = CycleEdge(front="ask", back="answer", round_trips=4)
    found = plan(replace(chain(*roles, slots=3), edges=(QueueEdge("answer", "learn"),), cycles=(cycle,)))
    assert isinstance(found, Found)
    sizes = {name: choice.micro_batch for name, choice in found.best.candidate.choices.items()}
    assert (sizes["ask"], sizes["answer"]) == (1, 1)
    assert sizes["learn"] > 1


def test_nested_cuts_of_three_roles():
    roles = (role("a", 1), role("b", 1), role("c", 1, service=InRounds()))
    assert set(layouts(chain(*roles, slots=8))) == {
        (("a",), ("b",), ("c",)),
        (("a", "b"), ("c",)),
        (("a", "c"), ("b",)),
        (("a",), ("b", "c")),
        (("a", "b", "c"),),
        (("a", "b"), ("a", "c")),  # a above b beside c
        (("a", "b"), ("b", "c")),  # b above a beside c; the gang c is above nobody
    }


@pytest.mark.parametrize("name", ["drawn-04", "drawn-08", "drawn-09", "drawn-13", "drawn-14", "drawn-28"])
def test_a_plan_of_a_synthetic_job_is_one_that_the_runtime_takes(name):
    """Cycles, two pools, workers of two slots and turns; read again, it predicts the same."""
    entry = workloads.entries()[name]
    problem = problems.of_entry(entry, items=16)
    found = plan(problem, effort=4_000)
    assert isinstance(found, Found)
    job = RLJobSpec.model_validate(workloads.job(entry, items=16)["spec"])
    reason = PlanReasonModel(code=PlanReason.PROFILED, message=found.explanation)
    written = spec.write(
        problem, found.best.candidate, found.best.prediction, job=JobRef(name=name, uid=UID), revision=2, reason=reason
    )
    assert written is not None
    plan_rules.check(written, job)
    assert written.predicted is not None
    parts = written.predicted.parts
    total = parts.compute + parts.load + parts.offload + parts.weights + parts.wait
    assert total == pytest.approx(written.predicted.period_seconds, rel=1e-3)
    again = spec.read(problem, written, job)
    assert {frozenset(t.role for t in r.turns) for r in again.regions} == {
        frozenset(t.role for t in r.turns) for r in found.best.candidate.regions
    }
    assert {name: choice.option for name, choice in again.choices.items()} == {
        name: choice.option for name, choice in found.best.candidate.choices.items()
    }
    assert again.slots == found.best.candidate.slots
    assert [c.stages for c in again.choices.values()] == [c.stages for c in found.best.candidate.choices.values()]


def test_what_is_chosen_of_a_role_stands_in_its_plan_and_is_read_again():
    entry = workloads.entries()["drawn-14"]
    problem = problems.of_entry(entry, items=16)
    found = plan(problem, effort=1_000)
    assert isinstance(found, Found)
    best = found.best.candidate
    choices = {**best.choices, "train": replace(best.choices["train"], option=1, stays=True)}
    reason = PlanReasonModel(code=PlanReason.PROFILED)
    written = spec.write(
        problem, replace(best, choices=choices), found.best.prediction, job=JobRef(name="j", uid=UID), revision=2,
        reason=reason,
    )  # fmt: skip
    assert written is not None
    assert [(w.option, w.stays) for w in written.workers if w.role == "train"] == [("0", True)]
    job = RLJobSpec.model_validate(workloads.job(entry, items=16)["spec"])
    plan_rules.check(written, job)
    again = spec.read(problem, written, job)
    assert {name: (c.option, c.stays) for name, c in again.choices.items()} == {
        name: (c.option, c.stays) for name, c in choices.items()
    }


@pytest.mark.parametrize(
    ("chosen", "stays", "option"),
    [(0, False, "base"), (0, True, "base"), (1, False, "0")],  # `base` is the option as the role stands, too
)
def test_what_no_candidate_says_is_as_in_the_plan_in_force(chosen, stays, option):
    """What is resident has its cache in it, and the plan says it apart."""
    problem = problems.of_entry(workloads.entries()["drawn-14"], items=16)
    found = plan(problem, effort=1_000)
    assert isinstance(found, Found)
    best = found.best.candidate
    choices = {**best.choices, "train": replace(best.choices["train"], option=chosen, stays=stays)}
    kept = WorkerMemory(resident="3Gi", kv="2Gi")
    there = WorkerPlan(role="train", count=1, slots="main/0:0", option="base", tokens=8192, memory=kept)
    written = spec.write(
        problem, replace(best, choices=choices), found.best.prediction, job=JobRef(name="j", uid=UID), revision=2,
        reason=PlanReasonModel(code=PlanReason.PROFILED), workers=[there],
    )  # fmt: skip
    assert written is not None
    (train,) = (w for w in written.workers if w.role == "train")
    assert train.memory is not None
    assert (train.option, train.tokens, train.memory.kv) == (option, 8192, "2Gi")
    assert train.memory.resident == "5961Mi"
    of_slot = declared.of_entry(train, RoleSpec(name="train", kind="my:Role"))
    assert of_slot.resident == problem.role("train").resident_mib * 2**20
    assert declared.kept(train, of_slot) == (of_slot.resident if stays else of_slot.offloaded)
    assert {w.tokens for w in written.workers if w.role != "train"} == {0}
