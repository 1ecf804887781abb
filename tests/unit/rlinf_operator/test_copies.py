"""What the cache keeps of an object: all that a pass reads, and nothing that would only take memory."""

import copy
import json
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api.store import Listing
from rlinf_operator.clients import copies, reflector
from rlinf_operator.clients.runtimes import Runtimes
from rlinf_operator.manifests import config, network
from rlinf_operator.manifests.metadata import MAX_POD_MESSAGE
from rlinf_operator.policies import pod_view
from rlinf_operator.reconcile.observe import observe
from rlinf_scheduler.jobs import plan_manifest
from tests.builders import NOW, plan_of, ppo_job
from tests.fakes.cluster import KEY, Cluster
from tests.fakes.drivers import FakeDrivers

TIME = "2026-11-21T12:00:00Z"
STATES = {
    "pending": {"phase": "Pending"},
    "unschedulable": {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes", "x": 1}
        ],
    },
    "no image": {
        "phase": "Pending",
        "conditions": [
            {"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True", "lastTransitionTime": TIME}
        ],
        "containerStatuses": [
            {"name": "agent", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}, "image": "a"}
        ],
    },
    "ready": {
        "phase": "Running",
        "podIP": "10.0.0.9",
        "podIPs": [{"ip": "10.0.0.9"}],
        "hostIP": "10.0.0.1",
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": TIME}
            for kind in ("Initialized", "Ready", "PodScheduled")
        ],
        "containerStatuses": [
            {"name": "sidecar", "state": {"running": {"startedAt": TIME}}},
            {"name": "agent", "state": {"running": {"startedAt": TIME}}, "imageID": "sha256:0"},
        ],
    },
    "init failed": {
        "phase": "Failed",
        "initContainerStatuses": [
            {"name": "one", "state": {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": TIME}}},
            {"name": "two", "state": {"terminated": {"exitCode": 2, "reason": "Error", "finishedAt": TIME, "x": 1}}},
        ],
        "containerStatuses": [{"name": "agent", "state": {"waiting": {"reason": "PodInitializing"}}}],
    },
    "init waiting": {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": TIME}],
        "initContainerStatuses": [
            {"name": "one", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}},
            {"name": "two", "state": {"waiting": {"reason": "PodInitializing"}}},
        ],
        "containerStatuses": [{"name": "agent", "state": {"waiting": {"reason": "PodInitializing"}}}],
    },
    "evicted": {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on resource: memory. " * 100,
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}],
    },
    "killed": {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}],
        "containerStatuses": [
            {
                "name": "agent",
                "state": {
                    "terminated": {
                        "exitCode": 137, "reason": "OOMKilled", "message": "{}", "finishedAt": TIME, "startedAt": TIME
                    }
                },
            }
        ],
    },
}  # fmt: skip


def pod(state="ready", **meta):
    return {
        "kind": "Pod",
        "metadata": {
            "name": "math-sim-0-a2",
            "namespace": "team",
            "uid": "p1",
            "resourceVersion": "7",
            "creationTimestamp": TIME,
            "labels": {
                names.LABEL_JOB: "math", names.LABEL_COMPONENT: "worker", names.LABEL_POOL: "sim",
                names.LABEL_ORDINAL: "0", names.LABEL_ATTEMPT: "2", "app.kubernetes.io/name": "rlinf",
            },
            "annotations": {names.ANNOTATION_LIFE: "2", names.ANNOTATION_INPUTS: "abc", "other.io/big": "x" * 9000},
            "ownerReferences": [{"kind": "RLJob", "name": "math", "uid": "u1", "controller": True}],
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
            **meta,
        },
        "spec": {"nodeName": "n7", "containers": [{"name": "agent", "env": [{"name": "A", "value": "x" * 5000}]}]},
        "status": copy.deepcopy(STATES[state]),
    }  # fmt: skip


def kept(obj, *, metadata_only=False):
    return copies.trimmed(obj, metadata_only=metadata_only)


class Reads:
    """What observe reads, whole or as the cache would have kept it."""

    def __init__(self, objects, *, as_copies):
        metadata_only = {"Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget"}
        self.objects = [
            copies.of(kept(o, metadata_only=o["kind"] in metadata_only), indexed=()).read()
            if as_copies and o["kind"] != "RLJob"
            else o
            for o in objects
        ]

    async def get(self, kind, name, *, namespace, live=True):
        return next(o for o in self.objects if (o["kind"], o["metadata"]["name"]) == (kind, name))

    async def list(self, kind, *, namespace, label_selector):
        return Listing(items=[o for o in self.objects if o["kind"] == kind], resource_version="")


async def objects_of_a_job():
    """All that a real pass made of one, and then what became of its pods."""
    cluster = Cluster()
    job = ppo_job()
    job.spec["driver"] = {"evictable": False}
    await cluster.apply(job)
    await cluster.settle()
    kinds = ("RLJob", "Pod", "RLPlan", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget")
    objects = [obj for kind in kinds for obj in (await cluster.store.list(kind, namespace="team")).items]
    assert {obj["kind"] for obj in objects} == set(kinds)
    return copy.deepcopy(objects)


@pytest.mark.parametrize("state", STATES)
async def test_a_pass_observes_the_same_in_the_copies(state):
    objects = await objects_of_a_job()
    for obj in objects:
        if obj["kind"] == "Pod":
            obj["status"] = copy.deepcopy(STATES[state])
            obj["metadata"]["deletionTimestamp"] = TIME

    async def observed(store: Any):
        return await observe(KEY, store=store, drivers=FakeDrivers(), now=NOW, platform=Runtimes(store))

    whole = await observed(Reads(objects, as_copies=False))
    copied = await observed(Reads(objects, as_copies=True))
    assert whole is not None
    assert len(whole.pods) == 4
    assert whole == copied


def test_a_copy_is_small_and_without_what_nobody_reads():
    found = copies.of(kept(pod()), indexed=(names.LABEL_JOB, names.LABEL_JOB_UID))
    assert len(found.text) < 1000 < len(json.dumps(pod()))
    assert (found.uid, found.version, found.labels) == ("p1", 7, ("math", ""))
    assert found.read()["metadata"]["annotations"] == {names.ANNOTATION_LIFE: "2", names.ANNOTATION_INPUTS: "abc"}


def test_a_copy_has_the_words_of_a_pod_that_ended_so_far_as_they_are_shown():
    ended, alive = pod("evicted"), pod()
    assert kept(ended)["status"]["message"] == ended["status"]["message"][:MAX_POD_MESSAGE]
    alive["status"]["message"] = "x"
    assert "message" not in kept(alive)["status"]


def test_init_containers_that_are_well_take_no_memory():
    status = pod()["status"] | {
        "initContainerStatuses": [{"name": "one", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]
    }
    assert kept({**pod(), "status": status}) == kept(pod())
    assert [c["name"] for c in kept(pod("init failed"))["status"]["initContainerStatuses"]] == ["two"]


def test_whoever_reads_a_copy_has_his_own():
    found = copies.of(kept(pod()), indexed=())
    found.read()["status"].clear()
    assert found.read()["status"]["phase"] == "Running"


def changed(**fields):
    after = pod()
    after["metadata"]["resourceVersion"] = "8"
    for path, value in fields.items():
        after[path] |= value
    return copies.is_news(copies.of(kept(pod()), indexed=()), kept(after))


def test_what_no_pass_reads_is_no_news():
    assert not changed()
    assert not changed(spec={"nodeName": "n8"})
    assert not changed(metadata={"managedFields": [], "labels": pod()["metadata"]["labels"] | {"theirs": "1"}})
    assert not changed(status={"qosClass": "Burstable"})


def test_what_a_pass_reads_is_news():
    assert changed(status={"phase": "Failed"})
    assert changed(status={"podIP": "10.0.0.10"})
    assert changed(metadata={"deletionTimestamp": TIME})
    assert changed(metadata={"uid": "p2"})
    assert changed(metadata={"annotations": {names.ANNOTATION_LIFE: "3"}})


def test_a_plan_is_kept_whole():
    plan = plan_manifest(plan_of(ppo_job()), namespace="team")
    plan["metadata"] |= {"uid": "x"}
    assert kept({**plan, "status": {"conditions": []}})["spec"] == plan["spec"]


def test_a_workload_is_kept_without_the_templates_of_its_pods():
    """Of a job with some pools they are most of it; whether it may run is the rest."""
    meta = {"name": "rljob-math", "namespace": "team", "uid": "u", "resourceVersion": "7"}
    nodes = {"levels": ["rack"], "slices": [{"domainCount": 1}]}
    assigned = [{"name": "sim", "count": 1, "topologyAssignment": nodes}, {"name": "driver", "count": 1}]
    told = {"conditions": [{"type": "Admitted", "status": "True"}]}
    near = {"name": "sim", "count": 1, "topologyRequest": {"required": "rack"}}
    workload = {
        "kind": "Workload", "metadata": meta,
        "spec": {"queueName": "team-a", "active": True, "podSets": [{**near, "minCount": 1, "template": {}}]},
        "status": {**told, "admission": {"podSetAssignments": assigned}, "requeueState": {"count": 3}},
    }  # fmt: skip
    found = kept(workload)
    assert found["spec"] == {"queueName": "team-a", "active": True, "podSets": [near]}
    kept_nodes = {**assigned[0], "topologyAssignment": {"levels": ["rack"]}}
    assert found["status"] == {**told, "admission": {"podSetAssignments": [kept_nodes, assigned[1]]}}
    bare = kept({"kind": "Workload", "metadata": meta})
    assert (bare["spec"], bare["status"]) == ({"podSets": []}, {})


def test_the_kinds_that_are_kept_without_data_say_what_their_annotations_say():
    spec = ppo_job().parsed()
    job = ppo_job().world().job
    made = config.config_map(job, spec, certificates_expire=NOW)
    made["metadata"] |= {"uid": "x"}
    assert kept(made, metadata_only=True)["metadata"]["annotations"] == made["metadata"]["annotations"]
    assert "data" not in kept(made, metadata_only=True)
    service = network.headless(job)
    service["metadata"] |= {"uid": "y"}
    assert kept(service, metadata_only=True).keys() == {"kind", "metadata"}


@pytest.mark.parametrize(
    ("obj", "good"),
    [
        (pod("pending"), True), (pod("ready"), True), (pod("evicted"), False), (pod("killed"), False),
        (pod("ready", deletionTimestamp="2026-01-01T00:00:00Z"), False),
        (pod("ready", labels={names.LABEL_COMPONENT: names.COMPONENT_DRIVER}), False),
        ({"kind": "RLPlan", "metadata": {"name": "math-p1"}}, False),
    ],
    ids=["on its way", "ready", "evicted", "killed", "going", "a driver", "a plan"],
)  # fmt: skip
def test_only_a_workers_pod_that_is_as_it_should_be_can_wait(obj, good):
    assert pod_view.is_good_news(obj) is good


def test_the_last_news_of_a_pod_is_not_good():
    assert not pod_view.is_good_news(pod("ready") | reflector.GONE)
