"""Who may call whom: the table, the certificates at the handshake, and the door in front of every shape of a method."""

import contextlib
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rlinf_api import names, rpc
from rlinf_api.errors import Refused, UserError
from tests.fakes.certs import Authority

UID = "1b4e"
METHODS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")
ALLOWED = {f"/test.Shapes/{name}": frozenset({"operator", "pool"}) for name in METHODS} | {
    "/test.Shapes/Nobody": frozenset[str]()
}
WITHIN_S = 20.0
HOUR = datetime.timedelta(hours=1)


# --- the table -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("part", "uid", "method", "server", "may"),
    [
        ("operator", "*", "UnaryUnary", UID, True),  # who serves all jobs may call the server of any
        ("operator", UID, "UnaryUnary", UID, True),
        ("pool:sim", UID, "UnaryUnary", UID, True),  # "pool" stands for every pool
        ("pool:sim", UID, "UnaryUnary", "*", True),  # a server of all jobs
        ("pool:sim", "other", "UnaryUnary", "*", True),
        ("pool:sim", "other", "UnaryUnary", UID, False),  # the very part, of another job
        ("operator", "other", "UnaryUnary", UID, False),
        ("pool:sim", "", "UnaryUnary", UID, False),
        ("driver", UID, "UnaryUnary", UID, False),  # the very job, another part
        ("pools", UID, "UnaryUnary", UID, False),
        ("operator", "*", "Nobody", UID, False),
        ("operator", "*", "Unlisted", UID, False),  # a method without a line is nobody's
    ],
)
def test_a_part_may_call_what_has_a_line_for_it_at_a_server_of_its_own_job(part, uid, method, server, may):
    identity = names.PartIdentity(namespace="team", job_uid=uid, part=part)
    assert rpc.is_allowed(identity, f"/test.Shapes/{method}", allowed=ALLOWED, job_uid=server) is may


# --- who is calling ------------------------------------------------------------------------------------------------
class Caller:
    """What gRPC knows of one: the names in its certificate."""

    def __init__(self, *sans: bytes) -> None:
        self.sans = sans

    def auth_context(self) -> dict[str, Any]:
        return {"x509_subject_alternative_name": self.sans} if self.sans else {}


def test_a_caller_is_the_part_that_one_of_its_certificates_names_says_whatever_the_others_are():
    ours = names.spiffe_id("team", UID, "pool:sim").encode()
    context: Any = Caller(b"sim.example", b"\xff\xfe", ours)
    assert rpc.peer_identity(context) == names.PartIdentity(namespace="team", job_uid=UID, part="pool:sim")
    for sans in ((), (b"\xff",), (b"spiffe://elsewhere/x",)):
        stranger: Any = Caller(*sans)
        with pytest.raises(Refused, match="the caller's certificate names no part"):
            rpc.peer_identity(stranger)


# --- a server with the door in front -------------------------------------------------------------------------------
class Shapes:
    """A method of each shape that gRPC has; answers with what it was asked. `ran`: those whose handler was reached."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        self.ran.append("UnaryUnary")
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.ran.append("UnaryStream")
        for _ in range(2):
            yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.ran.append("StreamUnary")
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.ran.append("StreamStream")
        async for request in requests:
            yield request

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        shapes: dict[str, Any] = {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
            "StreamStream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
            "Nobody": grpc.unary_unary_rpc_method_handler(self.unary_unary),
        }
        health: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(self.unary_unary)}
        return [
            grpc.method_handlers_generic_handler("test.Shapes", shapes),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        ]


@contextlib.asynccontextmanager
async def serving(tls: rpc.TlsFolder, shapes: Shapes) -> AsyncIterator[str]:
    gate = rpc.Gatekeeper(ALLOWED, job_uid=UID)
    server = grpc.aio.server(interceptors=[gate], options=list(rpc.SERVER_OPTIONS))
    server.add_generic_rpc_handlers(tuple(shapes.handlers()))
    port = rpc.bind(server, "127.0.0.1:0", tls=tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(channel: Any, method: str) -> bytes:
    """What came back, whole. Of the shapes two requests or two answers."""
    path = method if method.startswith("/") else f"/test.Shapes/{method}"
    if method == "UnaryStream":
        return b"".join([answer async for answer in channel.unary_stream(path)(b"a", timeout=WITHIN_S)])
    if method == "StreamUnary":
        return bytes(await channel.stream_unary(path)(iter([b"a", b"b"]), timeout=WITHIN_S))
    if method == "StreamStream":
        call = channel.stream_stream(path)(iter([b"a", b"b"]), timeout=WITHIN_S)
        return b"".join([answer async for answer in call])
    return bytes(await channel.unary_unary(path)(b"a", timeout=WITHIN_S))


async def refusal(channel: Any, method: str) -> grpc.aio.AioRpcError:
    """A message that is written as the other end refuses its stream makes grpc's client say INTERNAL of itself, and
    what the other end said is lost: then it is asked again."""
    for _ in range(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, method)
        if "execute_batch" not in (caught.value.debug_error_string() or ""):
            break
    return caught.value


@contextlib.asynccontextmanager
async def dialled(address: str, folder: Path, *, server: str = names.tls_name("driver", UID)) -> AsyncIterator[Any]:
    channel = await rpc.dial(address, tls=rpc.TlsFolder(folder), server=server)
    try:
        yield channel
    finally:
        await channel.close()


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server_tls(authority, tmp_path) -> rpc.TlsFolder:
    return rpc.TlsFolder(authority.folder(tmp_path / "server", part="driver", job_uid=UID))


@pytest.mark.parametrize(
    ("method", "answer"),
    [("UnaryUnary", b"a"), ("UnaryStream", b"aa"), ("StreamUnary", b"ab"), ("StreamStream", b"ab")],
)
async def test_every_shape_of_a_method_has_the_door_in_front(authority, server_tls, tmp_path, method, answer):
    own = authority.folder(tmp_path / "own", part="pool:sim", job_uid=UID)
    others = {
        f"may not be called by part 'pool:sim' of job 'other-{UID}'": {"part": "pool:sim", "job_uid": f"other-{UID}"},
        f"/test.Shapes/{method} may not be called by part 'driver' of job '{UID}'": {"part": "driver", "job_uid": UID},
    }
    shapes = Shapes()
    async with serving(server_tls, shapes) as address:
        for number, (why, who) in enumerate(others.items()):
            async with dialled(address, authority.folder(tmp_path / str(number), **who)) as channel:
                refused = await refusal(channel, method)
            assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
            assert why in (refused.details() or "")
        assert shapes.ran == [], "the handler ran for somebody who was refused"
        async with dialled(address, own) as channel:
            assert await ask(channel, method) == answer
        assert shapes.ran == [method]


async def test_what_nobody_may_call_nobody_calls_and_what_is_unknown_is_said_so(authority, server_tls, tmp_path):
    everybody = authority.folder(tmp_path / "operator", part="operator", job_uid="*")
    async with serving(server_tls, Shapes()) as address, dialled(address, everybody) as channel:
        for method, code in {
            "Nobody": grpc.StatusCode.PERMISSION_DENIED,
            "Unknown": grpc.StatusCode.UNIMPLEMENTED,
        }.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, method)
            assert caught.value.code() is code


async def test_health_is_open_to_every_certificate_of_the_ca_and_only_health(authority, server_tls, tmp_path):
    nobody = authority.folder(tmp_path / "nobody", part="x", job_uid="x", uri="spiffe://elsewhere/x")
    async with serving(server_tls, Shapes()) as address, dialled(address, nobody) as channel:
        assert await ask(channel, "/grpc.health.v1.Health/Check") == b"a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "UnaryUnary")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "names no part" in (caught.value.details() or "")


STRANGERS: dict[str, dict[str, Any]] = {
    "of another CA": {"authority": "another"},
    "that is over": {"until": -HOUR},
    "that is not valid yet": {"since": HOUR},
}


@pytest.mark.parametrize("end", ["client", "server"])
@pytest.mark.parametrize("how", STRANGERS)
async def test_a_certificate_is_refused_at_the_handshake(authority, tmp_path, how, end):
    """By either end; that the same pair agrees with good ones is the case that every other test here has."""
    fields = dict(STRANGERS[how])
    signer = Authority() if fields.pop("authority", "") else authority
    bad = signer.folder(tmp_path / "bad", part="driver" if end == "server" else "operator", job_uid=UID, **fields)
    (bad / "ca.crt").write_bytes(
        authority.folder(tmp_path / "x", part="x", job_uid="x").joinpath("ca.crt").read_bytes()
    )
    good = authority.folder(tmp_path / "good", part="operator" if end == "server" else "driver", job_uid=UID)
    served, called = (bad, good) if end == "server" else (good, bad)
    shapes = Shapes()
    async with serving(rpc.TlsFolder(served), shapes) as address, dialled(address, called) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "UnaryUnary")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert shapes.ran == []


async def test_who_shows_no_certificate_is_not_heard(authority, server_tls, tmp_path):
    shapes = Shapes()
    ca, _, _ = server_tls.read()
    options = [("grpc.ssl_target_name_override", names.tls_name("driver", UID))]
    async with serving(server_tls, shapes) as address:
        credentials = grpc.ssl_channel_credentials(ca)
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, "/grpc.health.v1.Health/Check")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert shapes.ran == []


async def test_a_server_is_believed_under_its_own_name_alone(authority, server_tls, tmp_path):
    """The driver of another job has a certificate of the same CA."""
    own = authority.folder(tmp_path / "own", part="operator", job_uid="*")
    shapes = Shapes()
    async with serving(server_tls, shapes) as address:
        for wanted in (names.tls_name("driver", "other"), names.tls_name("scheduler")):
            async with dialled(address, own, server=wanted) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(channel, "UnaryUnary")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert shapes.ran == []


# --- certificates as files -----------------------------------------------------------------------------------------
def test_channels_share_their_credentials_until_the_files_change(authority, tmp_path):
    tls = rpc.TlsFolder(authority.folder(tmp_path / "a", part="driver", job_uid=UID))
    first = tls.channel_credentials()
    assert tls.channel_credentials() is first
    authority.folder(tmp_path / "a", part="driver", job_uid=UID)
    assert tls.channel_credentials() is not first


async def test_a_server_takes_the_ca_that_its_mount_has_by_now(authority, server_tls, tmp_path, caplog):
    later = Authority()
    shapes = Shapes()
    async with serving(server_tls, shapes) as address:
        new = later.folder(tmp_path / "new", part="operator", job_uid="*")
        (server_tls.folder / "tls.key").unlink()  # the kubelet is between two files
        async with dialled(address, authority.folder(tmp_path / "old", part="operator", job_uid="*")) as channel:
            assert await ask(channel, "UnaryUnary") == b"a"
        assert "certificates not reloaded" in caplog.text
        later.folder(server_tls.folder, part="driver", job_uid=UID)
        async with dialled(address, new) as channel:
            assert await ask(channel, "UnaryUnary") == b"a"


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_folder_without_one_of_its_files_is_named(authority, tmp_path, name):
    folder = authority.folder(tmp_path / "a", part="driver", job_uid=UID)
    (folder / name).unlink()
    sentence = f"certificates cannot be read from {folder}: got .*{name}.*, wanted ca.crt, tls.crt and tls.key; look at"
    with pytest.raises(UserError, match=sentence):
        rpc.TlsFolder(folder).read()


def test_a_folder_is_read_in_the_order_that_its_readers_take(authority, tmp_path):
    folder = authority.folder(tmp_path / "a", part="driver", job_uid=UID)
    assert rpc.TlsFolder(folder).read() == tuple((folder / n).read_bytes() for n in ("ca.crt", "tls.crt", "tls.key"))


async def test_a_port_that_is_taken_is_a_sentence(authority, server_tls):
    async with serving(server_tls, Shapes()) as address:
        second = grpc.aio.server(options=list(rpc.SERVER_OPTIONS))
        with pytest.raises(
            UserError, match=f"cannot listen on {address}: got .*, wanted a free port .*; end the other"
        ):
            rpc.bind(second, address, tls=server_tls)


def test_the_options_of_every_connection():
    """A peer that is dead is noticed within 6 s: 2 s of silence, 2 s for the answer. Each is a decision."""
    common = {
        "grpc.keepalive_time_ms": 2_000,
        "grpc.keepalive_timeout_ms": 2_000,
        "grpc.http2.ping_timeout_ms": 2_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.enable_http_proxy": 0,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.max_receive_message_length": 16 * 1024 * 1024,
        "grpc.max_send_message_length": 16 * 1024 * 1024,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.min_reconnect_backoff_ms": 2_000,
        "grpc.max_reconnect_backoff_ms": 1_000,
    }
    server = {
        "grpc.http2.min_ping_interval_without_data_ms": 1_000,
        "grpc.http2.max_ping_strikes": 0,
        "grpc.so_reuseport": 0,
    }
    assert dict(rpc.OPTIONS) == common
    assert dict(rpc.SERVER_OPTIONS) == common | server
