"""/metrics over HTTP: bounded, within reach of a port-forward, and a port that is taken is a sentence."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rlinf_api.errors import UserError
from rlinf_worker import metrics_server
from rlinf_worker.metrics_server import MetricsServer, PortTaken

OWN_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
POD_IP = "10.9.8.7"
POD = f"""
import asyncio, fcntl, json, socket, struct, sys
from prometheus_client import CollectorRegistry
from rlinf_api import names
from rlinf_worker.metrics_server import MetricsServer

SIOCSIFADDR, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x8914, 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lo:  # up, with 127.0.0.1 and the pod's address
    fcntl.ioctl(lo, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton("{POD_IP}"))
    fcntl.ioctl(lo, SIOCSIFADDR, struct.pack("16s16s", b"lo:1", address))

def answers(host):
    with socket.create_connection((host, names.PORT_METRICS), timeout=20) as dialled:
        if host == "localhost" and sys.argv[1:]:
            return "the sidecar's"
        dialled.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
        return dialled.recv(64).decode().splitlines()[0]

async def main():
    sidecar = socket.create_server(("127.0.0.1", names.PORT_METRICS)) if sys.argv[1:] else None
    server = await MetricsServer(CollectorRegistry()).start(host="{POD_IP}", port=names.PORT_METRICS)
    print(json.dumps([await asyncio.to_thread(answers, host) for host in ("{POD_IP}", "localhost")]))
    await server.stop()

asyncio.run(main())
"""


def has_own_networks():
    found = shutil.which("unshare") is not None
    return found and subprocess.run([*OWN_NETWORK, "true"], capture_output=True, timeout=20).returncode == 0


@pytest.fixture
async def server():
    registry = CollectorRegistry()
    Counter("rlinf_steps", "Steps", registry=registry).inc(3)
    server = await MetricsServer(registry).start(host="127.0.0.1", port=0)
    yield server
    await server.stop()


async def ask(port, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer.decode()


async def is_dropped(port, request):
    """Closed without a word, or reset: what comes then had not been read."""
    try:
        return await ask(port, request) == ""
    except ConnectionResetError:
        return True


async def test_metrics_are_served_and_nothing_else_is(server):
    answer = await ask(server.port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith("HTTP/1.1 200 OK\r\n")
    assert "rlinf_steps_total 3.0" in answer
    assert (await ask(server.port, b"GET / HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 404")
    assert (await ask(server.port, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 405")
    assert "rlinf_steps" not in await ask(server.port, b"HEAD /metrics HTTP/1.1\r\n\r\n")


async def test_a_client_that_sends_too_much_or_nothing_is_dropped(server, monkeypatch):
    assert await is_dropped(server.port, b"GET /" + b"x" * 20_000)
    with monkeypatch.context() as patch:
        patch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.1)
        assert await is_dropped(server.port, b"GET /met")
    assert "200 OK" in await ask(server.port, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_connections_are_bounded(server, monkeypatch):
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 0)
    assert await is_dropped(server.port, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_so_many_may_be_open_at_once_and_again_when_they_have_ended(server):
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    for _ in range(2):
        opened = [
            await asyncio.open_connection("127.0.0.1", server.port) for _ in range(metrics_server.MAX_CONNECTIONS)
        ]
        async with asyncio.timeout(20):
            while server._open < metrics_server.MAX_CONNECTIONS:
                await asyncio.sleep(0.001)
        assert await is_dropped(server.port, request)
        for reader, writer in opened:
            writer.write(request)
            async with asyncio.timeout(20):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
            writer.close()


async def test_an_answer_says_how_long_it_is_and_of_what_type(server):
    for request, status, text in (
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found", "only /metrics is here\n"),
        (b"PUT /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed", "wanted GET\n"),
    ):
        assert await ask(server.port, request) == (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text)}\r\n"
            f"Connection: close\r\n\r\n{text}"
        )
    head, _, body = (await ask(server.port, b"GET /metrics HTTP/1.1\r\n\r\n")).partition("\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    assert fields == {"Content-Type": CONTENT_TYPE_LATEST, "Content-Length": str(len(body)), "Connection": "close"}
    assert (await ask(server.port, b"HEAD /metrics HTTP/1.1\r\n\r\n")).endswith("\r\n\r\n")


async def test_what_was_stopped_answers_nobody(server):
    port = server.port
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await MetricsServer(CollectorRegistry()).stop()


async def test_on_an_address_of_a_pod_the_same_port_of_loopback_is_listened_on_too(monkeypatch):
    """A port-forward comes in there; that it does in a real pod is tested below."""
    begun: list[tuple[object, ...]] = []

    class Listening:
        def __init__(self, host):
            self.sockets, self.is_open = [self], True
            self._host = host

        def getsockname(self):
            return (self._host, 7072)

        def close(self):
            self.is_open = False

    async def start_server(serve, host, port, *, limit):
        begun.append((host, port, limit))
        made.append(Listening(host))
        return made[-1]

    for host, local in (("10.0.0.7", True), ("fe80::1%eth0", True), ("127.0.0.9", False), ("::1", False)):
        made: list[Listening] = []
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "start_server", start_server)
            server = await MetricsServer(CollectorRegistry()).start(host=host, port=0)
        wanted = [(host, 0, 8 << 10), ("127.0.0.1", 7072, 8 << 10)]
        assert begun == (wanted if local else wanted[:1])
        await server.stop()
        assert [listening.is_open for listening in made] == [False] * len(made)
        begun.clear()


async def test_a_taken_port_names_itself_and_the_remedy(server):
    with pytest.raises(PortTaken, match=f"port {server.port} of 127.0.0.1, where /metrics is to be, is taken; end the"):
        await MetricsServer(CollectorRegistry()).start(host="127.0.0.1", port=server.port)


async def test_an_address_of_another_machine_is_the_users_error():
    with pytest.raises(UserError, match="look at RLINF_POD_IP"):
        await MetricsServer(CollectorRegistry()).start(host="192.0.2.1", port=0)


needs_networks = pytest.mark.skipif(
    not has_own_networks(), reason="needs the right to make a network name space, as a pod has"
)


def in_a_pod(*argv):
    """(what each address answers, what was logged)"""
    done = subprocess.run([*OWN_NETWORK, sys.executable, "-c", POD, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@needs_networks
def test_a_port_forward_reaches_it_in_a_pod():
    """Who runs pods dials localhost in the pod's network for `kubectl port-forward`, not the pod's address."""
    assert in_a_pod() == (["HTTP/1.1 200 OK"] * 2, "")


@needs_networks
def test_a_sidecar_that_has_the_port_of_loopback_costs_the_port_forward_and_not_the_pod():
    answers, said = in_a_pod("sidecar")
    assert answers == ["HTTP/1.1 200 OK", "the sidecar's"]
    assert "a port-forward does not reach /metrics" in said


async def test_pods_that_share_a_machine_keep_to_their_own_addresses():
    """As those of `rljob run`: the machine's 127.0.0.1 belongs to none of them."""
    server = await MetricsServer(CollectorRegistry()).start(host="127.1.0.9", port=0)
    with socket.create_server(("127.0.0.1", server.port)):
        await server.stop()
