"""The operator's CA is lost, exchanged or rotated under a running job: what becomes of the job's certificates."""

import base64
from datetime import timedelta

from rlinf_api import names
from rlinf_operator.clients.authority import CA_LIFE, Authority
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.certificates import CertificateAuthority
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW
from tests.fakes.cluster import AUTHORITY, QUICK, Cluster


def restarted_with(cluster: Cluster, ca: CertificateAuthority) -> Authority:
    """The next operator process, which found this CA in its namespace."""
    authority = Authority(ca, clock=lambda: NOW, life=timedelta(days=30))
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=lambda _: cluster.drivers, authority=authority,
        settings=QUICK, clock=lambda: NOW,
    )  # fmt: skip
    cluster.store.writes.clear()
    return authority


async def running() -> Cluster:
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    return cluster


async def cas_of_secrets(cluster: Cluster) -> set[bytes]:
    secrets = [await cluster.store.get("Secret", name, namespace="team") for name in await cluster.names("Secret")]
    return {base64.b64decode(secret["data"]["ca.crt"]) for secret in secrets}


def patched(cluster: Cluster) -> list[str]:
    return [kind for verb, kind, _ in cluster.store.writes if verb == "patch"]


async def issuer_of(cluster: Cluster) -> str:
    made = await cluster.store.get("ConfigMap", "math-job", namespace="team")
    return str(made["metadata"]["annotations"].get(names.ANNOTATION_CERT_ISSUER, ""))


async def test_every_certificate_of_a_running_job_is_made_anew_once_under_an_exchanged_ca():
    cluster = await running()
    pods = await cluster.names("Pod")
    authority = restarted_with(cluster, certificates.make_authority(now=NOW, life=CA_LIFE))
    await cluster.settle()
    assert await cas_of_secrets(cluster) == {authority.ca.certificate_pem}
    assert await issuer_of(cluster) == authority.trusted()[0]
    assert await cluster.names("Pod") == pods
    assert sorted(patched(cluster)) == ["ConfigMap", "Secret", "Secret", "Secret"]
    cluster.store.writes.clear()
    await cluster.settle()
    assert cluster.store.writes == []


async def test_a_rotated_ca_lets_certificates_of_the_one_before_end_in_their_own_time():
    cluster = await running()
    fresh, old = certificates.make_authority(now=NOW, life=CA_LIFE), AUTHORITY.ca.certificate_pem
    bundle = fresh.certificate_pem + old
    ca = CertificateAuthority(certificate_pem=fresh.certificate_pem, key_pem=fresh.key_pem, bundle_pem=bundle)
    restarted_with(cluster, ca)
    await cluster.settle()
    assert cluster.store.writes == []
    restarted_with(cluster, fresh)  # and when the old one is no longer trusted nothing of it is left
    await cluster.settle()
    assert await cas_of_secrets(cluster) == {fresh.certificate_pem}


async def test_a_job_of_a_release_that_wrote_no_issuer_gets_its_certificates_anew():
    cluster = await running()
    change = {"metadata": {"annotations": {names.ANNOTATION_CERT_ISSUER: None}}}
    await cluster.store.patch("ConfigMap", "math-job", namespace="team", patch=change)
    cluster.store.writes.clear()
    await cluster.settle()
    assert patched(cluster).count("Secret") == 3
    assert await issuer_of(cluster) == AUTHORITY.trusted()[0]


async def test_a_changed_spec_does_not_lose_whose_the_certificates_are():
    cluster = await running()
    cluster.store.writes.clear()
    change = {"spec": {"failurePolicy": {"maxRestarts": 7}}}
    await cluster.store.patch("RLJob", "math", namespace="team", patch=change)
    await cluster.settle()
    assert "ConfigMap" in patched(cluster)
    assert await issuer_of(cluster) == AUTHORITY.trusted()[0]
    assert "Secret" not in patched(cluster)


async def test_a_secret_that_is_gone_when_the_ca_is_exchanged_is_made_with_the_others():
    cluster = await running()
    authority = restarted_with(cluster, certificates.make_authority(now=NOW, life=CA_LIFE))
    await cluster.store.delete("Secret", (await cluster.names("Secret"))[0], namespace="team")
    await cluster.settle()
    assert await cas_of_secrets(cluster) == {authority.ca.certificate_pem}
    assert len(await cluster.names("Secret")) == 3
