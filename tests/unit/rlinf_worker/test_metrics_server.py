"""/metrics over HTTP: bounded, and a port that is taken is a sentence."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter

from rlinf_api.errors import UserError
from rlinf_worker import metrics_server
from rlinf_worker.metrics_server import MetricsServer, PortTaken


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


async def test_a_taken_port_names_itself_and_the_remedy(server):
    with pytest.raises(PortTaken, match=f"port {server.port} of 127.0.0.1, where /metrics is to be, is taken; end the"):
        await MetricsServer(CollectorRegistry()).start(host="127.0.0.1", port=server.port)


async def test_an_address_of_another_machine_is_the_users_error():
    with pytest.raises(UserError, match="look at RLINF_POD_IP"):
        await MetricsServer(CollectorRegistry()).start(host="192.0.2.1", port=0)
