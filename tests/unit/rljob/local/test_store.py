"""The in-memory API server keeps the promises of a real one that the operator relies on."""

import pytest

from rlinf_api.errors import Conflict
from rlinf_api.store import AlreadyExists, Invalid, NotFound
from rlinf_operator.clients.objects import ObjectStore
from rljob.local.store import MemoryStore


def job(name="a", **spec):
    return {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}


def pod(name="a", **spec):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def store():
    return MemoryStore()


def test_the_store_is_an_object_store(store):
    typed: ObjectStore = store
    assert typed is store


async def test_create_fills_in_what_the_server_owns(store):
    created = await store.create(
        job() | {"metadata": {"name": "a", "uid": "mine", "generation": 9}, "status": {"x": 1}}
    )
    metadata = created["metadata"]
    assert metadata["uid"] != "mine"
    assert (metadata["generation"], metadata["namespace"], created["status"]) == (1, "default", {})
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["resourceVersion"]
    assert (await store.create(pod()))["status"]["phase"] == "Pending"


async def test_a_name_is_taken_only_once(store):
    await store.create(job())
    with pytest.raises(AlreadyExists, match="compare its owner's uid"):
        await store.create(job())
    other = await store.create(job() | {"metadata": {"generateName": "a-"}})
    assert other["metadata"]["name"].startswith("a-")


async def test_what_is_returned_is_the_callers_own(store):
    created = await store.create(job(steps=1))
    created["spec"]["steps"] = 2
    (await store.list("RLJob")).items[0]["spec"]["steps"] = 3
    assert (await store.get("RLJob", "a"))["spec"]["steps"] == 1


async def test_a_write_on_an_old_version_is_a_conflict(store):
    old = await store.create(job(steps=1))
    await store.patch("RLJob", "a", patch={"spec": {"steps": 2}})
    with pytest.raises(Conflict, match="resourceVersion"):
        await store.replace(old)
    with pytest.raises(Conflict):
        await store.patch("RLJob", "a", patch={"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}})
    with pytest.raises(Conflict, match="uid"):
        await store.patch("RLJob", "a", patch={"metadata": {"uid": "another"}, "spec": {"steps": 3}})
    with pytest.raises(Invalid, match="must be specified"):
        await store.replace(job(steps=3))


async def test_generation_moves_with_the_spec_alone(store):
    await store.create(job(steps=1))
    labelled = await store.patch("RLJob", "a", patch={"metadata": {"labels": {"x": "1"}}})
    assert labelled["metadata"]["generation"] == 1
    status = await store.patch("RLJob", "a", patch={"status": {"step": 4}}, subresource="status")
    assert (status["metadata"]["generation"], status["status"]) == (1, {"step": 4})
    changed = await store.patch("RLJob", "a", patch={"spec": {"steps": 2}})
    assert changed["metadata"]["generation"] == 2


async def test_status_and_spec_are_written_through_their_own_doors(store):
    await store.create(job(steps=1))
    both = {"spec": {"steps": 2}, "status": {"step": 1}}
    assert (await store.patch("RLJob", "a", patch=both))["status"] == {}
    after = await store.patch("RLJob", "a", patch=both | {"spec": {"steps": 3}}, subresource="status")
    assert (after["spec"]["steps"], after["status"]) == (2, {"step": 1})


async def test_a_write_that_changes_nothing_is_silent(store):
    before = await store.create(job(steps=1))
    again = await store.patch("RLJob", "a", patch={"spec": {"steps": 1}})
    assert again["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_specs_of_pods_and_plans_are_immutable_and_a_pod_is_bound_once(store):
    await store.create(pod(containers=[]))
    with pytest.raises(Invalid, match="immutable"):
        await store.patch("Pod", "a", patch={"spec": {"nodeName": "n"}})
    bound = await store.patch("Pod", "a", patch={"spec": {"nodeName": "n"}}, subresource="binding")
    assert (bound["spec"]["nodeName"], bound["metadata"]["generation"]) == ("n", 1)
    with pytest.raises(Conflict, match="unbound"):
        await store.patch("Pod", "a", patch={"spec": {"nodeName": "m"}}, subresource="binding")


async def test_a_bound_pod_is_deleted_with_grace_others_at_once(store):
    await store.create(pod("unbound"))
    await store.delete("Pod", "unbound")
    await store.create(pod("bound", terminationGracePeriodSeconds=7))
    await store.patch("Pod", "bound", patch={"spec": {"nodeName": "n"}}, subresource="binding")
    await store.delete("Pod", "bound")
    going = await store.get("Pod", "bound")
    assert going["metadata"]["deletionGracePeriodSeconds"] == 7
    await store.delete("Pod", "bound", grace_period_s=20)
    assert (await store.get("Pod", "bound"))["metadata"]["deletionTimestamp"] == going["metadata"]["deletionTimestamp"]
    await store.delete("Pod", "bound", grace_period_s=0)
    for name in ("unbound", "bound"):
        with pytest.raises(NotFound):
            await store.get("Pod", name)


async def test_a_finished_pod_gets_no_grace(store):
    await store.create(pod())
    await store.patch("Pod", "a", patch={"spec": {"nodeName": "n"}}, subresource="binding")
    await store.patch("Pod", "a", patch={"status": {"phase": "Succeeded"}}, subresource="status")
    await store.delete("Pod", "a")
    with pytest.raises(NotFound):
        await store.get("Pod", "a")


async def test_a_finalizer_holds_an_object_until_it_is_taken_off(store):
    await store.create(job() | {"metadata": {"name": "a", "finalizers": ["x"]}})
    await store.delete("RLJob", "a")
    assert (await store.get("RLJob", "a"))["metadata"]["deletionTimestamp"]
    await store.patch("RLJob", "a", patch={"metadata": {"finalizers": []}})
    with pytest.raises(NotFound):
        await store.get("RLJob", "a")


async def test_deletion_may_insist_on_a_uid(store):
    await store.create(job())
    with pytest.raises(Conflict, match="another object now"):
        await store.delete("RLJob", "a", uid="other")


async def test_lists_select_by_namespace_and_labels(store):
    for name, namespace, labels in (
        ("a", "x", {"pool": "gpu"}),
        ("b", "x", {"pool": "cpu"}),
        ("c", "y", {"pool": "gpu"}),
    ):
        await store.create(pod() | {"metadata": {"name": name, "namespace": namespace, "labels": labels}})
    listed = await store.list("Pod", namespace="x", label_selector="pool=gpu")
    assert [p["metadata"]["name"] for p in listed.items] == ["a"]
    everywhere = await store.list("Pod", label_selector="pool=gpu")
    assert [p["metadata"]["name"] for p in everywhere.items] == ["a", "c"]
