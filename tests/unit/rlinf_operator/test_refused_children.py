"""A child that the API server refuses: it is named where it belongs, and everything else of the status goes on."""

from datetime import timedelta

from rlinf_api import times
from rlinf_api.report import DriverState
from rlinf_scheduler.jobs import plan_manifest
from rljob.local.store import MemoryStore
from tests.builders import NOW, plan_of, ppo_job
from tests.fakes.cluster import KEY
from tests.fakes.quota import World


def small_job(**spec):
    """One simulator pod; two are allowed."""
    job = ppo_job().with_spec(**spec)
    job.spec["pools"][0]["pods"] = {"min": 1, "max": 2}
    job.spec["roles"][0]["workers"] = {"min": 4, "max": 8}
    return job


async def larger_plan_under_a_quota():
    """math-p2, which is pinned, wants one more pod than the quota has room for."""
    world = World()
    job = small_job()
    await world.apply(job)
    large = plan_of(ppo_job())
    pools = [p.model_copy(update={"pods": 1}) if p.name == "sim" else p for p in large.pools]
    workers = [
        w.model_copy(update={"count": 4, "slots": "sim/0/[0-3]"}) if w.role == "env" else w for w in large.workers
    ]
    uid = (await world.store.get("RLJob", "math", namespace="team"))["metadata"]["uid"]
    for revision, plan in ((1, large.model_copy(update={"pools": pools, "workers": workers})), (2, large)):
        owner = plan.job.model_copy(update={"uid": uid})
        source = {"source": "User"} if revision == 2 else {}
        plan = plan.model_copy(update={"job": owner, "revision": revision, **source})
        await world.store.create(plan_manifest(plan, namespace="team"))
    await world.passes(8)
    assert await world.names("Pod") == ["math-driver-a1", "math-sim-0-a1", "math-train-0-a1"]
    world.quota.most = 3
    await world.edit(placement={"mode": "Pinned", "pin": "math-p2"})
    return world


async def test_a_pod_that_only_a_pinned_plan_wants_is_no_lack_of_the_job():
    world = await larger_plan_under_a_quota()
    applied = await world.passes(3)
    assert "exceeded quota" in applied.try_again
    assert (await world.condition("PodsReady"))[:2] == ("True", "PodsReady")
    status, reason, message = await world.condition("PlanApplied")
    assert (status, reason) == ("Unknown", "PlanPending")
    assert "math-p2 is on its way" in message
    assert "exceeded quota" in message
    assert "math-p1 stays in force" in message
    world.quota.most = 1000
    await world.passes(4)
    assert "math-sim-1-a2" in await world.names("Pod")
    assert (await world.status())["restarts"] == []


async def test_the_status_goes_on_while_a_child_is_refused():
    world = await larger_plan_under_a_quota()
    await world.passes(2)
    world.drivers.say(
        KEY, state=DriverState.RECOVERING, plan_revision=1, step=7, checkpoint_uri="/c", checkpoint_step=5,
        message="waiting for env/0",
    )  # fmt: skip
    await world.passes(1)
    status = await world.status()
    assert (status["step"], status["checkpoint"]["step"]) == (7, 5)
    assert (await world.condition("Degraded"))[:2] == ("True", "WorkerRestarting")
    assert (await world.condition("Running"))[:2] == ("False", "Recovering")


async def test_a_worker_that_ends_while_a_child_is_refused_is_named_counted_once_and_replaced():
    world = await larger_plan_under_a_quota()
    await world.passes(2)
    await world.exits("math-sim-0-a1")
    await world.passes(4)
    status = await world.status()
    assert [e.split()[1:] for e in status["restarts"]] == [["math-sim-0-a1", "Program"]]
    assert status["firstFailure"]["pod"] == "math-sim-0-a1"
    assert len(world.events("PodEnded")) == 1
    pods = await world.names("Pod")
    assert len([p for p in pods if p.startswith("math-sim-0-")]) == 1, pods
    assert "math-sim-0-a1" not in pods


async def test_a_replacement_that_is_refused_costs_nothing_however_often_it_is_tried():
    world = World()
    await world.apply(ppo_job().with_spec(failurePolicy={"maxRestarts": 1}))
    await world.passes(8)
    world.quota.most = 3
    await world.exits("math-sim-1-a1")
    await world.passes(6)
    assert "math-sim-1-a1" in await world.names("Pod"), "it stays until its successor is made"
    status = await world.status()
    assert [e.split()[1:] for e in status["restarts"]] == [["math-sim-1-a1", "Program"]]
    assert (await world.condition("Degraded"))[:2] == ("True", "PodReplaced")
    assert (await world.condition("PodsReady"))[:2] == ("False", "QuotaExceeded")
    assert "exceeded quota" in (await world.condition("PodsReady"))[2]
    assert len(world.events("PodEnded")) == 1
    world.quota.most = 1000
    await world.passes(4)
    assert [p for p in await world.names("Pod") if "sim-1" in p] == ["math-sim-1-a2"]
    assert (await world.status())["attempt"] == 2


async def test_a_replacement_that_is_refused_for_longer_than_the_window_is_told_once_and_counts_no_more():
    world = World()
    await world.apply(ppo_job().with_spec(failurePolicy={"maxRestarts": 0, "resetAfterSeconds": 3600}))
    await world.passes(8)
    world.quota.most = 3
    await world.exits("math-sim-1-a1")
    await world.edit(failurePolicy={"maxRestarts": 1, "resetAfterSeconds": 3600})
    for minutes in (1, 30, 59, 61, 62, 120):
        world.now = NOW + timedelta(minutes=minutes)
        await world.passes(2)
    assert len(world.events("PodEnded")) == 1
    assert [e.split()[1:] for e in (await world.status())["restarts"]] == [["math-sim-1-a1", "Program"]]
    await world.edit(failurePolicy={"maxRestarts": 0, "resetAfterSeconds": 3600})
    world.quota.most = 1000
    await world.passes(4)
    assert [p for p in await world.names("Pod") if "sim-1" in p] == ["math-sim-1-a2"], "it is out of the window"
    assert (await world.status())["restarts"] == []


async def test_a_pod_that_somebody_deletes_under_a_quota_is_lost_once_and_not_with_every_try():
    world = World()
    await world.apply()
    await world.passes(8)
    world.quota.most = 3
    await world.store.delete("Pod", "math-sim-1-a1", namespace="team", grace_period_s=0)
    await world.passes(6)
    assert len((await world.status())["restarts"]) <= 1
    world.quota.most = 1000
    await world.passes(3)
    assert [e.split()[1:] for e in (await world.status())["restarts"]] == [["math-sim-1", "Infrastructure"]]


async def test_superseded_pods_go_although_a_child_is_refused():
    world = await larger_plan_under_a_quota()
    await world.passes(2)
    pod = await world.store.get("Pod", "math-sim-0-a1", namespace="team")
    meta = pod["metadata"]
    stray = {k: v for k, v in meta.items() if k not in ("uid", "resourceVersion", "creationTimestamp")}
    stray |= {"name": "math-sim-7-a1", "labels": {**meta["labels"], "rlinf.io/ordinal": "7"}}
    await MemoryStore.create(world.store, {**pod, "metadata": stray})
    await world.passes(2)
    assert "math-sim-7-a1" not in await world.names("Pod")


async def test_the_deadline_of_a_job_whose_pods_are_refused_runs():
    world = World()
    await world.apply(ppo_job().with_spec(activeDeadlineSeconds=60))
    world.quota.most = 0
    await world.passes(4)
    assert (await world.status())["attempt"] == 0
    assert (await world.status())["startTime"] == times.text(NOW)
    world.now = NOW + timedelta(seconds=61)
    await world.passes(2)
    assert (await world.condition("Failed"))[:2] == ("True", "DeadlineExceeded")


async def test_first_pods_that_a_quota_lets_in_one_by_one_share_their_attempt():
    world = World()
    await world.apply()
    for room in (0, 1, 2, 3, 4):
        world.quota.most = room
        await world.passes(3)
    assert await world.names("Pod") == ["math-driver-a1", "math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"]
    status = await world.status()
    assert (status["attempt"], status["restarts"]) == (1, [])
    assert (await world.condition("PodsReady"))[:2] == ("True", "PodsReady")


async def test_a_resume_that_a_quota_lets_in_one_by_one_is_one_life():
    world = World()
    await world.apply()
    await world.passes(8)
    await world.edit(suspend=True)
    await world.passes(4)
    assert await world.names("Pod") == []
    await world.edit(suspend=False)
    for room in (1, 2, 3, 4):
        world.quota.most = room
        await world.passes(3)
        if room < 4:
            assert (await world.condition("Suspended"))[0] == "True"
    assert await world.names("Pod") == ["math-driver-a2", "math-sim-0-a2", "math-sim-1-a2", "math-train-0-a2"]
    status = await world.status()
    assert (status["attempt"], status["life"], status["restarts"]) == (2, 2, [])
    assert (await world.condition("Suspended"))[:2] == ("False", "NotSuspended")
