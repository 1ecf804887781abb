"""The scenarios, each with the one sequence that every back end must give. The vocabulary is that of parts.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tests.conformance.parts import (
    BEGUN,
    COMPLETE,
    FOUR_SLOTS,
    GO,
    HOLD,
    JOINED,
    LEARNS,
    RELEASE,
    STARTED,
    STARTING,
    STEPPING,
    STOPPED,
    TWO_SLOTS,
    WAITING_FOR_PLAN,
    apply,
    at_step,
    away,
    back,
    delete,
    delete_pod,
    edit,
    edit_pool,
    ended_by,
    failed,
    finished,
    gone,
    interruption,
    is_,
    job,
    joined,
    kept,
    kill,
    nothing,
    once,
    recovered,
    refused,
    remade,
    spoil_checkpoint,
    touch,
)
from tests.conformance.recorder import Transition
from tests.conformance.scenario import Do, End, Expected, Scenario, beside_a_sidecar
from tests.conformance.world import LIVES, MOUNT, Manifest, World

HELD: Final = (
    "{} cannot change while the job is at work, as its pods are made from it; set spec.suspend to true, change it, and "
    "set spec.suspend to false again"
)
OF_A: Final = {"uri": f"{MOUNT}/a", "everySteps": 2}
SECOND: Final = {"uri": f"{MOUNT}/second", "everySteps": 2}
WITHOUT_PODS: Final = ("ConfigMap 1", "NetworkPolicy 1", "RLPlan 1", "Secret 2", "Service 1")
KEPT: Final = ("ConfigMap 1", "NetworkPolicy 1", "Pod 1", "RLPlan 1", "Secret 2", "Service 1")
SUSPENDED: Final = ("Suspended=Unknown/Draining", *STOPPED, "Suspended=True/SuspendedByUser")
SUSPENDED_AT_ONCE: Final = (  # its plan waits for a driver, and for none from then on
    *SUSPENDED[:2], "PlanApplied=False/Stopped", *SUSPENDED[2:],
)  # fmt: skip
RESUMED: Final = ("Suspended=False/NotSuspended", *STARTING, "Degraded=False/Healthy", *JOINED, *STEPPING)
RESTARTED: Final = (
    "Running=False/Recovering", "Degraded=True/WorkerRestarting", *STEPPING, "Degraded=False/Healthy",
)  # fmt: skip
WORKERS_REPLACED: Final = (
    "PodsReady=False/PodsStarting", "Degraded=True/PodReplaced", "PodsReady=True/PodsReady", *RESTARTED,
)  # fmt: skip
DRIVER_REPLACED: Final = (*STARTING, "Degraded=True/PodReplaced", *JOINED, "Degraded=False/Healthy", *STEPPING)


def completes(
    *transitions: Transition,
    step: int | None = 40,
    attempt: int = 1,
    life: int = 1,
    restarts: tuple[str, ...] = (),
    failure: str = "",
    name: str = "a",
    driver: int = 1,
) -> Expected:
    end = End(
        children=KEPT, step=step, attempt=attempt, life=life, restarts=restarts, failure=failure,
        pods=(f"{name}-driver-a{driver} Succeeded 0",),
    )  # fmt: skip
    return Expected(transitions=(*transitions, *COMPLETE), end=end)


def fails(*transitions: Transition, reason: str, failure: str, code: int, step: int | None = 0) -> Expected:
    """By its driver's word: its pod stays and can be read."""
    end = End(children=KEPT, step=step, failure=failure, pods=(f"a-driver-a1 Failed {code}",))
    return Expected(transitions=(*transitions, *failed(reason)), end=end)


def rests(*transitions: Transition, children: tuple[str, ...] = (), attempt: int = 0) -> Expected:
    return Expected(transitions=transitions, end=End(children=children, step=0, attempt=attempt))


PLAIN: Final = completes(*STARTED)
ENDS: Final = at_step(1, GO)
"""Its first step was seen; the others need not take long."""

BEGINNINGS: Final = (
    Scenario(name="a-job-completes", jobs=(job(actor=LEARNS),), acts=(ENDS,), until=finished, expected={"a": PLAIN}),
    Scenario(
        name="a-job-that-writes-no-roles-completes",
        jobs=(job(roles=[], pool={"roles": []}),),
        acts=(ENDS,),
        until=finished,
        expected={"a": PLAIN},
    ),
    Scenario(
        name="a-wrong-value-is-named-and-can-be-repaired",
        jobs=(job(checkpoint={"uri": "relative"}),),
        acts=(once("Valid=False", edit(checkpoint=OF_A)), ENDS),
        until=finished,
        expected={"a": completes("Valid=False/InvalidSpec", "Running=False/InvalidSpec", *STARTED)},
    ),
    Scenario(
        name="what-is-not-supported-yet-is-refused",
        jobs=(job(checkpoint={"uri": "az://b/p"}),),
        until=is_("Valid=False"),
        expected={"a": rests("Valid=False/NotSupportedYet", "Running=False/NotSupportedYet")},
    ),
    Scenario(
        name="a-job-that-does-not-fit-starts-when-its-pool-grows",
        # Where all pods find a node, as on one machine, allOrNothing changes nothing.
        jobs=(job(pool={"slots": TWO_SLOTS}, allOrNothing={"timeoutSeconds": 30}),),
        acts=(once("Valid=False", edit_pool(pods=2)), ENDS),
        until=finished,
        expected={
            "a": completes(
                "Valid=False/Infeasible", *WAITING_FOR_PLAN[1:], "Valid=True/Accepted", *STARTING, *JOINED, *STEPPING
            )
        },
    ),
    Scenario(
        name="the-scheduler-is-away-at-first",
        jobs=(job(),),
        before=away,
        acts=(once("Running=Unknown/SchedulerUnavailable", back), ENDS),
        until=finished,
        expected={
            "a": completes(
                *WAITING_FOR_PLAN[:4], "PlanApplied=Unknown/SchedulerUnavailable",
                "Running=Unknown/SchedulerUnavailable", *WAITING_FOR_PLAN[6:], *STARTING, *JOINED, *STEPPING,
            )
        },
        alone=True,
    ),
    Scenario(
        name="two-jobs-at-once",
        jobs=(job(), job("b", steps=48)),
        acts=(at_step(1, nothing), at_step(1, GO, job="b")),
        until=finished,
        expected={"a": PLAIN, "b": completes(*STARTED, step=48, name="b")},
    ),
    Scenario(
        name="a-range-of-workers",
        jobs=(job(config={"slices": 2}, pool={"slots": FOUR_SLOTS}, workers={"env": {"min": 1, "max": 2}}),),
        acts=(ENDS,),
        until=finished,
        expected={"a": PLAIN},
    ),
    Scenario(
        name="a-gang-over-two-pods",
        jobs=(job(actor=LEARNS, pool={"slots": TWO_SLOTS, "pods": 2}, workers={"actor": 2}),),
        acts=(ENDS,),
        until=finished,
        expected={"a": PLAIN},
    ),
)  # fmt: skip

PAUSES_AND_ENDS: Final = (
    Scenario(
        name="suspended-from-the-start-then-resumed",
        jobs=(job(suspend=True),),
        acts=(once("Suspended=True", edit(suspend=False)), ENDS),
        until=finished,
        expected={
            "a": completes(
                "Valid=True/Accepted", "Suspended=True/SuspendedByUser", *STOPPED, *BEGUN[1:], *JOINED,
                *STEPPING,
            )
        },
    ),
    Scenario(
        name="suspended-before-a-pod-ran",
        jobs=(job(),),
        acts=(once("PodsReady=False/PodsStarting", edit(suspend=True)),),
        until=is_("Suspended=True"),
        expected={"a": rests(*BEGUN, *SUSPENDED_AT_ONCE, children=WITHOUT_PODS, attempt=1)},
    ),
    Scenario(
        name="suspended-and-resumed-twice-with-warm-spares",  # at first they wait, then they are still starting
        jobs=(job(spares={"env": 1, "rollout": 1}),),
        acts=(
            at_step(12, edit(suspend=True)), once("Suspended=True", edit(suspend=False)),
            at_step(18, edit(suspend=True)), once("Suspended=True", edit(suspend=False)), at_step(21, GO),
        ),
        until=finished,
        expected={
            "a": completes(
                *STARTED, *SUSPENDED, *RESUMED, *SUSPENDED, *RESUMED, attempt=3, life=3, driver=3
            )
        },
    ),
    Scenario(
        name="the-deadline-passes",
        jobs=(job(steps=400),),
        acts=(at_step(3, edit(activeDeadlineSeconds=1)),),
        until=finished,
        expected={
            "a": Expected(
                transitions=(*STARTED, *failed("DeadlineExceeded")), end=End(children=WITHOUT_PODS, step=None)
            )
        },
    ),
    Scenario(
        name="a-finished-job-goes-after-its-ttl",
        jobs=(job(ttlSecondsAfterFinished=1),),
        acts=(ENDS,),
        until=gone,
        expected={"a": Expected(transitions=(*STARTED, *COMPLETE), end=None)},
    ),
    Scenario(
        name="deleted-while-it-runs",
        jobs=(job(steps=400),),
        acts=(at_step(3, delete),),
        until=gone,
        expected={"a": Expected(transitions=STARTED, end=None)},
    ),
    Scenario(
        name="made-again-under-the-same-name",
        jobs=(job(),),
        acts=(ENDS, once("Complete=True", remade(job(checkpoint=SECOND))), at_step(1, GO, job="a#2")),
        until=finished,
        expected={"a#2": PLAIN},
    ),
    Scenario(
        name="a-job-goes-on-from-anothers-checkpoint-until-its-steps-are-reached",
        jobs=(job(),),
        acts=(
            ENDS,
            once("Complete=True", apply(job("b", steps=80, checkpoint=OF_A))),
            at_step(40, GO, job="b"),
            once("Complete=True", apply(job("c", steps=80, checkpoint=OF_A), held=True), job="b"),
            joined(RELEASE, job="c"),
        ),
        until=finished,
        expected={
            "a": PLAIN,
            "b": completes(*STARTED, step=80, name="b"),
            "c": completes(*BEGUN, *JOINED, step=80, name="c"),
        },
    ),
)  # fmt: skip

EDITS: Final = (
    Scenario(
        name="more-steps-and-another-cadence-without-a-restart",
        jobs=(job(steps=30),),
        acts=(
            at_step(3, edit(flow={"steps": 40}, checkpoint={"everySteps": 3, "keep": 1})),
            at_step(15, kept("b0-15", "b0-21", "b0-27", "b0-33")),  # of the first cadence none of them would be
            at_step(15, GO),
        ),
        until=finished,
        expected={"a": PLAIN},
    ),
    Scenario(
        name="fewer-steps-than-are-done-end-it-behind-the-open-one",
        jobs=(job(),),
        acts=(at_step(5, edit(flow={"steps": 3})), once("Complete=True", ended_by(39))),
        until=finished,
        expected={"a": completes(*STARTED, step=None)},
    ),
    Scenario(
        name="what-pods-are-made-from-is-edited-while-suspended",
        jobs=(job(),),
        acts=(
            at_step(3, refused("flow", {"config": {"horizon": 8}}, sentence=HELD.format("spec.flow.config"))),
            at_step(3, edit(suspend=True, flow={"config": {"horizon": 8}})),
            once("Suspended=True", edit(suspend=False)),
            at_step(4, GO),
        ),
        until=finished,
        expected={"a": completes(*STARTED, *SUSPENDED, *RESUMED, attempt=2, life=2, driver=2)},
    ),
    Scenario(
        name="an-edit-of-a-policy-replaces-nothing-and-one-of-the-seed-is-refused",
        jobs=(job(),),
        acts=(
            at_step(3, edit(failurePolicy={"maxRestarts": 5})),
            at_step(4, refused("seed", 2, sentence="spec.seed cannot change once the job exists; make a new RLJob")),
            at_step(6, GO),
        ),
        until=finished,
        expected={"a": PLAIN},
    ),
)  # fmt: skip


def interrupted(name: str, do: Do, expected: Expected, *, at: int = 3, **fields: Any) -> Scenario:
    """At a step `do`; the job must degrade, be well again, and complete."""
    acts = (at_step(at, do), *interruption(RELEASE), recovered(GO))
    return Scenario(name=name, jobs=(job(**fields),), acts=acts, until=finished, expected={"a": expected})


FAILURES: Final = (
    interrupted(
        "an-env-process-is-killed",
        kill("env/0", held=True),
        completes(*STARTED, *RESTARTED, failure="env 137 Killed"),
        at=14,  # its warm spare is there by then
        spares={"env": 1},
    ),
    interrupted(
        "the-actor-process-is-killed",
        kill("actor/0", held=True),
        completes(*STARTED, *RESTARTED, failure="actor 137 Killed"),
        actor=LEARNS,
    ),
    interrupted(
        "an-environment-that-crashes-once",
        touch("hold", "crash-once"),
        completes(*STARTED, *RESTARTED, failure="env 75 EnvironmentFailed"),
    ),
    interrupted(
        "an-agent-is-killed",
        kill("agent", held=True),
        completes(
            *STARTED, *WORKERS_REPLACED, attempt=2, restarts=("a-cpu-0-a1 Program",), failure=" 137 Killed"
        ),
    ),
    interrupted(
        "a-worker-pod-is-deleted",
        delete_pod("worker", pool="cpu", held=True),
        completes(
            *STARTED, *WORKERS_REPLACED, attempt=2, restarts=("a-cpu-0-a1 Infrastructure",),
            failure=" -1 Deleted",
        ),
    ),
    interrupted(
        "the-driver-pod-is-deleted",
        delete_pod("driver"),
        completes(
            *STARTED, *DRIVER_REPLACED, attempt=2, restarts=("a-driver-a1 Infrastructure",),
            failure=" -1 Deleted", driver=2,
        ),
    ),
    interrupted(
        "the-driver-process-is-killed",
        kill("driver"),
        completes(
            *STARTED, *DRIVER_REPLACED, attempt=2, restarts=("a-driver-a1 Program",), failure=" 137 Killed",
            driver=2,
        ),
    ),
    Scenario(
        name="an-environment-that-cannot-be-made",
        jobs=(job(env="conformance_envs:Broken-v0"),),
        before=HOLD,
        acts=(joined(RELEASE),),
        until=finished,
        expected={
            "a": fails(*BEGUN, *JOINED, reason="UserError", failure="env 64 LoadFailed", code=64)
        },
    ),
    Scenario(
        name="an-environment-that-always-crashes",
        jobs=(job(steps=400, failurePolicy={"maxRestarts": 1}),),
        acts=(
            at_step(3, touch("hold", "crash-once")), *interruption(RELEASE), recovered(touch("crash-once")),
        ),
        until=finished,
        expected={
            "a": fails(
                *STARTED, *RESTARTED, reason="TooManyRestarts", failure="env 75 EnvironmentFailed", code=1, step=None
            )
        },
    ),
    Scenario(
        name="a-checkpoint-that-cannot-be-read",
        jobs=(job(),),
        before=spoil_checkpoint,
        acts=(joined(RELEASE),),
        until=finished,
        expected={
            "a": fails(
                *BEGUN, *JOINED, reason="CheckpointUnreadable", failure="actor 64 CheckpointUnreadable",
                code=64,
            )
        },
    ),
)  # fmt: skip


def ruled(action: str, **more: Any) -> Manifest:
    """failurePolicy with a rule of an environment that raises, which ends its worker with 75, and its pod not."""
    return {"maxRestarts": 0, "rules": [{"name": "broke", "role": "env", "exitCodes": [75], "action": action, **more}]}


BROKE: Final = "env 75 EnvironmentFailed"
JOB_RESTARTED: Final = (*STARTING, "Degraded=True/JobRestarted", *JOINED, *STEPPING, "Degraded=False/Healthy")
RULES: Final = (
    interrupted(
        "a-rule-ignores-a-worker-that-ended",  # maxRestarts is 0
        touch("hold", "crash-once"),
        completes(*STARTED, *RESTARTED, failure=BROKE),
        failurePolicy=ruled("Ignore"),
    ),
    interrupted(
        "a-rule-replaces-the-pod-of-a-worker-that-ended",
        touch("hold", "crash-once"),
        completes(
            *STARTED, *WORKERS_REPLACED, attempt=2, restarts=("a-cpu-0-a1 Program:broke",), failure=BROKE
        ),
        failurePolicy=ruled("RestartPod", maxRestarts=1),
    ),
    Scenario(
        name="a-rule-restarts-the-job-for-a-worker-that-ended",
        jobs=(job(failurePolicy=ruled("RestartJob", maxRestarts=1)),),
        acts=(at_step(3, touch("crash-once")), once("Degraded=True/JobRestarted", nothing), recovered(GO)),
        until=finished,
        expected={
            "a": completes(
                *STARTED, *JOB_RESTARTED, attempt=2, life=2, restarts=("life/2 Program:broke",), failure=BROKE, driver=2
            )
        },
    ),
    Scenario(
        name="a-rule-restarts-the-job-for-a-pod-that-ended",
        jobs=(job(failurePolicy={"rules": [{"pool": "cpu", "exitCodes": [137], "action": "RestartJob"}]}),),
        acts=(at_step(3, kill("agent")), once("Degraded=True/JobRestarted", nothing), recovered(GO)),
        until=finished,
        expected={
            "a": completes(
                *STARTED, *JOB_RESTARTED, attempt=2, life=2, failure=" 137 Killed", driver=2,
                restarts=("a-cpu-0-a1 Ruled:#f9c9dc5b", "life/2 Program:#f9c9dc5b"),
            )
        },
    ),
    Scenario(
        name="a-rule-suspends-the-job-until-an-edit",
        jobs=(job(failurePolicy=ruled("Suspend")),),
        acts=(
            at_step(3, touch("crash-once")),
            once("Suspended=True/SuspendedByRule", edit(flow={"config": {"horizon": 8}})),
            at_step(4, GO),
        ),
        until=finished,
        expected={
            "a": completes(
                *STARTED, *SUSPENDED[:-1], "Suspended=True/SuspendedByRule", *RESUMED, attempt=2, life=2,
                failure=BROKE, driver=2,
            )
        },
    ),
    Scenario(
        name="a-rule-fails-the-job-for-a-worker-that-ended",
        jobs=(job(failurePolicy=ruled("FailJob")),),
        acts=(at_step(3, touch("crash-once")),),
        until=finished,
        expected={"a": fails(*STARTED, reason="FailureRule", failure=BROKE, code=1, step=None)},
    ),
)  # fmt: skip

IN_PLAIN_PODS: Final = frozenset(
    {
        "a-job-completes",
        "an-agent-is-killed",
        "the-driver-process-is-killed",
        "an-environment-that-cannot-be-made",
    }
)
"""On the cluster in pods as they are, too: what of them ends by itself, well, failed or killed, leaves a pod that can
be read, and beside a sidecar none. The rest of a story is the same there, and tests/cluster has plain pods alone."""
SHIPPER: Final = {"name": "log-shipper", "command": LIVES}
_BESIDE: Final = {
    "an-agent-is-killed-beside-a-sidecar": "an-agent-is-killed",
    "the-driver-process-is-killed-beside-a-sidecar": "the-driver-process-is-killed",
    "an-environment-that-cannot-be-made-beside-a-sidecar": "an-environment-that-cannot-be-made",
}


def _beside(name: str, of: Scenario) -> Scenario:
    """The same beside a container that a mesh's webhook has put into each pod."""

    async def before(world: World) -> None:
        await world.inject()
        if of.before is not None:
            await of.before(world)

    expected = {label: beside_a_sidecar(alone) for label, alone in of.expected.items()}
    return replace(of, name=name, before=before, expected=expected)


SIDECARS: Final = (
    *(_beside(name, next(s for s in FAILURES if s.name == of)) for name, of in _BESIDE.items()),
    Scenario(
        name="a-job-completes-beside-a-sidecar-of-its-template",
        jobs=(job(pool={"template": {"spec": {"containers": [SHIPPER]}}}),),
        acts=(ENDS,),
        until=finished,
        expected={"a": PLAIN},
    ),
    Scenario(
        name="a-job-completes-beside-a-sidecar-of-all-its-pods",
        jobs=(job(template={"spec": {"containers": [SHIPPER]}}),),
        acts=(ENDS,),
        until=finished,
        expected={"a": beside_a_sidecar(PLAIN)},
    ),
)  # fmt: skip

SCENARIOS: Final = (*BEGINNINGS, *PAUSES_AND_ENDS, *EDITS, *FAILURES, *RULES, *SIDECARS)
ON_BACKEND: Final = {
    "local": SCENARIOS,
    "cluster": tuple(scenario for scenario in SCENARIOS if scenario.name in IN_PLAIN_PODS),
    "injected": tuple(scenario for scenario in SCENARIOS if scenario.name not in _BESIDE),
}
"""Each once on this machine, and on the cluster once with a sidecar in each pod: there those of _BESIDE would be what
they are made of."""
IN_MAKE_TEST: Final = frozenset(
    {
        "a-job-completes",
        "suspended-from-the-start-then-resumed",
        "more-steps-and-another-cadence-without-a-restart",
        "an-env-process-is-killed",
        "a-rule-restarts-the-job-for-a-worker-that-ended",
        "a-worker-pod-is-deleted",
        "the-driver-process-is-killed-beside-a-sidecar",
    }
)
"""Of each kind at least one, and of its failures one that ends a process and one that takes a pod."""
