"""GET /metrics for Prometheus, in the event loop of driver or agent: no thread, no web framework, bounded.

Called by `driver` and `agent`, each with a registry of its own. Not for anything else over HTTP.

It listens on the pod's address, for scrapers, and in a pod also on 127.0.0.1, where `kubectl port-forward` comes in:
past any NetworkPolicy, for whoever may do that in the namespace. Where pods share a machine (`rljob run`) their
addresses are of 127/8 themselves, and each keeps to its own.

    server = await MetricsServer(registry).start(host="10.0.0.7", port=names.PORT_METRICS)
    ...
    await server.stop()
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rlinf_api.errors import RetryableError, UserError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 16  # a scraper or two; more are closed at once
REQUEST_TIMEOUT_S: Final = 5.0  # for request and answer together
MAX_REQUEST_BYTES: Final = 8 << 10
LOCAL: Final = "127.0.0.1"  # also of a pod that has only IPv6; runtimes try it before ::1


class PortTaken(RetryableError):
    """Another process of the pod listens there; often the one before us, which is about to be gone."""


class MetricsServer:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._local: asyncio.Server | None = None
        self._open = 0

    async def start(self, *, host: str, port: int) -> MetricsServer:
        """Port 0 takes a free one; see `port`."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"port {port} of {host}, where /metrics is to be, is taken",
                    next=f"end the process that listens there (ss -ltnp 'sport = {port}')",
                ) from error
            raise UserError(
                f"/metrics cannot listen on {host}:{port}", got=str(error), wanted="an address of this pod",
                next="look at RLINF_POD_IP",
            ) from error  # fmt: skip
        if not ipaddress.ip_address(self._server.sockets[0].getsockname()[0].partition("%")[0]).is_loopback:
            await self._listen_locally()
        return self

    async def _listen_locally(self) -> None:
        try:
            self._local = await asyncio.start_server(self._serve, LOCAL, self.port, limit=MAX_REQUEST_BYTES)
        except OSError as error:  # a sidecar's, say; scrapers do not need it
            logger.warning("a port-forward does not reach /metrics", extra={"error": str(error)})

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        for server in (self._server, self._local):
            if server is not None:
                server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("scrape broke off", extra={"error": repr(error)})
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"wanted GET\n")
        if path != b"/metrics":
            return _response("404 Not Found", b"only /metrics is here\n")
        body = generate_latest(self._registry)
        return _response("200 OK", b"" if method == b"HEAD" else body, content_type=CONTENT_TYPE_LATEST)


def _response(status: str, body: bytes, *, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
