"""Certificates that say which part of which job somebody is: the CA, leaf certificates, and the Secrets they lie in.

Pure but for keys and serial numbers, which are made here. Called by clients/authority.py.

A leaf carries its SPIFFE URI (`names.spiffe_id`: who calls) and a DNS name (`names.tls_name`: who serves, never an
address), and may do both. The operator and the scheduler serve all jobs: namespace and job uid are `*`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rlinf_api import names, times
from rlinf_operator.manifests.metadata import JobMeta, Manifest, labels, metadata

BACKDATED: Final = timedelta(minutes=5)  # clocks of nodes differ by seconds, rarely by minutes
ANY: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateAuthority:
    certificate_pem: bytes
    key_pem: bytes
    bundle_pem: bytes = b""
    """Every CA that is trusted: this one, and the one before or after it while rotating. Empty: this one alone."""

    @property
    def trusted_pem(self) -> bytes:
        return self.bundle_pem or self.certificate_pem


def fingerprints(pem: bytes) -> tuple[str, ...]:
    """A bundle's certificates, each by its fingerprint, in the bundle's order."""
    return tuple(c.fingerprint(hashes.SHA256()).hex() for c in x509.load_pem_x509_certificates(pem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes
    not_after: datetime

    def files(self) -> dict[str, bytes]:
        """As rpc.TlsFolder reads them."""
        return {"ca.crt": self.ca_pem, "tls.crt": self.certificate_pem, "tls.key": self.key_pem}


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def make_authority(
    *, now: datetime, life: timedelta, key: ec.EllipticCurvePrivateKey | None = None
) -> CertificateAuthority:
    """`key`: of a CA that is made anew under the same one."""
    key = key or new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{names.GROUP} jobs")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificateAuthority(certificate_pem=certificate.public_bytes(serialization.Encoding.PEM), key_pem=_pem(key))


def check_pair(certificate_pem: bytes, key_pem: bytes) -> None:
    """ValueError where these are no CA's certificate and its key."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    try:
        signer = serialization.load_pem_private_key(key_pem, password=None)
        ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise ValueError(str(error)) from error
    if not ca or not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise ValueError("the certificate is no CA's" if not ca else "the key is no key of an elliptic curve")
    if signer.public_key() != certificate.public_key():
        raise ValueError("the key is not the certificate's")


def issue(
    authority: CertificateAuthority,
    *,
    part: str,
    namespace: str = ANY,
    job_uid: str = ANY,
    now: datetime,
    life: timedelta,
) -> Leaf:
    """`part` is driver, pool:<name>, operator or scheduler."""
    key = new_key()
    signer = serialization.load_pem_private_key(authority.key_pem, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.certificate_pem)
    not_after = min((now + life).replace(microsecond=0), issuer.not_valid_after_utc)
    sans = x509.SubjectAlternativeName(
        [
            x509.UniformResourceIdentifier(names.spiffe_id(namespace, job_uid, part)),
            x509.DNSName(names.tls_name(part, job_uid)),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, part[:64])]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(not_after)
        .add_extension(sans, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return Leaf(ca_pem=authority.trusted_pem, certificate_pem=pem, key_pem=_pem(key), not_after=not_after)


def secret(job: JobMeta, part: str, leaf: Leaf) -> Manifest:
    """Type Opaque: kubernetes.io/tls would refuse no more and say no more."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(
            job,
            names.secret_name(job.name, part, uid=job.uid),
            label=labels(job),
            annotations={names.ANNOTATION_CERT_EXPIRY: times.text(leaf.not_after)},
        ),
        "type": "Opaque",
        "data": {name: base64.b64encode(content).decode() for name, content in sorted(leaf.files().items())},
    }


def parts(pools: Sequence[str]) -> tuple[str, ...]:
    """The parts of a job that have a certificate, in a stable order."""
    return ("driver", *(f"pool:{name}" for name in pools))


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
