"""`rljob plan -n NAMESPACE JOB`: what is said before any API server answers; how it answers: tests/cluster."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import yaml

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef
from rlinf_api.profile import key_of
from rlinf_scheduler.jobs import plan_manifest
from rlinf_scheduler.kept import KeptProfiles
from rljob import cluster, graph, plan, reasons
from rljob.local.store import MemoryStore
from rljob.reasons import OtherPools
from tools import workloads
from tools.prove.world import World

TEAM = cluster.Cluster(namespace="team")


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path, monkeypatch):
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", f"{path}:/else")
    with pytest.raises(UserError) as refused:
        reasons.history(("math", TEAM))
    assert str(refused.value) == (
        f"no API server to talk to: got no such file, wanted a kubeconfig at {path}; set KUBECONFIG, or name a "
        "--context of it"
    )


def test_a_context_that_it_does_not_have_is_named(tmp_path, monkeypatch):
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "contexts": [], "clusters": [], "users": []}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(UserError, match=r"no API server to talk to: got .*; set KUBECONFIG, or name a --context of it"):
        plan.pin(("math", cluster.Cluster(namespace="team", context="prod")), "math-p2", timeout_s=1)


# --- what was measured ------------------------------------------------------------------------------------------------
@pytest.fixture
def store(monkeypatch):
    """What the API server has."""
    found = MemoryStore()

    @asynccontextmanager
    async def reached(of):
        assert of == TEAM
        yield found

    monkeypatch.setattr(cluster, "_reached", reached)
    return found


async def begun(store, *, steps=60):
    """A job and its first plan, and its world, without profiles."""
    entry = workloads.entries()["drawn-14"]
    job = workloads.job(entry, steps=steps)
    job["metadata"]["namespace"] = "team"
    job = await store.create(job)
    world = World.of_entry(entry, steps=steps)
    ref = JobRef(name="drawn-14", uid=job["metadata"]["uid"])
    first = world.begin().model_copy(update={"job": ref})
    await store.create(plan_manifest(first, namespace="team"))
    return job, world, first


async def keep(store, job, world, plan_, *, uid=""):
    ref = JobRef(name="drawn-14", uid=uid or job["metadata"]["uid"])
    of = {"key": key_of(RLJobSpec.model_validate(job["spec"])), "job": ref}
    reports = [world.profile(plan_, world.truth, [5.2], last=step).model_copy(update=of) for step in (1, 2, 3)]
    assert await KeptProfiles(store).write(reports, namespace="team")


def ask(work):
    """From a thread of its own, as the command does: these verbs begin an event loop."""
    return asyncio.to_thread(work)


async def test_a_jobs_graph_and_other_pods_are_told_by_what_the_scheduler_kept(store):
    job, world, first = await begun(store)
    await keep(store, job, world, first)
    where = ("drawn-14", TEAM)
    told = await ask(lambda: graph.text(where))
    assert told.splitlines()[0] == "1 steps of revision 1, 5.2 s each"
    weighed = await ask(lambda: reasons.what_if(where, OtherPools(), more=False))
    assert "now, as simulated" in weighed.splitlines()[0]
    more = await ask(lambda: reasons.what_if(where, OtherPools(pods={"main": 2}), more=False))
    assert float(more.splitlines()[1].split()[0]) < 0.9 * float(weighed.splitlines()[1].split()[0])


async def test_a_job_that_names_a_runtime_is_looked_at_with_what_that_says(store):
    """As its driver is: the key is of the slots that the runtime gave it."""
    job, world, first = await begun(store)
    whole = job["spec"]["pools"][0]["slots"]
    said = {"poolDefaults": {"slots": {"memory": whole["memory"]}}}
    status = {"runtime": {"name": "gpu", "generation": 1, "spec": said}}
    await keep(store, job, world, first)
    bare = {**job, "metadata": {"name": "drawn-14", "namespace": "team"}}
    await store.delete("RLJob", "drawn-14", namespace="team")
    pool = {**job["spec"]["pools"][0], "slots": {k: v for k, v in whole.items() if k != "memory"}}
    made = await store.create({**bare, "spec": {**job["spec"], "runtime": "gpu", "pools": [pool]}})
    await store.patch("RLJob", "drawn-14", patch={"status": status}, namespace="team", subresource="status")
    made = await store.get("RLJob", "drawn-14", namespace="team")
    await store.create(plan_manifest(first.model_copy(update={"job": _ref(made)}), namespace="team"))
    await keep(store, job, world, first, uid=made["metadata"]["uid"])
    told = await ask(lambda: reasons.what_if(("drawn-14", TEAM), OtherPools(), more=False))
    assert "now, as simulated" in told


def _ref(job):
    return JobRef(name=job["metadata"]["name"], uid=job["metadata"]["uid"])


async def test_a_job_of_which_nothing_is_kept_says_where_to_look(store):
    job, world, first = await begun(store)
    where = ("drawn-14", TEAM)
    with pytest.raises(UserError, match=r"nothing that was measured of job drawn-14 is kept yet: got no RLProf"):
        await ask(lambda: reasons.measured(where))
    await keep(store, job, world, first, uid="an-earlier-one")
    with pytest.raises(UserError, match=r"got one of job drawn-14, uid an-earlier-one.*get rlprofiles -n team"):
        await ask(lambda: reasons.measured(where))
    name = names.profile_name(key_of(RLJobSpec.model_validate(job["spec"])))
    await store.patch("RLProfile", name, patch={"spec": {"reports": []}}, namespace="team")
    with pytest.raises(UserError, match=rf"RLProfile {name} is not as the scheduler writes it"):
        await ask(lambda: reasons.measured(where))
    with pytest.raises(UserError, match="namespace team has no RLJob 'math'"):
        await ask(lambda: reasons.measured(("math", TEAM)))


async def test_a_kept_profile_of_a_plan_that_is_gone_is_no_answer(store):
    job, world, first = await begun(store)
    await keep(store, job, world, first)
    await store.delete("RLPlan", "drawn-14-p1", namespace="team")
    with pytest.raises(UserError, match="measured of drawn-14 is of plan revision 1, which is not there any more"):
        await ask(lambda: reasons.what_if(("drawn-14", TEAM), OtherPools(), more=False))
