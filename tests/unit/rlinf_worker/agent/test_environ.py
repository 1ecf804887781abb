"""What a worker finds in its environment besides its agent's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_worker.agent import spawning
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.settings import Settings
from rlinf_worker.weights import copying


def made(agents: dict[str, str]) -> dict[str, str]:
    start = Start(worker="actor/0", role="actor", kind="fake")
    identity: Any = SimpleNamespace(socket_path="s")
    return spawning.Spawner(identity, Settings(), agents, "m", ()).environ_of(start, Path("f/config.json"))


def test_a_lost_answer_of_the_dns_holds_no_gang_up_and_whole_tensors_are_copied_past_the_caches():
    found = made({})
    assert (found["RES_OPTIONS"], found["GLIBC_TUNABLES"]) == ("timeout:1 attempts:3", copying.TUNABLES)


@pytest.mark.parametrize(("name", "value"), [("RES_OPTIONS", "ndots:2"), ("GLIBC_TUNABLES", "glibc.malloc.check=3")])
def test_what_the_pod_says_stands(name, value):
    assert made({name: value})[name] == value
