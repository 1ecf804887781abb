"""Certificates: who they say somebody is, what they may do, how long; and that gRPC agrees."""

import datetime as dt
import stat

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_operator.clients.authority import Authority
from rlinf_operator.manifests import certificates
from rlinf_operator.manifests.metadata import JobMeta
from tests.builders import NOW, UID

JOB = JobMeta(namespace="team", name="math", uid=UID)
LIFE = dt.timedelta(days=30)


def leaf(part="pool:sim", **kwargs):
    authority = certificates.make_authority(now=NOW, life=LIFE * 12)
    made = certificates.issue(authority, part=part, namespace="team", job_uid=UID, now=NOW, life=LIFE, **kwargs)
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


def test_key_clock_and_serial_can_be_given():
    key = certificates.new_key()
    _, made, certificate = leaf(key=key, serial=77)
    assert certificate.serial_number == 77
    assert certificate.public_key().public_numbers() == key.public_key().public_numbers()
    assert certificate.not_valid_before_utc == NOW - certificates.BACKDATED
    assert made.ca_pem


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
