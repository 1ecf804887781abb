"""Passes over the in-memory store: what is written, in which order, and that a crash at any write changes nothing."""

import asyncio
import itertools
from datetime import timedelta

import pytest

from rlinf_api import names, times
from rlinf_api.errors import ClusterBusy, Conflict, RLinfError, WorkerUnreachable
from rlinf_api.report import DriverState
from rlinf_operator.reconcile import loop
from rlinf_operator.reconcile.decide import decide
from rlinf_operator.reconcile.loop import Reconciler, key_of
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, KEY, QUICK, Cluster, Crash, Store
from tests.fakes.drivers import FakeDrivers


async def test_a_job_comes_up_with_everything_that_it_needs():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    assert await cluster.names("Pod") == ["math-driver-a1", "math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"]
    assert await cluster.names("Service") == ["math"]
    assert await cluster.names("NetworkPolicy") == ["math"]
    assert await cluster.names("ConfigMap") == ["math-job"]
    assert len(await cluster.names("Secret")) == 3
    assert await cluster.names("RLPlan") == ["math-p1"]
    assert cluster.drivers.told == [("Prepare", 1), ("Commit", 1)]
    assert (await cluster.condition("Running"))[:2] == ("True", "Stepping")
    assert (await cluster.condition("PlanApplied"))[:2] == ("True", "PlanInForce")


async def test_a_job_that_runs_costs_no_write():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    cluster.store.writes.clear()
    await cluster.settle(3)
    assert cluster.store.writes == []


async def test_the_pass_that_has_the_first_plan_made_leaves_the_status_to_the_next():
    cluster = Cluster()
    await cluster.apply()
    applied = await cluster.reconciler.pass_over(KEY)
    assert applied.progressed
    assert await cluster.names("RLPlan") == ["math-p1"]
    assert [entry for entry in cluster.store.writes if entry[1] in ("RLJob", "Event")] == []
    await cluster.reconciler.pass_over(KEY)
    assert [entry[0] for entry in cluster.store.writes if entry[1] == "RLJob"] == ["replace"]
    assert (await cluster.condition("Valid"))[0] == "True"
    assert (await cluster.condition("PlanApplied"))[:2] == ("Unknown", "PlanPending")


async def test_the_configmap_comes_after_the_secrets_and_the_pods_after_it():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    kinds = [kind for verb, kind, _ in cluster.store.writes if verb == "create"]
    assert max(i for i, k in enumerate(kinds) if k == "Secret") < kinds.index("ConfigMap") < kinds.index("Pod")


async def test_a_pods_life_costs_few_writes():
    """Issue's bar for a 10-pod job: 2 x pods + 22, events and deletions included."""
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    cluster.drivers.say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)
    await cluster.settle()
    assert len(cluster.store.writes) <= 2 * 4 + 22, cluster.store.writes


async def end_of_life(cluster):
    """A whole life: up, a pod lost, complete. Passes that crash are repeated by a new process, as on a cluster."""
    lost = done = False
    idle = 0
    while idle < 3:
        writes = len(cluster.store.writes)
        try:
            await cluster.reconciler.pass_over(KEY)
        except Crash:
            cluster.restart()
            continue
        except RLinfError:
            continue
        await cluster.kubelet()
        pods = await cluster.names("Pod")
        if not lost and len(pods) == 4 and cluster.drivers.told:
            ended = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": times.text(NOW)}}
            status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": ended}]}
            await MemoryStore.patch(
                cluster.store, "Pod", "math-sim-1-a1", namespace="team", patch={"status": status}, subresource="status"
            )
            lost = True
        elif lost and not done and "math-sim-1-a2" in pods and "math-sim-1-a1" not in pods:
            cluster.drivers.say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)
            done = True
        idle = idle + 1 if done and len(cluster.store.writes) == writes else 0
    status = await cluster.status()
    return {
        "pods": sorted(await cluster.names("Pod")),
        "plans": await cluster.names("RLPlan"),
        "secrets": len(await cluster.names("Secret")),
        "network": await cluster.names("Service") + await cluster.names("NetworkPolicy"),
        "attempt": status["attempt"],
        "restarts": [e.split()[1:] for e in status["restarts"]],
        "conditions": [(c["type"], c["status"], c["reason"]) for c in status["conditions"]],
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_operator_killed_at_every_write_in_turn_ends_in_the_same_state(after):
    whole = Cluster()
    await whole.apply()
    wanted = await end_of_life(whole)
    assert ("Complete", "True", "FlowFinished") in wanted["conditions"]
    assert wanted["restarts"] == [["math-sim-1-a1", "Program"]]
    for number in range(1, len(whole.store.writes) + 1):
        cluster = Cluster()
        await cluster.apply()
        cluster.store.crash_at, cluster.store.crash_after = number, after
        assert await end_of_life(cluster) == wanted, f"killed {'after' if after else 'before'} write {number}"


class DiesAtSecrets(Store):
    """The process dies whenever it has written a Secret; one that was there already is no write."""

    async def _write(self, verb, kind, name, call):
        done = await super()._write(verb, kind, name, call)
        if kind == "Secret":
            raise Crash
        return done


async def test_an_operator_that_dies_whenever_it_wrote_a_secret_gets_on():
    cluster, deaths = Cluster(DiesAtSecrets()), 0
    await cluster.apply()
    for _ in range(8):
        try:
            await cluster.settle(1)
        except Crash:
            deaths += 1
            cluster.restart()
    assert 1 <= deaths <= 3
    assert (await cluster.condition("Running"))[:2] == ("True", "Stepping")


@pytest.mark.parametrize(("minutes", "kept"), [(9, True), (11, False)])
async def test_secrets_without_a_configmap_are_kept_under_a_young_job_and_written_anew_under_an_older_one(
    minutes, kept
):
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    await cluster.store.delete("ConfigMap", "math-job", namespace="team")
    cluster.store.writes.clear()
    later = NOW + timedelta(minutes=minutes)
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=lambda _: cluster.drivers, authority=AUTHORITY,
        settings=QUICK, clock=lambda: later,
    )  # fmt: skip
    await cluster.settle(2)
    patched = [kind for verb, kind, _ in cluster.store.writes if verb == "patch" and kind == "Secret"]
    assert len(patched) == (0 if kept else 3)
    made = await cluster.store.get("ConfigMap", "math-job", namespace="team")
    ends = times.parse(made["metadata"]["annotations"][names.ANNOTATION_CERT_EXPIRY])
    assert ends == NOW + timedelta(days=30) - (timedelta(minutes=minutes) if kept else timedelta(0))


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy"])
async def test_a_foreign_object_with_a_childs_name_is_named_and_left_alone(kind):
    cluster = Cluster()
    await cluster.apply()
    await cluster.store.create({"kind": kind, "metadata": {"name": "math", "namespace": "team"}, "spec": {"x": 1}})
    applied = await cluster.reconciler.pass_over(KEY)
    assert f"{kind} team/math exists and does not belong to this job" in applied.try_again
    assert (await cluster.condition("PodsReady"))[1] == "PodsMissing"
    assert "delete it, or make the job again under another name" in (await cluster.condition("PodsReady"))[2]
    assert (await cluster.store.get(kind, "math", namespace="team"))["spec"] == {"x": 1}
    await cluster.store.delete(kind, "math", namespace="team")
    await cluster.settle()
    assert (await cluster.condition("PodsReady"))[:2] == ("True", "PodsReady")


async def test_a_quota_that_refuses_pods_is_told_and_costs_no_attempt():
    cluster = Cluster()
    await cluster.apply()
    cluster.store.refuse["create", "Pod"] = RLinfError("pods are forbidden: exceeded quota")
    for _ in range(4):
        applied = await cluster.reconciler.pass_over(KEY)
    assert "exceeded quota" in applied.try_again
    assert "exceeded quota" in (await cluster.condition("PodsReady"))[2]
    assert (await cluster.status())["attempt"] == 0
    cluster.store.refuse.clear()
    await cluster.settle()
    assert "math-driver-a1" in await cluster.names("Pod")
    assert (await cluster.status())["restarts"] == []


async def test_a_conflict_on_the_status_repeats_the_pass_and_makes_no_twins():
    cluster = Cluster()
    await cluster.apply()
    await cluster.reconciler.pass_over(KEY)
    cluster.store.refuse["replace", "RLJob"] = Conflict("write of RLJob team/math")
    for _ in range(3):
        with pytest.raises(Conflict):
            await cluster.reconciler.pass_over(KEY)
    cluster.store.refuse.clear()
    await cluster.settle()
    assert await cluster.names("Pod") == ["math-driver-a1", "math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"]


async def test_a_deleted_secret_is_made_again_with_the_next_pod():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    name = next(n for n in await cluster.names("Secret") if "pool-sim" in n)
    await cluster.store.delete("Secret", name, namespace="team")
    await cluster.store.delete("Pod", "math-sim-1-a1", namespace="team", grace_period_s=0)
    await cluster.settle()
    assert name in await cluster.names("Secret")
    assert "math-sim-1-a2" in await cluster.names("Pod")


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "ConfigMap"])
async def test_a_deleted_child_is_made_again(kind):
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    before = await cluster.names(kind)
    await cluster.store.delete(kind, before[0], namespace="team")
    await cluster.settle()
    assert await cluster.names(kind) == before
    assert (await cluster.status())["attempt"] == 1


async def test_an_infeasible_job_has_the_schedulers_sentences_and_no_pods():
    cluster = Cluster()
    job = ppo_job()
    job.spec["pools"][1]["slots"]["perPod"] = 1
    await cluster.apply(job)
    await cluster.settle(3)
    status, reason, message = await cluster.condition("Valid")
    assert (status, reason) == ("False", "Infeasible")
    assert "role 'actor' needs 1 worker of 1 slot" in message
    assert await cluster.names("Pod") == []


async def test_a_scheduler_that_is_away_is_named_and_asked_again():
    class Away:
        async def request_plan(self, job, *, reason, highest_revision):
            raise WorkerUnreachable("the scheduler at x:1 gave no plan", got="UNAVAILABLE")

    cluster = Cluster()
    await cluster.apply()
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Away(), drivers=lambda _: cluster.drivers, authority=AUTHORITY, settings=QUICK,
        clock=lambda: NOW,
    )  # fmt: skip
    applied = await cluster.reconciler.pass_over(KEY)
    assert applied.try_again
    assert (await cluster.condition("Running"))[:2] == ("Unknown", "SchedulerUnavailable")
    cluster.restart()
    await cluster.settle()
    assert (await cluster.condition("Running"))[:2] == ("True", "Stepping")


async def test_a_driver_that_refuses_its_plan_is_quoted():
    cluster = Cluster()
    cluster.drivers.refusal = "revision 1 names a role that is not here"
    await cluster.apply()
    await cluster.settle()
    status, reason, message = await cluster.condition("PlanApplied")
    assert (status, reason) == ("False", "PlanPending")
    assert "revision 1 names a role that is not here" in message


async def test_deleting_the_job_leaves_nothing():
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    await cluster.store.delete("RLJob", "math", namespace="team")
    await cluster.reconciler.pass_over(KEY)
    for kind in ("Pod", "Service", "NetworkPolicy", "ConfigMap", "Secret", "RLPlan", "RLJob"):
        assert await cluster.names(kind) == []
    assert cluster.drivers.followed == {}


async def test_a_job_that_is_gone_waits_for_no_further_pass():
    cluster = Cluster()
    cluster.reconciler.enqueue(KEY)
    assert cluster.reconciler.overdue()[0] == 1
    await cluster.reconciler.pass_over(KEY)
    assert cluster.reconciler.overdue() == (0, 0.0)


async def test_the_ttl_deletes_the_job():
    cluster = Cluster()
    await cluster.apply(ppo_job().with_spec(ttlSecondsAfterFinished=0))
    await cluster.settle()
    cluster.drivers.say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)
    await cluster.settle()
    assert await cluster.names("RLJob") == []


async def until(what, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not await what():
            await asyncio.sleep(0.01)


async def test_the_loop_runs_a_job_by_itself_and_ends_with_its_drivers_closed():
    store, drivers = Store(), []

    def make(on_change):
        drivers.append(FakeDrivers(on_change))
        return drivers[0]

    cluster = Cluster(store)
    reconciler = Reconciler(
        store=store, scheduler=Planning(store), drivers=make, authority=AUTHORITY, settings=QUICK, clock=lambda: NOW
    )
    task = asyncio.create_task(reconciler.run())
    await store.create(ppo_job().build())

    async def running():
        await cluster.kubelet()
        found = (await cluster.status()).get("conditions", [])
        return any(c["type"] == "Running" and c["status"] == "True" for c in found)

    await until(running)
    drivers[0].say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)

    async def complete():
        return any(c["type"] == "Complete" and c["status"] == "True" for c in (await cluster.status())["conditions"])

    await until(complete)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert drivers[0].closed


async def test_the_loop_goes_on_after_errors_of_the_api_server():
    store = Store()
    errors = itertools.cycle([ClusterBusy("429"), RLinfError("500"), Crash()])
    left = [6]
    cluster = Cluster(store)

    class Flaky(Store):
        async def _write(self, verb, kind, name, call):
            if left[0] > 0 and kind != "RLJob":
                left[0] -= 1
                raise next(errors)
            return await super()._write(verb, kind, name, call)

    store = cluster.store = Flaky()
    await store.create(ppo_job().build())
    cluster.restart()
    task = asyncio.create_task(cluster.reconciler.run())

    async def up():
        return len(await cluster.names("Pod")) == 4

    await until(up)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_pass_that_breaks_once_says_nothing_on_the_job(monkeypatch):
    cluster, left = Cluster(Store()), [1]
    await cluster.store.create(ppo_job().build())
    seen = list[str]()

    def breaks(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise KeyError("team")
        return decide(*arguments, **options)

    monkeypatch.setattr(loop, "decide", breaks)
    write = cluster.store.replace

    async def replace(obj, **options):
        seen.extend(c["reason"] for c in obj.get("status", {}).get("conditions", []))
        return await write(obj, **options)

    monkeypatch.setattr(cluster.store, "replace", replace)
    task = asyncio.create_task(cluster.reconciler.run())
    cluster.reconciler.enqueue(KEY)

    async def written():
        return seen

    await until(written)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "InternalError" not in seen


@pytest.mark.parametrize("begun", [False, True])
async def test_a_job_whose_passes_break_says_so_until_one_goes_through(monkeypatch, begun):
    """Its status would else be silent, or stand still, for ever: a bug of ours is in the operator's log alone."""
    cluster = Cluster(Store())
    await cluster.store.create(ppo_job().build())
    if begun:
        await cluster.settle()
    before = (await cluster.status()).get("conditions", [])

    def breaks(*arguments, **options):
        raise KeyError("team")

    monkeypatch.setattr(loop, "decide", breaks)
    task = asyncio.create_task(cluster.reconciler.run())
    cluster.reconciler.enqueue(KEY)

    async def degraded():
        found = {c["type"]: c for c in (await cluster.status()).get("conditions", [])}
        return found.get("Degraded") if found.get("Degraded", {}).get("reason") == "InternalError" else None

    await until(degraded)
    said = await degraded()
    assert said["status"] == "True"
    assert said["message"].startswith("the operator cannot look after this job (KeyError: 'team')")
    others = [c for c in (await cluster.status())["conditions"] if c["type"] != "Degraded"]
    assert others == [c for c in before if c["type"] != "Degraded"]

    monkeypatch.setattr(loop, "decide", decide)

    async def well():
        return not await degraded()

    await until(well)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_objects_are_traced_to_their_job():
    pod = {"kind": "Pod", "metadata": {"name": "p", "namespace": "team", "labels": {"rlinf.io/job": "math"}}}
    plan = {"kind": "RLPlan", "metadata": {"name": "x", "namespace": "team"}, "spec": {"job": {"name": "math"}}}
    stranger = {"kind": "Pod", "metadata": {"name": "p", "namespace": "team"}}
    assert key_of(pod) == key_of(plan) == KEY
    assert key_of(stranger) is None
