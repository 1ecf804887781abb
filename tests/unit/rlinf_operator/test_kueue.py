"""Kueue's Workload: what is read of it, and what is written into it. Kueue itself is in tests/cluster."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from rlinf_api.errors import Conflict, RLinfError
from rlinf_operator.clients import kueue, reflector
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.clients.kube import RESOURCES
from rlinf_operator.clients.kueue import Kueue
from rlinf_operator.manifests import asking
from rlinf_operator.manifests.asking import OrderKind, PodSet, QueueOrder, QueueStanding, QueueView
from tests.fakes.api_server import FakeApiServer

NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
UID = "job-uid"
LABELS = {"rlinf.io/job": "math", "rlinf.io/job-uid": UID}
TIMEOUT_S = 10.0


def job(**labels: str) -> dict[str, Any]:
    names = {
        key.replace("__", "/").replace("_", "-").replace("kueue", "kueue.x-k8s.io"): v for key, v in labels.items()
    }
    return {"kind": "RLJob", "metadata": {"name": "math", "namespace": "team", "uid": UID, "labels": names}, "spec": {}}


QUEUED = job(kueue__queue_name="lq")


def workload(*conditions: tuple[str, str, str], uid: str = UID, **fields: Any) -> dict[str, Any]:
    listed = [
        {
            "type": t,
            "status": s,
            "reason": r,
            "message": f"{t} because {r}",
            "lastTransitionTime": "2026-11-26T11:00:00Z",
        }
        for t, s, r in conditions
    ]
    meta = {"name": "rljob-math", "namespace": "team", "labels": LABELS, "ownerReferences": [{"uid": uid}]}
    return {
        "apiVersion": RESOURCES["Workload"][0], "kind": "Workload", "metadata": meta,
        "spec": {"queueName": "lq", "active": fields.pop("active", True), "podSets": []},
        "status": {"conditions": listed, **fields},
    }  # fmt: skip


ADMITTED = (("QuotaReserved", "True", "QuotaReserved"), ("Admitted", "True", "Admitted"))


class Served:
    """A store over the fake API server, and Kueue's class over that."""

    def __init__(self, server: FakeApiServer, store: CachedStore, kueue: Kueue) -> None:
        self.server, self.store, self.kueue = server, store, kueue

    async def look(self, of: dict[str, Any] = QUEUED) -> QueueView:
        found = await self.kueue.look(of)
        assert found is not None
        return found

    async def tell(self, kind: OrderKind, of: dict[str, Any] = QUEUED, **fields: Any) -> None:
        await self.kueue.carry_out(QueueOrder(kind=kind, queue="lq", **fields), of, now=NOW)

    def stored(self) -> dict[str, Any]:
        return self.server.objects["Workload", "team", "rljob-math"]

    def conditions(self) -> dict[str, tuple[str, str, str]]:
        listed = self.stored()["status"]["conditions"]
        return {c["type"]: (c["status"], c["reason"], c["lastTransitionTime"]) for c in listed}

    def orders(self) -> dict[str, float]:
        value = self.server.metrics.registry.get_sample_value
        return {k: n for k in OrderKind if (n := value("rlinf_operator_queue_orders_total", {"order": str(k)}))}


@pytest.fixture
async def served(server: FakeApiServer) -> AsyncIterator[Served]:
    api = server.client(timeout_s=5)
    store = CachedStore(api, metrics=server.metrics, on_change=lambda obj: None, inactivity_s=60)
    async with asyncio.TaskGroup() as group:
        watches = group.create_task(_run(store))
        await store.wait_listed(timeout_s=TIMEOUT_S)
        yield Served(server, store, Kueue(store, api, metrics=server.metrics))
        watches.cancel()


async def _run(store: CachedStore) -> None:
    async with asyncio.TaskGroup() as group:
        store.start(group)


async def seen(served: Served, standing: QueueStanding | None) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            place = (await served.look()).place
            if (place.standing if place else None) is standing:
                return
            await asyncio.sleep(0.01)


NO_QUOTA = ("QuotaReserved", "False", "Pending")
UNCHECKED = (("QuotaReserved", "True", "QuotaReserved"), ("Admitted", "False", "UnsatisfiedChecks"))
EVICTED = ("Evicted", "True", "Preempted")
CQ = {"admission": {"clusterQueue": "cq"}}


@pytest.mark.parametrize(
    ("conditions", "fields", "standing", "holds", "message"),
    [
        ((), {}, QueueStanding.WAITS, False, ""),
        ((NO_QUOTA,), {}, QueueStanding.WAITS, False, "QuotaReserved because Pending (Pending)"),
        (UNCHECKED, {}, QueueStanding.WAITS, True, "Admitted because UnsatisfiedChecks (UnsatisfiedChecks)"),
        (ADMITTED, CQ, QueueStanding.GRANTED, True, "ClusterQueue cq"),
        ((*ADMITTED, EVICTED), CQ, QueueStanding.WITHDRAWN, True, "Evicted because Preempted (Preempted)"),
        ((NO_QUOTA, EVICTED), {}, QueueStanding.WAITS, False, "QuotaReserved because Pending (Pending)"),
        ((*ADMITTED, ("Evicted", "False", "QuotaReserved")), CQ, QueueStanding.GRANTED, True, "ClusterQueue cq"),
        ((*ADMITTED, EVICTED), {"active": False}, QueueStanding.STOPPED, True, "Evicted because Preempted (Preempted)"),
        (ADMITTED, {"active": False}, QueueStanding.STOPPED, True, ""),
    ],
)
def test_where_a_job_stands_is_read_off_the_conditions(conditions, fields, standing, holds, message):
    found = workload(*conditions, **fields)
    found["metadata"]["uid"] = "w"
    place = kueue.place_of(found, shares={})
    assert (place.standing, place.holds, place.message, place.queue) == (standing, holds, message, "lq")
    assert not place.finished
    found["metadata"]["deletionTimestamp"] = "2026-11-26T12:00:00Z"
    assert kueue.place_of(found, shares={}).standing is QueueStanding.GOING


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 4, 2), "ClusterQueue cq"),
        ((1, 3, 2), "ClusterQueue cq, 3 of the 4 pods that pool gpu asked for"),
        ((1, 4), "ClusterQueue cq"),
    ],
)
async def test_an_admission_says_which_pool_has_fewer_pods_than_it_asked_for(served, counts, said):
    assigned = [{"name": n, "count": c} for n, c in zip(("driver", "gpu", "sim"), counts, strict=False)]
    found = workload(*ADMITTED, admission={"clusterQueue": "cq", "podSetAssignments": assigned})
    gpu = {"name": "gpu", "count": 4, "minCount": 2}
    found["spec"]["podSets"] = [{"name": "driver", "count": 1}, gpu, {"name": "sim", "count": 2}]
    served.server.put(found)
    await seen(served, QueueStanding.GRANTED)
    place = (await served.look()).place
    assert place is not None
    assert place.message == said


async def test_without_the_kind_nobody_serves_queues_until_it_is_there(server, monkeypatch):
    monkeypatch.setattr(reflector, "RETRY_MAX_S", 0.05)
    server.fault(status=404, times=1000, path="/workloads")
    api = server.client(timeout_s=5)
    store = CachedStore(api, metrics=server.metrics, on_change=lambda obj: None, inactivity_s=60)
    served = Kueue(store, api, metrics=server.metrics)
    task = asyncio.create_task(_run(store))
    try:
        await store.wait_listed(timeout_s=TIMEOUT_S)
        assert await served.look(QUEUED) == QueueView(queue="lq", provider="")
        assert await served.look(job()) is None
        assert store.age_s()["Workload"] == 0.0, "nobody is unready for that"
        server.mend()
        async with asyncio.timeout(TIMEOUT_S):
            while await served.look(QUEUED) != QueueView(queue="lq", provider="kueue"):
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_job_is_asked_for_with_its_pods_its_owner_and_its_queue(served):
    assert await served.look() == QueueView(queue="lq", provider="kueue")
    template = {"metadata": {}, "spec": {"containers": [{"name": "agent", "image": "i"}]}}
    sets = (PodSet(name="driver", count=1, template=template), PodSet(name="gpu", count=4, least=2, template=template))
    await served.tell(OrderKind.ASK, pod_sets=sets)
    made = served.stored()
    assert made["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    assert made["spec"] == {
        "active": True, "queueName": "lq",
        "podSets": [
            {"name": "driver", "count": 1, "template": template},
            {"name": "gpu", "count": 4, "minCount": 2, "template": template},
        ],
    }  # fmt: skip
    assert [(o["kind"], o["uid"], o["controller"]) for o in made["metadata"]["ownerReferences"]] == [
        ("RLJob", UID, True)
    ]
    assert made["metadata"]["labels"]["rlinf.io/job"] == "math"
    assert served.orders() == {"ask": 1}
    await served.tell(OrderKind.ASK, pod_sets=sets)  # a pass that is repeated
    place = (await served.look()).place
    assert place is not None
    assert place.standing is QueueStanding.WAITS


async def test_what_is_asked_of_a_topology_is_its_pod_sets(served):
    template = {"metadata": {}, "spec": {"containers": [{"name": "agent", "image": "i"}]}}
    near = PodSet(name="gpu", count=4, topology={"required": "example.com/rack"}, template=template)
    await served.tell(OrderKind.ASK, pod_sets=(PodSet(name="driver", count=1, template=template), near))
    requests = [s.get("topologyRequest") for s in served.stored()["spec"]["podSets"]]
    assert requests == [None, {"required": "example.com/rack"}]


@pytest.mark.parametrize(
    ("request_", "annotation"),
    [
        ({"required": "example.com/rack"}, {"kueue.x-k8s.io/podset-required-topology": "example.com/rack"}),
        ({"preferred": "example.com/rack"}, {"kueue.x-k8s.io/podset-preferred-topology": "example.com/rack"}),
        (None, {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}),  # a queue that has topologies alone
    ],
)
async def test_pods_whose_nodes_were_chosen_wait_at_their_gate_and_say_whose_they_are(served, request_, annotation):
    slices = [{"domainCount": 1, "valuesPerLevel": [{"universal": "r1"}], "podCounts": {"universal": 2}}]
    chosen = {"levels": ["example.com/rack"], "slices": slices}
    assigned = [
        {"name": "driver", "count": 1, "flavors": {}},
        {"name": "gpu", "count": 2, "flavors": {}, "topologyAssignment": chosen},
    ]
    found = workload(*ADMITTED, admission={"clusterQueue": "cq", "podSetAssignments": assigned})
    asked = {"name": "gpu", "count": 2} | ({"topologyRequest": request_} if request_ else {})
    found["spec"]["podSets"] = [{"name": "driver", "count": 1}, asked]
    served.server.put(found)
    await seen(served, QueueStanding.GRANTED)
    place = (await served.look()).place
    assert place is not None
    driver, gpu = place.shares["driver"], place.shares["gpu"]
    assert (driver.gates, driver.annotations, driver.labels) == ((), {}, {})
    assert gpu.gates == ("kueue.x-k8s.io/topology",)
    assert gpu.labels == {"kueue.x-k8s.io/podset": "gpu"}
    assert gpu.annotations == {"kueue.x-k8s.io/workload": "rljob-math", **annotation}


async def test_somebody_elses_workload_of_the_name_is_a_sentence(served):
    served.server.put(workload(uid="another"))
    with pytest.raises(RLinfError, match="Workload team/rljob-math exists and does not belong to this job"):
        await served.tell(OrderKind.ASK)
    assert (await served.look()).place is None
    await served.tell(OrderKind.LEAVE)
    assert served.stored(), "and it is not ours to delete"


@pytest.mark.parametrize(
    ("labels", "of_pods", "kind", "group", "value"),
    [
        ({"kueue__priority_class": "high"}, "pods", "WorkloadPriorityClass", "kueue.x-k8s.io", 7),
        ({}, "pods", "PriorityClass", "scheduling.k8s.io", 3),
        ({}, "", "", "", None),
    ],
)
async def test_a_class_of_its_own_comes_before_that_of_the_pods(served, labels, of_pods, kind, group, value):
    for known, name, number in (("WorkloadPriorityClass", "high", 7), ("PriorityClass", "pods", 3)):
        served.server.put({"kind": known, "metadata": {"name": name, "namespace": ""}, "value": number})
    spec: dict[str, Any] = {"containers": [{"name": "agent"}]} | ({"priorityClassName": of_pods} if of_pods else {})
    one = PodSet(name="driver", count=1, template={"spec": spec})
    await served.tell(OrderKind.ASK, job(kueue__queue_name="lq", **labels), pod_sets=(one,))
    found = served.stored()["spec"]
    assert found.get("priority") == value
    wanted = {"group": group, "kind": kind, "name": "high" if labels else "pods"} if kind else None
    assert found.get("priorityClassRef") == wanted


async def test_a_class_that_is_not_there_is_a_sentence(served):
    with pytest.raises(RLinfError, match=r"WorkloadPriorityClass 'high' is not there.*make it, or name another"):
        await served.tell(OrderKind.ASK, job(kueue__queue_name="lq", kueue__priority_class="high"))
    assert ("Workload", "team", "rljob-math") not in served.server.objects


async def test_a_job_that_waits_has_the_priority_that_it_says_now(served):
    for known, name, number in (("WorkloadPriorityClass", "high", 7), ("PriorityClass", "pods", 3)):
        served.server.put({"kind": known, "metadata": {"name": name, "namespace": ""}, "value": number})
    spec = {"containers": [{"name": "agent"}], "priorityClassName": "pods"}
    one = PodSet(name="driver", count=1, template={"spec": spec})
    plain = PodSet(name="driver", count=1, template={"spec": {"containers": [{"name": "agent"}]}})

    async def changed(*sets: PodSet, **labels: str) -> tuple[Any, str]:
        said = job(kueue__queue_name="lq", **labels)
        await served.kueue.carry_out(QueueOrder(kind=OrderKind.CHANGE, queue="lq", pod_sets=sets), said, now=NOW)
        view = await served.kueue.look(said)
        assert (view.priority, view.place.priority) == (labels.get("kueue__priority_class", ""),) * 2
        stored = served.stored()["spec"]
        return stored.get("priority"), (stored.get("priorityClassRef") or {}).get("name", "")

    await served.tell(OrderKind.ASK, job(kueue__queue_name="lq"), pod_sets=(one,))
    assert await changed(one, kueue__priority_class="high") == (7, "high")
    assert await changed(kueue__priority_class="high") == (7, "high"), "before there is a plan, too"
    assert await changed(one) == (3, "pods")
    assert await changed(plain) == (None, "")


async def test_what_it_waits_for_is_changed_in_place(served):
    template = {"metadata": {}, "spec": {"containers": [{"name": "agent", "image": "i"}]}}
    one = PodSet(name="driver", count=1, template=template)
    await served.tell(OrderKind.ASK, pod_sets=(one,))
    uid, place = served.stored()["metadata"]["uid"], (await served.look()).place
    assert place is not None
    assert place.asked == asking.inputs((one,))
    more = PodSet(name="gpu", count=2, template=template)
    await served.kueue.carry_out(
        QueueOrder(kind=OrderKind.CHANGE, queue="other", pod_sets=(one, more)), QUEUED, now=NOW
    )
    spec = served.stored()["spec"]
    assert (served.stored()["metadata"]["uid"], spec["queueName"]) == (uid, "other")
    assert [(s["name"], s["count"]) for s in spec["podSets"]] == [("driver", 1), ("gpu", 2)]
    place = (await served.look()).place
    assert place is not None
    assert place.asked == asking.inputs((one, more))
    await served.kueue.carry_out(QueueOrder(kind=OrderKind.CHANGE, queue="lq"), QUEUED, now=NOW)
    assert (served.stored()["spec"]["queueName"], len(served.stored()["spec"]["podSets"])) == ("lq", 2)
    assert served.stored()["metadata"]["annotations"]["rlinf.io/inputs-hash"] == place.asked


@pytest.mark.parametrize(
    ("reason", "again"), [("Preempted", "True"), ("Deactivated", "False"), ("PodsReadyTimeout", "False")]
)
async def test_quota_is_given_back_as_kueues_own_jobs_do_it(served, reason, again):
    served.server.put(workload(*ADMITTED, ("Evicted", "True", reason), admission={"clusterQueue": "cq"}))
    await seen(served, QueueStanding.WITHDRAWN)
    await served.tell(OrderKind.GIVE_BACK)
    assert served.conditions() == {
        "QuotaReserved": ("False", "Pending", "2026-11-26T12:00:00Z"),
        "Admitted": ("False", "NoReservation", "2026-11-26T12:00:00Z"),
        "Evicted": ("True", reason, "2026-11-26T11:00:00Z"),
        "Requeued": (again, reason, "2026-11-26T12:00:00Z"),
    }
    assert served.stored()["status"].get("admission") is None
    await seen(served, QueueStanding.WAITS)


async def test_pods_that_are_ready_are_said_to_be_and_not_those_of_the_next_admission(served):
    served.server.put(workload(*ADMITTED, admission={"clusterQueue": "cq"}))
    await seen(served, QueueStanding.GRANTED)
    await served.tell(OrderKind.READY)
    assert served.conditions()["PodsReady"] == ("True", "Started", "2026-11-26T12:00:00Z")
    place = (await served.look()).place
    assert place is not None
    assert place.ready
    await served.tell(OrderKind.GIVE_BACK)
    assert served.conditions()["PodsReady"][:2] == ("False", "WaitForStart")


async def test_a_pod_that_is_lost_and_finds_no_node_is_said_until_all_are_ready_again(served):
    served.server.put(workload(*ADMITTED, ("PodsReady", "True", "Started"), admission={"clusterQueue": "cq"}))
    await seen(served, QueueStanding.GRANTED)
    await served.tell(OrderKind.LACKS, message="no node has room")
    assert served.conditions()["PodsReady"] == ("False", "WaitForRecovery", "2026-11-26T12:00:00Z")
    assert served.stored()["status"]["conditions"][-1]["message"] == "no node has room"
    place = (await served.look()).place
    assert place is not None
    assert not place.ready
    await served.tell(OrderKind.READY)
    assert served.conditions()["PodsReady"][:2] == ("True", "Recovered")


async def test_a_finished_job_says_how_it_ended(served):
    served.server.put(workload(*ADMITTED, admission={"clusterQueue": "cq"}))
    await seen(served, QueueStanding.GRANTED)
    await served.tell(OrderKind.FINISH, succeeded=False, message="no way")
    assert served.conditions()["Finished"] == ("True", "Failed", "2026-11-26T12:00:00Z")
    assert served.conditions()["Admitted"][0] == "True"
    assert served.stored()["status"]["admission"] == {"clusterQueue": "cq"}


async def test_what_kueue_wrote_meanwhile_is_not_overwritten(served):
    served.server.put(workload(*ADMITTED))
    await seen(served, QueueStanding.GRANTED)
    served.server.put(workload(*ADMITTED, ("Evicted", "True", "Preempted")), silently=True)
    with pytest.raises(Conflict):
        await served.tell(OrderKind.FINISH, succeeded=True, message="")
    assert "Finished" not in served.conditions()
    await served.tell(OrderKind.FINISH, succeeded=True, message="")  # the next pass looks at it anew
    assert {kind: said[0] for kind, said in served.conditions().items()} == {
        "QuotaReserved": "True", "Admitted": "True", "Evicted": "True", "Finished": "True",
    }  # fmt: skip
    patches = [path for method, path in served.server.requests if method == "PATCH"]
    assert [path.partition("?")[0].rpartition("/")[2] for path in patches] == ["status"] * 2


async def test_a_job_that_leaves_has_no_workload(served):
    served.server.put(workload())
    await seen(served, QueueStanding.WAITS)
    await served.tell(OrderKind.LEAVE)
    assert ("Workload", "team", "rljob-math") not in served.server.objects
    await served.tell(OrderKind.LEAVE)
    await served.tell(OrderKind.FINISH, succeeded=True)
    assert served.orders() == {"leave": 1}


async def test_a_job_whose_label_was_taken_off_still_knows_its_place(served):
    served.server.put(workload())
    await seen(served, QueueStanding.WAITS)
    found = await served.look(job())
    assert (found.queue, found.place is not None) == ("", True)


async def test_flavors_and_checks_say_where_pods_may_run(served):
    for name, spec in {
        "fast": {"nodeLabels": {"speed": "fast"}, "tolerations": [{"key": "fast", "operator": "Exists"}]},
        "big": {"nodeLabels": {"memory": "big"}, "tolerations": [{"key": "fast", "operator": "Exists"}]},
    }.items():
        served.server.put({"kind": "ResourceFlavor", "metadata": {"name": name, "namespace": ""}, "spec": spec})
    update = {"name": "gpu", "nodeSelector": {"pool": "made"}, "labels": {"a": "b"}, "annotations": {"c": "d"}}
    served.server.put(
        workload(
            *ADMITTED,
            admission={
                "clusterQueue": "cq",
                "podSetAssignments": [
                    {"name": "driver", "count": 1, "flavors": {"cpu": "big"}},
                    {"name": "gpu", "count": 3, "flavors": {"cpu": "fast", "memory": "big"}},
                ],
            },
            admissionChecks=[{"name": "provision", "podSetUpdates": [update, {"name": "driver"}]}],
        )
    )
    await seen(served, QueueStanding.GRANTED)
    place = (await served.look()).place
    assert place is not None
    driver, gpu = place.shares["driver"], place.shares["gpu"]
    assert (driver.count, dict(driver.node_selector)) == (1, {"memory": "big"})
    assert (gpu.count, dict(gpu.node_selector)) == (3, {"speed": "fast", "memory": "big", "pool": "made"})
    assert (gpu.tolerations, dict(gpu.labels), dict(gpu.annotations)) == (
        ({"key": "fast", "operator": "Exists"},), {"a": "b"}, {"c": "d"},
    )  # fmt: skip
    asked = [path for _, path in served.server.requests if "resourceflavors" in path]
    assert len(asked) == 2, "and are asked for once a minute"
