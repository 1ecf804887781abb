"""A certificate authority and leaf certificates for tests, in the shape that rlinf_api.rpc asks for.

Not for: what a job really gets (rlinf_operator.manifests makes that, and tests it).
"""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rlinf_api import names

_DAY = datetime.timedelta(days=1)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class Authority:
    """`Authority().folder(path, part="driver", job_uid="1b4e")` writes ca.crt, tls.crt and tls.key."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(_named("test-ca"))
            .issuer_name(_named("test-ca"))
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def folder(
        self,
        path: Path,
        *,
        part: str,
        job_uid: str,
        namespace: str = "team",
        since: datetime.timedelta = -_DAY,
        until: datetime.timedelta = _DAY,
        uri: str = "",
    ) -> Path:
        """`since` and `until` are counted from now. `uri`: instead of the one that names part and job."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_named(part))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + since)
            .not_valid_after(now + until)
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        x509.DNSName(names.tls_name(part, job_uid)),
                        x509.UniformResourceIdentifier(uri or names.spiffe_id(namespace, job_uid, part)),
                    ]
                ),
                critical=False,
            )
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        path.mkdir(parents=True, exist_ok=True)
        pem = serialization.Encoding.PEM
        (path / "ca.crt").write_bytes(self._certificate.public_bytes(pem))
        (path / "tls.crt").write_bytes(certificate.public_bytes(pem))
        (path / "tls.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return path
