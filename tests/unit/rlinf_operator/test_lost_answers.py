"""Own writes that are done and whose answer is lost, with watches that are late: no pass decides on less than them."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rlinf_api import names, times
from rlinf_api.errors import ClusterBusy, Conflict, RLinfError
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_operator import access
from rlinf_operator.clients import cache, kube
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_operator.settings import OperatorSettings
from rlinf_scheduler.service import Planning
from tests.builders import ppo_job
from tests.fakes.api_server import FakeApiServer
from tests.fakes.cluster import AUTHORITY, Cluster
from tests.fakes.drivers import FakeDrivers

KEY = JobKey(namespace="team", name="math")
LABELS = {names.LABEL_JOB: "math", names.LABEL_JOB_UID: "u1"}
TIMEOUT_S = 20.0


def pod(name="a", **more):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": LABELS},
        "spec": {"containers": [{"name": "agent"}]},
        "status": {"phase": "Pending"},
        **more,
    }


class World:
    """The operator's copies over an API server."""

    def __init__(self, server):
        self.server, self.seen, self.changed = server, [], asyncio.Event()
        self.store = CachedStore(server.client(), metrics=server.metrics, on_change=self._changed, inactivity_s=30.0)

    def quiet_and_losing(self, method, *, then=0, **more):
        """Watches say nothing, and the next write is done without an answer. A second try is refused with `then`."""
        self.server.silence()
        self.server.fault(status=500, method=method, after=True, **more)
        if then:
            self.server.fault(status=then, method=method, headers={"Retry-After": "60"}, **more)

    def _changed(self, obj):
        self.seen.append((obj["kind"], obj["metadata"]["name"]))
        self.changed.set()

    async def until_seen(self, kind, name):
        async with asyncio.timeout(TIMEOUT_S):
            while (kind, name) not in self.seen:
                self.changed.clear()
                await self.changed.wait()

    async def pods(self):
        listing = await self.store.list("Pod", namespace="team", label_selector=f"{names.LABEL_JOB_UID}=u1")
        return {found["metadata"]["name"]: found for found in listing.items}


@asynccontextmanager
async def running():
    async with FakeApiServer() as server, asyncio.TaskGroup() as group:
        world = World(server)
        before = set(asyncio.all_tasks())
        world.store.start(group)
        try:
            await world.store.wait_listed(timeout_s=TIMEOUT_S)
            yield world
        finally:
            for task in set(asyncio.all_tasks()) - before:
                if "watch of" in task.get_name():
                    task.cancel()


async def refused(call) -> RLinfError:
    with pytest.raises(RLinfError) as caught:
        await call
    return caught.value


async def test_a_create_that_is_found_to_be_taken_is_in_the_next_read():
    async with running() as world:
        world.quiet_and_losing("POST")
        assert isinstance(await refused(world.store.create(pod())), AlreadyExists)
        assert set(await world.pods()) == {"a"}
        assert world.server.count("GET", "/pods/a") == 1
        await world.pods()
        assert world.server.count("GET", "/pods/a") == 1, "asked once more than needed"


async def test_a_create_whose_answer_never_comes_is_in_the_next_read():
    async with running() as world:
        world.quiet_and_losing("POST", then=429)
        assert isinstance(await refused(world.store.create(pod())), ClusterBusy)
        assert set(await world.pods()) == {"a"}


async def test_a_create_that_a_quota_refuses_when_it_was_done_already_is_in_the_next_read():
    """The pod itself has filled it."""
    async with running() as world:
        world.quiet_and_losing("POST", then=403)
        assert (await refused(world.store.create(pod()))).reason == "Forbidden"
        assert set(await world.pods()) == {"a"}


async def test_a_deletion_that_finds_nothing_left_to_delete_is_in_the_next_read():
    async with running() as world:
        made = await world.store.create(pod())
        world.quiet_and_losing("DELETE")
        deletion = world.store.delete("Pod", "a", namespace="team", uid=made["metadata"]["uid"])
        assert isinstance(await refused(deletion), NotFound)
        assert await world.pods() == {}


async def test_a_deletion_whose_answer_never_comes_is_in_the_next_read():
    async with running() as world:
        await world.store.create(pod())
        world.quiet_and_losing("DELETE", then=429)
        assert isinstance(await refused(world.store.delete("Pod", "a", namespace="team")), ClusterBusy)
        assert await world.pods() == {}
        # The same name, made anew: the old one's end, told late, does not take the new one away.
        await world.store.create(pod(status={"phase": "Running"}))
        world.server.silence(False)
        world.server.put(pod("end"))
        await world.until_seen("Pod", "end")
        assert (await world.pods())["a"]["status"]["phase"] == "Running"


async def test_a_deletion_that_meets_another_object_under_the_name_shows_that_one():
    async with running() as world:
        first = await world.store.create(pod())
        world.server.silence()
        world.server.remove("Pod", "a")
        second = world.server.put(pod())
        deletion = world.store.delete("Pod", "a", namespace="team", uid=first["metadata"]["uid"])
        assert isinstance(await refused(deletion), Conflict)
        assert (await world.pods())["a"]["metadata"]["uid"] == second["metadata"]["uid"]


async def test_a_patch_whose_answer_never_comes_is_in_the_next_read():
    async with running() as world:
        await world.store.create(pod())
        world.quiet_and_losing("PATCH", then=429)
        change = {"status": {"phase": "Failed"}}
        assert isinstance(await refused(world.store.patch("Pod", "a", patch=change, namespace="team")), ClusterBusy)
        assert (await world.pods())["a"]["status"]["phase"] == "Failed"


async def test_a_child_that_is_got_by_name_is_asked_for_where_its_write_is_in_doubt():
    """Also before a job's first pass, which is content with copies."""
    async with running() as world:
        service = {"kind": "Service", "metadata": {"name": "math", "namespace": "team", "labels": LABELS}}
        world.quiet_and_losing("POST", then=429)
        assert isinstance(await refused(world.store.create(service)), ClusterBusy)
        found = await world.store.get("Service", "math", namespace="team", live=False)
        assert found["metadata"]["name"] == "math"


async def test_as_long_as_nobody_can_look_nothing_is_read():
    async with running() as world:
        world.quiet_and_losing("POST", then=429)
        await refused(world.store.create(pod()))
        world.server.fault(status=429, method="GET", path="/pods/a", headers={"Retry-After": "60"})
        listing = world.store.list("Pod", namespace="team", label_selector=f"{names.LABEL_JOB_UID}=u1")
        assert isinstance(await refused(listing), ClusterBusy)
        assert set(await world.pods()) == {"a"}


async def test_a_plain_refusal_leaves_no_doubt():
    async with running() as world:
        for status in (403, 422):
            world.server.fault(status=status, method="POST")
            await refused(world.store.create(pod()))
        world.server.fault(status=429, method="POST", headers={"Retry-After": "9"})
        assert isinstance(await refused(world.store.create(pod())), ClusterBusy)
        assert await world.pods() == {}
        assert world.server.count("GET", "/pods/a") == 0


async def test_what_a_live_read_finds_is_in_the_copy_and_told():
    async with running() as world:
        world.server.silence()
        world.server.put(pod())
        await world.store.get("Pod", "a", namespace="team")
        assert set(await world.pods()) == {"a"}
        assert world.seen == [("Pod", "a")]


@pytest.mark.parametrize("answer", ["wrote", "saw"])
async def test_an_answer_that_comes_after_the_objects_end_brings_it_not_back(answer):
    async with running() as world:
        made = world.server.put(pod())
        await world.until_seen("Pod", "a")
        world.server.remove("Pod", "a")
        world.server.put(pod("end"))
        await world.until_seen("Pod", "end")
        reflector = next(r for r in world.store.reflectors if r.kind == "Pod")
        getattr(reflector, answer)(made)
        assert set(await world.pods()) == {"end"}


async def test_of_more_doubts_than_are_kept_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(cache, "MOST_DOUBTS", 3)
    async with running() as world:
        for number in (0, 1, 2, 3, 1, 4):
            world.quiet_and_losing("POST", then=429)
            await refused(world.store.create(pod(f"p{number}")))
        assert set(await world.pods()) == {"p1", "p3", "p4"}, "the one of p1 is young again"
        assert world.server.count("GET", "/pods/p") == 3
        await world.pods()
        assert world.server.count("GET", "/pods/p") == 3


async def test_a_pod_whose_create_was_done_and_not_answered_is_neither_doubled_nor_counted_as_lost():
    async with running() as world:
        reconciler = Reconciler(
            store=world.store, scheduler=Planning(world.server.client()), drivers=FakeDrivers, authority=AUTHORITY,
            settings=OperatorSettings(progress_interval_s=0.0), clock=times.utc_now, follows=(),
        )  # fmt: skip
        world.server.put(ppo_job().build())
        await reconciler.pass_over(KEY)
        await world.until_seen("RLPlan", "math-p1")
        world.quiet_and_losing("POST", path="/pods")
        for _ in range(3):
            await reconciler.pass_over(KEY)
        first = {name for kind, _, name in world.server.objects if kind == "Pod"}
        assert {name.rpartition("-")[2] for name in first} == {"a1"}
        world.server.silence(False)
        world.server.put(pod("end"))
        await world.until_seen("Pod", "end")
        await reconciler.pass_over(KEY)
        assert {name for kind, _, name in world.server.objects if kind == "Pod"} == first | {"end"}
        status = world.server.objects["RLJob", "team", "math"]["status"]
        assert status["restarts"] == []
        assert next(c["status"] for c in status["conditions"] if c["type"] == "Degraded") == "False"


async def test_a_pod_whose_name_was_taken_for_a_moment_only_counts_as_refused_and_not_as_lost():
    cluster = Cluster()
    await cluster.apply()
    cluster.store.refuse["create", "Pod"] = AlreadyExists("create of a pod")
    await cluster.settle(2)
    assert await cluster.names("Pod") == []
    cluster.store.refuse.clear()
    await cluster.settle()
    assert {name.rpartition("-")[2] for name in await cluster.names("Pod")} == {"a1"}
    assert (await cluster.status())["restarts"] == []


def test_whatever_is_kept_in_copies_may_be_looked_at():
    """Without the verb, a doubt would never be settled, and no pass over its job come to an end."""
    plurals = {kube.RESOURCES[kind][1] for kind in cache.CACHED}
    rules = [rule for rule in access.OPERATOR if rule.resource in plurals]
    assert {rule.resource for rule in rules} == plurals
    assert all({"get", "list", "watch"} <= set(rule.verbs) for rule in rules)
