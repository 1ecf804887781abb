"""Flow ppo in the planner: env asks the rollout, steps on each answer and feeds the actor itself."""

import math

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import CyclePlan, JobRef, PlanReason, RLPlanSpec
from rlinf_api.profile import Profile
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.planner.problem import Provenance
from rlinf_scheduler.planner.simulate import simulate
from rlinf_scheduler.replan.first import by_profiles
from rlinf_scheduler.replan.fit import HOP_MS, Fit, Unfit, fit

TRIPS, STEPS = 32, 5
REF = JobRef(name="cartpole", uid="u")


def job(*, slices=2, env=1, slots=3, actor="fsdp", flow="ppo"):
    roles = [("env", "gymnasium", env), ("rollout", "torch", 1), ("actor", actor, 1)]
    return RLJobSpec.model_validate(
        {
            "flow": {"name": flow, "steps": 400, "config": {"env": "CartPole-v1", "slices": slices, "numEnvs": 32}},
            "roles": [{"name": name, "kind": kind, "workers": workers} for name, kind, workers in roles],
            "pools": [{"name": "cpu", "roles": ["env", "rollout", "actor"], "pods": 1, "slots": {"perPod": slots}}],
        }
    )


def profile(*, slices=2, env_ms=0.25, rollout_ms=0.15, released_s=0.064, pulled_s=0.0, envs=1, rounds=1, more=()):
    """As a driver reports it; released_s: when units left env, from their tickets on."""

    def number(value, count):
        return {"value": value, "count": count}

    def role(name, ms, units, count, workers=1, **parts):
        return {
            "name": name, "pool": "cpu", "workers": workers,
            "seconds": {"compute": number(1e-3 * ms * count / STEPS / workers, STEPS * workers)},
            "batches": [{"size": units, "units": units, "seconds": number(1e-3 * ms, count)}], **parts,
        }  # fmt: skip

    def channel(name, mode, producer, consumer, units):
        return {
            "name": name, "mode": mode, "producer": producer, "consumer": consumer,
            "units": number(units, STEPS), "bytes": number(64.0 * units, STEPS),
        }  # fmt: skip

    passages = TRIPS * slices
    wait = {"wait_data": number(pulled_s, STEPS)}
    pull = {"channel": "weights", "side": "consumer", "units": 1, "waitSeconds": number(pulled_s, STEPS)}
    rollout = role("rollout", rollout_ms, 1, passages * STEPS, ends=[pull])
    rollout["seconds"] |= wait
    return Profile.model_validate(
        {
            "key": "sha256:" + 64 * "a", "job": {"name": "cartpole", "uid": "u"}, "revision": 1,
            "firstStep": 4, "lastStep": 3 + STEPS, "steps": STEPS, "stepSeconds": number(0.12, STEPS),
            "roles": [
                role("env", env_ms, 1, passages * STEPS, envs,
                     releases=[{"channel": "trajectories", "count": slices * STEPS, "seconds": [released_s]}]),
                rollout,
                role("actor", 50.0 / rounds, slices // rounds, rounds * STEPS),
            ],
            "channels": [
                channel("segments", "Queue", "", "env", slices),
                channel("trajectories", "Queue", "env", "actor", slices),
                channel("actions", "Cycle", "env", "rollout", passages),
                channel("actions", "Cycle", "rollout", "env", passages), *more,
                channel("weights", "Weights", "actor", "rollout", 1),
            ],
        }
    )  # fmt: skip


def fitted(*, of=None, spec=None, plan=None):
    found = fit(spec or job(), [of or profile()], plan=plan)
    assert isinstance(found, Fit), found
    return found


def first_plan(spec):
    found = initial(spec, job=REF)
    assert isinstance(found, RLPlanSpec)
    return found


def test_a_unit_goes_round_as_often_as_the_horizon_and_leaves_at_the_asker():
    problem = fitted().problem
    (cycle,) = problem.cycles
    assert problem.asker_feeds(cycle)
    assert (cycle.front, cycle.back, cycle.round_trips) == ("env", "rollout", TRIPS)
    assert cycle.is_single
    assert (problem.items, problem.terminal) == (2, ("actor",))


def test_questions_that_are_asked_for_several_units_at_once_do_not_travel_by_themselves():
    several = profile()
    env = next(role for role in several.roles if role.name == "env")
    env.batches[0] = env.batches[0].model_copy(update={"units": 2.0})
    [cycle] = fitted(of=several).problem.cycles
    assert not cycle.is_single
    assert cycle.round_trips == 2 * TRIPS, "a unit of each passage"


@pytest.mark.parametrize("pulled_s", [0.0, 0.016])
def test_what_a_question_is_under_way_is_measured_by_the_trips_of_a_unit(pulled_s):
    """64 ms over 32 trips are 2 ms; 0.25 and 0.15 of them is work, and there are two ways. Weights came first."""
    problem = fitted(of=profile(released_s=0.064 + pulled_s, pulled_s=pulled_s)).problem
    (cycle,) = problem.cycles
    assert cycle.hop_ms.value == pytest.approx(0.8)
    assert cycle.hop_ms.by is Provenance.MEASURED


def test_units_that_took_turns_were_under_way_for_a_part_of_that_time():
    """One of two at once: 128 ms until both are through are 2 ms a trip all the same."""
    plan = first_plan(job()).model_copy(update={"cycles": [CyclePlan(roles=["env", "rollout"], stages=1)]})
    problem = fitted(of=profile(released_s=0.128), plan=plan).problem
    (cycle,) = problem.cycles
    assert cycle.hop_ms.value == pytest.approx(0.8)


def test_a_queue_before_an_end_that_never_rests_is_not_taken_for_the_way_to_it():
    problem = fitted(of=profile(env_ms=0.95)).problem
    (cycle,) = problem.cycles
    assert (cycle.hop_ms.value, cycle.hop_ms.by) == (HOP_MS, Provenance.ASSUMED)


def test_the_profiled_plan_is_predicted_by_its_own_trips_and_its_update():
    """Two units beside each other: 32 trips of 2 ms, 2 ms to the actor, and 50 ms of update, which begins when both
    are there; two hand-overs, as a ticket takes one as well."""
    plan = first_plan(job())
    problem = fitted(plan=plan).problem
    assert simulate(problem, plans.read(problem, plan, job())).period_ms == pytest.approx(2 + 64 + 2 + 50, rel=0.02)


def test_no_more_simulators_than_slices_are_planned():
    """The flow refuses them."""
    spec = job(slices=2, env={"min": 1, "max": 6}, slots=8)
    problem = fitted(spec=spec).problem
    assert problem.role("env").most == 2
    slow = profile(slices=4, env_ms=8.0, released_s=4 * 8e-3 * TRIPS)
    spec = job(slices=4, env={"min": 1, "max": 6}, slots=8)
    plan = by_profiles(spec, [slow], job=REF, revision=2, reason=PlanReason.INITIAL)
    assert plan is not None
    assert {w.role: w.count for w in plan.workers} == {"env": 4, "rollout": 1, "actor": 1}
    assert plan.predicted is not None
    # Each simulator has a unit of its own by then: 32 trips of 8 + 0.15 ms and two hops; then 50 ms.
    assert plan.predicted.period_seconds == pytest.approx(1e-3 * (TRIPS * (8.15 + 2 * HOP_MS) + 54), rel=0.02)


def test_a_gang_is_seen_to_train_at_once_where_rounds_were_asked_for():
    """Of a trainer of one's own it shows: one span of 4 units, where the plan hands it over unit by unit."""
    spec = job(slices=4, actor="my.trainer:Role")
    plan = first_plan(spec)
    actor = fitted(of=profile(slices=4), spec=spec, plan=plan).problem.role("actor")
    assert getattr(actor.service, "at_once") is True  # noqa: B009 - of InRounds alone
    in_rounds = fitted(of=profile(slices=4, rounds=4), spec=spec, plan=plan)
    assert getattr(in_rounds.problem.role("actor").service, "at_once") is False  # noqa: B009
    unknown = fitted(of=profile(slices=4), spec=spec)  # without the plan nobody knows what was asked for
    assert getattr(unknown.problem.role("actor").service, "at_once") is False  # noqa: B009


def test_what_trains_at_once_is_not_probed_with_smaller_batches():
    assert fitted().one_size == ()


def test_two_ends_that_both_feed_others_are_no_cycle_that_is_planned():
    number = {"value": 2.0, "count": STEPS}
    too = {
        "name": "logs",
        "mode": "Queue",
        "producer": "rollout",
        "consumer": "actor",
        "units": number,
        "bytes": number,
    }
    found = fit(job(), [profile(more=[too])], plan=None)
    assert isinstance(found, Unfit)
    assert str(found) == "roles 'env' and 'rollout' ask and answer in a cycle and both feed others: one of them may"


def test_more_units_under_way_hide_the_way_to_the_policy():
    """Four units of one simulator: with one at a time each trip takes 2 ms, with four env works without a rest."""
    plan = first_plan(job(slices=4))
    problem = fitted(of=profile(slices=4), spec=job(slices=4), plan=plan).problem

    def step(stages):
        changed = plan.model_copy(update={"cycles": [CyclePlan(roles=["env", "rollout"], stages=stages)]})
        return simulate(problem, plans.read(problem, changed, job(slices=4))).period_ms

    assert step(1) == pytest.approx(4 * TRIPS * 2.0 + 54, rel=0.02)
    assert step(4) == pytest.approx(TRIPS * 2.0 + 54, rel=0.05)
    assert math.isclose(step(2), (step(1) + 54) / 2, rel_tol=0.1)
