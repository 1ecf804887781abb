"""What a leader puts together: which part gets which setting, what probes look at, what ends it and what it leaves."""

import asyncio
import contextlib
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api.errors import InvariantBroken
from rlinf_operator import leading, process
from rlinf_operator.handlers.known import Sight
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.process import ProcessSettings
from tests.builders import NOW
from tests.fakes.cluster import AUTHORITY, QUICK

TIMEOUT_S = 20.0
KEY = JobKey(namespace="team", name="math")
LABELS = {names.LABEL_JOB: "math", names.LABEL_JOB_UID: "u1", names.LABEL_COMPONENT: "worker"}
CHILD = {"metadata": {"name": "math-sim-0-a1", "namespace": "team", "uid": "p1", "labels": LABELS}}


class Kopf:
    """Stands for handlers.rljobs.Watcher."""

    def __init__(self, told, *, namespaces, login, inactivity_s):
        self.ended, self.given = asyncio.Event(), (told, namespaces, login, inactivity_s)
        self.began = self.stopped = False

    def start(self):
        self.began = True

    async def stop(self):
        self.stopped = True


class World:
    """A leader over an API server on loopback, its parts the real ones but Kopf, by name; `given`: what they got."""

    def __init__(self, server, monkeypatch, folder, **process):
        self.server, self.folder = server, folder
        self.made: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.process = ProcessSettings(**process)
        self.operator = replace(QUICK, scheduler_address="127.0.0.1:1", certificate_life_s=3600.0, driver_late_s=7.0)
        self.probes = Probes(server.metrics)
        AUTHORITY.write_folder(folder, "operator")

        async def nothing():
            """The certificates are there."""

        def certificates(api, **given):
            self.given["Certificates"] = given
            return SimpleNamespace(authority=AUTHORITY, begin=nothing, run=asyncio.Event().wait)

        monkeypatch.setattr(leading, "Certificates", certificates)
        monkeypatch.setattr(leading, "Watcher", Kopf)
        monkeypatch.setattr(leading, "login_of", lambda configuration: ("login of", configuration))
        for name in ("CachedStore", "Reconciler", "KnownJobs", "GrpcScheduler", "Refusals", "GrpcDrivers", "Watcher"):
            self._noted(monkeypatch, name, getattr(leading, name))
        self.standing = SimpleNamespace(**vars(server.connection))
        self.leader = self.leader_with(self.operator)

    def leader_with(self, operator):
        return leading.Leader(
            self.server.connection, standing=self.standing, probes=self.probes, folder=self.folder,
            metrics=self.server.metrics, process=self.process, operator=operator, clock=lambda: NOW,
        )  # fmt: skip

    def _noted(self, monkeypatch, name, kind):
        def make(*words, **given):
            self.given[name] = given
            self.made[name] = kind(*words, **given)
            return self.made[name]

        monkeypatch.setattr(leading, name, make)

    @contextlib.asynccontextmanager
    async def leads(self):
        self.task = asyncio.create_task(self.leader.run())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while "Watcher" not in self.made or not self.made["Watcher"].began:
                    assert not self.task.done(), self.task.exception()
                    await asyncio.sleep(0.01)
            yield self.made
        finally:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def world(server, monkeypatch, tmp_path):
    server.put({"apiVersion": "v1", "kind": "Pod", **CHILD, "spec": {}, "status": {"phase": "Pending"}})
    return lambda **process: World(server, monkeypatch, tmp_path, **process)


async def test_podgroups_are_those_of_the_scheduler_of_gangs_that_it_is_told(server, world):
    found: Any = world()
    found.leader = found.leader_with(replace(found.operator, gang_scheduler="volcano"))
    async with found.leads():
        asked = {path.partition("?")[0] for _, path in server.requests if "/podgroups" in path}
    assert asked == {"/apis/scheduling.volcano.sh/v1beta1/podgroups"}


async def test_each_part_gets_its_settings_and_what_it_shares_with_others(world):
    found: Any = world(watch_namespaces="team,b", watch_inactivity_s=77.0, ca_life_days=9.0, namespace="own")
    async with found.leads() as made:
        given = found.given
        assert given["Certificates"]["namespace"] == "own"
        assert given["Certificates"]["ca_life"] == timedelta(days=9)
        assert given["Certificates"]["leaf_life"] == timedelta(hours=1)
        assert given["Certificates"]["clock"]() == NOW
        assert given["GrpcScheduler"]["timeout_s"] == found.operator.call_timeout_s
        assert given["GrpcDrivers"]["late_s"] == 7.0
        assert given["GrpcDrivers"]["timeout_s"] == found.operator.call_timeout_s
        store, known, reconciler = given["CachedStore"], given["KnownJobs"], given["Reconciler"]
        assert (store["inactivity_s"], made["Watcher"].given[3]) == (77.0, 77.0)
        assert (reconciler["settings"], reconciler["follows"], reconciler["clock"]()) == (found.operator, (), NOW)
        assert reconciler["store"] is made["CachedStore"]
        assert reconciler["scheduler"] is made["GrpcScheduler"]
        assert reconciler["authority"] is AUTHORITY
        assert store["namespaces"] == made["Watcher"].given[1] == ("team", "b")
        assert store["refusals"] is made["Refusals"]
        assert {store["metrics"], known["metrics"], given["Refusals"]["metrics"]} == {found.server.metrics}
        assert store["watches"]._connection is found.standing, "beside the connections of passes"
        assert made["Watcher"].given[0] is made["KnownJobs"]
        assert known["enqueue"] == made["Reconciler"].enqueue
        assert made["Watcher"].given[2] == ("login of", found.server.connection.configuration)


async def test_probes_look_at_each_watch_and_the_queue(world):
    found: Any = world(watch_stale_s=33.0, queue_stale_s=44.0)
    assert found.probes.checks == {}
    async with found.leads() as made:
        limits = {name: check()[1] for name, check in found.probes.checks.items()}
        kinds = (
            "RLPlan",
            "Pod",
            "Service",
            "NetworkPolicy",
            "PodDisruptionBudget",
            "ConfigMap",
            "Workload",
            "PodGroup",
            "RLJob",
        )
        assert limits == {f"watch of {kind}": 33.0 for kind in kinds} | {"queue": 44.0}
        made["CachedStore"].age_s = lambda: {"Pod": 1.0, "RLPlan": 2.0}
        made["KnownJobs"].behind_s = lambda: 3.0
        made["KnownJobs"].counts = lambda: {"Running": 6, "Failed": 0}
        made["Reconciler"].overdue = lambda: (4, 5.0)
        ages = {name: found.probes.checks[name]()[0] for name in ("watch of Pod", "watch of RLPlan", "watch of RLJob")}
        assert ages == {"watch of Pod": 1.0, "watch of RLPlan": 2.0, "watch of RLJob": 3.0}
        assert found.probes.checks["queue"]()[0] == 5.0
        found.probes.before_scrape()
        value = found.server.metrics.registry.get_sample_value
        assert value("rlinf_operator_queue_depth") == 4
        assert value("rlinf_operator_queue_oldest_due_seconds") == 5
        ages = {kind: value("rlinf_operator_watch_age_seconds", {"kind": kind}) for kind in ("Pod", "RLPlan", "RLJob")}
        assert ages == {"Pod": 1, "RLPlan": 2, "RLJob": 3}
        assert [value("rlinf_operator_jobs", {"state": state}) for state in ("Running", "Failed")] == [6, 0]
        assert value("rlinf_operator_cached_objects", {"kind": "Pod"}) == 1
        assert value("rlinf_operator_cached_objects", {"kind": "Service"}) == 0
    assert found.probes.checks == {}, "the next leader's are its own"


async def test_news_wake_the_job_that_they_are_about_and_good_ones_can_wait(world):
    found: Any = world()
    async with found.leads() as made:
        wakes: list[object] = []
        made["Reconciler"].child_changed = lambda key, *, can_wait=False: wakes.append((key, can_wait))
        made["Reconciler"].look_at = wakes.append
        made["KnownJobs"].excuse = lambda namespace: wakes.append(("excused", namespace))
        changed = found.given["CachedStore"]["on_change"]
        changed({"kind": "Pod", **CHILD, "status": {"phase": "Running"}})
        changed({"kind": "Pod", **CHILD, "status": {"phase": "Failed"}})
        changed({"kind": "Pod", "metadata": {"name": "theirs", "namespace": "team"}})
        assert wakes == [(KEY, True), (KEY, False)]
        found.given["Refusals"]["on_change"]("team")
        assert wakes[2:] == [("excused", "team"), "team"]


async def test_passes_are_measured_and_known_jobs_hear_of_own_writes_and_of_the_end(world):
    found: Any = world()
    async with found.leads() as made:
        found.given["Reconciler"]["on_pass"](0.3, "done")
        value = found.server.metrics.registry.get_sample_value
        assert value("rlinf_operator_reconcile_seconds_sum", {"result": "done"}) == 0.3
        told: list[object] = []
        made["KnownJobs"].wrote = told.append
        made["KnownJobs"].gone = told.append
        found.given["CachedStore"]["on_job_written"](
            {"kind": "RLJob", "metadata": {"namespace": "team", "name": "math", "resourceVersion": "7"}}
        )
        found.given["Reconciler"]["on_gone"](KEY)
        assert told == [Sight(key=KEY, version=7, state="Pending"), KEY]


async def test_where_a_watch_is_silent_jobs_are_listed_of_the_namespaces_that_are_not_refused(world):
    found: Any = world(watch_namespaces="team,b", watch_inactivity_s=88.0)
    for namespace in ("team", "b"):
        meta = {"namespace": namespace, "name": "math"}
        found.server.put({"apiVersion": names.API_VERSION, "kind": "RLJob", "metadata": meta, "spec": {}})
    async with found.leads() as made:
        said: list[str] = []
        made["KnownJobs"].silent = lambda: said.append("silent")
        found.given["CachedStore"]["on_silent"]()
        assert said == ["silent"]
        look = found.given["KnownJobs"]["look"]
        assert found.given["KnownJobs"]["look_every_s"] == 88.0
        sights = [sight async for sight in look()]
        assert [(s.key.namespace, s.state, s.is_listed) for s in sights] == [
            ("team", "Pending", True), ("b", "Pending", True)
        ]  # fmt: skip
        made["Refusals"].refuses = lambda namespace: namespace == "team"
        assert [sight.key.namespace async for sight in look()] == ["b"]


async def test_kopfs_end_ends_the_leader_and_all_that_it_started(world):
    """Without it nobody tells of a new job; a new process begins at once."""
    found: Any = world()
    async with found.leads() as made:
        closed = []
        close = made["GrpcScheduler"].close

        async def noted():
            closed.append("scheduler")
            await close()

        made["GrpcScheduler"].close = noted
        made["Watcher"].ended.set()
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(found.task, TIMEOUT_S)
        [error] = caught.value.exceptions
        assert isinstance(error, InvariantBroken)
        assert "kopf ended by itself" in str(error)
        assert made["Watcher"].stopped
        assert closed == ["scheduler"]
        left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("operator: ")]
        assert left == []


async def test_memory_that_the_start_left_is_given_back_again_and_again(world, monkeypatch):
    trims = []
    monkeypatch.setattr(leading, "TRIM_S", 0.001)
    monkeypatch.setattr(process, "give_memory_back", lambda: trims.append("trim"))
    async with world().leads(), asyncio.timeout(TIMEOUT_S):
        while len(trims) < 3:
            await asyncio.sleep(0.005)
    assert trims[:3] == ["trim"] * 3
