"""Between pods a peer shows a certificate of this job and, where it is known, of its own pool."""

from __future__ import annotations

import asyncio

import pytest

from rlinf_api import names, rpc
from rlinf_worker.links import hello, tcp
from rlinf_worker.links.certificates import LinkCertificates
from rlinf_worker.links.endpoint import Listener
from rlinf_worker.links.hello import Refusal
from rlinf_worker.links.protocol import LinkBroken, LinkRefused, LinkSettings
from tests.unit.rlinf_worker.links.conftest import A, Authority, B


def certificate(uri):
    return {"subjectAltName": (("DNS", "x"), ("URI", uri))}


def uri(job=A.job, part="pool:gpu"):
    return names.spiffe_id("team", job, part)


@pytest.mark.parametrize(
    ("found", "pool", "why"),
    [
        (None, "gpu", None),  # no TLS, nothing to check
        (certificate(uri()), "gpu", None),
        (certificate(uri()), "", None),
        (certificate(uri()), "cpu", "is of part 'pool:gpu', wanted 'pool:cpu'"),
        (certificate(uri(part="driver")), "", "is of part 'driver', wanted 'pool:'"),
        (certificate(uri(job="other")), "", "is of job other, worker rollout/0/0#3 of job-1"),
        (certificate("spiffe://elsewhere/x"), "", "names no part of a job"),
        ({}, "", "names no part of a job"),
    ],
)
def test_what_a_certificate_has_to_name(found, pool, why):
    if why is None:
        hello.check_certificate(found, A, pool=pool)
        return
    with pytest.raises(Refusal, match=why) as caught:
        hello.check_certificate(found, A, pool=pool)
    assert caught.value.code == "certificate"


@pytest.mark.parametrize("wrong", ["listener", "dialer"])
async def test_another_jobs_certificate_is_refused_at_either_end_though_the_ca_is_the_same(
    run_dir, authority, tmp_path, wrong
):
    other = Authority(tmp_path, uri=uri(job="other-job"))
    for context in (other.server, other.client, authority.server, authority.client):
        context.load_verify_locations(str(tmp_path / "ca.pem"))
        context.load_verify_locations(cadata=authority.ca_pem)
    listener = await Listener.open(
        B, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1",
        tls=(other if wrong == "listener" else authority).server,
    )  # fmt: skip
    with pytest.raises((LinkRefused, LinkBroken), match="certificate is of job other-job"):
        async with asyncio.timeout(20):
            await tcp.dial(
                "127.0.0.1", listener.endpoint.port, A, to_worker=B.worker, to_attempt=B.attempt,
                settings=LinkSettings(), context=(other if wrong == "dialer" else authority).client,
                server_name="127.0.0.1",
            )  # fmt: skip
    if wrong == "dialer":
        assert listener.refused["certificate"] == 1
    await listener.close()


@pytest.fixture
def later(tmp_path):
    """A CA that the job is given later."""
    (tmp_path / "later").mkdir()
    return Authority(tmp_path / "later")


async def try_to_link(listener: Listener, certificates: LinkCertificates) -> None:
    """Dials, and is greeted; raises LinkBroken where either end did not like what it was shown."""
    async with asyncio.timeout(20):
        link = await tcp.dial(
            "127.0.0.1", listener.endpoint.port, A, to_worker=B.worker, to_attempt=B.attempt, settings=LinkSettings(),
            context=certificates.dialling(), server_name=None,
        )  # fmt: skip
        accepted = await listener.accept()
    await link.close()
    await accepted.close()


@pytest.mark.parametrize("older", ["listener", "dialer"])
async def test_a_worker_links_with_the_certificates_that_its_mount_has_by_now(
    run_dir, authority, later, tmp_path, caplog, older
):
    """It started with others, of a CA that nobody who starts now has heard of."""
    mounts = {"listener": authority.mount(tmp_path / "b"), "dialer": authority.mount(tmp_path / "a")}
    listening, dialling = (LinkCertificates(rpc.TlsFolder(mounts[end])) for end in ("listener", "dialer"))
    listener = await Listener.open(
        B, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", tls=listening.listening()
    )
    await try_to_link(listener, dialling)

    later.mount(mounts[{"listener": "dialer", "dialer": "listener"}[older]])
    with pytest.raises(LinkBroken):  # it is really another CA
        await try_to_link(listener, dialling)
    (mounts[older] / "tls.key").unlink()  # in the middle of the exchange: no worse than before
    with pytest.raises(LinkBroken):
        await try_to_link(listener, dialling)
    assert "certificates not reloaded" in caplog.text
    later.mount(mounts[older])
    await try_to_link(listener, dialling)
    await listener.close()
