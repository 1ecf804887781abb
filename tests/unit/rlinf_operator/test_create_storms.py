"""A large job is made in several passes, which count as one. A full quota is asked once in a pause."""

import dataclasses
import time

import pytest

from rlinf_api import declared
from rlinf_api.errors import RLinfError
from rlinf_operator.manifests import pods
from rlinf_operator.policies.pod_view import PodPlace, PodView
from rlinf_operator.reconcile import decide, events
from rlinf_operator.reconcile.state import DeletePod
from tests.builders import ppo_job
from tests.fakes.cluster import KEY, Cluster
from tests.fakes.quota import Quota, World

FULL = RLinfError("pods are forbidden: exceeded quota: team")


def large(pods=20):
    job = ppo_job()
    job.spec["pools"][0]["pods"] = pods
    job.spec["roles"][0]["workers"] = 4 * pods
    return job


async def test_a_job_above_the_bound_of_a_pass_is_made_by_the_next_ones_with_one_attempt(monkeypatch):
    monkeypatch.setattr(decide, "PER_PASS", 8)
    cluster = Cluster()
    await cluster.apply(large(20))
    seen, asked_at_once = [], []
    for _ in range(6):
        applied = await cluster.reconciler.pass_over(KEY)
        seen.append(len(await cluster.names("Pod")))
        asked_at_once.append(applied.progressed)
        if 0 < seen[-1] < 22:
            status = await cluster.status()
            assert status["attempt"] == 0
            assert (await cluster.condition("PodsReady"))[1:] == (
                "PodsStarting", f"{22 - seen[-1]} pods are still to be made",
            )  # fmt: skip
    begun = seen.index(8)
    assert seen[begun:][:4] == [8, 16, 22, 22]
    assert asked_at_once[begun:][:4] == [True, True, False, False], "the next pass follows at once"
    await cluster.settle()
    status = await cluster.status()
    assert (status["attempt"], status.get("restarts", [])) == (1, [])
    assert {name.rsplit("-", 1)[1] for name in await cluster.names("Pod")} == {"a1"}
    assert (await cluster.condition("PodsReady"))[:2] == ("True", "PodsReady")


async def test_an_operator_that_dies_between_two_of_them_goes_on(monkeypatch):
    monkeypatch.setattr(decide, "PER_PASS", 8)
    cluster = Cluster()
    await cluster.apply(large(20))
    for _ in range(12):
        await cluster.reconciler.pass_over(KEY)
        cluster.restart()
    assert len(await cluster.names("Pod")) == 22
    assert (await cluster.status())["attempt"] == 1


class CountingQuota(Quota):
    """Notes the pods that the API server is asked for."""

    def __init__(self):
        super().__init__()
        self.asked: list[str] = []

    async def create(self, obj):
        if obj["kind"] == "Pod":
            self.asked.append(obj["metadata"]["name"])
        return await super().create(obj)


class Counting(World):
    def __init__(self):
        super().__init__()
        self.store = self.quota = CountingQuota()
        self.asked = self.quota.asked
        self.restart()


async def full(pods=4):
    world = Counting()
    world.quota.most = pods
    await world.apply(large(20))
    await world.passes(3)
    return world


async def test_a_full_quota_is_asked_for_few_pods_and_said_with_its_own_reason():
    world = await full(pods=4)
    assert len(await world.names("Pod")) == 4
    status, reason, message = await world.condition("PodsReady")
    assert (status, reason) == ("False", "QuotaExceeded")
    assert "exceeded quota" in message
    assert message.endswith("and 17 more")
    assert [e["type"] for e in world.events("QuotaExceeded")] == ["Warning"]
    world.asked.clear()
    await world.passes(1)
    assert len(world.asked) == 1, "what was refused is tried with one pod"


async def one(world, *, min_s):
    """A pass as a worker makes it, with a pause after it that no test waits for."""
    settings = world.reconciler._settings
    world.reconciler._settings = type(settings)(**{**vars_of(settings), "retry_min_s": min_s})
    await world.reconciler._one(KEY)


def vars_of(settings):
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


async def test_passes_for_other_reasons_do_not_ask_a_full_quota_again_before_the_pause_is_over():
    world = await full()
    await one(world, min_s=60)
    world.asked.clear()
    before = await world.condition("PodsReady")
    for _ in range(5):
        await world.reconciler._one(KEY)
        await world.kubelet()
    assert world.asked == []
    assert await world.condition("PodsReady") == before
    memory = world.reconciler._memory[KEY]
    assert memory.failures == 1, "what was not asked is no further failure"
    assert memory.full.until - time.monotonic() <= 60


@pytest.mark.parametrize("why", ["edit", "a pod that is gone", "the pause is over"])
async def test_a_quota_that_may_have_room_is_asked_at_once(why):
    world = await full()
    await one(world, min_s=60)
    world.asked.clear()
    world.quota.most = 1000
    if why == "edit":
        await world.edit(flow={"name": "ppo", "steps": 7})
    elif why == "a pod that is gone":
        [pod, *_] = [name for name in await world.names("Pod") if "sim" in name]
        await world.store.delete("Pod", pod, namespace="team", grace_period_s=0)
    else:
        memory = world.reconciler._memory[KEY]
        memory.full = dataclasses.replace(memory.full, until=time.monotonic())
    await world.passes(2)
    assert len(await world.names("Pod")) == 22


async def test_room_that_is_found_ends_the_pause():
    world = await full()
    await one(world, min_s=60)
    world.quota.most = 1000
    await world.edit(flow={"name": "ppo", "steps": 7})
    await world.passes(1)
    assert world.reconciler._memory[KEY].full is None


@pytest.mark.parametrize("there", [0, 1000])
async def test_a_pass_computes_no_more_for_a_large_job_than_what_it_makes(monkeypatch, there):
    """Passes share one thread: what one of them computes, each other job waits for."""
    pods_, world = 2000, large(2000).world()
    world.step()  # its plan
    with monkeypatch.context() as earlier:
        earlier.setattr(decide, "PER_PASS", there)
        for pod in world.decide().create_pods:  # the status stays as it is until the last one is made
            world._add(pod)
    observed = dataclasses.replace(world.observed(), pods=Looked(world.observed().pods))
    rendered, compared, allotted = Counted(pods, "worker"), Counted(PodPlace, "__eq__"), Counted(declared, "allotment")
    for counted in (rendered, compared, allotted):
        counted.put(monkeypatch)
    decision = decide.decide(observed, now=world.now)
    assert len(decision.create_pods) == decide.PER_PASS
    assert len(decision.later_pods) == pods_ + 2 - there - decide.PER_PASS
    assert (decision.create_pods[0]["metadata"]["name"] == "math-driver-a1") == (there == 0)
    assert rendered.calls == decide.PER_PASS - (there == 0), "all but the driver"
    assert compared.calls < 20 * pods_, "each place a few times, and not with each other one"
    assert observed.pods.times < 40, "all pods a few times, and not for each that is missing"
    assert allotted.calls < 20, "once for an entry of the plan, whatever its workers"


def test_what_is_made_and_deleted_is_written_down_without_a_look_at_all_pods_for_each():
    world = large(100).world()
    world.step()
    world.step()
    observed = dataclasses.replace(world.observed(), pods=Looked(world.observed().pods))
    log = events.PodLog(observed)
    for pod in world.pods.values():
        log.made(pod)
        log.deleted(DeletePod(name=pod["metadata"]["name"], uid=pod["metadata"]["uid"], why="gone"))
    assert len(world.pods) == 102
    assert observed.pods.times == 2


class Looked(tuple[PodView, ...]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


class Counted:
    def __init__(self, of, name):
        self.of, self.name, self.calls, self._real = of, name, 0, getattr(of, name)

    def put(self, monkeypatch):
        def call(*args, **kwargs):
            self.calls += 1
            return self._real(*args, **kwargs)

        monkeypatch.setattr(self.of, self.name, call)
