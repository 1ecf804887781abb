"""Certificates: who they say somebody is, what they may do, how long; and that gRPC agrees."""

import base64
import datetime as dt
import stat
from dataclasses import replace

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from rlinf_api import names, rpc, times
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_operator.clients.authority import Authority
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.metadata import JobMeta, labels
from tests.builders import NOW, UID

JOB = JobMeta(namespace="team", name="math", uid=UID)
LIFE = dt.timedelta(days=30)


def leaf(part="pool:sim"):
    authority = certificates.make_authority(now=NOW, life=LIFE * 12)
    made = certificates.issue(authority, part=part, namespace="team", job_uid=UID, now=NOW, life=LIFE)
    return authority, made, x509.load_pem_x509_certificate(made.certificate_pem)


def test_a_leaf_names_its_part_and_job_twice_and_may_call_and_serve():
    _, _, certificate = leaf()
    sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sans.get_values_for_type(x509.UniformResourceIdentifier) == [names.spiffe_id("team", UID, "pool:sim")]
    assert sans.get_values_for_type(x509.DNSName) == [f"pool-sim.{UID}.rlinf.io"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.public_key().curve.name == "secp256r1"


def test_a_leaf_is_signed_by_the_authority_and_ends_no_later():
    authority, made, certificate = leaf()
    issuer = x509.load_pem_x509_certificate(authority.certificate_pem)
    certificate.verify_directly_issued_by(issuer)
    assert certificate.not_valid_after_utc == NOW + LIFE == made.not_after
    short = certificates.make_authority(now=NOW, life=dt.timedelta(hours=1))
    assert certificates.issue(short, part="driver", now=NOW, life=LIFE).not_after == NOW + dt.timedelta(hours=1)


def test_a_leaf_is_backdated_as_clocks_differ_and_brings_its_authority():
    _, made, certificate = leaf()
    assert certificate.not_valid_before_utc == NOW - certificates.BACKDATED
    assert made.ca_pem


def test_a_pool_of_a_long_name_is_cut_where_x509_ends_a_common_name_and_whole_in_its_address():
    part = f"pool:{'s' * 63}"
    _, _, certificate = leaf(part)
    [name] = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    assert name.value == part[:64], "X.520 has no room for more"
    sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sans.get_values_for_type(x509.UniformResourceIdentifier) == [names.spiffe_id("team", UID, part)]


def test_the_operators_own_certificate_is_for_all_jobs(tmp_path):
    authority = Authority.new(clock=lambda: NOW)
    authority.write_folder(tmp_path / "tls", "operator")
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls" / "tls.crt").read_bytes())
    sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sans.get_values_for_type(x509.DNSName) == ["operator.rlinf.io"]
    identity = names.parse_spiffe_id(sans.get_values_for_type(x509.UniformResourceIdentifier)[0])
    assert identity == names.PartIdentity(namespace="*", job_uid="*", part="operator")
    assert stat.S_IMODE((tmp_path / "tls" / "tls.key").stat().st_mode) == 0o600


def test_the_parts_of_a_job_are_its_driver_and_its_pools():
    assert certificates.parts(["sim", "train"]) == ("driver", "pool:sim", "pool:train")


async def get_status(request, context):
    return job_pb2.JobStatus(job_uid=UID, state=job_pb2.RUNNING)


def service():
    """The one method that is called here; the generated servicer would ask for all of them."""
    handler = grpc.unary_unary_rpc_method_handler(
        get_status,
        request_deserializer=job_pb2.GetStatusRequest.FromString,
        response_serializer=job_pb2.JobStatus.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("rlinf.job.v1alpha1.Job", {"GetStatus": handler})


@pytest.mark.parametrize(
    ("part", "uid", "code"),
    [
        ("operator", "*", None),
        ("pool:sim", UID, grpc.StatusCode.PERMISSION_DENIED),
        ("operator", "another-job", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_grpc_takes_these_certificates_and_refuses_by_them(tmp_path, part, uid, code):
    now = dt.datetime.now(dt.UTC)
    authority = certificates.make_authority(now=now, life=LIFE)

    def folder(name, **who):
        (tmp_path / name).mkdir()
        for file, content in certificates.issue(authority, now=now, life=LIFE, **who).files().items():
            (tmp_path / name / file).write_bytes(content)
        return rpc.TlsFolder(tmp_path / name)

    server_tls = folder("server", part="driver", namespace="team", job_uid=UID)
    client_tls = folder("client", part=part, namespace="team" if uid != "*" else "*", job_uid=uid)
    allowed = {"/rlinf.job.v1alpha1.Job/GetStatus": frozenset({"operator"})}
    server = grpc.aio.server(interceptors=[rpc.Gatekeeper(allowed, job_uid=UID)], options=list(rpc.SERVER_OPTIONS))
    server.add_generic_rpc_handlers((service(),))
    port = server.add_secure_port("127.0.0.1:0", server_tls.server_credentials())
    await server.start()
    channel = await rpc.dial(f"127.0.0.1:{port}", tls=client_tls, server=names.tls_name("driver", UID))
    try:
        stub = job_pb2_grpc.JobStub(channel)
        if code is None:
            assert (await stub.GetStatus(job_pb2.GetStatusRequest(), timeout=5)).job_uid == UID
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(job_pb2.GetStatusRequest(), timeout=5)
            assert caught.value.code() == code
    finally:
        await channel.close()
        await server.stop(None)


def usages(certificate):
    found = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert found.critical
    said = found.value
    plain = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return {name for name in (*plain, "key_cert_sign", "crl_sign") if getattr(said, name)}


def test_a_ca_may_sign_leaves_and_no_further_ca_and_a_leaf_may_sign_nothing():
    authority, _, certificate = leaf()
    ca = x509.load_pem_x509_certificate(authority.certificate_pem)
    limits = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (limits.critical, limits.value.ca, limits.value.path_length) == (True, True, 0)
    assert usages(ca) == {"digital_signature", "key_cert_sign", "crl_sign"}
    assert usages(certificate) == {"digital_signature"}
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).critical
    signer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    named = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert named.key_identifier == signer.digest


def test_a_ca_lives_from_a_little_before_now_as_long_as_it_is_told_and_five_years_by_default():
    """Clocks of nodes differ by seconds, rarely by minutes."""
    made = x509.load_pem_x509_certificate(certificates.make_authority(now=NOW, life=LIFE).certificate_pem)
    assert made.not_valid_before_utc == NOW - dt.timedelta(minutes=5)
    assert made.not_valid_after_utc == NOW + LIFE
    by_default = Authority.new(clock=lambda: NOW)
    ca = x509.load_pem_x509_certificate(by_default.ca.certificate_pem)
    assert ca.not_valid_after_utc == NOW + dt.timedelta(days=1825)
    assert by_default.leaf("driver").not_after == NOW + dt.timedelta(days=30)


def test_the_secret_of_a_part_is_the_jobs_and_has_the_files_and_says_when_they_end():
    authority = Authority.new(clock=lambda: NOW, life=LIFE)
    made, ends = authority.secret(JOB, "pool:sim")
    assert ends == NOW + LIFE
    meta = made["metadata"]
    assert (made["kind"], made["type"]) == ("Secret", "Opaque")
    assert (meta["namespace"], meta["name"]) == ("team", names.secret_name("math", "pool:sim", uid=UID))
    assert meta["labels"] == labels(JOB)
    assert meta["ownerReferences"][0]["uid"] == UID
    assert meta["annotations"][names.ANNOTATION_CERT_EXPIRY] == times.text(ends)
    files = {name: base64.b64decode(content) for name, content in made["data"].items()}
    assert list(files) == ["ca.crt", "tls.crt", "tls.key"]
    assert files["ca.crt"] == authority.ca.certificate_pem
    certificate = x509.load_pem_x509_certificate(files["tls.crt"])
    sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert sans.get_values_for_type(x509.UniformResourceIdentifier) == [names.spiffe_id("team", UID, "pool:sim")]
    key = serialization.load_pem_private_key(files["tls.key"], password=None)
    assert key.public_key() == certificate.public_key()


def test_a_leaf_brings_every_ca_that_is_trusted_and_is_signed_by_the_first():
    ca, other = (certificates.make_authority(now=NOW, life=LIFE) for _ in range(2))
    both = replace(ca, bundle_pem=ca.certificate_pem + other.certificate_pem)
    made = certificates.issue(both, part="driver", now=NOW, life=LIFE)
    assert made.ca_pem == ca.certificate_pem + other.certificate_pem
    assert len(certificates.fingerprints(made.ca_pem)) == 2
    authority = Authority(both, clock=lambda: NOW, life=LIFE)
    assert authority.trusted() == certificates.fingerprints(both.trusted_pem)
    authority.ca = other
    assert authority.trusted() == certificates.fingerprints(other.certificate_pem), "the CA has been exchanged"


def test_the_files_of_a_part_are_written_for_its_user_alone_and_over_those_that_are_there(tmp_path):
    authority = Authority.new(clock=lambda: NOW, life=LIFE)
    folder = tmp_path / "below" / "tls"
    for _ in range(2):
        assert authority.write_folder(folder, "operator") == NOW + LIFE
    assert {path.name for path in folder.iterdir()} == {"ca.crt", "tls.crt", "tls.key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ca, certificate, key = rpc.TlsFolder(folder).read()
    x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    assert serialization.load_pem_private_key(key, password=None) is not None


def test_a_pair_that_is_none_is_refused():
    good, other = (certificates.make_authority(now=NOW, life=LIFE) for _ in range(2))
    certificates.check_pair(good.certificate_pem, good.key_pem)
    with pytest.raises(ValueError, match="the key is not the certificate's"):
        certificates.check_pair(good.certificate_pem, other.key_pem)
    _, made, _ = leaf()
    with pytest.raises(ValueError, match="the certificate is no CA's"):
        certificates.check_pair(made.certificate_pem, made.key_pem)
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with pytest.raises(ValueError, match="no key of an elliptic curve"):
        certificates.check_pair(good.certificate_pem, rsa_key)
