"""A job that comes up and is well: what it says of itself word by word, and each write that it costs."""

import pytest

from rlinf_operator.clients import objects
from tests.builders import ppo_job
from tests.fakes.cluster import Cluster, Store


async def running() -> Cluster:
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    return cluster


async def test_its_conditions_say_this():
    listed = (await (await running()).status())["conditions"]
    assumed = (
        "math-p1: pools filled in order, roles side by side: 8 env in sim, 1 rollout in train, 1 actor in train. "
        "Assumed, as nothing is measured yet: every slot holds its role's memory, and all workers of a role are "
        "equally fast; how long a step takes is not known before steps are measured"
    )
    assert [(c["type"], c["status"], c["reason"], c["message"]) for c in listed] == [
        ("Valid", "True", "Accepted", ""),
        ("Suspended", "False", "NotSuspended", ""),
        ("Admitted", "True", "NoQueue", "no queue is configured; pods start at once"),
        ("PodsReady", "True", "PodsReady", "all 4 pods are ready"),
        ("Running", "True", "Stepping", ""),
        ("Profiled", "Unknown", "Profiling", "the first 3 steps of math-p1 are measured"),
        ("PlanApplied", "True", "PlanInForce", assumed),
        ("Degraded", "False", "Healthy", ""),
    ]


async def test_each_of_its_objects_is_written_once_in_this_order():
    cluster = await running()
    wrote = [(verb, kind) for verb, kind, _ in cluster.store.writes if kind not in ("Event", "RLJob")]
    first = ["RLPlan", "Service", "NetworkPolicy", *["Secret"] * 3, "ConfigMap", *["Pod"] * 4]
    assert wrote == [*(("create", kind) for kind in first), ("patch", "RLPlan")]


class Asked(Store):
    def __init__(self):
        super().__init__()
        self.live: list[bool] = []

    async def get(self, kind, name, *, live=True, **where):
        self.live.append(live)
        return await super().get(kind, name, **where)


@pytest.mark.parametrize(("given", "live"), [({}, True), ({"live": True}, True), ({"live": False}, False)])
async def test_an_object_is_read_from_the_server_where_the_copy_is_not_asked_for(given, live):
    store = Asked()
    assert await objects.get_or_none(store, "RLJob", "math", namespace="team", **given) is None
    await store.create(ppo_job().build())
    found = await objects.get_or_none(store, "RLJob", "math", namespace="team", **given)
    assert found is not None
    assert found["metadata"]["name"] == "math"
    assert store.live == [live, live]
