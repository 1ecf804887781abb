"""A job that names an RLRuntime: it waits for one, keeps what it began with, and says that there is another by now."""

import pytest

from rlinf_api import names
from rlinf_api.errors import ClusterBusy, InvariantBroken
from rlinf_api.job import RLJobStatus, RuntimeStatus
from rlinf_api.report import DriverState
from rlinf_api.runtimes import RLRuntimeSpec, RuntimeFound, missing
from rlinf_operator.clients.api_errors import Forbidden
from rlinf_operator.clients.runtimes import MOST, Runtimes
from rlinf_operator.policies import runtime
from rljob.local.store import MemoryStore
from tests.builders import ppo_job
from tests.fakes.cluster import KEY, Cluster

META = {"name": "gpu", "namespace": ""}
"""It has none: it is of the cluster."""


def gpu(**spec):
    return {"apiVersion": names.API_VERSION, "kind": "RLRuntime", "metadata": META, "spec": spec}


def named(name="gpu"):
    job = ppo_job()
    job.spec["runtime"] = name
    return job


def image(name):
    return {"poolDefaults": {"image": name}}


class Platform(Cluster):
    async def put(self, **spec):
        """An administrator's write; the operator is a new process, as it remembers a runtime for a while."""
        if await self.has_it():
            old = await self.store.get("RLRuntime", "gpu", namespace="")
            await self.store.replace({**gpu(**spec), "metadata": old["metadata"]})
        else:
            await self.store.create(gpu(**spec))
        self.restart()

    async def has_it(self):
        return bool((await self.store.list("RLRuntime")).items)

    async def images(self):
        pods = (await self.store.list("Pod", namespace="team")).items
        return {p["spec"]["containers"][0]["image"] for p in pods if p["metadata"]["labels"].get(names.LABEL_POOL)}

    async def suspend(self, wanted):
        await self.store.patch("RLJob", "math", patch={"spec": {"suspend": wanted}}, namespace="team")

    async def at_work(self):
        """Until its state is one in which a step could be lost."""
        await self.settle()
        self.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=1, step=5)
        await self.settle()
        assert (await self.status())["state"] in ("Running", "Profiling")


@pytest.fixture
async def cluster():
    return Platform()


async def test_a_job_is_made_with_its_runtime_and_its_status_names_what_it_was(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.settle()
    assert await cluster.images() == {"ours:1"}
    assert (await cluster.status())["runtime"] == {"name": "gpu", "generation": 1, "spec": image("ours:1")}
    assert (await cluster.condition("Valid"))[:2] == ("True", "Accepted")
    job = await cluster.store.get("RLJob", "math", namespace="team")
    assert job["spec"]["runtime"] == "gpu", "the user's spec is not rewritten"
    assert "image" not in job["spec"]["pools"][0]


async def test_a_job_waits_for_a_runtime_that_is_not_there_and_begins_when_it_is(cluster):
    await cluster.apply(named())
    await cluster.settle()
    assert await cluster.names("Pod") == []
    assert await cluster.condition("Valid") == (
        "False", "RuntimeNotFound",
        "spec.runtime names RLRuntime 'gpu', which is not there; make it, or correct the name",
    )  # fmt: skip
    await cluster.put(**image("ours:1"))
    await cluster.settle()
    assert await cluster.images() == {"ours:1"}


async def test_a_job_waits_for_a_runtime_that_is_wrong_and_says_what_is(cluster):
    await cluster.put(pool={})
    await cluster.apply(named())
    await cluster.settle()
    status, reason, message = await cluster.condition("Valid")
    assert (status, reason) == ("False", "RuntimeInvalid")
    assert message.startswith("RLRuntime 'gpu' is wrong: spec.pool: is not a field; did you mean 'pools'?")
    assert await cluster.names("Pod") == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [(None, "RuntimeNotFound"), ({"pool": {}}, "RuntimeInvalid"), ({"poolDefaults": {}}, "InvalidSpec"),
     (image("ours:1"), "Accepted")],
)  # fmt: skip
async def test_a_job_that_waits_for_its_runtime_to_be_repaired_looks_at_it_again(cluster, monkeypatch, spec, reason):
    job = named()
    if spec is not None:
        await cluster.put(**spec)
    if reason == "InvalidSpec":
        job.spec["roles"][0]["slotsPerWorker"] = 64
    await cluster.apply(job)
    pauses = []
    monkeypatch.setattr(cluster.reconciler, "enqueue", lambda key, *, after_s=0.0: pauses.append(after_s))
    await cluster.reconciler.pass_over(KEY)
    assert (15.0 in pauses) == (reason != "Accepted")
    assert reason == "Accepted" or (await cluster.condition("Valid"))[1] == reason


async def test_a_job_at_work_keeps_what_it_began_with_and_says_that_there_is_another(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.at_work()
    pods = await cluster.names("Pod")
    await cluster.put(**image("ours:2"))
    await cluster.settle()
    assert await cluster.images() == {"ours:1"}
    assert await cluster.names("Pod") == pods
    status, reason, message = await cluster.condition("Valid")
    assert (status, reason) == ("True", "RuntimeChanged")
    assert message == (
        "RLRuntime 'gpu' has changed since the job began, which goes on with what it began with; suspend the job and "
        "resume it to have what it says now"
    )
    await cluster.put(**image("ours:1"))
    await cluster.settle()
    assert (await cluster.condition("Valid"))[1:] == ("Accepted", "")


async def test_a_pod_that_is_lost_comes_back_as_the_job_began(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.at_work()
    await cluster.put(**image("ours:2"))
    await cluster.store.delete("Pod", "math-sim-0-a1", namespace="team", grace_period_s=0)
    await cluster.settle()
    assert "math-sim-0-a2" in await cluster.names("Pod")
    assert await cluster.images() == {"ours:1"}


async def test_a_job_at_work_goes_on_without_its_runtime(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.at_work()
    await cluster.store.delete("RLRuntime", "gpu", namespace="")
    cluster.restart()
    await cluster.settle()
    assert (await cluster.status())["state"] in ("Running", "Profiling")
    _, reason, message = await cluster.condition("Valid")
    assert reason == "RuntimeChanged"
    assert "cannot be used any more (spec.runtime names RLRuntime 'gpu', which is not there" in message


async def test_a_copy_that_cannot_be_read_leaves_the_job_alone(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.at_work()
    pods = await cluster.names("Pod")
    broken = {"runtime": {"name": "gpu", "spec": {"poolDefaults": {"slots": {"perPod": "eight"}}}}}
    await cluster.store.patch("RLJob", "math", namespace="team", patch={"status": broken}, subresource="status")
    await cluster.settle()
    status, reason, message = await cluster.condition("Valid")
    assert (status, reason) == ("False", "RuntimeInvalid")
    assert message.startswith("status.runtime, which the job began with, cannot be read any more (")
    assert message.endswith("; suspend the job and resume it to have what RLRuntime 'gpu' says now")
    assert await cluster.names("Pod") == pods
    assert (await cluster.status())["runtime"]["spec"]["poolDefaults"]["slots"] == {"perPod": "eight"}


async def test_a_resume_takes_what_the_runtime_says_by_then(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.at_work()
    await cluster.suspend(True)
    await cluster.put(**image("ours:2"))
    for pod in await cluster.names("Pod"):
        await cluster.store.delete("Pod", pod, namespace="team", grace_period_s=0)
    await cluster.settle()
    assert (await cluster.status())["state"] == "Suspended"
    await cluster.suspend(False)
    await cluster.settle()
    assert await cluster.images() == {"ours:2"}
    assert (await cluster.status())["runtime"]["spec"] == image("ours:2")


async def test_a_job_that_starts_takes_a_runtime_that_is_repaired(cluster):
    """An image that cannot be had holds no step that could be lost."""
    await cluster.put(**image("nowhere:1"))
    await cluster.apply(named())
    await cluster.settle(3)
    assert (await cluster.status())["state"] == "Starting"
    await cluster.put(**image("ours:1"))
    await cluster.settle()
    assert await cluster.images() == {"ours:1"}


async def test_a_job_without_a_runtime_asks_nobody(cluster):
    await cluster.apply()
    cluster.reconciler._runtimes = None
    await cluster.settle()
    assert "runtime" not in await cluster.status()


# --- the rule alone ---------------------------------------------------------------------------------------------------

OURS, OTHER = (RLRuntimeSpec.model_validate(image(name)) for name in ("ours", "other"))


def began(state, *, attempt=1, name="gpu"):
    kept = RuntimeStatus(name=name, generation=1, spec=image("ours"))
    return RLJobStatus(state=state, attempt=attempt, runtime=kept)


@pytest.mark.parametrize(
    ("status", "found", "spec", "reason"),
    [
        (RLJobStatus(), OTHER, OTHER, "Accepted"),
        (RLJobStatus(), None, None, "RuntimeNotFound"),
        (began("Queued", attempt=0), OTHER, OTHER, "Accepted"),
        (began("Running"), OTHER, OURS, "RuntimeChanged"),
        (began("Running"), OURS, OURS, "Accepted"),
        (began("Running"), None, OURS, "RuntimeChanged"),
        (began("Recovering"), OTHER, OURS, "RuntimeChanged"),
        (began("Stalled"), None, OURS, "RuntimeChanged"),
        (began("Starting"), OTHER, OTHER, "Accepted"),
        (began("Starting"), None, OURS, "RuntimeChanged"),
        (began("Suspended"), OTHER, OTHER, "Accepted"),
        (began("Suspended"), None, None, "RuntimeNotFound"),
        (began("Queued"), None, None, "RuntimeNotFound"),
        (began("Running", name="cpu"), OTHER, OTHER, "Accepted"),
    ],
)
def test_which_runtime_it_is(status, found, spec, reason):
    here = missing("gpu") if found is None else RuntimeFound(name="gpu", generation=7, spec=found)
    view = runtime.judge(here, status)
    assert (view.spec, str(view.reason)) == (spec, reason)
    if view.spec is not None:
        assert view.kept is not None
        assert view.kept.generation == (1 if spec is OURS else 7)


# --- asking -----------------------------------------------------------------------------------------------------------


class Asked(MemoryStore):
    def __init__(self):
        super().__init__()
        self.calls, self.error = [], None

    async def get(self, kind, name, *, namespace="default", live=True):
        self.calls.append((kind, name))
        if self.error is not None:
            raise self.error
        return gpu(**image("ours:1")) | {"metadata": {"name": name, "generation": 3}}


async def test_one_call_answers_for_a_while_however_many_jobs_ask():
    store, now = Asked(), [0.0]
    known = Runtimes(store, clock=lambda: now[0])
    for at, age_s, calls in ((0.0, 1.0, 1), (0.9, 1.0, 1), (1.1, 30.0, 1), (1.1, 1.0, 2), (31.2, 30.0, 3)):
        now[0] = at
        found = await known.look("gpu", max_age_s=age_s)
        assert (found.generation, len(store.calls)) == (3, calls)
    for number in range(MOST):
        await known.look(f"r{number}", max_age_s=30.0)
    assert len(known._known) == MOST
    await known.look("gpu", max_age_s=30.0)
    assert store.calls[-1] == ("RLRuntime", "gpu"), "the one that was asked longest ago has made room"


async def test_a_right_that_is_missing_is_said_and_silence_is_no_answer():
    store = Asked()
    known = Runtimes(store)
    store.error = Forbidden("get of RLRuntime gpu", got="403 Forbidden: no")
    found = await known.look("gpu", max_age_s=0)
    assert (found.spec, str(found.reason)) == (None, "RuntimeRefused")
    assert found.message == (
        "spec.runtime names RLRuntime 'gpu', which the operator may not read (403 Forbidden: no); give it that right "
        "(value rbac.kindsOfTheCluster of the chart)"
    )
    store.error = ClusterBusy("get of RLRuntime gpu", got="503")
    with pytest.raises(ClusterBusy):
        await known.look("gpu", max_age_s=0)
    store.error = InvariantBroken("a bug")
    with pytest.raises(InvariantBroken):
        await known.look("gpu", max_age_s=0)


async def test_a_job_at_work_goes_on_while_nobody_says_what_its_runtime_is(cluster):
    await cluster.put(**image("ours:1"))
    await cluster.apply(named())
    await cluster.at_work()
    store = Asked()
    store.error = ClusterBusy("get of RLRuntime gpu", got="503")
    cluster.reconciler._runtimes = Runtimes(store)
    await cluster.settle()
    assert store.calls
    assert (await cluster.condition("Valid"))[:2] == ("True", "Accepted")
    assert await cluster.images() == {"ours:1"}
