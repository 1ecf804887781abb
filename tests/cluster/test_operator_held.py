"""What the API server says to writes of the operator: a misspelt field is an error, and a stranger's object none of its
own. The policy is the chart's, for the account that the operator has here."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf_api.errors import RLinfError
from rlinf_operator.clients import kube
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.metrics import Metrics
from tests.cluster import pods
from tests.cluster.control_plane import BEGUN_S, ControlPlane, cartpole, is_complete, pods_of, refused_calls
from tests.cluster.kueues import said
from tools.chart import rendering
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
MINE = {"rlinf.io/job": "cartpole"}
OWNER = [{"apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "name": "cartpole", "uid": "none"}]
SMALL = {"numEnvs": 2, "slices": 1, "horizon": 8, "epochs": 1, "minibatches": 1}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"token": "their-own"}}


@pytest.fixture
def policy(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Until it holds."""
    values = tmp_path / "values.yaml"
    accounts = {"operator": {"create": False, "name": "rlinf-operator"}}
    values.write_text(yaml.safe_dump({"serviceAccounts": accounts}), encoding="utf-8")
    rendered = rendering.manifests(rendering.render(values, "--show-only", "templates/admissionpolicy.yaml"))
    made = [m for m in rendered if m["metadata"]["name"].endswith("-operator-keeps-to-jobs")]
    assert [m["kind"] for m in made] == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    together = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
    cluster.kubectl("apply", "-f", "-", stdin=together)

    def checked() -> dict[str, Any] | None:
        name = f"{made[0]['kind']}/{made[0]['metadata']['name']}"
        found: dict[str, Any] = json.loads(cluster.kubectl("get", name, "-o", "json"))
        status: dict[str, Any] = found.get("status") or {}
        return status if status.get("observedGeneration") == found["metadata"]["generation"] else None

    status = until(checked, what="the policy to be type-checked", timeout_s=30)
    assert not (status.get("typeChecking") or {}).get("expressionWarnings")
    yield
    cluster.kubectl("delete", "-f", "-", stdin=together)


@asynccontextmanager
async def client(kubeconfig: str) -> AsyncIterator[KubeApi]:
    async with await kube.connect(kubeconfig=kubeconfig) as connection:
        yield KubeApi(connection, timeout_s=10, metrics=Metrics())


async def until_held(api: KubeApi, namespace: str) -> None:
    """A patch that changes nothing is answered with the Secret until the policy holds."""
    async with asyncio.timeout(30):
        while True:
            try:
                found = await api.patch("Secret", "token", patch={}, namespace=namespace)
            except RLinfError:
                break
            assert base64.b64decode(found["data"]["token"]) == b"their-own"
            await asyncio.sleep(0.1)
    with pytest.raises(RLinfError, match="may UPDATE secrets of RLJobs alone"):
        await api.patch("Secret", "token", patch={}, namespace=namespace)


@pytest.mark.usefixtures("policy")
async def test_the_operators_account_writes_nothing_of_strangers_and_still_runs_a_job(
    cluster: Cluster, namespace: str, claim: str, image: str, tmp_path: Path
):
    cluster.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(SECRET))
    foreign = {**pods.pod("theirs"), "metadata": {"name": "theirs", "labels": MINE}}
    pods.create(cluster, namespace, foreign)
    with ControlPlane(cluster, tmp_path) as plane:
        async with client(plane.kubeconfig("rlinf-operator")) as api:
            await until_held(api, namespace)
            named = {"metadata": {"labels": MINE, "ownerReferences": OWNER}}
            for patch in ({"data": {"a": "Yg=="}}, named):
                with pytest.raises(RLinfError, match=r"which have label rlinf.io/job and an owner of kind"):
                    await api.patch("Secret", "token", patch=patch, namespace=namespace)
            with pytest.raises(RLinfError, match="may DELETE pods of RLJobs alone"):
                await api.delete("Pod", "theirs", namespace=namespace)
            for kind, name in (("ConfigMap", "foreign"), ("Secret", "rlinf-operator-ca")):
                made = {"kind": kind, "metadata": {"name": name, "namespace": namespace, "labels": MINE}}
                with pytest.raises(RLinfError, match=f"may CREATE {kind.lower()}s of RLJobs alone"):
                    await api.create(made)
        job = cartpole(claim=claim, steps=2)
        job["spec"]["flow"]["config"] |= SMALL
        plane.apply(namespace, job)
        plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=BEGUN_S)
        until(lambda: workers(plane, namespace) == [], what="its workers to go", timeout_s=30)
        assert refused_calls(plane.operator) == []


def workers(plane: ControlPlane, namespace: str) -> list[Any]:
    return pods_of(plane, namespace, "worker")


def test_a_misspelt_field_of_a_template_is_said_on_the_job(cluster: Cluster, namespace: str, tmp_path: Path):
    with ControlPlane(cluster, tmp_path) as plane:
        job = cartpole(claim="none")
        job["spec"]["pools"][0]["template"] = {"spec": {"nodeSelecter": {"disk": "ssd"}}}
        plane.apply(namespace, job)
        status = plane.until(
            namespace, "cartpole", lambda job: said(job, "PodsReady") == ("False", "PodsMissing"), what="a refused pod"
        )["status"]
        [message] = [c["message"] for c in status["conditions"] if c["type"] == "PodsReady"]
        assert 'strict decoding error: unknown field "spec.nodeSelecter"' in message
        assert [p["metadata"]["labels"]["rlinf.io/component"] for p in plane.pods(namespace)] == ["driver"]


async def test_no_write_of_the_client_drops_a_field(cluster: Cluster, namespace: str):
    async with client(str(cluster.kubeconfig)) as api:
        config: dict[str, Any] = {"kind": "ConfigMap", "metadata": {"name": "a", "namespace": namespace}}
        made = await api.create(config)
        for write in (
            api.create({**config, "metadata": {"name": "b", "namespace": namespace}, "dataa": {"x": "y"}}),
            api.patch("ConfigMap", "a", namespace=namespace, patch={"dataa": {"x": "y"}}),
            api.replace({**made, "dataa": {"x": "y"}}),
        ):
            with pytest.raises(RLinfError, match='unknown field "dataa"'):
                await write
