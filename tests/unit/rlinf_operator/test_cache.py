"""The cache under everything that can happen to a list and a watch, over an API server that does it when asked."""

import asyncio
import random
import time
from contextlib import asynccontextmanager

import pytest

from rlinf_api import names
from rlinf_api.errors import InvariantBroken, RLinfError
from rlinf_api.store import NotFound
from rlinf_operator.clients import reflector
from rlinf_operator.clients.cache import CachedStore

LABELS = {names.LABEL_JOB: "math", names.LABEL_JOB_UID: "u1"}
TIMEOUT_S = 20.0


def pod(name="a", labels=LABELS, **more):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": labels, "managedFields": [{"manager": "x"}]},
        "spec": {"nodeName": "n1", "containers": [{"name": "agent"}]},
        "status": {"phase": "Pending"},
        **more,
    }


class Cache:
    def __init__(self, server, **settings):
        self.seen: list[tuple[str, str]] = []
        self.jobs_written: list[object] = []
        self.api = server.client()
        self.store = CachedStore(
            self.api,
            metrics=server.metrics,
            on_change=lambda obj: self.seen.append((obj["kind"], obj["metadata"]["name"])),
            on_job_written=self.jobs_written.append,
            **({"inactivity_s": 30.0} | settings),
        )

    async def pods(self):
        listing = await self.store.list("Pod", namespace="team", label_selector=f"{names.LABEL_JOB_UID}=u1")
        return {obj["metadata"]["name"]: obj for obj in listing.items}


@asynccontextmanager
async def running(server, **settings):
    cache = Cache(server, **settings)
    group = asyncio.TaskGroup()
    async with group:
        before = set(asyncio.all_tasks())
        cache.store.start(group)
        try:
            await cache.store.wait_listed(timeout_s=TIMEOUT_S)
            yield cache
        finally:
            for task in set(asyncio.all_tasks()) - before:
                if "watch of" in task.get_name():
                    task.cancel()


async def until(holds, what):
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = holds()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
        await asyncio.sleep(0.01)


def relists(server, why):
    return server.metrics.registry.get_sample_value("rlinf_operator_relists_total", {"kind": "Pod", "why": why}) or 0


async def has(cache, *wanted):
    return set(await cache.pods()) == set(wanted)


async def test_what_exists_and_what_changes_is_read_without_a_call(server):
    server.put(pod("a"))
    async with running(server) as cache:
        assert await has(cache, "a")
        server.put(pod("b"))
        await until(lambda: has(cache, "a", "b"), "b")
        server.remove("Pod", "a")
        await until(lambda: has(cache, "b"), "a to be gone")
        assert cache.seen[-1] == ("Pod", "a")
        assert server.count("GET", "/pods/") == 0


async def test_only_what_a_pass_reads_is_kept(server):
    server.put(pod("a"))
    async with running(server) as cache:
        found = (await cache.pods())["a"]
        assert found["spec"] == {"nodeName": "n1"}
        assert "managedFields" not in found["metadata"]


async def test_objects_without_the_label_are_not_there_but_can_be_got(server):
    server.put(pod("theirs", labels={}))
    async with running(server) as cache:
        assert await has(cache)
        assert (await cache.store.get("Pod", "theirs", namespace="team"))["metadata"]["name"] == "theirs"


async def test_an_own_write_is_read_at_once_though_the_watch_is_late(server):
    async with running(server) as cache:
        server.silence()
        made = await cache.store.create(pod("a"))
        assert await has(cache, "a")
        await cache.store.patch("Pod", "a", patch={"status": {"phase": "Running"}}, namespace="team")
        assert (await cache.pods())["a"]["status"]["phase"] == "Running"
        await cache.store.delete("Pod", "a", namespace="team", uid=made["metadata"]["uid"])
        assert await has(cache)
        # The watch now tells all of it, old states first: none of them comes back.
        server.silence(False)
        server.put(pod("end"))
        states = set()

        async def ended():
            states.update(await cache.pods())
            return "end" in states

        await until(ended, "the watch to catch up")
        assert states == {"end"}


async def test_of_own_deletions_that_the_watch_has_not_told_yet_the_latest_are_remembered(server, monkeypatch):
    monkeypatch.setattr(reflector, "TOMBSTONES", 1)
    async with running(server) as cache:
        server.silence()
        for name in ("a", "b"):
            made = await cache.store.create(pod(name))
            await cache.store.delete("Pod", name, namespace="team", uid=made["metadata"]["uid"])
        server.silence(False)
        server.put(pod("end"))
        await until(lambda: has(cache, "end"), "the watch to catch up")
        assert cache.seen.count(("Pod", "b")) == 1, "its end, and no state before it"
        assert cache.seen.count(("Pod", "a")) == 2


async def test_a_dropped_watch_goes_on_where_it_stood(server):
    server.put(pod("a"))
    async with running(server) as cache:
        server.break_watches()
        server.put(pod("b"))
        await until(lambda: has(cache, "a", "b"), "b")
        assert relists(server, "Start") == 1
        assert relists(server, "Expired") == 0


async def test_after_410_a_list_finds_what_came_and_what_went(server):
    server.put(pod("a"))
    server.put(pod("b"))
    async with running(server) as cache:
        server.remove("Pod", "a", silently=True)
        server.put(pod("c"), silently=True)
        server.expire()
        await until(lambda: has(cache, "b", "c"), "the list")
        assert ("Pod", "a") in cache.seen, "nobody was told that a is gone"
        assert relists(server, "Expired") == 1


async def test_a_silent_watch_is_listed_anew(server):
    server.put(pod("a"))
    async with running(server, inactivity_s=0.3) as cache:
        server.silence()
        server.put(pod("b"))
        server.remove("Pod", "a")
        await until(lambda: has(cache, "b"), "the list")
        assert relists(server, "Silent") >= 1


async def test_a_watch_that_is_refused_is_tried_again_with_pauses(server):
    async with running(server) as cache:
        server.fault(status=500, times=3, watch=True, path="/pods")
        server.break_watches()
        server.put(pod("a"))
        await until(lambda: has(cache, "a"), "the watch")
        assert server.count("GET", "/pods?watch") <= 6


async def test_watches_that_deliver_and_are_cut_early_leave_no_pause_behind(server, monkeypatch):
    """Each is a fresh try. The pauses of thirty cuts in a row would add up to three minutes."""
    monkeypatch.setattr(reflector, "RETRY_MIN_S", 0.01)
    async with running(server) as cache:
        for number in range(30):
            server.break_watches()
            server.put(pod(f"p{number}"))
            await until(lambda number=number: ("Pod", f"p{number}") in cache.seen, f"the event after cut {number}")


async def test_a_watch_that_lived_for_a_while_leaves_no_pause_behind(server, monkeypatch):
    monkeypatch.setattr(reflector, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(reflector, "STEADY_S", 0.0)
    async with running(server):
        await until(lambda: server.break_watches() or server.count("GET", "/pods?watch") > 30, "thirty watches")


async def test_lists_are_paced_where_each_watch_after_them_is_too_old(server, monkeypatch):
    """A list of all pods costs more than a watch: an event in between is no reason to hurry."""
    monkeypatch.setattr(reflector, "RETRY_MIN_S", 0.1)
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    async with running(server) as cache:
        started = time.monotonic()
        for number in range(4):
            server.expire()
            server.put(pod("of-the-list"))
            await until(lambda number=number: relists(server, "Expired") > number, f"list {number}")
            server.put(pod(f"p{number}"))
            await until(lambda number=number: ("Pod", f"p{number}") in cache.seen, f"p{number}")
        assert time.monotonic() - started >= 0.1 + 0.2 + 0.4 + 0.8


async def test_a_storm_at_the_first_list_delays_it(server):
    server.put(pod("a"))
    server.fault(status=503, times=12, method="GET")
    async with running(server) as cache:
        assert await has(cache, "a")


async def test_without_a_first_list_the_kinds_that_miss_are_named(server):
    server.fault(status=403, times=1000, path="/rlplans")
    cache = Cache(server)

    async def start():
        async with asyncio.TaskGroup() as group:
            cache.store.start(group)
            await cache.store.wait_listed(timeout_s=3.0)

    with pytest.raises(ExceptionGroup) as caught:
        await start()
    assert "still missing: RLPlan" in str(caught.value.exceptions[0])


async def test_a_write_that_is_younger_than_a_list_survives_it(server):
    """The list was taken, the pod made, and then the list arrives."""
    async with running(server) as cache:
        server.fault(status=500, method="GET", path="/pods", watch=True)
        made = await cache.store.create(pod("a"))
        reflector = next(r for r in cache.store.reflectors if r.kind == "Pod")
        older = int(made["metadata"]["resourceVersion"]) - 1

        class Late:
            items, resource_version = [], str(older)

        async def late(*_, **__):
            yield Late

        reflector._api = type("Api", (), {"pages": staticmethod(late)})()
        await reflector._list("Test")
        assert await has(cache, "a")


async def test_an_object_made_again_under_its_name_replaces_the_old_one(server):
    async with running(server) as cache:
        first = server.put(pod("a"))
        await until(lambda: has(cache, "a"), "a")
        server.remove("Pod", "a")
        second = server.put(pod("a"))

        async def is_second():
            return (await cache.pods()).get("a", first)["metadata"]["uid"] == second["metadata"]["uid"]

        await until(is_second, "the second a")
        assert first["metadata"]["uid"] != second["metadata"]["uid"]


async def test_jobs_are_read_live(server):
    job = {"apiVersion": names.API_VERSION, "kind": "RLJob", "metadata": {"name": "math", "namespace": "team"}}
    server.put(job)
    async with running(server) as cache:
        await cache.store.get("RLJob", "math", namespace="team")
        await cache.store.get("RLJob", "math", namespace="team")
        assert server.count("GET", "/rljobs/math") == 2


async def test_secrets_are_never_listed_or_watched(server):
    server.put({"kind": "Secret", "metadata": {"name": "s", "namespace": "team", "labels": LABELS}})
    async with running(server):
        assert server.count("GET", "secrets") == 0


async def test_the_cache_is_asked_for_one_job_at_a_time(server):
    async with running(server) as cache:
        with pytest.raises(InvariantBroken):
            await cache.store.list("Pod", namespace="team", label_selector="")
        with pytest.raises(InvariantBroken):
            await cache.store.list("RLJob", namespace="team", label_selector=f"{names.LABEL_JOB}=math")
        with pytest.raises(RLinfError):
            cache.store.watch("Pod")


async def test_age_grows_while_a_watch_says_nothing(server):
    async with running(server) as cache:
        server.silence()
        await until(lambda: cache.store.age_s()["Pod"] >= 0.2, "silence to show")
        assert cache.store.counts()["Pod"] == 0


async def test_an_own_write_of_a_job_is_told_of(server):
    job = server.put(
        {
            "apiVersion": names.API_VERSION,
            "kind": "RLJob",
            "metadata": {"name": "math", "namespace": "team"},
            "spec": {},
        }
    )
    async with running(server) as cache:
        written = await cache.store.replace({**job, "status": {"step": 1}}, subresource="status")
        await cache.store.create(pod("a"))
        assert cache.jobs_written == [written], "of each write of a job, and of nothing else"


async def test_a_pod_that_was_given_a_node_wakes_nobody_until_it_starts(server):
    server.put(pod("a", spec={}))
    async with running(server) as cache:
        cache.seen.clear()
        server.put(pod("a"))
        server.put(pod("a", status={"phase": "Running"}))
        await until(lambda: cache.seen, "the start")
        assert cache.seen == [("Pod", "a")]
        assert (await cache.pods())["a"]["spec"] == {"nodeName": "n1"}


async def test_a_child_in_no_copy_costs_no_call_where_the_caller_is_content_with_copies(server):
    async with running(server) as cache:
        with pytest.raises(RLinfError) as caught:
            await cache.store.get("Service", "math", namespace="team", live=False)
        assert isinstance(caught.value, NotFound)
        assert server.count("GET", "/services/math") == 0
        with pytest.raises(RLinfError):
            await cache.store.get("Service", "math", namespace="team")
        assert server.count("GET", "/services/math") == 1
