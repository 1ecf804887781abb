"""How a worker's process begins: all that it finds around it, in which folder, with which pipes and signals."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from rlinf_api import names
from rlinf_worker import proctree
from rlinf_worker.agent import spawning
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.process import mark_of
from rlinf_worker.agent.spawning import Spawner
from rlinf_worker.agent.worker_log import Prefixed
from rlinf_worker.bounded_file import BoundedFile
from rlinf_worker.settings import Settings

START = Start(
    worker="actor/2", role="actor", kind="fake", rank=1, world=4, attempt=3, slots=(0, 2), config_json='{"a": 1}',
    flow_json='{"steps": 5}',
)  # fmt: skip
SPARE = Start(
    worker="spare.actor/0", role="actor", kind="fake", attempt=3, spare=True, config_json="{}", flow_json='{"steps": 5}'
)


def made(folder: Path, *command: str, logs: str = "", environ: dict[str, str] | None = None) -> Spawner:
    identity = PodIdentity(
        job_uid="j", pod="math-sim-0", pod_ip="", node="", pool="sim", ordinal=0, attempt=1, slots=4,
        driver_address="", run_dir=str(folder), tls_dir="", output_dir="", worker_log_dir=logs, termination_log="",
    )  # fmt: skip
    settings = Settings(worker_log_bytes=9, last_words_bytes=4)
    return Spawner(identity, settings, environ or {}, "mark-1", command)


def test_all_that_an_agent_adds_to_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(spawning, "bytecode_environment", lambda agents: {"BYTECODE": agents["OWN"]})
    found = made(tmp_path, environ={"OWN": "x", names.ENV_WORKER_ID: "of the agent"})
    wanted = {
        **spawning.DEFAULTS,
        "OWN": "x",
        "BYTECODE": "x",
        names.ENV_WORKER_ID: "actor/2",
        names.ENV_WORKER_ROLE: "actor",
        names.ENV_WORKER_KIND: "fake",
        names.ENV_WORKER_RANK: "1",
        names.ENV_WORKER_WORLD: "4",
        names.ENV_WORKER_ATTEMPT: "3",
        names.ENV_WORKER_SLOTS: "0,2",
        names.ENV_WORKER_CONFIG: "/run/own/config.json",
        names.ENV_WORKER_SPARE: "",
        names.ENV_SLOTS_SOCKET: f"{tmp_path}/agent.sock",
        names.ENV_TERMINATION_LOG: "/run/own/last_words.json",
        names.ENV_AGENT_PID: str(os.getpid()),
        names.ENV_AGENT_MARK: "mark-1",
    }
    assert found.environ_of(START, Path("/run/own/config.json")) == wanted
    spare = found.environ_of(SPARE, Path("/run/own/config.json"))
    assert spare[names.ENV_WORKER_SPARE] == "/run/own/flow.json"


def test_its_config_lies_in_a_folder_of_this_user_alone_and_a_spares_flow_beside_it(tmp_path):
    config = spawning.write_config(tmp_path / "a" / "own", START)
    assert (config, json.loads(config.read_text())) == (tmp_path / "a" / "own" / "config.json", {"a": 1})
    assert config.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in config.parent.iterdir()] == ["config.json"]
    config = spawning.write_config(tmp_path / "a" / "own", SPARE)
    assert json.loads((config.parent / "flow.json").read_text()) == {"steps": 5}


def test_its_output_goes_to_a_bounded_file_or_to_the_pods_own_log(tmp_path):
    log = made(tmp_path, logs=str(tmp_path)).open_log(START)
    log.err(b"12345678")
    log.out(b"9ab")
    log.close()
    assert (tmp_path / "actor-2.log").read_bytes() == b"9ab"
    assert (tmp_path / "actor-2.log.1").read_bytes() == b"12345678"
    assert log.tail() == "5678"
    assert isinstance(log._sink, BoundedFile)
    log = made(tmp_path).open_log(START)
    assert isinstance(log._sink, Prefixed)


@pytest.mark.parametrize(
    ("start", "folder", "mark"),
    [
        (START, "actor-2-a3", mark_of("actor/2")),
        (SPARE, "spare.actor-0-a3", b"RLINF_WORKER_CONFIG=%(folder)s/config.json"),
    ],
)
async def test_a_process_is_in_a_session_of_its_own_with_its_streams_and_signals(
    tmp_path, monkeypatch, start, folder, mark
):
    """What it starts is found by the mark: a worker's by its name, a spare's by its life, as the next has the name."""
    monkeypatch.setattr(proctree, "oom_kills", lambda: 6)
    before = len(os.listdir("/proc/self/fd"))
    process = made(tmp_path, "sleep", "60", logs=str(tmp_path)).spawn(start)
    try:
        found = proctree.read(process.pid)
        assert found is not None
        assert (found.session, found.started, found.ppid) == (process.pid, process.started, os.getpid())
        assert process.folder == tmp_path / folder
        assert process.mark == mark.replace(b"%(folder)s", str(tmp_path / folder).encode())
        async with asyncio.timeout(20):
            while process.mark not in proctree.environment(process.pid):
                await asyncio.sleep(0.002)  # between fork and exec it has none
        assert process.oom_kills == 6
        assert [take.__name__ for take in process.pipes.values()] == ["out", "err"]
        streams = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (0, 1, 2)]
        assert streams[0] == "/dev/null"
        assert streams[1:] == [os.readlink(f"/proc/self/fd/{fd}") for fd in process.pipes]
        assert len(set(streams)) == 3
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        masks = {
            line.split(":")[0]: int(line.split()[1], 16) for line in status if line.startswith(("SigBlk:", "SigIgn:"))
        }
        assert masks["SigBlk"] == 0
        for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            assert not masks["SigIgn"] & 1 << (number - 1), number.name
    finally:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)  # noqa: ASYNC222 - it is dead
        process.close()
    assert len(os.listdir("/proc/self/fd")) == before, "the ends that are the worker's are closed here"


async def test_a_process_that_cannot_begin_leaves_nothing_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        made(tmp_path, str(tmp_path / "missing")).spawn(START)
    assert len(os.listdir("/proc/self/fd")) == before
