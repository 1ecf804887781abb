"""A genuine API server takes the CRDs, refuses nonsense with our sentences, and admits what the operator renders."""

import json
from functools import partial

import pytest

from rlinf_api.errors import RLinfError
from rlinf_operator.clients import kube
from rlinf_operator.clients.authority import Authority
from rlinf_operator.manifests import network
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.metrics import Metrics
from rlinf_operator.settings import OperatorSettings, Peers
from rlinf_scheduler.jobs import plan_manifest
from tests.builders import NOW, UID, plan_of, ppo_job
from tests.cluster.control_plane import served
from tools import gen_crds
from tools.testcluster.errors import ClusterError
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
UNHELD = json.dumps([{"op": "remove", "path": "/metadata/finalizers"}])


@pytest.fixture(scope="module")
def crds(cluster):
    cluster.kubectl("apply", "-f", str(gen_crds.FOLDER))
    for plural in ("rljobs", "rlplans", "rlprofiles"):
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{plural}.rlinf.io", "--timeout=30s")
        until(partial(served, cluster, plural), what=f"the API of {plural}", timeout_s=30)
        conditions = json.loads(cluster.kubectl("get", "crd", f"{plural}.rlinf.io", "-o", "json"))["status"][
            "conditions"
        ]
        assert not [c for c in conditions if c["type"] == "NonStructuralSchema"]


def create(cluster, obj, *, verb="create"):
    """The API server's refusal, or nothing. Dry, so that no operator has anything to do."""
    words = [verb, "-f", "-", *(["--dry-run=server"] if verb == "create" else [])]
    try:
        cluster.kubectl(*words, stdin=json.dumps(obj))
    except ClusterError as error:
        return str(error)
    return ""


def in_namespace(manifest, namespace):
    manifest["metadata"] = {"name": manifest["metadata"]["name"], "namespace": namespace}
    return manifest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: None, ""),
        (lambda m: m["metadata"].update(name="a" * 41), "metadata.name must be at most 40"),
        (lambda m: m["spec"]["pools"][1].update(roles=["actor"]), "add its name to spec.pools[*].roles"),
        (lambda m: m["spec"]["pools"][1]["roles"].append("critic"), "add the role or remove the name"),
        (lambda m: m["spec"]["pools"][0]["slots"].update(resource="x/y", cpu="1", hostMemory="8Gi"), ""),
        (lambda m: m["spec"]["pools"][0]["slots"].update(hostMemory="8Gi"), "has hostMemory and no resource"),
        (lambda m: m["spec"]["pools"][0]["slots"].update(resource="x/y", hostMemory="8 GB"), "should match"),
        (
            lambda m: m["spec"]["pools"][0]["slots"].update(resource="foo bar"),
            "write domain/name, such as nvidia.com/gpu",
        ),
        (lambda m: m["spec"]["pools"][0]["slots"].update(resource="nvidia.com/gpu"), ""),
        (lambda m: m["spec"].update(placement={"mode": "Pinned"}), "write the name of an RLPlan"),
        (lambda m: m["spec"].update(placement={"pin": "math-p1"}), "write mode: Pinned or remove pin"),
        (lambda m: m["spec"].update(placement={"topology": {}}), "has not one of required, preferred and spread"),
        (
            lambda m: m["spec"]["pools"][0].update(topology={"required": "rack", "spread": "zone"}),
            "write one, such as {required: example.com/rack}",
        ),
        (lambda m: m["spec"]["pools"][0].update(topology={"spread": "a rack"}), "spread in body should match"),
        (lambda m: m["spec"]["pools"][0].update(topology={"required": "example.com/rack"}), ""),
        (lambda m: m["spec"].update(placement={"mode": "Pinned", "pin": "math-p1"}), ""),
        (lambda m: m["spec"]["flow"].update(setps=3), 'unknown field "spec.flow.setps"'),
        (lambda m: m["spec"]["roles"].append(m["spec"]["roles"][0]), "Duplicate value"),
        (
            lambda m: m["spec"]["pools"][0].update(pods=0),
            "spec.pools[0].pods in body should be greater than or equal to 1",
        ),
        (lambda m: m["spec"]["roles"][0].update(workers=200_000), "should be less than or equal to 100000"),
        (lambda m: m["spec"]["roles"][0].update(workers={"min": 1}), "spec.roles[0].workers.max: Required value"),
        (lambda m: m["spec"]["roles"][0].update(workers={"min": 1, "max": 0}), "workers.max in body should be greater"),
        (lambda m: m["spec"]["roles"][0].update(workers={"min": 1, "max": 9}), ""),
    ],
)
def test_nonsense_is_refused_with_the_field_and_the_remedy(cluster, crds, namespace, change, sentence):
    job = in_namespace(ppo_job().build(), namespace)
    change(job)
    refusal = create(cluster, job)
    assert sentence in refusal
    assert bool(sentence) == bool(refusal)


def test_what_a_job_is_cannot_change_and_how_long_it_runs_can(cluster, crds, namespace):
    job = in_namespace(ppo_job().build(), namespace)
    assert create(cluster, job, verb="apply") == ""
    for field, value, sentence in (
        ("seed", 9, "spec.seed cannot change"),
        ("flow", {"name": "grpo"}, "spec.flow.name cannot change"),
        ("flow", {"name": "ppo", "steps": 7}, ""),
    ):
        changed = {**job, "spec": {**job["spec"], field: value}}
        refusal = create(cluster, changed, verb="apply")
        assert sentence in refusal
        assert bool(sentence) == bool(refusal)


def test_a_plan_cannot_change_and_no_channel_may_stand_still(cluster, crds, namespace):
    plan = plan_manifest(plan_of(ppo_job()), namespace=namespace)
    plan["metadata"].pop("ownerReferences")
    assert create(cluster, plan, verb="apply") == ""
    plan["spec"]["workers"][0]["count"] = 4
    assert "spec of an RLPlan cannot change" in create(cluster, plan, verb="apply")
    plan["metadata"]["name"] = "other-p1"
    plan["spec"]["channels"] = [{"name": "s", "microBatch": 64, "depth": 4, "capacity": {"units": 100}}]
    assert "raise capacity.units or lower depth" in create(cluster, plan)


def test_what_the_operator_renders_is_admitted_under_pod_security_restricted(cluster, namespace):
    peers = Peers('[{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "operator"}}}]')
    settings = OperatorSettings(network_policy_callers=peers, network_policy_scrapers=peers)
    world = ppo_job(namespace=namespace).world(settings=settings).planned()
    decision = world.decide()
    assert decision.network_policy is not None
    objects = [
        *decision.create_pods,
        decision.network_policy,
        network.headless(world.job),
        Authority.new(clock=lambda: NOW).secret(world.job, "pool:sim")[0],
    ]
    for obj in objects:
        assert create(cluster, obj) == "", obj["metadata"]["name"]


async def test_a_namespace_that_is_being_deleted_refuses_with_the_cause_that_the_operator_looks_for(cluster, namespace):
    """A ConfigMap with a finalizer holds it in that state."""
    meta = {"name": "held", "namespace": namespace, "finalizers": ["example.com/hold"]}
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(held))
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    connection = await kube.connect(kubeconfig=str(cluster.kubeconfig))
    try:
        api = kube.KubeApi(connection, timeout_s=10.0, metrics=Metrics())
        with pytest.raises(RLinfError, match="the namespace is being deleted; the job goes with it") as caught:
            await api.create(network.headless(JobMeta(namespace=namespace, name="math", uid=UID)))
        assert caught.value.reason == "NamespaceTerminating"
    finally:
        await connection.close()
        cluster.kubectl("-n", namespace, "patch", "configmap", "held", "--type=json", "-p", UNHELD)
