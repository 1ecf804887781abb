"""The operator set up otherwise: for one namespace only, as another version, with certificates that live three minutes,
with a CA that is being exchanged. Every operator here serves one namespace, as two are at work at a time.
"""

import base64
import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from rlinf_api import names
from rlinf_operator import access
from rlinf_operator.manifests import certificates
from tests.cluster import pods, worker_image
from tests.cluster.control_plane import (
    BEGUN_S,
    NAMESPACE,
    ControlPlane,
    cartpole,
    condition,
    further_than,
    is_complete,
    is_stepping,
    pods_of,
    refused_calls,
)
from tests.cluster.paced import STEPS, Paced
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = pytest.mark.cluster
LIFE_S = 180


@dataclass(frozen=True, slots=True)
class Aging:
    """A job under certificates that live LIFE_S, while the file's other tests are at work."""

    plane: ControlPlane
    namespace: str
    expiry: str
    """Of the job's first certificates, noted at `since`."""
    since: float

    def expires(self) -> str:
        config = self.plane.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/configmaps/cartpole-job")
        return str(config["metadata"]["annotations"]["rlinf.io/certificate-expires"])


@pytest.fixture(scope="module")
def aging(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aging]:
    """With an operator of its own, in a namespace of its own."""
    system, namespace = "rlinf-aging", f"t-aging-{uuid.uuid4().hex[:10]}"
    folder = tmp_path_factory.mktemp("aging")
    pods.make_namespace(cluster, namespace)
    try:
        claim = cluster.site_packages_volume(namespace, name="site-packages")
        with (
            Paced(cluster, namespace, claim=claim) as paced,
            ControlPlane(
                cluster, folder, system=system, namespaces=(namespace,), certificate_life_s=str(LIFE_S),
                driver_cpu="100m",
            ) as plane,
        ):  # fmt: skip
            job = paced.job(steps=100_000)
            (pool,) = job["spec"]["pools"]  # the actor is in the second pod: its links to the others are mTLS, too
            pool["pods"], pool["slots"]["perPod"] = 2, 2
            plane.apply(namespace, job)
            plane.until(namespace, "cartpole", is_running, what="Running", timeout_s=90)
            made = Aging(plane=plane, namespace=namespace, expiry="", since=time.monotonic())
            yield replace(made, expiry=made.expires())
    finally:
        pods.remove_namespace(cluster, namespace)
        cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-site-packages")
        cluster.api.delete(f"/api/v1/namespaces/{system}")


@pytest.fixture(scope="module", autouse=True)
def begun_first(request: pytest.FixtureRequest) -> None:
    """What is judged last grows old beside the others; where its test is not chosen, it is not begun."""
    if any("aging" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("aging")


def is_running(job: dict[str, Any]) -> bool:
    return condition(job, "Running") == "True"


def rejoined(before: dict[str, Any], *, attempt: int) -> Callable[[dict[str, Any]], bool]:
    """At work with a worker pod of that attempt: without a checkpoint it begins a branch. Running=True alone, which is
    written a moment after the attempt, may still be that of before."""
    branch = int(before["status"]["policyVersion"]["branch"])

    def holds(later: dict[str, Any]) -> bool:
        status = later["status"]
        return status["attempt"] == attempt and int(status["policyVersion"]["branch"]) > branch and is_stepping(later)

    return holds


# --- an upgrade -------------------------------------------------------------------------------------------------------

UPGRADED = {
    "worker_image": "localhost/rlinf-worker:next",
    "driver_image": "localhost/rlinf-worker:next",
    "image_pull_policy": "Never",
    "default_checkpoint_uri": "file:///tmp/checkpoints",
    "node_lost_toleration_s": "7",
    "worker_grace_s": "20",
    "driver_memory": "768Mi",
    "run_dir_size": "32Mi",
    "shm_share": "0.125",
}
"""Whatever a newer operator may render otherwise: images, environment, resources, volumes."""


@pytest.mark.timeout(400)
def test_an_upgraded_operator_restarts_no_pod_and_the_next_one_that_it_makes_joins(
    cluster: Cluster, image: str, namespace: str, paced: Paced, tmp_path: Path
):
    """Busy cores take most of the deadlines; an idle machine is through in 30 s."""
    worker_image.load(cluster, name=UPGRADED["worker_image"])
    with ControlPlane(cluster, tmp_path, namespaces=(namespace,)) as plane:
        plane.apply(namespace, paced.job())
        plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
        # Labels are no setting: these are what an operator of another version would have written.
        cluster.kubectl(
            "-n", namespace, "label", "--overwrite", "-l", "rlinf.io/job=cartpole",
            "pods,services,configmaps,networkpolicies", "app.kubernetes.io/version=0.0.1",
            "app.kubernetes.io/part-of=another",
        )  # fmt: skip
        before = {pod["metadata"]["uid"] for pod in plane.pods(namespace)}
        assert plane.operator.stop() == 0
        plane.change(**UPGRADED)
        plane.operator.start()
        plane.until(
            namespace, "cartpole", further_than(plane.job(namespace, "cartpole")), what="a step that it reports",
            timeout_s=60,
        )  # fmt: skip
        assert {pod["metadata"]["uid"] for pod in plane.pods(namespace)} == before
        assert plane.job(namespace, "cartpole")["status"]["attempt"] == 1
        job = plane.job(namespace, "cartpole")
        cluster.kubectl("-n", namespace, "delete", "pod", "-l", "rlinf.io/component=worker", "--wait=false")
        plane.until(
            namespace, "cartpole", rejoined(job, attempt=2), what="steps with the new operator's pod", timeout_s=90
        )
        worker = next(
            p for p in pods_of(plane, namespace, "worker") if p["metadata"]["labels"]["rlinf.io/attempt"] == "2"
        )
        assert worker["spec"]["containers"][0]["image"] == UPGRADED["worker_image"]
        assert worker["spec"]["terminationGracePeriodSeconds"] == 20
        (driver,) = pods_of(plane, namespace, "driver")
        assert driver["metadata"]["uid"] in before
        paced.go()
        job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=120)
        assert job["status"]["step"] == STEPS
        assert job["status"]["attempt"] == 2
        assert refused_calls(plane.operator) == [], "an operator of one namespace needs no right elsewhere"


# --- another CA -------------------------------------------------------------------------------------------------------

CHECKED_EVERY_S = LIFE_S / 20
TROUBLE = re.compile(r"SSL_ERROR_SSL|CERTIFICATE_VERIFY_FAILED|certificate verify failed|TLSV1_ALERT|UNAUTHENTICATED")
"""What gRPC, Python's TLS and our own servers say of a certificate that they do not accept."""


@pytest.fixture
def announced(cluster: Cluster) -> Iterator[tuple[x509.Certificate, x509.Certificate]]:
    """The operator's CA when the next one is announced and not due, later than the deadlines of a first step together
    allow: (the old one, the next one as it is when it is due). The latter has the key and the name of the announced
    one, so a certificate of either is accepted by who knows the other; `make_due` puts it in its place."""
    now, life = datetime.now(UTC), timedelta(days=10)
    old, key = certificates.make_authority(now=now - timedelta(days=8), life=life), certificates.new_key()
    following = certificates.make_authority(now=now + certificates.BACKDATED / 2, life=life, key=key)
    due = certificates.make_authority(now=now - timedelta(seconds=LIFE_S), life=life, key=key)
    files = {
        "ca.crt": old.certificate_pem, "ca.key": old.key_pem,
        "next.crt": following.certificate_pem, "next.key": following.key_pem,
    }  # fmt: skip
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    cluster.api.apply(
        f"/api/v1/namespaces/{NAMESPACE}", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    )
    cluster.api.delete(f"{path}/{access.CA_SECRET}")
    body = {
        "metadata": {"name": access.CA_SECRET},
        "data": {name: base64.b64encode(pem).decode() for name, pem in files.items()},
    }
    cluster.api.request("POST", path, body=body)
    yield x509.load_pem_x509_certificate(old.certificate_pem), x509.load_pem_x509_certificate(due.certificate_pem)
    cluster.api.delete(f"{path}/{access.CA_SECRET}")  # the next test's operator makes one of its own


def make_due(cluster: Cluster, following: x509.Certificate) -> None:
    """As if a leaf's life had passed since it was announced: the operator's next look makes it the one that signs."""
    pem = base64.b64encode(following.public_bytes(serialization.Encoding.PEM)).decode()
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/{access.CA_SECRET}"
    cluster.api.request("PATCH", path, body={"data": {"next.crt": pem}}, kind="application/merge-patch+json")


@pytest.mark.timeout(500)
def test_a_job_goes_on_while_the_operators_ca_is_exchanged(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path,
    announced: tuple[x509.Certificate, x509.Certificate],
):  # fmt: skip
    """Pods of either CA meet: an old driver a new worker, then a new driver that worker, and the operator both."""
    old, following = announced

    def issuer(part: str) -> x509.Certificate:
        """Of the part's certificate: whose signature is on it."""
        uid = plane.job(namespace, "cartpole")["metadata"]["uid"]
        path = f"/api/v1/namespaces/{namespace}/secrets/{names.secret_name('cartpole', part, uid=uid)}"
        leaf = x509.load_pem_x509_certificate(base64.b64decode(cluster.api.get(path)["data"]["tls.crt"]))
        for authority in announced:
            with contextlib.suppress(InvalidSignature):
                leaf.verify_directly_issued_by(authority)
                return authority
        raise AssertionError(f"the certificate of {part} is of neither CA")

    def replaced(part: str, *, component: str, attempt: int) -> None:
        """With a certificate of the present CA: the next pod, and a step of the job that is made with it."""
        logs.append(cluster.kubectl("-n", namespace, "logs", "-l", f"rlinf.io/component={component}", "--tail=-1"))
        uid = plane.job(namespace, "cartpole")["metadata"]["uid"]
        cluster.kubectl("-n", namespace, "delete", "secret", names.secret_name("cartpole", part, uid=uid))
        before = plane.job(namespace, "cartpole")
        cluster.kubectl("-n", namespace, "delete", "pod", "-l", f"rlinf.io/component={component}", "--wait=false")
        what = f"a step with the next {component}"
        if component == "worker":
            plane.until(namespace, "cartpole", rejoined(before, attempt=attempt), what=what, timeout_s=90)
        else:  # it adopts the workers with their branch; who is told of in the status is the newest driver
            until(lambda: attempts(component) == [str(attempt)], what=f"the next {component} alone", timeout_s=90)
            stepped(what)
        assert issuer(part) == following

    def attempts(component: str) -> list[str]:
        return [p["metadata"]["labels"]["rlinf.io/attempt"] for p in pods_of(plane, namespace, component)]

    def stepped(what: str) -> None:
        plane.until(namespace, "cartpole", further_than(plane.job(namespace, "cartpole")), what=what, timeout_s=90)

    def switched() -> bool:
        secret = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{access.CA_SECRET}")
        return base64.b64decode(secret["data"]["ca.crt"]) == following.public_bytes(serialization.Encoding.PEM)

    logs: list[str] = []
    with ControlPlane(
        cluster, tmp_path, namespaces=(namespace,), certificate_life_s=str(LIFE_S), ca_life_days="10"
    ) as plane:
        plane.apply(namespace, cartpole(claim=claim, steps=100_000))
        plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
        assert not switched()
        assert issuer("driver") == issuer("pool:cpu") == old
        make_due(cluster, following)
        until(switched, what="the next CA to sign", timeout_s=3 * CHECKED_EVERY_S)
        stepped("a step after the change")
        # Its connection to the driver is made anew, with a certificate of the other CA.
        plane.operator.kill()
        plane.operator.start()
        stepped("a step that the new operator hears of")
        replaced("pool:cpu", component="worker", attempt=2)
        replaced("driver", component="driver", attempt=3)
        logs += [cluster.kubectl("-n", namespace, "logs", "-l", "rlinf.io/job=cartpole", "--tail=-1")]
        logs += [process.log.read_text() for process in (plane.operator, plane.scheduler)]
    assert [line for text in logs for line in text.splitlines() if TROUBLE.search(line)] == []


@pytest.mark.timeout(500)
def test_a_running_job_gets_new_certificates_when_the_operators_ca_was_lost(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    """Its driver is reached again, replaced at most once until the kubelet has brought it the new ones, and a worker
    that starts then gets in."""

    def issuer() -> str:
        config = cluster.api.get(f"/api/v1/namespaces/{namespace}/configmaps/cartpole-job")
        return str(config["metadata"]["annotations"].get(names.ANNOTATION_CERT_ISSUER, ""))

    with ControlPlane(cluster, tmp_path, namespaces=(namespace,)) as plane:
        plane.apply(namespace, cartpole(claim=claim, steps=100_000))
        plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
        before = issuer()
        plane.operator.kill()
        cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}/secrets/{access.CA_SECRET}")
        plane.operator.start()
        until(lambda: issuer() not in ("", before), what="certificates of the new CA", timeout_s=60)
        heard = further_than(plane.job(namespace, "cartpole"))
        job = plane.until(namespace, "cartpole", heard, what="a step that the new operator hears of", timeout_s=180)
        attempt = job["status"]["attempt"]
        assert attempt <= 2, plane.describe(namespace, "cartpole")
        cluster.kubectl("-n", namespace, "delete", "pod", "-l", "rlinf.io/component=worker", "--wait=false")
        what = "the next worker to work"
        plane.until(namespace, "cartpole", rejoined(job, attempt=attempt + 1), what=what, timeout_s=120)


# --- certificates that live three minutes -----------------------------------------------------------------------------


@pytest.mark.slow("waits for the whole life of a certificate, three minutes")
@pytest.mark.timeout(600)
def test_certificates_of_three_minutes_are_renewed_while_a_job_runs(cluster: Cluster, aging: Aging):
    """After more than a whole life every certificate is another one, and a pod that starts then still gets in. Last in
    its file: meanwhile the other tests have let most of that life pass."""
    plane, namespace = aging.plane, aging.namespace
    until(lambda: time.monotonic() - aging.since > LIFE_S + 20, what="a whole life to pass", timeout_s=LIFE_S + 60)
    assert aging.expires() > aging.expiry
    assert is_running(plane.job(namespace, "cartpole"))
    assert plane.job(namespace, "cartpole")["status"]["attempt"] == 1
    # Workers that start now have a new certificate, and meet a driver and workers that are older than a life.
    before = plane.job(namespace, "cartpole")
    cluster.kubectl("-n", namespace, "delete", "pod", "cartpole-cpu-1-a1", "--wait=false")
    plane.until(namespace, "cartpole", rejoined(before, attempt=2), what="the next actor to work", timeout_s=90)
    plane.until(namespace, "cartpole", further_than(plane.job(namespace, "cartpole")), what="a further step")
    # The operator, started anew, is let in by a driver whose certificate is of a later life than its first.
    plane.operator.kill()
    try:
        plane.operator.start()
        plane.until(namespace, "cartpole", further_than(plane.job(namespace, "cartpole")), what="a step after that")
    finally:
        plane.operator.kill()  # this one belongs to the test
