"""Flows of one's own in the planner: several cycles, units that are split and put together, work that goes by tokens.
From a driver's report to a plan that the runtime takes."""

import pytest

from rlinf_api import plan_rules
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, PlanReason, PlanReasonModel
from rlinf_api.profile import Profile
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner.search import Found, plan
from rlinf_scheduler.replan.fit import HOP_MS, Fit, Unfit, fit

STEPS = 5


def job(*names, gang="", slots=8):
    roles = [{"name": n, "kind": "my.roles:Role", "workers": {"min": 1, "max": 8}} for n in names]
    return RLJobSpec.model_validate(
        {
            "flow": {"name": "my.flow:main", "steps": 400},
            "roles": roles,
            "pools": [{"name": "cpu", "roles": list(names), "pods": 1, "slots": {"perPod": slots}}],
        }
    )


def number(value, count=STEPS):
    return {"value": value, "count": count}


def role(name, *batches, workers=1):
    """`batches`: (units, ms, how many a step), and what else is known of them."""
    return {
        "name": name, "pool": "cpu", "workers": workers,
        "seconds": {"compute": number(1e-3 * sum(ms * n for _, ms, n, *_ in batches) / workers)},
        "batches": [
            {"size": units, "units": units, "seconds": number(1e-3 * ms, n * STEPS), **(more[0] if more else {})}
            for units, ms, n, *more in batches
        ],
    }  # fmt: skip


def channel(name, producer, consumer, units, mode="Queue"):
    return {
        "name": name, "mode": mode, "producer": producer, "consumer": consumer,
        "units": number(units), "bytes": number(64.0 * units),
    }  # fmt: skip


def asked(name, front, back, units):
    return [channel(name, front, back, units, "Cycle"), channel(name, back, front, units, "Cycle")]


def profile(roles, channels):
    return Profile.model_validate(
        {
            "key": "sha256:" + 64 * "a", "job": {"name": "mine", "uid": "u"}, "revision": 1,
            "firstStep": 4, "lastStep": 3 + STEPS, "steps": STEPS, "stepSeconds": number(0.5),
            "roles": roles, "channels": channels,
        }
    )  # fmt: skip


def fitted(spec, report):
    found = fit(spec, [report], plan=None)
    assert isinstance(found, Fit), found
    return found.problem


def written(spec, problem):
    """The plan that is chosen, as it stands in an RLPlan and as it is read again."""
    found = plan(problem, effort=3_000)
    assert isinstance(found, Found)
    said = plans.write(
        problem, found.best.candidate, found.best.prediction, job=JobRef(name="mine", uid="u"), revision=2,
        reason=PlanReasonModel(code=PlanReason.PROFILED),
    )  # fmt: skip
    assert said is not None
    plan_rules.check(said, spec)
    return found.best.candidate, said, plans.read(problem, said, spec)


# --- cycles -----------------------------------------------------------------------------------------------------------
NAMES = ("env", "policy", "agent", "judge", "train")
ROUNDS = [
    role("env", (1, 2.0, 32)),
    role("policy", (1, 4.0, 32)),
    role("agent", (1, 1.0, 24)),
    role("judge", (1, 3.0, 24)),
    role("train", (8, 40.0, 1)),
]
WAYS = [
    channel("starts", "", "env", 8),
    channel("episodes", "env", "agent", 8),
    channel("graded", "agent", "train", 8),
    *asked("actions", "env", "policy", 32),
    *asked("opinions", "agent", "judge", 24),
]


def test_a_flow_of_two_cycles_is_planned_with_the_stages_of_each():
    spec = job(*NAMES)
    problem = fitted(spec, profile(ROUNDS, WAYS))
    assert [(c.front, c.back, c.round_trips) for c in problem.cycles] == [("env", "policy", 4), ("agent", "judge", 3)]
    assert all(c.is_single for c in problem.cycles)
    assert problem.cycles[1].hop_ms.value == HOP_MS, "a ticket's way is not the agent's alone: assumed"
    assert (problem.first, problem.terminal) == (("env",), ("train",))
    chosen, said, again = written(spec, problem)
    assert [c.roles for c in said.cycles] == [["env", "policy"], ["agent", "judge"]]
    assert [c.stages for c in said.cycles] == [chosen.choices["env"].stages, chosen.choices["agent"].stages]
    assert {n: c.stages for n, c in again.choices.items()} == {n: c.stages for n, c in chosen.choices.items()}


def test_a_fed_asker_whose_spans_are_of_several_units_is_still_asked_unit_by_unit():
    several = [role("agent", (4, 4.0, 6)) if r["name"] == "agent" else r for r in ROUNDS]
    (_, agents) = fitted(job(*NAMES), profile(several, WAYS)).cycles
    assert (agents.is_single, agents.round_trips) == (True, 3)


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (asked("doubts", "judge", "policy", 8), "role 'policy' asks or answers in cycles actions, doubts: one"),
        ([channel("logs", "judge", "train", 8)], "'agent' and 'judge' ask and answer in a cycle and both feed others"),
    ],
)
def test_cycles_that_are_not_planned_are_named(ways, said):
    found = fit(job(*NAMES), [profile(ROUNDS, [*WAYS, *ways])], plan=None)
    assert isinstance(found, Unfit)
    assert said in str(found)
