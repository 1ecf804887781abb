"""Between pods a peer shows a certificate of this job and, where it is known, of its own pool."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from rlinf_api import names, rpc
from rlinf_worker.links import hello, tcp
from rlinf_worker.links.certificates import LinkCertificates
from rlinf_worker.links.errors import LinkBroken, LinkRefused
from rlinf_worker.links.hello import Refusal
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.settings import LinkSettings
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
                "127.0.0.1", listener.endpoint.port, A, peer=B,
                settings=LinkSettings(), context=(other if wrong == "dialer" else authority).client,
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
            "127.0.0.1", listener.endpoint.port, A, peer=B, settings=LinkSettings(),
            context=certificates.dialling(),
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


def test_certificates_that_cannot_be_read_are_said_once_and_once_more_after_they_could(authority, tmp_path, caplog):
    mount = authority.mount(tmp_path / "a")
    certificates = LinkCertificates(rpc.TlsFolder(mount))

    def said():
        certificates.dialling()
        return sum("certificates not reloaded" in record.getMessage() for record in caplog.records)

    assert said() == 0
    for times in (1, 2):
        (mount / "tls.key").unlink()
        assert [said(), said()] == [times, times]
        authority.mount(mount)
        assert said() == times


@pytest.mark.parametrize("older", ["listener", "dialer"])
async def test_no_link_is_made_below_tls_1_3(run_dir, authority, tmp_path, older):
    """TLS 1.2 shows certificates, and so which pool of which job talks to which, to whoever listens."""
    certificates = LinkCertificates(rpc.TlsFolder(authority.mount(tmp_path / "mount")))
    listening, dialling = certificates.listening(), certificates.dialling()
    for context in (listening, dialling):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    old = authority.server if older == "listener" else authority.client
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if older == "listener" else ssl.PROTOCOL_TLS_CLIENT)
    other.check_hostname = False
    other.load_verify_locations(cadata=authority.ca_pem)
    other.load_cert_chain(tmp_path / "mount" / "tls.crt", tmp_path / "mount" / "tls.key")
    other.verify_mode, other.maximum_version = old.verify_mode, ssl.TLSVersion.TLSv1_2
    listener = await Listener.open(
        B, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1",
        tls=other if older == "listener" else listening,
    )  # fmt: skip
    with pytest.raises(LinkBroken):
        async with asyncio.timeout(20):
            await tcp.dial(
                "127.0.0.1", listener.endpoint.port, A, peer=B,
                settings=LinkSettings(), context=other if older == "dialer" else dialling,
            )  # fmt: skip
    await listener.close()


@pytest.mark.parametrize("bare", ["listener", "dialer"])
async def test_who_shows_no_certificate_or_a_strangers_gets_no_link(run_dir, authority, later, tmp_path, bare):
    """Both ends ask, though only a server must by TLS."""
    own = LinkCertificates(rpc.TlsFolder(authority.mount(tmp_path / "own")))
    stranger = LinkCertificates(rpc.TlsFolder(later.mount(tmp_path / "stranger")))
    listening = (stranger if bare == "listener" else own).listening()
    nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nothing.check_hostname = False
    nothing.load_verify_locations(cadata=authority.ca_pem)
    listener = await Listener.open(B, pod_uid="p", run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1", tls=listening)
    with pytest.raises((LinkBroken, LinkRefused)):
        async with asyncio.timeout(20):
            await tcp.dial(
                "127.0.0.1", listener.endpoint.port, A, peer=B,
                settings=LinkSettings(), context=nothing if bare == "dialer" else own.dialling(),
            )  # fmt: skip
    await listener.close()
