"""The status as other programs read it: one word, times that are times, nothing that is an empty text. Old plans."""

from dataclasses import replace

import pytest

from rlinf_api import edits, names
from rlinf_api import job as api
from rlinf_api.conditions import Condition, JobState, state_of
from rlinf_api.job import RLJobStatus
from rlinf_api.plan import JobRef
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import plans
from rlinf_operator.reconcile.observe import read_status
from tests.builders import World, ppo_job
from tests.fakes.cluster import KEY, Cluster

STEPPING = "Running=True/Stepping"
STARTS = "Running=Unknown/WaitingForDriver"


def of(*texts: str) -> JobState:
    """`of("Running=True/Stepping", "Degraded=False/Healthy")`"""
    listed = []
    for text in texts:
        kind, _, rest = text.partition("=")
        status, _, reason = rest.partition("/")
        listed.append(Condition.model_validate({"type": kind, "status": status, "reason": reason}))
    return state_of(listed)


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ((), "Queued"),
        (("Valid=True/Accepted", "Running=Unknown/WaitingForPlan"), "Queued"),
        (("Running=Unknown/SchedulerUnavailable",), "Queued"),
        (("Valid=False/InvalidSpec", "Running=False/InvalidSpec"), "Stalled"),
        (("Valid=False/Infeasible", "Running=Unknown/WaitingForPlan"), "Stalled"),
        ((STARTS,), "Starting"),
        (("Running=False/WaitingForWorkers", "Degraded=False/Healthy"), "Starting"),
        ((STEPPING,), "Running"),
        ((STEPPING, "Profiled=Unknown/Profiling"), "Profiling"),
        ((STEPPING, "Profiled=True/Profiled"), "Running"),
        ((STEPPING, "Profiled=Unknown/WaitingForPlan"), "Running"),
        (("Running=False/Recovering", "Profiled=Unknown/Profiling"), "Recovering"),
        ((STEPPING, "Profiled=Unknown/Profiling", "Degraded=True/Stalled"), "Stalled"),
        (("Valid=False/InvalidSpec", STEPPING), "Running"),
        ((STEPPING, "Degraded=True/PodReplaced"), "Running"),
        ((STARTS, "Degraded=True/PodReplaced"), "Recovering"),
        (("Running=False/Recovering", "Degraded=False/Healthy"), "Recovering"),
        ((STEPPING, "Degraded=True/Stalled"), "Stalled"),
        ((STEPPING, "Degraded=True/TurnsWithoutItems"), "Stalled"),
        ((STEPPING, "Degraded=True/DriverUnreachable"), "Stalled"),
        ((STEPPING, "Suspended=Unknown/Draining"), "Running"),
        (("Suspended=Unknown/Draining", "Running=False/Stopped"), "Running"),
        (("Suspended=True/SuspendedByUser", "Running=False/Stopped"), "Suspended"),
        (("Complete=True/FlowFinished", "Running=False/Stopped"), "Complete"),
        (("Failed=True/UserError", "Suspended=True/SuspendedByUser"), "Failed"),
        (("Failed=False/UserError", STEPPING), "Running"),
    ],
)
def test_a_job_is_in_one_state_by_its_conditions(conditions, state):
    assert of(*conditions) == state


def test_a_status_has_the_word_for_its_conditions():
    world = ppo_job().world().created()
    assert world.status.state == "Starting"
    world.all_ready().report(state=DriverState.RUNNING, plan_revision=1).step()
    assert api.dump(world.status)["state"] == "Profiling"
    world.report(state=DriverState.RUNNING, plan_revision=1, plan_steps=3).step()
    assert api.dump(world.status)["state"] == "Running"


def test_a_job_that_lost_its_driver_alone_recovers_and_does_not_start():
    """Another driver knows of no step and waits for all; who edits the image then would lose what was learnt."""
    world = ppo_job().world().created().all_ready()
    world.report(state=DriverState.RUNNING, plan_revision=1, step=5000).step()
    world.exited("math-driver-a1", 1).step()
    world.later(5).step()
    world.all_ready().step()
    assert world.status.state == "Recovering", "nobody has heard of it"
    world.report(attempt=2, state=DriverState.STARTING).step()
    assert (world.condition("Degraded"), world.status.state) == (("False", "Healthy"), "Recovering")
    assert not edits.is_free(api.dump(world.status))
    world.edit(suspend=True).step()
    for name in world.names():
        world.vanished(name)
    world.step()
    world.edit(suspend=False).step()
    assert (world.status.life, world.status.worked_life, world.status.state) == (2, 1, "Starting")
    assert edits.is_free(api.dump(world.status)), "a life that has made no step loses none"


def _texts(value, path="status"):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, path)
    else:
        yield path, value


def test_what_is_not_there_is_absent():
    for world in (ppo_job().world().created(), ppo_job().world().started().edit(suspend=True)):
        world.step()
        written = api.dump(world.status)
        empty = [path for path, value in _texts(written) if value in ("", None)]
        assert [path for path in empty if not path.endswith("conditions.message")] == []
        assert "completionTime" not in written
    assert api.dump(RLJobStatus())["step"] == 0, "a number is said"


def test_a_status_with_empty_times_is_read_and_mended():
    old = {"startTime": "", "completionTime": "", "plan": {"current": "math-p1", "pending": ""}, "attempt": 1}
    status = read_status({"status": old})
    assert (status.start_time, status.completion_time, status.plan.pending) == (None, None, "")
    assert "startTime" not in api.dump(status)


async def test_an_empty_time_that_an_earlier_version_stored_goes_with_the_next_write():
    cluster = Cluster()
    await cluster.apply()
    await cluster.reconciler.pass_over(KEY)
    stored = {"startTime": "", "completionTime": "", "later": "a newer operator's"}
    await cluster.store.patch("RLJob", "math", namespace="team", patch={"status": stored}, subresource="status")
    await cluster.reconciler.pass_over(KEY)
    status = (await cluster.store.get("RLJob", "math", namespace="team"))["status"]
    assert "completionTime" not in status
    assert status["startTime"]
    assert status["later"] == "a newer operator's"


# --- plans ------------------------------------------------------------------------------------------------------------
def with_plans(number: int, **report) -> World:
    world = ppo_job().world().started()
    world.step()
    for revision in range(2, number + 1):
        world.planned(revision=revision)
    world.plans = [replace(plan, uid=f"uid-{plan.revision}") for plan in world.plans]
    world.report(**{"state": DriverState.RUNNING, "plan_revision": number, "plan_switches": number, **report})
    return world


def gone(world: World) -> list[str]:
    return [name for name, _ in world.step().delete_plans]


def test_old_plans_of_the_scheduler_go():
    most = plans.PLANS_KEPT
    assert gone(with_plans(most)) == []
    world = with_plans(most + 3)
    assert world.step().delete_plans == (("math-p3", "uid-3"), ("math-p2", "uid-2"))
    assert "math-p1" in gone(world), "of which the status said until then that it is in force"


def test_plans_that_somebody_needs_stay_however_old():
    number = plans.PLANS_KEPT + 8  # of which one is a person's and one another job's
    world = with_plans(number, plan_revision=1, plan_preparing=2, plan_prepared=3)
    world.status = world.status.model_copy(
        update={"plan": world.status.plan.model_copy(update={"current": names.plan_name("math", 1)})}
    )
    of_another = JobRef(name="math", uid="another")
    changes: dict[int, dict[str, object]] = {4: {"source": "User"}, 5: {"job": of_another}}
    world.plans = [
        replace(p, spec=p.spec.model_copy(update=changes.get(p.revision, {}))) if p.spec else p for p in world.plans
    ]
    assert gone(world) == ["math-p8", "math-p7", "math-p6"]
    assert plans.PLANS_KEPT > plans.PLANS_IN_VAIN, "which are counted by them"


def test_a_pinned_plan_stays():
    world = with_plans(plans.PLANS_KEPT + 2)
    world.edit(placement={"mode": "Pinned", "pin": "math-p1"})
    assert gone(world) == ["math-p2"]


async def test_an_old_plan_is_deleted_as_it_was_seen():
    cluster = Cluster()
    await cluster.apply()
    for _ in range(6):
        await cluster.reconciler.pass_over(KEY)
        await cluster.kubelet()
    first = await cluster.store.get("RLPlan", "math-p1", namespace="team")
    for revision in range(2, plans.PLANS_KEPT + 3):
        spec = first["spec"] | {"revision": revision}
        meta = {"name": f"math-p{revision}", "namespace": "team", "labels": first["metadata"]["labels"]}
        await cluster.store.create({"kind": "RLPlan", "metadata": meta, "spec": spec})
    newest = plans.PLANS_KEPT + 2
    cluster.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=newest, plan_switches=2)
    for _ in range(3):
        await cluster.reconciler.pass_over(KEY)
    left = await cluster.names("RLPlan")
    assert len(left) == plans.PLANS_KEPT
    assert {"math-p1", "math-p2"}.isdisjoint(left)
