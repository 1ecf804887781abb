"""The process of a worker: from its environment to its exit code, as itself or first as a warm spare."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from rlinf_api import names
from rlinf_worker import settings as all_settings
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.roles import registry
from rlinf_worker.runtime import identity as identities
from rlinf_worker.runtime import main
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.dialling import RefusedByDriver

ME = WorkerIdentity(
    worker=names.worker_id("env", 0), role="env", kind="k:K", driver_address="driver:7070", job_uid="j", tls_dir="/tls"
)
SETTINGS = Settings(stop_grace_s=3.0)


class Process:
    """What `main` makes is a mock here; `made` is what the worker was given."""

    def __init__(self, monkeypatch: Any) -> None:
        self.made: dict[str, Any] = {}
        self.worker = Mock(run=AsyncMock(return_value=5))
        self.spare = Mock(run=AsyncMock(), left=AsyncMock(), exit_code=9)
        self.logs, self.dial, self.signals = Mock(), Mock(return_value="dial"), dict[int, Any]()
        monkeypatch.setattr(main, "Worker", self.make)
        monkeypatch.setattr(main, "Spare", Mock(side_effect=self.make_spare))
        monkeypatch.setattr(main, "to_driver", self.dial)
        monkeypatch.setattr(main, "logs", self.logs)
        monkeypatch.setattr(main, "LinkCertificates", lambda tls: f"certificates of {tls.folder}")
        monkeypatch.setattr(main, "flow_of", lambda path: f"flow of {path}")
        monkeypatch.setattr(registry, "make", lambda kind: f"role of {kind}")
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "add_signal_handler", lambda number, heard: self.signals.update({number: heard}))

    def make(self, identity: Any, **given: Any) -> Mock:
        self.made = {"identity": identity, **given}
        return self.worker

    def make_spare(self, identity: Any, **given: Any) -> Mock:
        self.made_spare = {"identity": identity, **given}
        return self.spare

    async def run(self) -> int:
        return await main._run(ME, SETTINGS)


@pytest.fixture
async def process(monkeypatch):
    return Process(monkeypatch)


async def test_a_worker_is_made_of_its_environment_and_ends_with_its_code(process, monkeypatch):
    monkeypatch.setenv(names.ENV_LINK_GPU, "host")
    assert await process.run() == 5
    made = process.made
    assert (made["identity"], made["settings"], made["dial_driver"]) == (ME, SETTINGS, "dial")
    assert made["make_role"]() == "role of k:K"
    assert made["link_settings"] == LinkSettings(gpu="host")
    assert made["certificates"] == "certificates of /tls"
    (dialled,) = process.dial.mock_calls
    assert (dialled.args, dialled.kwargs["job_uid"]) == (("driver:7070",), "j")
    assert str(dialled.kwargs["tls"].folder) == "/tls"
    assert process.spare.mock_calls == process.logs.mock_calls == []


async def test_sigterm_stops_a_worker_and_the_terminals_word_is_the_agents_to_pass_on(process):
    await process.run()
    process.signals[signal.SIGINT]()
    assert process.worker.stop.mock_calls == []
    process.signals[signal.SIGTERM]()
    assert process.worker.stop.mock_calls == [call("SIGTERM", exit_code=names.EXIT_TERMINATED)]


async def test_a_spare_becomes_the_worker_whose_place_it_is_given(process, monkeypatch):
    monkeypatch.setenv(names.ENV_WORKER_SPARE, "/flow.json")
    became = SimpleNamespace(kind="k:K")
    process.spare.run.return_value = (became, "its role")
    assert await process.run() == 5
    spare = process.made_spare
    assert (spare["identity"], spare["settings"], spare["flow"]) == (ME, SETTINGS, "flow of /flow.json")
    assert spare["make_role"]() == "role of k:K"
    assert (process.made["identity"], process.made["make_role"]) == (became, "its role")
    assert process.spare.left.await_count == 1
    assert process.logs.configure.mock_calls == [call("worker", os.environ)]
    process.signals[signal.SIGTERM]()
    assert (process.worker.stop.call_count, process.spare.stop.call_count) == (1, 0)


async def test_a_spare_that_is_told_to_end_ends_with_its_code(process, monkeypatch):
    monkeypatch.setenv(names.ENV_WORKER_SPARE, "/flow.json")
    process.spare.run.return_value = None
    assert await process.run() == 9
    assert (process.made, process.spare.left.await_count, process.logs.mock_calls) == ({}, 1, [])
    process.signals[signal.SIGTERM]()
    assert process.spare.stop.mock_calls == [call("SIGTERM", exit_code=names.EXIT_TERMINATED)]


async def test_a_spare_that_fails_hangs_up_first(process, monkeypatch):
    monkeypatch.setenv(names.ENV_WORKER_SPARE, "/flow.json")
    process.spare.run.side_effect = ValueError("no module x")
    with pytest.raises(ValueError, match="no module x"):
        await process.run()
    assert process.spare.left.await_count == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_drivers_last_word_is_a_sentence_and_an_exit_code(monkeypatch, capsys, is_refused):
    refused = RefusedByDriver("the job is over", who="worker env/0", exit_code=names.EXIT_STALE)
    ran = AsyncMock(return_value=3, side_effect=refused if is_refused else None)
    monkeypatch.setattr(main, "_run", ran)
    monkeypatch.setattr(identities, "read", lambda environ: "me" if environ is os.environ else None)
    monkeypatch.setattr(all_settings, "load", lambda environ: "settings" if environ is os.environ else None)
    assert main.run() == (names.EXIT_STALE if is_refused else 3)
    assert ran.mock_calls == [call("me", "settings")]
    assert capsys.readouterr().err == ("the driver refuses worker env/0: the job is over\n" if is_refused else "")
