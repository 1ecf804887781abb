"""A readiness probe over HTTP: which answers make a container ready, and after how many."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rljob.local.containers import watch_readiness


@asynccontextmanager
async def probed(answer, **probe):
    """(asked, reports): what a server that answers so was asked, and (after how many answers, what) was reported."""
    asked, reports = [], []
    nobody: Any = None  # only a command asks a process

    async def serve(reader, writer):
        asked.append(await reader.readline())
        writer.write(answer(len(asked)).encode() + b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asks = {"httpGet": {"port": "web", "path": "/up"}, "periodSeconds": 0.01, "timeoutSeconds": 20}
    container = {"ports": [{"name": "web", "containerPort": port}], "readinessProbe": asks | probe}

    def report(ready):
        reports.append((len(asked), ready))

    task = asyncio.create_task(watch_readiness(container, address="127.0.0.1", process=nobody, argv=[], report=report))
    try:
        yield asked, reports
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


async def asked_times(asked, count):
    async with asyncio.timeout(30):
        while len(asked) < count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("HTTP/1.1 200 OK", [(1, True)]),
        ("HTTP/1.1 200", [(1, True)]),
        ("HTTP/1.1 399 x", [(1, True)]),
        ("HTTP/1.1 400 Bad Request", []),
        ("HTTP/1.1 199 x", []),
        ("HTTP/1.1 ok", []),
        ("nonsense", []),
        ("", []),
    ],
)
async def test_an_answer_from_200_to_399_is_ready(line, reported):
    async with probed(lambda _: line) as (asked, reports):
        await asked_times(asked, 3)  # by then the second answer has been counted
        assert reports == reported
    assert asked[0] == b"GET /up HTTP/1.1\r\n"


async def test_as_many_answers_in_a_row_as_the_thresholds_say_change_it():
    lines = {3: "HTTP/1.1 500 x", 4: "HTTP/1.1 200 x", 5: "HTTP/1.1 500 x", 6: "HTTP/1.1 500 x"}

    def answer(number):
        return lines.get(number, "HTTP/1.1 200 OK")

    async with probed(answer, successThreshold=2, failureThreshold=2) as (asked, reports):
        await asked_times(asked, 10)
        assert reports == [(2, True), (6, False), (8, True)]
