"""What a queue's provider refuses is said on the job, and tried again; what it grants goes through whole passes."""

from typing import Any

import pytest

from rlinf_api.errors import RLinfError
from rlinf_operator.clients.queues import Providers
from rlinf_operator.manifests import asking
from rlinf_operator.manifests.asking import OrderKind, PlaceInQueue, QueueStanding, QueueView, Share
from rlinf_operator.reconcile.apply import _within
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, KEY, QUICK, Cluster


class FakeQueues:
    """A provider that answers as it is told."""

    name = "fake"

    def __init__(self):
        self.view = QueueView(queue="team", provider="fake")
        self.orders, self.refuses, self.asked = [], None, ""

    async def look(self, job):
        return self.view

    async def carry_out(self, order, job, *, now):
        if self.refuses is not None:
            raise self.refuses
        self.orders.append(order.kind)
        self.asked = asking.inputs(order.pod_sets)
        self.view = QueueView(queue="team", provider="fake", place=self.place(QueueStanding.WAITS))

    def place(self, standing):
        shares = {name: Share(count=2, node_selector={"a": "b"}) for name in ("driver", "sim", "train")}
        granted = standing is QueueStanding.GRANTED
        return PlaceInQueue(
            name="w",
            asked=self.asked,
            ready=granted,
            uid="u",
            queue="team",
            standing=standing,
            holds=granted,
            shares=shares if granted else {},
        )


class Queued(Cluster):
    def __init__(self) -> None:
        super().__init__()
        self.queues: Any = FakeQueues()


@pytest.fixture
async def cluster():
    made = Queued()
    made.reconciler = Reconciler(
        store=made.store, scheduler=Planning(made.store), drivers=lambda _: made.drivers, authority=AUTHORITY,
        settings=QUICK, clock=lambda: NOW, queues=Providers(made.queues),
    )  # fmt: skip
    await made.apply(ppo_job())
    return made


async def test_a_refusal_is_said_on_the_job_and_tried_again(cluster):
    cluster.queues.refuses = RLinfError("create of Workload", got="422 podSets: must have at most 8 items")
    await cluster.settle(2)
    applied = await cluster.reconciler.pass_over(KEY)
    assert "must have at most 8 items" in applied.try_again
    status, reason, message = await cluster.condition("Admitted")
    assert (status, reason) == ("False", "QueueRefused")
    assert message.startswith("the queue refused to ask: create of Workload")
    assert await cluster.names("Pod") == []
    events = [e["reason"] for e in (await cluster.store.list("Event", namespace="team")).items]
    assert events.count("QueueRefused") == 1
    cluster.queues.refuses = None
    applied = await cluster.reconciler.pass_over(KEY)
    assert (cluster.queues.orders, applied.try_again) == ([OrderKind.ASK], "")


async def test_an_admitted_jobs_pods_are_made_where_its_share_says(cluster):
    await cluster.settle()
    assert cluster.queues.orders == [OrderKind.ASK]
    assert await cluster.names("Pod") == []
    cluster.queues.view = QueueView(queue="team", provider="fake", place=cluster.queues.place(QueueStanding.GRANTED))
    await cluster.settle()
    pods = (await MemoryStore.list(cluster.store, "Pod", namespace="team")).items
    assert len(pods) == 4
    assert all(pod["spec"]["nodeSelector"] == {"a": "b"} for pod in pods)
    assert (await cluster.condition("Admitted"))[:2] == ("True", "Admitted")


def test_the_planner_counts_with_what_was_admitted_and_never_with_less_than_the_least():
    pools: list[dict[str, Any]] = [
        {"name": "a", "pods": {"min": 1, "max": 8}},
        {"name": "b", "pods": 4},
        {"name": "c", "pods": {"min": 0, "max": 2}},
    ]
    job: dict[str, Any] = {"kind": "RLJob", "spec": {"pools": pools, "seed": 1}}
    assert _within(job, None) is job
    found = _within(job, {"a": 3, "b": 2})["spec"]
    bounds = [{"min": 1, "max": 3}, {"min": 4, "max": 4}, {"min": 0, "max": 1}]
    assert (found["seed"], [pool["pods"] for pool in found["pools"]]) == (1, bounds)
    assert pools[1]["pods"] == 4
