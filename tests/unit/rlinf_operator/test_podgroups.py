"""A job of allOrNothing where the cluster serves PodGroups: one is made before its pods, and the first ones name it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from rlinf_api import names, templates
from rlinf_api.errors import RLinfError
from rlinf_operator.clients.cache import CachedStore
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.clients.kueue import Kueue
from rlinf_operator.clients.podgroups import PodGroups, place_of
from rlinf_operator.clients.queues import Providers
from rlinf_operator.gangs import SCHEDULERS
from rlinf_operator.manifests.asking import (
    PODGROUPS,
    OrderKind,
    PlaceInQueue,
    PodGang,
    PodSet,
    QueueOrder,
    QueueStanding,
    QueueView,
)
from rlinf_operator.settings import DEFAULTS
from tests.builders import World, ppo_job
from tests.fakes.api_server import FakeApiServer

NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
UID, TIMEOUT_S = "job-uid", 10.0
ASKED = QueueView(queue=PODGROUPS, provider=PODGROUPS)
ORDER = QueueOrder(
    kind=OrderKind.ASK,
    pod_sets=tuple(PodSet(name=n, count=c, template={"spec": {}}) for n, c in (("driver", 1), ("sim", 2))),
)


def job(*, gang: bool = True, queue: str = "", ended: str = "", more: dict[str, str] | None = None) -> dict[str, Any]:
    labels = ({"kueue.x-k8s.io/queue-name": queue} if queue else {}) | (more or {})
    return {
        "kind": "RLJob", "metadata": {"name": "math", "namespace": "team", "uid": UID, "labels": labels},
        "spec": {"allOrNothing": {"timeoutSeconds": 600}} if gang else {},
        "status": {"conditions": [{"type": ended, "status": "True"}]} if ended else {},
    }  # fmt: skip


@asynccontextmanager
async def serving(server: FakeApiServer, scheduler: str) -> AsyncIterator[PodGroups]:
    gangs = SCHEDULERS[scheduler]
    api = KubeApi(
        server.connection, timeout_s=5, metrics=server.metrics, api_versions={"PodGroup": gangs.api_version}
    )  # fmt: skip
    store = CachedStore(api, metrics=server.metrics, on_change=lambda obj: None, inactivity_s=60)
    async with asyncio.TaskGroup() as group:
        watches = group.create_task(_run(store))
        await store.wait_listed(timeout_s=TIMEOUT_S)
        yield PodGroups(store, gangs, metrics=server.metrics)
        watches.cancel()


@pytest.fixture
async def served(server: FakeApiServer) -> AsyncIterator[PodGroups]:
    async with serving(server, "kubernetes") as groups:
        yield groups


async def _run(store: CachedStore) -> None:
    async with asyncio.TaskGroup() as group:
        store.start(group)


async def test_a_group_is_of_all_pods_and_owned_by_the_job(server, served):
    assert await served.look(job()) == ASKED
    await served.carry_out(ORDER, job(), now=NOW)
    stored = server.objects["PodGroup", "team", "rljob-math"]
    assert stored["apiVersion"] == "scheduling.k8s.io/v1alpha2"
    assert stored["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}}
    assert [owner["uid"] for owner in stored["metadata"]["ownerReferences"]] == [UID]
    view = await served.look(job())
    assert view is not None
    assert view.place is not None
    says = {"spec": {"schedulingGroup": {"podGroupName": "rljob-math"}}}
    gang = PodGang(name="rljob-math", size=3, membership=says)
    assert (view.place.standing, view.place.gang) == (QueueStanding.GRANTED, gang)
    await served.carry_out(ORDER, job(), now=NOW)  # as after a crash


@pytest.mark.parametrize(
    ("scheduler", "path", "spec", "membership"),
    [
        (
            "coscheduling", "/apis/scheduling.x-k8s.io/v1alpha1/", {"minMember": 3},
            {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "rljob-math"}}},
        ),
        (
            "volcano", "/apis/scheduling.volcano.sh/v1beta1/", {"minMember": 3, "queue": "default"},
            {"metadata": {"annotations": {"scheduling.k8s.io/group-name": "rljob-math"}}},
        ),
    ],
)  # fmt: skip
async def test_another_scheduler_of_gangs_has_a_group_in_its_own_words(server, scheduler, path, spec, membership):
    async with serving(server, scheduler) as groups:
        await groups.carry_out(ORDER, job(), now=NOW)
        stored = server.objects["PodGroup", "team", "rljob-math"]
        assert f"/apis/{stored['apiVersion']}/" == path
        assert stored["spec"] == spec
        assert ("POST", f"{path}namespaces/team/podgroups?fieldValidation=Strict") in server.requests
        view = await groups.look(job())
        assert view is not None
        assert view.place is not None
        assert view.place.gang == PodGang(name="rljob-math", size=3, membership=membership)
        assert view.queue == view.place.queue, "or it would be made anew for ever"


async def test_a_volcano_queue_is_named_by_a_label_and_a_group_has_its_pods_priority(server):
    template = {"spec": {"priorityClassName": "high"}}
    order = replace(ORDER, pod_sets=(*ORDER.pod_sets, PodSet(name="gpu", count=1, template=template)))
    async with serving(server, "volcano") as groups:
        asked = job(more={"volcano.sh/queue-name": "research"})
        await groups.carry_out(order, asked, now=NOW)
        stored = server.objects["PodGroup", "team", "rljob-math"]
        assert stored["spec"] == {"minMember": 4, "queue": "research", "priorityClassName": "high"}
        for moved, queue in ((asked, "research"), (job(), "default")):
            view = await groups.look(moved)
            assert view is not None
            assert view.place is not None
            assert (view.queue, view.place.queue) == (queue, "research")


def test_a_pod_keeps_what_it_has_when_it_names_its_group():
    pod = {"metadata": {"name": "p", "labels": {"a": "1"}}, "spec": {"hostname": "h"}}
    said = SCHEDULERS["coscheduling"].membership("g")
    assert templates.overlay(pod, said) == {
        "metadata": {"name": "p", "labels": {"a": "1", "scheduling.x-k8s.io/pod-group": "g"}},
        "spec": {"hostname": "h"},
    }
    said = SCHEDULERS["volcano"].membership("g")
    found = templates.overlay({"metadata": {"annotations": None}, "spec": {}}, said)
    assert found == {"metadata": {"annotations": {"scheduling.k8s.io/group-name": "g"}}, "spec": {}}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ""),
        ({"gang_scheduler": "coscheduling"}, "scheduler-plugins-scheduler"),
        ({"gang_scheduler": "volcano"}, "volcano"),
        ({"gang_scheduler": "coscheduling", "gang_scheduler_pods": "default-scheduler"}, "default-scheduler"),
        ({"gang_scheduler_pods": "mine"}, "mine"),
    ],
)
def test_pods_of_such_a_job_go_to_the_scheduler_that_has_the_group(settings, wanted):
    for spec, name in (({"allOrNothing": {"timeoutSeconds": 60}}, wanted), ({}, "")):
        made = ppo_job().with_spec(**spec).world(settings=replace(DEFAULTS, **settings))
        made.queue = place() if spec else None
        made.planned()
        pods = made.step().create_pods
        assert len(pods) == 4
        assert {pod["spec"].get("schedulerName", "") for pod in pods} == {name}


def test_a_scheduler_that_a_template_names_stays():
    spec = {"allOrNothing": {"timeoutSeconds": 60}, "template": {"spec": {"schedulerName": "theirs"}}}
    made = ppo_job().with_spec(**spec).world(settings=replace(DEFAULTS, gang_scheduler="volcano"))
    made.queue = place()
    made.planned()
    decision = made.step()
    assert {pod["spec"]["schedulerName"] for pod in decision.create_pods} == {"theirs"}
    assert [event.reason for event in decision.events if event.reason == "TemplateOverridden"] == []


@pytest.mark.parametrize(
    ("meta", "spec", "changes"),
    [
        ({}, {"spec": {"schedulingPolicy": {"gang": {"minCount": 3}}}}, {"size": 3}),
        ({"annotations": {names.ANNOTATION_INPUTS: "a1"}}, {}, {"asked": "a1"}),
        ({"annotations": {"other": "x"}}, {"spec": {}}, {}),
        ({"annotations": None}, {"spec": None}, {}),
        ({"deletionTimestamp": "2026-11-26T12:00:00Z"}, {}, {"standing": QueueStanding.GOING}),
        ({}, {"spec": {"schedulingPolicy": {"basic": {}}}}, {}),
        ({}, {"spec": {"schedulingPolicy": None}}, {}),
        ({}, {"spec": {"schedulingPolicy": {"gang": {"minCount": None}}}}, {}),
    ],
)
def test_what_is_read_off_a_group_whoever_has_edited_it(meta, spec, changes):
    known: dict[str, Any] = {"standing": QueueStanding.GRANTED, "size": 0} | changes
    native = SCHEDULERS["kubernetes"]
    gang = PodGang(name="g", size=known.pop("size"), membership=native.membership("g"))
    place = PlaceInQueue(name="g", uid="g1", queue=PODGROUPS, ready=True, gang=gang, **known)
    assert place_of({"metadata": {"name": "g", "uid": "g1", **meta}, **spec}, scheduler=native) == place
    assert place_of(None, scheduler=native) is None


async def test_it_goes_when_the_job_leaves_and_stays_when_it_has_ended(server, served):
    await served.carry_out(ORDER, job(), now=NOW)
    assert await served.look(job(ended="Complete")) is None
    view = await served.look(job(gang=False))
    assert view is not None
    assert view.queue == ""
    await served.carry_out(QueueOrder(kind=OrderKind.LEAVE), job(), now=NOW)
    assert ("PodGroup", "team", "rljob-math") not in server.objects
    await served.carry_out(QueueOrder(kind=OrderKind.LEAVE), job(), now=NOW)
    assert await served.look(job(gang=False)) is None
    assert server.metrics.registry.get_sample_value("rlinf_operator_queue_orders_total", {"order": "leave"}) == 2


async def test_another_jobs_group_of_that_name_is_said(server, served):
    meta = {"name": "rljob-math", "namespace": "team", "ownerReferences": [{"uid": "other"}]}
    version = SCHEDULERS["kubernetes"].api_version
    server.put({"apiVersion": version, "kind": "PodGroup", "metadata": meta, "spec": {}})
    assert await served.look(job()) == ASKED
    with pytest.raises(RLinfError, match="does not belong to this job"):
        await served.carry_out(ORDER, job(), now=NOW)


async def test_a_job_with_a_queue_is_the_queues_and_one_without_the_field_nobodys(server, served):
    assert await served.look(job(queue="lq")) is None
    assert await served.look(job(gang=False)) is None
    kueue = Kueue(served._store, server.client(timeout_s=5), metrics=server.metrics)
    both = Providers(kueue, served)
    assert await both.look(job(queue="lq")) == QueueView(queue="lq", provider="kueue")
    assert await both.look(job()) == ASKED
    assert (both.of("kueue"), both.of(PODGROUPS)) == (kueue, served)


async def test_where_nobody_serves_the_kind_the_operators_deadline_does_it(server):
    server.fault(status=404, times=1000, path="/podgroups")
    store = CachedStore(
        server.client(timeout_s=5), metrics=server.metrics, on_change=lambda obj: None, inactivity_s=60
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:
        watches = group.create_task(_run(store))
        await store.wait_listed(timeout_s=TIMEOUT_S)
        assert await PodGroups(store, SCHEDULERS["kubernetes"], metrics=server.metrics).look(job()) is None
        watches.cancel()


# --- what decide makes of it ------------------------------------------------------------------------------------------


def place(size: int = 4, *, standing: QueueStanding = QueueStanding.GRANTED) -> QueueView:
    gang = PodGang(name="rljob-math", size=size, membership=SCHEDULERS["kubernetes"].membership("rljob-math"))
    found = PlaceInQueue(name="rljob-math", uid="g", queue=PODGROUPS, standing=standing, ready=True, gang=gang)
    return replace(ASKED, place=found)


def world(**spec: Any) -> World:
    made = ppo_job().with_spec(allOrNothing={"timeoutSeconds": 60}, **spec).world()
    made.queue = ASKED
    return made


def groups(decision: Any) -> list[str]:
    return [(p["spec"].get("schedulingGroup") or {}).get("podGroupName", "") for p in decision.create_pods]


def test_no_pod_is_made_before_its_group_and_the_first_ones_name_it():
    made = world()
    made.step()
    decision = made.step()
    assert (decision.create_pods, made.condition("Admitted")) == ((), ("False", "Queued"))
    assert decision.queue is not None
    assert decision.queue.kind is OrderKind.ASK
    assert sum(one.count for one in decision.queue.pod_sets) == 4
    assert decision.requeue_after_s == 1.0, "nobody tells of it"
    made.queue = place()
    decision = made.step()
    assert groups(decision) == ["rljob-math"] * 4
    assert decision.queue is None
    assert made.condition("Admitted") == ("True", "Admitted")
    assert made.message("Admitted") == "PodGroup rljob-math: the scheduler gives 4 pods a node each, or none"


def test_a_pod_that_is_replaced_is_placed_alone():
    made = world()
    made.queue = place()
    made.started()
    made.exited("math-sim-0-a1", 1).later(60)
    decisions = [made.step() for _ in range(3)]
    assert [group for decision in decisions for group in groups(decision)] == [""]


def test_fewer_pods_than_a_group_waits_for_do_not_name_it():
    made = world()
    made.queue = place(size=5)
    made.planned()
    assert groups(made.step()) == [""] * 4


def test_a_group_that_goes_stops_no_job():
    made = world()
    made.queue = place()
    made.started().step()
    for view in (place(standing=QueueStanding.GOING), ASKED):
        made.queue = view
        decision = made.step()
        assert (decision.drain, decision.delete_pods, decision.queue) == (None, (), None)
        assert made.condition("Admitted") == ("True", "NoQueue")


def test_a_half_placed_job_gives_back_its_group_too_and_asks_for_another_when_it_tries_again():
    made = world()
    made.queue = place()
    made.created()
    made.pods["math-driver-a1"]["spec"]["nodeName"] = "n1"
    made.step()
    made.later(60).step()
    assert (made.names(), made.condition("Admitted")) == ([], ("False", "NotPlaced"))
    left = made.step().queue
    assert left is not None
    assert left.kind is OrderKind.LEAVE
    made.queue = ASKED
    assert made.step().queue is None, "before its pause is over it asks for none"
    asked = made.later(30).step().queue
    assert asked is not None
    assert asked.kind is OrderKind.ASK


def test_a_suspended_job_leaves_its_group():
    made = world(checkpoint={"uri": "/c"})
    made.queue = place()
    made.created().edit(suspend=True)
    made.step()
    order = made.step().queue
    assert order is not None
    assert order.kind is OrderKind.LEAVE
