"""Flows of one's own in the planner: several cycles, units that are split and put together, work that goes by tokens.
From a driver's report to a plan that the runtime takes."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlinf_api import plan_rules
from rlinf_api.job import Range, RLJobSpec
from rlinf_api.plan import JobRef, PlanReason, PlanReasonModel
from rlinf_api.profile import Profile
from rlinf_scheduler.planner import spec as plans
from rlinf_scheduler.planner import words
from rlinf_scheduler.planner.candidate import Candidate, Choice, PlannedTurn, Region
from rlinf_scheduler.planner.problem import Cost, InLanes, InRounds, Option, Provenance, RoleCosts
from rlinf_scheduler.planner.search import Found, plan
from rlinf_scheduler.planner.simulate import simulate
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


def end(channel, side, units):
    return {"channel": channel, "side": side, "units": units, "waitSeconds": number(0.0)}


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


def test_a_fed_asker_whose_answerer_feeds_the_next_role_ends_no_step():
    ways = [channel("graded", "judge", "train", 8) if c["name"] == "graded" else c for c in WAYS]
    problem = fitted(job(*NAMES), profile(ROUNDS, ways))
    assert problem.terminal == ("train",)
    assert [problem.asker_feeds(cycle) for cycle in problem.cycles] == [True, False]
    written(job(*NAMES), problem)


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


# --- units that are split and put together ----------------------------------------------------------------------------
def chain(*, prompts=4, samples=32, groups=4):
    return [
        channel("prompts", "", "rollout", prompts),
        channel("samples", "rollout", "reward", samples),
        channel("graded", "reward", "train", groups),
    ]


def test_prompts_samples_and_groups_are_units_of_their_own():
    """Four prompts of 80 ms, eight samples of each, of which a group is made again. The trainer says samples."""
    roles = [role("rollout", (1, 80.0, 4)), role("reward", (1, 2.0, 32)), role("train", (8, 40.0, 4))]
    spec = job("rollout", "reward", "train", slots=4)
    problem = fitted(spec, profile(roles, chain()))
    assert problem.units == {"rollout": 4, "reward": 32, "train": 4}
    assert [r.options[0].per_item_ms.value for r in problem.roles] == pytest.approx([80.0, 2.0, 40.0])
    chosen, said, again = written(spec, problem)
    assert {n: c.micro_batch for n, c in again.choices.items()} == {n: c.micro_batch for n, c in chosen.choices.items()}
    rooms = {c.name: c.capacity.units for c in said.channels if c.capacity}
    assert rooms == {"prompts": 16, "samples": 128, "graded": 16}, "four steps of what each of them carries"
    assert simulate(problem, again).period_ms == pytest.approx(1e3 * said.predicted.period_seconds)


def test_an_engines_units_are_the_samples_that_it_makes_of_a_prompt():
    """32 of 20 ms in 160 ms: four at once. A lane is held by a sample, and not by its prompt."""
    engine = role("rollout", (1, 20.0, 32))
    engine["seconds"]["compute"] = number(0.160)
    roles = [engine, role("reward", (1, 2.0, 32)), role("train", (4, 40.0, 1))]
    problem = fitted(job("rollout", "reward", "train"), profile(roles, chain()))
    assert problem.units == {"rollout": 32, "reward": 32, "train": 4}
    assert problem.role("rollout").options[0].per_item_ms.value == pytest.approx(20 / 4)
    assert problem.role("rollout").bundle == 8


def test_what_a_role_costs_is_made_of_its_spec_and_of_what_was_measured():
    """An engine of which no memory is known, a plain role that was measured, and one that declares its memory."""
    spec = job("rollout", "reward", "train")
    spec.roles[1] = spec.roles[1].model_copy(update={"slots_per_worker": 2, "workers": Range(min=2, max=6)})
    declares = {"memory": {"resident": 100, "peak": 600, "offloaded": 20}}
    spec.roles[2] = spec.roles[2].model_copy(update={"kind": "rule", "config": declares, "workers": 3})
    engine = role("rollout", (1, 20.0, 32))
    engine["seconds"]["compute"] = number(0.160)
    moves = [{"what": what, "seconds": number(s)} for what, s in (("load", 0.5), ("offload", 0.25))]
    seen = {"resident": 64 << 20, "peak": 128 << 20, "offloaded": 8 << 20}
    reward = role("reward", (1, 2.0, 32)) | {"moves": moves, "memory": seen}
    train = role("train", (4, 40.0, 1)) | {"memory": {"resident": 200 << 20, "peak": 500 << 20}}

    def option(ms, peak):
        return (Option(per_item_ms=Cost(ms, by=Provenance.MEASURED), peak_mib=peak),)

    nothing, measured = Cost(0.0, by=Provenance.ASSUMED), Provenance.MEASURED
    by_bytes = Cost(1e3 * (200 - 20) / 8192, by=Provenance.ASSUMED)
    known: dict[str, Any] = {"per_batch_ms": nothing, "sizes": (1.0,), "scaling": 0.0}
    assert fitted(spec, profile([engine, reward, train], chain())).roles == (
        RoleCosts(
            name="rollout", service=InLanes(lanes=4), options=option(5.0, 2048.0), items=32, load_ms=nothing,
            offload_ms=nothing, offloaded_mib=1.0, most=8, tickets="prompts", bundle=8, **known,
        ),
        RoleCosts(
            name="reward", options=option(2.0, 128.0), items=32, load_ms=Cost(500.0, by=measured),
            offload_ms=Cost(250.0, by=measured), resident_mib=64.0, offloaded_mib=8.0, slots_per_worker=2, fewest=2,
            most=6, **known,
        ),
        RoleCosts(
            name="train", service=InRounds(sync_ms=nothing), options=option(10.0, 600.0), items=4,
            load_ms=by_bytes, offload_ms=by_bytes, resident_mib=200.0, offloaded_mib=20.0,
            may_stay=True, fewest=3, most=3, **known,
        ),
    )  # fmt: skip


def test_samples_of_a_prompt_stay_with_the_engine_that_has_it():
    """Three prompts of four samples, 20 ms each, on two engines of two lanes: one has two prompts, so eight samples two
    by two. One by one each would have six."""
    engine = role("rollout", (1, 20.0, 12))
    engine["seconds"]["compute"] = number(0.120)
    roles = [engine, role("reward", (1, 0.0, 12)), role("train", (3, 0.0, 1))]
    problem = fitted(job("rollout", "reward", "train"), profile(roles, chain(prompts=3, samples=12, groups=3)))
    assert (problem.role("rollout").service, problem.role("rollout").bundle) == (InLanes(lanes=2), 4)
    problem = replace(problem, hand_over_ms=Cost(0.0))
    one_by_one = replace(problem, roles=tuple(replace(r, bundle=1) for r in problem.roles))
    planned = Candidate(
        regions=tuple(
            Region((n,), (PlannedTurn(r.name, (n,)),)) for r, n in zip(problem.roles, (2, 1, 1), strict=True)
        ),
        choices={r.name: Choice(depth=12) for r in problem.roles},
    )
    assert simulate(problem, planned).period_ms == pytest.approx(80)
    assert simulate(one_by_one, planned).period_ms == pytest.approx(60)


@pytest.mark.parametrize(("said", "times"), [(32, 1), (24, 1), (64, 2), (8, 0.25)])
def test_a_role_that_goes_over_its_units_twice_takes_twice_as_long_for_each(said, times):
    """Spans of one unit of its own, 3 ms each; the channel carries 32. A few that are lost change nothing."""
    roles = [role("rollout", (1, 80.0, 4)), role("reward", (1, 3.0, said)), role("train", (4, 40.0, 1))]
    problem = fitted(job("rollout", "reward", "train"), profile(roles, chain()))
    assert problem.units["reward"] == 32
    assert problem.role("reward").options[0].per_item_ms.value == pytest.approx(3 * times)


def test_who_has_worked_ahead_has_the_units_of_a_step_all_the_same():
    """At the end of a job with staleness rewards are given for half of a step's samples in the time of one."""
    rollout = role("rollout", (1, 80.0, 2)) | {"ends": [end("prompts", "consumer", 2), end("samples", "producer", 16)]}
    reward = role("reward", (1, 3.0, 16)) | {"ends": [end("samples", "consumer", 16)]}
    roles = [rollout, reward, role("train", (4, 40.0, 1))]
    problem = fitted(job("rollout", "reward", "train"), profile(roles, chain()))
    assert problem.units == {"rollout": 4, "reward": 32, "train": 4}
    assert [problem.role(n).options[0].per_item_ms.value for n in ("rollout", "reward")] == pytest.approx([80, 3])


def test_how_much_units_differ_is_known_of_all_reports_and_their_drift_is_no_part_of_it():
    """Of 40 and then of 80 ms, each with a deviation of half; then a report in which the role had nothing to do."""

    def report(ms, count):
        spans = role("reward", (1, ms, count))
        for batch in spans["batches"]:
            batch["seconds"]["spread"] = 5e-4 * ms
        idle = {**spans, "batches": []} if not count else spans
        return profile([role("rollout", (1, 80.0, 4)), idle, role("train", (4, 40.0, 1))], chain())

    spec = job("rollout", "reward", "train")
    for reports in ([report(40.0, 32)], [report(40.0, 32), report(80.0, 32)], [report(40.0, 32), report(0.0, 0)]):
        found = fit(spec, reports, plan=None)
        assert isinstance(found, Fit)
        sizes = [s for step in found.problem.role("reward").all_sizes for s in step]
        assert np.std(sizes) == pytest.approx(0.5, abs=0.06), len(reports)


def test_a_round_costs_what_the_rank_takes_that_waits_least():
    """Two ranks wait 30 ms a step in the mean, and one of them 4 in two rounds: those of two ranks are half of all."""
    gang = role("train", (2, 20.0, 4), workers=2)
    gang["seconds"]["comm"] = number(0.030, 2 * STEPS)
    gang["moves"] = [{"what": "exchange", "seconds": number(0.004)}]
    roles = [role("rollout", (1, 80.0, 4)), role("reward", (1, 2.0, 32)), gang]
    service = fitted(job("rollout", "reward", "train"), profile(roles, chain())).role("train").service
    assert isinstance(service, InRounds)
    assert service.sync_ms.value == pytest.approx(4.0)
    assert service.sync_ms.by is Provenance.MEASURED


# --- tokens -----------------------------------------------------------------------------------------------------------
def by_tokens(units, tokens, deviation, *, alone_ms, each_ms, noise_ms=0.0):
    """Spans on 32 units a step whose time goes by their tokens, as a worker sums them up."""
    squared = tokens**2 + deviation**2
    ms, spread = alone_ms + each_ms * tokens, math.hypot(each_ms * deviation, noise_ms)
    more = {
        "tokens": tokens, "tokensSquared": squared, "tokenSeconds": 1e-3 * (alone_ms * tokens + each_ms * squared),
        "seconds": {"value": 1e-3 * ms, "spread": 1e-3 * spread, "count": 32 // units * STEPS},
    }  # fmt: skip
    return units, ms, 32 // units, more


def trained(*spans):
    roles = [role("rollout", (1, 80.0, 32)), role("reward", (1, 2.0, 32)), role("train", *spans)]
    return profile(roles, chain(prompts=32, groups=32))


def test_what_a_batch_and_a_token_cost_is_seen_with_batches_of_one_size():
    """8 units of 512 tokens, which differ by 362 each: 10 ms a batch, 10 us a token."""
    spec = job("rollout", "reward", "train")
    report = trained(by_tokens(8, 4096, 1024, alone_ms=10, each_ms=0.01, noise_ms=2))
    found = fit(spec, [report], plan=None)
    assert isinstance(found, Fit)
    train = found.problem.role("train")
    assert train.per_batch_ms.value == pytest.approx(10)
    assert [train.options[0].per_item_ms.value, train.tokens] == pytest.approx([5.12, 512])
    assert "graded" not in found.one_size, "no smaller batches are tried to learn it"
    sizes = [s for step in train.all_sizes for s in step]
    assert max(sizes) > 2.5
    assert sum(sizes) / len(sizes) == pytest.approx(1)
    shorter = trained(by_tokens(8, 2048, 512, alone_ms=10, each_ms=0.01, noise_ms=2))
    later = fit(spec, [report, shorter], plan=None)
    assert isinstance(later, Fit)
    assert later.problem.role("train").options[0].per_item_ms.value == pytest.approx(2.56, rel=1e-3)


def test_a_long_unit_is_long_for_all_roles_that_work_by_tokens():
    """Lanes are held for all of a unit's time, of which half is by tokens: it varies half as much."""
    engine = role("rollout", by_tokens(1, 512, 512, alone_ms=10.24, each_ms=0.02))
    engine["seconds"]["compute"] = number(32e-3 * 20.48 / 4)
    train = role("train", by_tokens(1, 512, 512, alone_ms=0, each_ms=0.01))
    roles = [engine, role("reward", (1, 2.0, 32)), train]
    problem = fitted(job("rollout", "reward", "train"), profile(roles, chain(prompts=32, groups=32)))
    made, learnt = problem.role("rollout"), problem.role("train")
    assert made.options[0].per_item_ms.value == pytest.approx(20.48 / 4)
    for of_made, of_learnt in zip(made.all_sizes, learnt.all_sizes, strict=True):
        order = sorted(range(32), key=of_made.__getitem__)
        assert [of_learnt[i] for i in order] == sorted(of_learnt)
    assert max(max(s) for s in made.all_sizes) < max(max(s) for s in learnt.all_sizes)


@pytest.mark.parametrize(
    "span",
    [
        by_tokens(8, 4096, 0, alone_ms=10, each_ms=0.01),
        by_tokens(8, 4096, 1024, alone_ms=50, each_ms=0.0, noise_ms=5),
        by_tokens(8, 4096, 1024, alone_ms=50, each_ms=0.001, noise_ms=5),
    ],
    ids=["all alike", "time goes by something else", "jitter goes by them a little"],
)
def test_tokens_that_say_nothing_leave_time_to_units(span):
    train = fitted(job("rollout", "reward", "train"), trained(span)).role("train")
    assert (train.tokens, train.per_batch_ms.value) == (0.0, 0.0)
    assert train.options[0].per_item_ms.value == pytest.approx(span[1] / 8)


# --- what is said -----------------------------------------------------------------------------------------------------
def told(problem, **stages):
    """Of a worker for each role, on a slot of its own."""
    regions = tuple(Region((1,), (PlannedTurn(r.name, (1,)),)) for r in problem.roles)
    planned = Candidate(regions=regions, choices={r.name: Choice(stages=stages.get(r.name, 1)) for r in problem.roles})
    return words.explain(problem, planned, simulate(problem, planned))


def test_an_explanation_names_the_cycle_that_binds_with_its_trips_and_what_is_under_way():
    problem = fitted(job(*NAMES), profile(ROUNDS, WAYS))
    slow = [replace(r, options=(Option(per_item_ms=Cost(30.0)),)) if r.name == "judge" else r for r in problem.roles]
    said = told(replace(problem, roles=tuple(slow)), agent=2, env=4)
    assert "compute of judge" in said
    assert (
        "critical path, in the cycle of agent and judge: 3 trips a unit, 2 units of each agent at once; slots" in said
    )
    assert "the cycle of env and policy: 4 trips a unit, 4 units of each env at once" in told(problem, env=4)


def test_an_explanation_names_the_edge_on_which_units_become_others_and_the_tokens_of_one():
    span = by_tokens(4, 2048, 1024, alone_ms=10, each_ms=0.5)
    roles = [role("rollout", (1, 8.0, 4)), role("reward", (1, 2.0, 32)), role("train", span)]
    problem = fitted(job("rollout", "reward", "train"), profile(roles, chain(groups=8)))
    said = told(problem)
    assert ", where 32 of reward become 8 of train (graded), by 2048 tokens a unit; slots idle" in said
    slow = [role("rollout", (1, 800.0, 4)), *roles[1:2], role("train", (4, 40.0, 8))]
    said = told(fitted(job("rollout", "reward", "train"), profile(slow, chain(groups=32))))
    assert "compute of rollout" in said
    assert "critical path, where 4 of rollout become 32 of reward (samples); slots idle" in said
    plain = told(fitted(job("rollout", "reward", "train"), profile(slow, chain(prompts=32, groups=32))))
    assert "become" not in plain
    assert "tokens" not in plain
