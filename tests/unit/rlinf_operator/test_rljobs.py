"""Kopf in its thread, over the scripted API server: every event enqueues a key, and nothing is ever written."""

import asyncio
import threading
import time
from typing import Any

import kopf
import pytest

from rlinf_api import names
from rlinf_operator.handlers import rljobs
from rlinf_operator.handlers.known import Sight
from rlinf_operator.manifests.metadata import JobKey
from tests.fakes.api_server import FakeApiServer

KEY = JobKey(namespace="team", name="math")
TIMEOUT_S = 15.0


class Ear:
    """Who is told; notes."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []
        self.beats = 0
        self.threads: set[str] = set()

    def seen(self, sight: Sight) -> None:
        self.sights.append(sight)
        self.threads.add(threading.current_thread().name)

    def beat(self) -> None:
        self.beats += 1

    def has(self, version: int) -> bool:
        return any(sight.version == version for sight in self.sights)


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


async def test_events_are_told_in_the_callers_loop_and_nothing_is_written(server, monkeypatch):
    monkeypatch.setattr(rljobs, "BEAT_S", 0.01)
    ear = Ear()
    first = server.put(job() | {"status": {"conditions": [{"type": "Running", "status": "True"}]}})
    login = kopf.ConnectionInfo(server=server.connection.configuration.host)
    watcher = rljobs.Watcher(ear, login=login)
    watcher.start()
    try:
        await until(lambda: ear.has(version(first)), "the list")
        second = server.put(job(managedBy="kueue.x-k8s.io/multikueue"))
        await until(lambda: ear.has(version(second)), "a change")
        server.remove("RLJob", "math")
        await until(lambda: ear.has(0), "the deletion")
        beats = ear.beats
        await until(lambda: ear.beats > beats + 3, "Kopf's loop to go round")
    finally:
        await watcher.stop()
    assert watcher.ended.is_set()
    assert {method for method, _ in server.requests} == {"GET"}
    assert ear.threads == {threading.current_thread().name}
    assert ear.sights == [
        Sight(key=KEY, version=version(first), state="Running", is_listed=True),
        Sight(key=KEY, version=version(second), state=""),
        Sight(key=KEY),
    ], "another's job has no state that is counted here"


def version(obj) -> int:
    return int(obj["metadata"]["resourceVersion"])


async def test_stopping_kopf_leaves_the_tasks_of_others_alone(server):
    login = kopf.ConnectionInfo(server=server.connection.configuration.host)
    watcher = rljobs.Watcher(Ear(), login=login)
    watcher.start()
    other = asyncio.create_task(asyncio.sleep(60))
    await until(lambda: server.count("GET", "/rljobs"), "the list")
    await watcher.stop()
    assert not other.done()
    other.cancel()


async def test_kopf_that_gives_up_says_so(server, monkeypatch, caplog):
    def broken(**_):
        raise RuntimeError("scripted")

    monkeypatch.setattr(kopf, "run", broken)
    watcher = rljobs.Watcher(Ear())
    watcher.start()
    async with asyncio.timeout(20):
        await watcher.ended.wait()
    assert "kopf gave up" in caplog.messages


def configured(**more):
    settings = kopf.OperatorSettings()
    activity(".configure", **more)(settings=settings)
    return settings


def activity(name, **more) -> Any:
    handlers = rljobs.registry(Ear(), **more)._activities.get_all_handlers()
    return next(handler.fn for handler in handlers if handler.id.endswith(name))


def test_kopf_writes_nothing_asks_for_no_right_beyond_rljobs_and_ends_no_process():
    settings = configured()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.scanning.disabled is True
    assert settings.process.ultimate_exiting_timeout is None


def test_a_watch_that_hangs_is_noticed_by_kopf_between_two_bookmarks_and_opened_anew_every_five_minutes():
    watching = configured().watching
    found = (watching.connect_timeout, watching.inactivity_timeout, watching.server_timeout, watching.chunk_size)
    assert found == (10, 90, 300, 100), "bookmarks come every 60 s; 100 RLJobs are a page"
    assert configured(inactivity_s=7.0).watching.inactivity_timeout == 7.0


def test_calls_of_kopf_have_a_deadline_and_heed_the_server_and_its_stop_is_within_the_leaders_two_seconds():
    settings = configured()
    assert settings.networking.request_timeout == 30
    assert settings.networking.enforce_retry_after is True
    assert settings.queueing.exit_timeout == 0.5
    assert rljobs.STOP_TIMEOUT_S == 2.0


def test_kopf_gives_up_in_the_end_where_it_watches_all_namespaces_and_never_where_some_are_listed():
    pauses = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 30.0)
    assert configured(listed=False).networking.error_backoffs == configured().networking.error_backoffs == pauses
    assert isinstance(configured(listed=True).networking.error_backoffs, rljobs.Unending)


def test_kopf_logs_in_as_it_is_told_or_as_the_pods_service_account(monkeypatch):
    given = kopf.ConnectionInfo(server="https://given")
    own = kopf.ConnectionInfo(server="https://own")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **more: own if more == {"logger": 1} else None)
    assert activity(".log_in", login=given)(logger=1) is given
    assert activity(".log_in")(logger=1) is own


class Configuration:
    """As kubernetes.aio leaves it after a kubeconfig was read."""

    refresh_api_key_hook: Any = None
    host, ssl_ca_cert, verify_ssl = "https://api:6443", "/ca", True
    cert_file, key_file = "/crt", "/key"

    def __init__(self, **api_key):
        self.api_key = api_key


@pytest.mark.parametrize(
    ("api_key", "token"), [({"BearerToken": "Bearer abc"}, "abc"), ({"BearerToken": "abc"}, "abc"), ({}, None)]
)
def test_a_kubeconfigs_person_is_who_kopf_is(api_key, token):
    found = rljobs.login_of(Configuration(**api_key))
    assert found == kopf.ConnectionInfo(
        server="https://api:6443", ca_path="/ca", insecure=False, certificate_path="/crt", private_key_path="/key",
        token=token,
    )  # fmt: skip


def test_a_kubeconfig_that_trusts_anybody_is_heeded_and_a_service_account_is_read_anew_by_kopf():
    insecure, in_pod = Configuration(), Configuration()
    insecure.verify_ssl, in_pod.refresh_api_key_hook = False, print
    found = rljobs.login_of(insecure)
    assert found is not None
    assert found.insecure is True
    assert rljobs.login_of(in_pod) is None


@pytest.mark.parametrize("namespaces", [(), ("a", "b")])
async def test_kopf_is_run_for_the_namespaces_that_are_served(monkeypatch, namespaces):
    given = {}
    monkeypatch.setattr(kopf, "run", lambda **more: given.update(more))
    watcher = rljobs.Watcher(Ear(), namespaces=namespaces)
    watcher.start()
    async with asyncio.timeout(20):
        await watcher.ended.wait()
    assert not given["stop_flag"].is_set()
    await watcher.stop()
    assert given.pop("stop_flag").is_set()
    assert isinstance(given.pop("registry"), kopf.OperatorRegistry)
    assert given == {"standalone": True, "clusterwide": not namespaces, "namespaces": namespaces}


async def test_a_kopf_that_does_not_stop_is_left_behind(monkeypatch, caplog):
    let_go = threading.Event()
    monkeypatch.setattr(rljobs, "STOP_TIMEOUT_S", 0.01)
    monkeypatch.setattr(kopf, "run", lambda **_: let_go.wait(TIMEOUT_S))
    watcher = rljobs.Watcher(Ear())
    watcher.start()
    await watcher.stop()
    assert "kopf did not stop" in caplog.messages
    assert [t.daemon for t in threading.enumerate() if t.name == "kopf"] == [True], "it keeps no process"
    let_go.set()
    async with asyncio.timeout(20):
        await watcher.ended.wait()


async def test_kopf_compares_no_event_with_the_one_before():
    storage = configured().persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "math"}, "spec": {"flow": {"name": "ppo"}}})
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
