"""The small parts of a worker's runtime: identity, the registry."""

import json
import subprocess
import sys

import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_worker.roles import registry
from rlinf_worker.runtime import identity as identities


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
    me = identities.read(environ(tmp_path))
    assert (me.worker, me.rank, me.world, me.attempt) == ("rollout/3", 3, 4, 2)
    assert me.config == {"envs": 4}
    assert me.data_port == names.PORT_DATA_BASE + 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (names.ENV_WORKER_ID, "", "RLINF_WORKER_ID is not set"),
        (names.ENV_WORKER_RANK, "x", "RLINF_WORKER_RANK is no number: got 'x'"),
        (names.ENV_WORKER_CONFIG, "/nowhere", "config cannot be read from /nowhere"),
    ],
)
def test_what_the_environment_lacks_is_named(tmp_path, name, value, words):
    with pytest.raises(UserError, match=words):
        identities.read(environ(tmp_path, **{name: value}))


@pytest.mark.parametrize("kind", ["gymnasiun", "", "module:", ":Class"])
def test_a_kind_that_is_none_is_answered_with_those_there_are(kind):
    with pytest.raises(UserError, match="gymnasium, torch, fsdp, synthetic, or module:Class"):
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
