"""The cluster's certificate authority, certificates and kubeconfigs, made new at every `up`.

Every component has an identity of its own with the rights it has in production: nodes are `system:nodes` under the
Node authorizer and NodeRestriction, the scheduler is `system:kube-scheduler` and so on. Only `admin` may do all.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tools.testcluster.layout import Addresses, Paths, node_name

LIFETIME = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    file: str
    common_name: str
    organizations: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    ips: tuple[str, ...] = ()


def identities(addresses: Addresses, *, nodes: int) -> list[Identity]:
    fixed = [
        Identity(
            file="apiserver",
            common_name="kube-apiserver",
            dns=("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
            + ("kubernetes.default.svc.cluster.local",),
            ips=("127.0.0.1", addresses.hub, addresses.hub_link, addresses.api_service, addresses.machine_link),
        ),
        Identity(file="apiserver-to-kubelet", common_name="kube-apiserver-kubelet-client"),
        Identity(file="admin", common_name="kubernetes-admin", organizations=("system:masters",)),
        Identity(file="controller-manager", common_name="system:kube-controller-manager"),
        Identity(file="scheduler", common_name="system:kube-scheduler"),
        Identity(file="proxy", common_name="system:kube-proxy"),
        Identity(file="coredns", common_name="testcluster:coredns"),
        Identity(file="kwok", common_name="testcluster:kwok", organizations=("system:masters",)),
    ]
    kubelets = [
        Identity(
            file=node_name(index),
            common_name=f"system:node:{node_name(index)}",
            organizations=("system:nodes",),
            dns=(node_name(index),),
            ips=(addresses.node(index), "127.0.0.1"),
        )
        for index in range(nodes)
    ]
    return fixed + kubelets


def write(folder: Path, addresses: Addresses, *, nodes: int) -> None:
    """ca, one key and certificate per identity, the service-account key pair, one kubeconfig per identity."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test cluster CA")])
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    _write(folder / "ca.key", _key_pem(ca_key))
    _write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    for identity in identities(addresses, nodes=nodes):
        key, certificate = issue(identity, ca_name=ca_name, ca_key=ca_key)
        _write(folder / f"{identity.file}.key", key)
        _write(folder / f"{identity.file}.crt", certificate)
        kubeconfig = yaml.safe_dump(
            kubeconfig_for(folder / identity.file, ca=folder / "ca.crt", server=addresses.server)
        )
        _write(folder / f"{identity.file}.kubeconfig", kubeconfig.encode())
    service_accounts = ec.generate_private_key(ec.SECP256R1())
    _write(folder / "service-accounts.key", _key_pem(service_accounts))
    _write(
        folder / "service-accounts.pub",
        service_accounts.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )


def issue(identity: Identity, *, ca_name: x509.Name, ca_key: ec.EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
    """Key and certificate, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, name) for name in identity.organizations]
    subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, identity.common_name)])
    builder = _certificate(subject, ca_name, key.public_key()).add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in identity.dns]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in identity.ips]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(ca_key, hashes.SHA256())
    return _key_pem(key), certificate.public_bytes(serialization.Encoding.PEM)


def issue_from(folder: Path, identity: Identity) -> tuple[bytes, bytes]:
    """A further certificate of the CA that `write` made in `folder`."""
    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return issue(identity, ca_name=ca.subject, ca_key=key)


def kubeconfig_for(stem: Path, *, ca: Path, server: str) -> dict[str, object]:
    """`stem` is the path of key and certificate without their endings."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(ca)}}],
        "users": [{"name": stem.name, "user": {"client-certificate": f"{stem}.crt", "client-key": f"{stem}.key"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": stem.name}}],
        "current-context": "test",
    }


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A machine whose clock was set back a little must still accept it.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + LIFETIME)
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def write_kubeconfig(paths: Paths, addresses: Addresses) -> None:
    """With the certificates inside, for people and tests."""

    def data(file: str) -> str:
        return base64.b64encode((paths.pki / file).read_bytes()).decode()

    config = kubeconfig_for(paths.pki / "admin", ca=paths.pki / "ca.crt", server=addresses.server)
    config["clusters"] = [
        {"name": "test", "cluster": {"server": addresses.server, "certificate-authority-data": data("ca.crt")}}
    ]
    config["users"] = [
        {
            "name": "admin",
            "user": {"client-certificate-data": data("admin.crt"), "client-key-data": data("admin.key")},
        }
    ]
    paths.kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")
    paths.kubeconfig.chmod(0o600)
