"""Garbage collection by owner references."""

import pytest

from rlinf_api.store import NotFound
from rljob.local.store import MemoryStore


def obj(kind, name, *owners):
    references = [{"kind": o["kind"], "name": o["metadata"]["name"], "uid": o["metadata"]["uid"]} for o in owners]
    return {"kind": kind, "metadata": {"name": name, "ownerReferences": references}, "spec": {}}


async def exists(store, kind, name):
    try:
        await store.get(kind, name)
    except NotFound:
        return False
    return True


@pytest.fixture
def store():
    return MemoryStore()


async def test_children_go_with_their_owner_and_theirs_with_them(store):
    job = await store.create(obj("RLJob", "a"))
    plan = await store.create(obj("RLPlan", "a-p1", job))
    await store.create(obj("ConfigMap", "grandchild", plan))
    await store.create(obj("ConfigMap", "foreign"))
    await store.delete("RLJob", "a")
    assert not await exists(store, "RLPlan", "a-p1")
    assert not await exists(store, "ConfigMap", "grandchild")
    assert await exists(store, "ConfigMap", "foreign")


async def test_a_running_pod_of_a_deleted_owner_keeps_its_grace(store):
    job = await store.create(obj("RLJob", "a"))
    await store.create(obj("Pod", "p", job))
    await store.patch("Pod", "p", patch={"spec": {"nodeName": "n"}}, subresource="binding")
    await store.delete("RLJob", "a")
    assert (await store.get("Pod", "p"))["metadata"]["deletionGracePeriodSeconds"] == 30


async def test_an_object_with_another_living_owner_stays(store):
    one, two = await store.create(obj("RLJob", "a")), await store.create(obj("RLJob", "b"))
    await store.create(obj("ConfigMap", "c", one, two))
    await store.delete("RLJob", "a")
    assert await exists(store, "ConfigMap", "c")
    await store.delete("RLJob", "b")
    assert not await exists(store, "ConfigMap", "c")


async def test_a_child_of_a_dead_owner_does_not_live(store):
    job = await store.create(obj("RLJob", "a"))
    await store.delete("RLJob", "a")
    assert (await store.create(obj("ConfigMap", "late", job)))["metadata"]["name"] == "late"
    assert not await exists(store, "ConfigMap", "late")
