"""gRPC as all parts use it: options, mTLS from a mounted folder, and who may call which method.

A server's identity is the DNS name of `names.tls_name` (part and job, never an address); a caller's is the SPIFFE URI
of its certificate. Every method of every service has a line in the `Allowed` table that its server passes in; a method
without one is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc
import grpc.aio

from rlinf_api import names
from rlinf_api.errors import Refused, UserError, WorkerUnreachable

logger = logging.getLogger(__name__)

# A dead peer must be noticed within 6 s: ping after 2 s of silence, wait 2 s. `ping_timeout` is the one that counts
# (keepalive_timeout alone did not notice a frozen server within 35 s, grpcio 1.85.1).
MAX_MESSAGE_BYTES: Final = 16 << 20
OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_http_proxy", 0),  # http_proxy is meant for the world outside, and no proxy knows pods
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also the time that one connect with its handshake may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
SERVER_OPTIONS: Final = (
    *OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),  # our own peers ping on purpose; a GOAWAY for it would cut a watch
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a partner
)

RESTING: Final = {"grpc.keepalive_time_ms": 60_000}
"""In place of what OPTIONS say, for connections that stand between calls of seconds, each with a deadline: a thousand
that ping every 2 s are a tenth of a core."""

RESOLVE_TIMEOUT_S: Final = 5.0  # cluster DNS answers in milliseconds; a dead one must not eat a dial's whole deadline

Allowed = Mapping[str, frozenset[str]]
"""Full method name ("/rlinf.job.v1alpha1.Job/Watch") to the parts that may call it; "pool" stands for every pool."""


class TlsFolder:
    """ca.crt, tls.crt, tls.key of a mounted Secret; read anew when the kubelet swaps them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._channels_with: tuple[tuple[bytes, bytes, bytes], grpc.ChannelCredentials] | None = None

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(ca, certificate, key)."""
        try:
            return tuple((self.folder / n).read_bytes() for n in ("ca.crt", "tls.crt", "tls.key"))  # type: ignore[return-value]
        except OSError as error:
            raise UserError(
                f"certificates cannot be read from {self.folder}", got=str(error), wanted="ca.crt, tls.crt and tls.key",
                next="look at the Secret that the pod mounts there",
            ) from error  # fmt: skip

    def server_credentials(self) -> grpc.ServerCredentials:
        """Client certificates are required; files that changed are used from the next handshake on."""
        last = [self.read()]

        def configuration() -> grpc.ServerCertificateConfiguration:
            ca, cert, key = last[0]
            return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

        def fetch() -> Any:  # None: no change; the published stubs do not know that
            try:
                fresh = self.read()
            except UserError as error:  # half-swapped mount: the old certificates still serve
                logger.warning("certificates not reloaded", extra={"error": str(error)})
                return None
            if fresh == last[0]:
                return None
            last[0] = fresh
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """One object for as long as the files are the same: each holds them parsed, a tenth of a channel's memory."""
        files = self.read()
        if self._channels_with is None or self._channels_with[0] != files:
            ca, cert, key = files
            self._channels_with = files, grpc.ssl_channel_credentials(ca, key, cert)
        return self._channels_with[1]


def _from_file(host: str, path: str) -> str | None:
    """The address that a hosts(5) file gives for a name; None where the file or the name is missing."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                fields = line.split("#", 1)[0].split()
                if host in fields[1:]:
                    return fields[0]
    except FileNotFoundError:
        return None
    return None


async def resolve(host: str) -> str:
    """An IPv4 address: by the hosts file of the pod contract (local mode), then by the system's resolver. Not a cache:
    a replaced pod keeps its name and changes its address. Raises WorkerUnreachable: a name appears only once its pod
    has an address."""
    path = os.environ.get(names.ENV_HOSTS_FILE, "")
    if path and (found := _from_file(host, path)):
        return found
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            infos = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise WorkerUnreachable(
            f"no address for {host!r}", got=str(error) or "no answer", next="wait for its pod"
        ) from error
    return str(infos[0][4][0])


def bind(server: grpc.aio.Server, address: str, *, tls: TlsFolder) -> int:
    """Adds the secure port; UserError where it is taken."""
    try:
        port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        port, cause = 0, error
    else:
        cause = RuntimeError("not bound")
    if port == 0:
        raise UserError(
            f"cannot listen on {address}", got=str(cause)[:200], wanted="a free port of this pod's address",
            next="end the other process that listens there",
        ) from cause  # fmt: skip
    return int(port)


async def dial(
    address: str, *, tls: TlsFolder, server: str, more: Mapping[str, int] = MappingProxyType({})
) -> grpc.aio.Channel:
    """A channel to host:port whose certificate must carry the DNS name `server` (names.tls_name). `more`: options that
    replace those of OPTIONS."""
    host, _, port = address.rpartition(":")
    ip = await resolve(host)
    options: list[tuple[str, int | str]] = [*({**dict(OPTIONS), **more}).items()]
    options.append(("grpc.ssl_target_name_override", server))
    return grpc.aio.secure_channel(f"ipv4:{ip}:{port}", tls.channel_credentials(), options=options)


def peer_identity(context: grpc.aio.ServicerContext[Any, Any]) -> names.PartIdentity:
    """Who is calling, by certificate. Raises Refused where the certificate is none of ours."""
    for san in context.auth_context().get("x509_subject_alternative_name", ()):
        if identity := names.parse_spiffe_id(san.decode(errors="replace")):
            return identity
    raise Refused(
        "the caller's certificate names no part", wanted="a URI SAN spiffe://rlinf.io/...", next="use the job's Secret"
    )


def is_allowed(identity: names.PartIdentity, method: str, *, allowed: Allowed, job_uid: str) -> bool:
    """Pure: whether this part may call this method of a server of this job ("*": a server of all jobs)."""
    part = identity.part.split(":", 1)[0]
    own_job = job_uid == "*" or identity.job_uid in (job_uid, "*")
    return own_job and part in allowed.get(method, frozenset())


class Gatekeeper(grpc.aio.ServerInterceptor):
    """Refuses callers before the handler runs. Health checks are open to every certificate of the CA."""

    def __init__(self, allowed: Allowed, *, job_uid: str) -> None:
        self._allowed, self._job_uid = allowed, job_uid

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc.health."):
            return handler
        return _guarded(handler, lambda context: self._check(context, method))

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        try:
            identity = peer_identity(context)
        except Refused as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if not is_allowed(identity, method, allowed=self._allowed, job_uid=self._job_uid):
            logger.warning("call refused", extra={"method": method, "part": identity.part, "job_uid": identity.job_uid})
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{method} may not be called by part {identity.part!r} of job {identity.job_uid!r}",
            )


def _guarded(
    handler: Any,
    check: Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[None]],
) -> Any:
    """The same handler with `check(context)` in front; gRPC has four shapes of it."""
    deserialize, serialize = handler.request_deserializer, handler.response_serializer
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def streaming(request: Any, context: Any) -> Any:
            await check(context)
            async for response in inner(request, context):
                yield response

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(streaming, deserialize, serialize)
        return grpc.unary_stream_rpc_method_handler(streaming, deserialize, serialize)
    answer = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def unary(request: Any, context: Any) -> Any:
        await check(context)
        return await answer(request, context)

    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary, deserialize, serialize)
    return grpc.unary_unary_rpc_method_handler(unary, deserialize, serialize)
