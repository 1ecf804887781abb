"""Pairs of links of every kind, both ends in one process; certificates of a job that exists for one test run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rlinf_api import names
from rlinf_worker.links import nccl, shm, tcp
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.link import Link
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.settings import LinkSettings

A = Identity(job="job-1", worker="rollout/0/0", attempt=3)
B = Identity(job="job-1", worker="actor/0/1", attempt=0)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A CA and one leaf certificate of a worker's pool, as server and client contexts."""

    def __init__(self, folder: Path, *, uri: str | None = names.spiffe_id("team", A.job, "pool:gpu")) -> None:
        now = datetime.datetime.now(datetime.UTC)
        ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

        def certificate(subject: str, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
            return (
                x509.CertificateBuilder()
                .subject_name(_name(subject))
                .issuer_name(_name(f"ca of {folder}"[-60:]))
                .public_key(public_key)
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(minutes=5))
                .not_valid_after(now + datetime.timedelta(hours=1))
            )

        ca = (
            certificate(f"ca of {folder}"[-60:], ca_key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(ca_key, hashes.SHA256())
        )
        sans: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        if uri is not None:
            sans.append(x509.UniformResourceIdentifier(uri))
        leaf = (
            certificate("worker", key.public_key())
            .add_extension(x509.SubjectAlternativeName(sans), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        self.ca_pem = ca.public_bytes(pem).decode()
        (folder / "ca.pem").write_text(self.ca_pem)
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / "leaf.pem").write_bytes(private + leaf.public_bytes(pem))
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(folder / "ca.pem"))
        for context in (self.server, self.client):
            context.load_cert_chain(str(folder / "leaf.pem"))
        self._files = {"ca.crt": self.ca_pem.encode(), "tls.crt": leaf.public_bytes(pem), "tls.key": private}

    def mount(self, folder: Path) -> Path:
        """The files as the kubelet shows them in a pod, over those that are there."""
        folder.mkdir(exist_ok=True)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        return folder


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def run_dir(tmp_path_factory):
    # Not tmp_path: it holds the test's name, and a unix socket's path has 107 bytes.
    return str(tmp_path_factory.mktemp("r"))


@pytest.fixture
async def connect(run_dir, authority, monkeypatch):
    """`a, b = await connect("shm", settings)`; everything is closed at the end of the test. A busy machine gets the
    time that it needs: who gives up on making a link is said elsewhere."""
    monkeypatch.setattr(nccl, "STORE_WAIT_S", 30.0)
    async with contextlib.AsyncExitStack() as stack:

        async def make(kind, settings=None, *, shm_dir="/dev/shm"):
            settings = settings or LinkSettings()
            bulk = "plain" if kind == "bulk" else "tls"
            settings = dataclasses.replace(
                settings, bulk=bulk, bulk_from_bytes=6_000, dial_timeout_s=30.0, hello_timeout_s=30.0
            )
            tls = authority if kind in ("tls", "bulk") else None
            listener = await Listener.open(
                B,
                pod_uid="pod",
                run_dir=run_dir,
                shm_dir=shm_dir,
                host="127.0.0.1",
                tls=tls.server if tls else None,
                settings=settings,
            )
            stack.push_async_callback(listener.close)
            there = listener.endpoint
            to = {"peer": B, "settings": settings}
            a: Link
            if kind == "shm":
                a = await shm.dial(there.unix_path, A, shm_dir=shm_dir, **to)
            else:
                a = await tcp.dial(there.host, there.port, A, context=tls.client if tls else None, **to)
            stack.push_async_callback(a.close)
            async with asyncio.timeout(40):
                b = await listener.accept()
            stack.push_async_callback(b.close)
            assert a.kind == b.kind == {"tls": "tcp", "bulk": "tcp"}.get(kind, kind)
            if kind == "bulk":
                assert isinstance(a, tcp.TcpLink)
                assert isinstance(b, tcp.TcpLink)
                async with asyncio.timeout(40):
                    while b._lane is None:
                        await asyncio.sleep(0)
                assert a._lane is not None
                assert a._lane.kind == b._lane.kind == "plain"
            assert (a.me, a.peer, b.me, b.peer) == (A, B, B, A)
            return a, b

        yield make
