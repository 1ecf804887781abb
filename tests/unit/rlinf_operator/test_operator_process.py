"""`python -m rlinf_operator` from its start to its exit status: who leads, what ends it, what it leaves behind."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import aiohttp
import pytest

from rlinf_api import logs
from rlinf_api.errors import ClusterBusy, UserError
from rlinf_operator import __main__ as main
from rlinf_operator import process as process_settings
from rlinf_operator.clients import kube, lease
from rlinf_operator.handlers.probes import Probes
from rlinf_operator.process import ProcessSettings
from rlinf_operator.settings import OperatorSettings

TIMEOUT_S = 20.0
LEASE = ("Lease", "rlinf-system", "rlinf-operator")
OPERATOR = OperatorSettings(scheduler_address="127.0.0.1:1")


class Leading:
    """Stands for leading.Leader; `script` is what its run() does."""

    made: ClassVar[list["Leading"]]
    script: ClassVar[Callable[[], Awaitable[object]]]

    def __init__(self, connection, **given):
        self.connection, self.given = connection, given
        self.cancelled = False
        self.folder_was_there = given["folder"].is_dir()
        type(self).made.append(self)

    async def run(self):
        try:
            await type(self).script()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class World:
    def __init__(self, server, monkeypatch):
        self.server, self.monkeypatch = server, monkeypatch

        class OneLeading(Leading):
            made: ClassVar[list[Leading]] = []
            script = staticmethod(asyncio.Event().wait)

        self.leader: type[Leading] = OneLeading
        self.exits: list[int] = []
        self.connections: list[dict[str, object]] = []
        self.signals: dict[int, object] = {}

        async def connect(**given):
            self.connections.append(given)
            return contextlib.nullcontext(f"connection {len(self.connections)}")

        monkeypatch.setattr(kube, "connect", connect)
        # Who leads is settled over the server's own connection, whatever the operator was given.
        self.asks: list[tuple[str, float]] = []

        def api(connection, *, timeout_s, metrics):
            self.asks.append((connection, timeout_s))
            return server.client(timeout_s=5.0)

        monkeypatch.setattr(kube, "KubeApi", api)
        monkeypatch.setattr(main, "Leader", self.leader)
        monkeypatch.setattr(os, "_exit", self.exits.append)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "add_signal_handler", lambda number, call: self.signals.update({number: call}))

    def start(self, **process):
        given: dict[str, Any] = {
            "http_host": "127.0.0.1",
            "http_port": 0,
            "identity": "me",
            "lease_retry_s": 0.05,
        } | process
        self.process = ProcessSettings(**given)
        self.task = asyncio.create_task(main.serve(self.process, OPERATOR))
        return self.task

    async def until_it_leads(self):
        await until(lambda: self.leader.made)
        return self.leader.made[0]

    def holder(self):
        return self.server.objects[LEASE]["spec"]["holderIdentity"]


async def until(holds):
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
async def world(server, monkeypatch):
    made = World(server, monkeypatch)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


def value(leader, name):
    return leader.given["metrics"].registry.get_sample_value(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_leader_that_is_told_to_stop_ends_its_passes_gives_the_lease_away_and_exits_0(world, number):
    task = world.start()
    leader = await world.until_it_leads()
    assert (world.holder(), value(leader, "rlinf_operator_leader")) == ("me", 1)
    assert leader.folder_was_there
    world.signals[number]()
    assert await asyncio.wait_for(task, TIMEOUT_S) == 0
    assert leader.cancelled
    assert (world.holder(), value(leader, "rlinf_operator_leader")) == ("", 0)
    assert not leader.given["folder"].exists(), "its certificate is left to nobody"
    assert world.exits == []


async def test_a_leader_gets_what_the_process_was_started_with_and_connections_for_watches_beside_those_of_passes(
    world,
):
    world.start(watch_namespaces="a,b,c", kubeconfig="/k", context="dev")
    leader = await world.until_it_leads()
    who = {"kubeconfig": "/k", "context": "dev"}
    assert world.connections == [who, who | {"connections": 8 * 3 + 4}]
    assert (leader.connection, leader.given["standing"]) == ("connection 1", "connection 2")
    assert (leader.given["process"], leader.given["operator"]) == (world.process, OPERATOR)


async def test_an_operator_of_all_namespaces_has_a_connection_for_each_kind_that_it_watches(world):
    world.start()
    await world.until_it_leads()
    assert world.connections[1]["connections"] == 8 + 4


async def test_so_has_one_of_namespaces_by_their_labels_and_one_for_these(world):
    world.start(watch_namespace_selector="rlinf=yes")
    await world.until_it_leads()
    assert world.connections[1]["connections"] == 8 + 1 + 4


async def test_probes_answer_before_anybody_leads_and_until_the_end(world, monkeypatch):
    ports = []
    start = Probes.start

    async def noted(self, **where):
        ports.append(await start(self, **where))
        return ports[0]

    monkeypatch.setattr(Probes, "start", noted)
    world.server.put(held_by_another())
    task = world.start()
    await until(lambda: world.server.count("GET", "/leases/"))

    async def get(path):
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{ports[0]}{path}") as answer:
            return answer.status, await answer.text()

    assert (await get("/readyz"))[0] == 200
    assert "rlinf_operator_leader 0.0" in (await get("/metrics"))[1]
    world.signals[signal.SIGTERM]()
    assert await asyncio.wait_for(task, TIMEOUT_S) == 0
    assert (world.leader.made, world.holder()) == ([], "another"), "it never led, and gives nothing away"
    with pytest.raises(aiohttp.ClientError):
        await get("/readyz")


def held_by_another():
    spec = {"holderIdentity": "another", "leaseDurationSeconds": 600}
    return {"kind": "Lease", "metadata": {"name": LEASE[2], "namespace": LEASE[1]}, "spec": spec}


async def test_a_leader_that_breaks_ends_the_process_with_1_and_the_next_one_need_not_wait(world, caplog):
    async def breaks():
        raise ClusterBusy("a part broke")

    world.leader.script = staticmethod(breaks)
    assert await asyncio.wait_for(world.start(), TIMEOUT_S) == 1
    assert world.holder() == ""
    assert "the leader broke" in caplog.messages


async def test_a_leader_that_lost_the_lease_exits_1_and_is_ended_where_it_does_not(world, monkeypatch):
    monkeypatch.setattr(main, "KILL_AFTER_S", 0.0)
    task = world.start()
    leader = await world.until_it_leads()
    world.server.put(held_by_another())
    assert await asyncio.wait_for(task, TIMEOUT_S) == 1
    assert leader.cancelled
    assert world.holder() == "another"
    await until(lambda: world.exits)
    assert world.exits == [1]


async def test_a_candidacy_that_breaks_ends_the_process_with_1(world, monkeypatch):
    class Broken:
        def __init__(self, api, **_):
            self.won, self.ended = asyncio.Event(), asyncio.Event()
            self.ended.set()

        async def release(self):
            """Nothing was taken."""

    monkeypatch.setattr(lease, "Election", Broken)
    assert await asyncio.wait_for(world.start(), TIMEOUT_S) == 1
    assert world.leader.made == []


async def test_passes_that_do_not_end_in_time_are_not_waited_for(world, caplog):
    """Another would lead while they still write."""
    let_go = asyncio.Event()

    async def stubborn():
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    def leave(status):
        world.exits.append(status)
        let_go.set()

    world.monkeypatch.setattr(os, "_exit", leave)
    world.leader.script = staticmethod(stubborn)
    world.start(stop_timeout_s=0.15)
    await world.until_it_leads()
    await asyncio.sleep(0)
    world.signals[signal.SIGTERM]()
    await until(lambda: world.exits)
    assert world.exits == [1]
    assert "the passes did not end" in caplog.messages
    assert [r.timeout_s for r in caplog.records if r.msg == "the passes did not end"] == [pytest.approx(0.05)]


async def test_a_candidate_without_an_identity_is_called_after_its_host_and_told_from_its_twin(world):
    world.start(identity="")
    await world.until_it_leads()
    assert re.fullmatch(re.escape(socket.gethostname()) + "-[0-9a-f]{6}", world.holder())


async def test_the_lease_is_asked_for_as_the_settings_say(world, monkeypatch):
    given: dict[str, object] = {}
    election = lease.Election

    def noted(api, **settings):
        given.update(settings)
        return election(api, **settings)

    monkeypatch.setattr(lease, "Election", noted)
    world.start(namespace="rlinf-system", lease_s=33.0, lease_renew_deadline_s=22.0)
    await world.until_it_leads()
    assert given == {
        "name": "rlinf-operator", "namespace": "rlinf-system", "identity": "me", "lease_s": 33.0,
        "renew_deadline_s": 22.0, "retry_s": 0.05,
    }  # fmt: skip
    assert world.asks == [("connection 2", 0.05)], "not in line behind the calls of passes"


# --- main -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (0, 0, None),
        (1, 1, None),
        (UserError("no API server to talk to"), 2, "cannot start"),
        (ClusterBusy("it is away"), 1, "stopped"),
    ],
)
def test_the_exit_status_says_whether_it_was_stopped_or_broke_or_cannot_start(
    monkeypatch, caplog, answer, status, said
):
    configured, heaps, served = [], [], []

    async def serve(process, operator):
        served.append((process, operator))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(main, "serve", serve)
    monkeypatch.setattr(logs, "configure", lambda who, **more: configured.append((who, more)))
    monkeypatch.setattr(process_settings, "share_one_heap", lambda: heaps.append("one"))
    monkeypatch.setattr(sys, "argv", ["rlinf_operator", "--log-level", "DEBUG"])
    monkeypatch.setattr(os, "environ", {"HOSTNAME": "op-0", "RLINF_OPERATOR_WORKER_IMAGE": "w:1"})
    assert main.main() == status
    who = {"part": "operator", "replica": "op-0"}
    assert configured == [(who, {"level": "INFO"}), (who, {"level": "DEBUG", "noisy": main.NOISY})]
    assert heaps == ["one"]
    assert served == [(ProcessSettings(log_level="DEBUG"), OperatorSettings(worker_image="w:1"))]
    assert caplog.messages == ([said] if said else [])
    assert all(record.levelno == logging.ERROR for record in caplog.records)


def test_settings_that_cannot_be_used_are_status_2_before_anything_begins(monkeypatch):
    monkeypatch.setattr(logs, "configure", lambda who, **more: None)
    monkeypatch.setattr(process_settings, "share_one_heap", lambda: None)
    monkeypatch.setattr(sys, "argv", ["rlinf_operator"])
    monkeypatch.setattr(os, "environ", {"RLINF_OPERATOR_LEASE_S": "soon"})
    assert main.main() == 2
