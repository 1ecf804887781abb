"""The small parts of a worker's runtime: identity, the registry."""

import json
import subprocess
import sys

import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.roles import registry
from rlinf_worker.runtime import identity as identities
from rlinf_worker.runtime.identity import WorkerIdentity


def environ(tmp_path, **changed: str) -> dict[str, str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"envs": 4}))
    return {
        names.ENV_WORKER_ID: "rollout/3",
        names.ENV_WORKER_ROLE: "rollout",
        names.ENV_WORKER_KIND: "torch",
        names.ENV_WORKER_RANK: "3",
        names.ENV_WORKER_WORLD: "4",
        names.ENV_WORKER_ATTEMPT: "2",
        names.ENV_WORKER_SLOTS: "1,2",
        names.ENV_WORKER_CONFIG: str(config),
        names.ENV_JOB_UID: "5f2c",
        names.ENV_POD_UID: "p1",
        names.ENV_ATTEMPT: "7",
        names.ENV_POD_IP: "10.0.0.1",
        names.ENV_DRIVER_ADDRESS: "driver:7070",
        names.ENV_SLOTS_SOCKET: "/run/rlinf/agent.sock",
        **changed,
    }


def test_an_identity_is_what_the_agent_set(tmp_path):
    paths = {
        names.ENV_RUN_DIR: "/run/1", names.ENV_SHM_DIR: "/shm/1", names.ENV_TLS_DIR: "/tls/1", names.ENV_POOL: "gpu",
        names.ENV_CHECKPOINT_URI: "/checkpoints",
    }  # fmt: skip
    me = identities.read(environ(tmp_path, **paths))
    assert me == WorkerIdentity(
        worker=WorkerId("rollout/3"),
        role="rollout",
        kind="torch",
        rank=3,
        world=4,
        attempt=2,
        slots=(1, 2),
        pool="gpu",
        config={"envs": 4},
        job_uid="5f2c",
        pod_uid="p1",
        pod_ip="10.0.0.1",
        driver_address="driver:7070",
        run_dir="/run/1",
        shm_dir="/shm/1",
        tls_dir="/tls/1",
        slots_socket="/run/rlinf/agent.sock",
        folder=str(tmp_path),
        checkpoint_uri="/checkpoints",
    )
    assert (me.data_port, me.slot) == (names.PORT_DATA_BASE + 1, "1,2")


def test_what_the_agent_need_not_set_is_where_the_pod_contract_has_it(tmp_path):
    without_slots = {**environ(tmp_path)}
    del without_slots[names.ENV_WORKER_SLOTS]
    me = identities.read(without_slots)
    assert (me.run_dir, me.shm_dir, me.tls_dir) == (names.MOUNT_RUN, names.MOUNT_SHM, names.MOUNT_TLS)
    assert (me.pool, me.checkpoint_uri, me.slots, me.data_port, me.slot) == ("", "", (), 0, "")


def test_a_worker_that_nobody_numbers_is_the_only_one_in_its_first_life():
    """As of a spare and of a driver's test: neither has a rank."""
    me = WorkerIdentity(worker=WorkerId("env/0"), role="env", kind="fake")
    assert (me.rank, me.world, me.attempt, me.slots, me.config, me.data_port) == (0, 1, 1, (), {}, 0)


@pytest.mark.parametrize(("text", "words"), [("[1]", "is no JSON object: got list"), ("{", "config cannot be read")])
def test_a_config_that_is_no_object_is_refused(tmp_path, text, words):
    config = tmp_path / "other.json"
    config.write_text(text)
    with pytest.raises(UserError, match=words):
        identities.read(environ(tmp_path, **{names.ENV_WORKER_CONFIG: str(config)}))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (names.ENV_WORKER_ID, "", "RLINF_WORKER_ID is not set"),
        (names.ENV_POD_IP, "", "RLINF_POD_IP is not set"),
        (names.ENV_WORKER_RANK, "x", "RLINF_WORKER_RANK is no number: got 'x'"),
        (names.ENV_WORKER_CONFIG, "/nowhere", "config cannot be read from /nowhere"),
    ],
)
def test_what_the_environment_lacks_is_named(tmp_path, name, value, words):
    with pytest.raises(UserError, match=words):
        identities.read(environ(tmp_path, **{name: value}))


@pytest.mark.parametrize("kind", ["gymnasiun", "", "module:", ":Class"])
def test_a_kind_that_is_none_is_answered_with_those_there_are(kind):
    with pytest.raises(UserError, match="gymnasium, torch, transformers, vllm, rule, fsdp, synthetic, or module:Class"):
        registry.make(kind)


def test_a_module_that_is_missing_or_holds_no_role_is_named():
    with pytest.raises(UserError, match="No module named 'nowhere'"):
        registry.make("nowhere:Role")
    with pytest.raises(UserError, match="a class with `async def run"):
        registry.make("json:JSONDecoder")
    assert type(registry.make("tests.fakes.toy_roles:Idle")).__name__ == "Idle"


def test_a_worker_starts_without_what_its_role_may_not_need():
    heavy = "{'numpy', 'torch', 'pydantic', 'gymnasium', 'kubernetes', 'prometheus_client'}"
    program = f"import sys, rlinf_worker.runtime.main; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
