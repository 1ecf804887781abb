"""Kopf in its thread, over the scripted API server: every event enqueues a key, and nothing is ever written."""

import asyncio
import time
from typing import Any

import kopf
import pytest

from rlinf_api import names
from rlinf_operator.handlers import check, rljobs
from rlinf_operator.handlers.check import JobsCheck
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.metrics import Metrics
from tests.fakes.api_server import FakeApiServer

KEY = JobKey(namespace="team", name="math")
TIMEOUT_S = 15.0


def job(**spec):
    return {
        "apiVersion": names.API_VERSION, "kind": "RLJob", "metadata": {"name": "math", "namespace": "team"},
        "spec": spec,
    }  # fmt: skip


@pytest.fixture
async def server():
    async with FakeApiServer(discovery=True) as made:
        yield made


async def until(holds, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
        await asyncio.sleep(0.02)


async def test_events_become_keys_and_nothing_is_written(server):
    seen: list[tuple[JobKey, str]] = []
    first = server.put(job())
    login = kopf.ConnectionInfo(server=server.connection.configuration.host)
    watcher = rljobs.Watcher(lambda key, version: seen.append((key, version)), login=login)
    watcher.start()
    try:
        await until(lambda: (KEY, first["metadata"]["resourceVersion"]) in seen, "the list")
        second = server.put(job(suspend=True))
        await until(lambda: (KEY, second["metadata"]["resourceVersion"]) in seen, "a change")
        server.remove("RLJob", "math")
        await until(lambda: (KEY, "") in seen, "the deletion")
    finally:
        await watcher.stop()
    assert watcher.ended.is_set()
    assert {method for method, _ in server.requests} == {"GET"}


async def test_stopping_kopf_leaves_the_tasks_of_others_alone(server):
    login = kopf.ConnectionInfo(server=server.connection.configuration.host)
    watcher = rljobs.Watcher(lambda *_: None, login=login)
    watcher.start()
    other = asyncio.create_task(asyncio.sleep(60))
    await until(lambda: server.count("GET", "/rljobs"), "the list")
    await watcher.stop()
    assert not other.done()
    other.cancel()


async def test_kopf_that_gives_up_says_so(server, monkeypatch):
    def broken(**_):
        raise RuntimeError("scripted")

    monkeypatch.setattr(kopf, "run", broken)
    watcher = rljobs.Watcher(lambda *_: None)
    watcher.start()
    async with asyncio.timeout(20):
        await watcher.ended.wait()


def test_the_echo_of_an_own_status_write_is_less_urgent_than_anybody_elses_change():
    wishes = []
    made = JobsCheck(
        None,  # type: ignore[arg-type]  # not asked here
        enqueue=lambda key, *, after_s=0.0: wishes.append(after_s),
        is_own=lambda key, version: version == "7",
        metrics=Metrics(),
        every_s=60,
    )
    for version in ("6", "7", "8", ""):
        made.seen(KEY, version)
    assert wishes == [0.0, check.ECHO_S, 0.0, 0.0]


async def test_kopf_compares_no_event_with_the_one_before():
    settings = kopf.OperatorSettings()
    handlers = list(rljobs.registry(lambda *_: None)._activities.get_all_handlers())
    configure: Any = next(handler.fn for handler in handlers if handler.id.endswith(".configure"))
    configure(settings=settings)
    storage = settings.persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "math"}, "spec": {"flow": {"name": "ppo"}}})
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
