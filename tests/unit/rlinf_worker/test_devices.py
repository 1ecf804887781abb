"""Which GPUs a worker may see: found once per pod, by UUID, and those of its slots alone in its environment."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker import devices
from rlinf_worker.agent import spawning
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.runtime import identity, spare
from rlinf_worker.settings import Settings

GPU = "nvidia.com/gpu"
TWO = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1a)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2b)\n"
CUT = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1a)
  MIG 3g.20gb     Device  0: (UUID: MIG-7c)
  MIG 3g.20gb     Device  1: (UUID: MIG-8d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2b)
"""


def found(text: str = TWO, *, resource: str = GPU, slots: int = 2, **environ: str) -> tuple[str, ...]:
    return devices.find(resource, slots=slots, environ=environ, ask=lambda: text)


def test_each_slot_has_a_device_of_the_pod_in_the_order_of_the_driver():
    assert found() == ("GPU-1a", "GPU-2b")
    assert found(slots=1) == ("GPU-1a",)
    assert found(CUT, resource="nvidia.com/mig-3g.20gb") == ("MIG-7c", "MIG-8d"), "a GPU that is cut is none itself"
    assert found(CUT) == ("MIG-7c", "MIG-8d")


def test_slots_that_are_shares_of_cpu_or_of_another_make_have_none_and_nobody_is_asked():
    def ask() -> str:
        raise AssertionError("nvidia-smi was asked")

    for resource in ("", "amd.com/gpu", "example.com/fpga"):
        assert devices.find(resource, slots=4, environ={}, ask=ask) == ()


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-9f, GPU-8e"}, ("GPU-9f", "GPU-8e")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-7,GPU-6", "NVIDIA_VISIBLE_DEVICES": "GPU-9f,GPU-8e"}, ("GPU-7", "GPU-6")),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ("GPU-1a", "GPU-2b")),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, ("GPU-1a", "GPU-2b")),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, ("GPU-1a", "GPU-2b")),
    ],
)
def test_what_the_container_runtime_or_a_person_has_named_stands(environ, wanted):
    assert found(**environ) == wanted


def test_too_few_devices_are_said_with_where_they_were_looked_for():
    with pytest.raises(UserError) as refused:
        found(slots=3)
    assert str(refused.value) == (
        "this pod has 3 slots of nvidia.com/gpu, and not as many devices: got GPU-1a, GPU-2b, by nvidia-smi -L, wanted "
        "3, one for each slot; look at the node's device plugin, or at the variable; where several share one, the "
        "resource's name ends with .shared"
    )
    with pytest.raises(UserError, match="got GPU-5, by NVIDIA_VISIBLE_DEVICES, wanted 2"):
        found(NVIDIA_VISIBLE_DEVICES="GPU-5")
    with pytest.raises(UserError, match="got none, by nvidia-smi -L"):
        found("No devices found.\n")


def test_slots_that_share_a_device_take_it_in_turn():
    assert found(resource="nvidia.com/gpu.shared", slots=5) == ("GPU-1a", "GPU-2b", "GPU-1a", "GPU-2b", "GPU-1a")


def tool(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_drivers_own_tool_is_asked(tmp_path, monkeypatch):
    tool(tmp_path, f"test \"$*\" = -L && printf '%s' '{TWO}'", monkeypatch)
    assert devices.find(GPU, slots=2, environ={}) == ("GPU-1a", "GPU-2b")


@pytest.mark.parametrize(
    ("script", "got"),
    [
        ("echo 'Failed to initialize NVML: Unknown Error'; exit 255", "Failed to initialize NVML: Unknown Error"),
        ("sleep 5", "timed out after 0.2 seconds"),
    ],
)
def test_a_tool_that_fails_is_said_with_its_words_and_in_time(tmp_path, monkeypatch, script, got):
    tool(tmp_path, script, monkeypatch)
    monkeypatch.setattr(devices, "ASK_S", 0.2)
    with pytest.raises(UserError, match="the devices of this pod are not known: nvidia-smi -L failed") as refused:
        devices.find(GPU, slots=2, environ={})
    assert got in str(refused.value)


def test_in_a_pod_without_the_tool_devices_go_by_number(tmp_path, monkeypatch, caplog):
    """The container sees its own alone, and an image for computing alone has no tools."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.find(GPU, slots=2, environ={}) == ("0", "1")
    assert "no nvidia-smi here: the devices of slots go by number" in caplog.text
    assert devices.find("nvidia.com/gpu.shared", slots=2, environ={}) == (), "nobody knows how many there are"
    assert worker(1, pod="0,1")["CUDA_VISIBLE_DEVICES"] == "1"


# --- a worker ---------------------------------------------------------------------------------------------------------
def worker(*slots: int, pod: str) -> dict[str, str]:
    start = Start(worker="rollout/0", role="rollout", kind="fake", slots=slots)
    agent: Any = SimpleNamespace(socket_path="s")
    environ = {names.ENV_DEVICES: pod, "CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b,GPU-3c"}
    return spawning.Spawner(agent, Settings(), environ, "m", ()).environ_of(start, Path("f/config.json"))


def test_a_worker_sees_the_devices_of_its_slots_and_no_others():
    pod = "GPU-1a,GPU-2b,GPU-3c"
    assert [worker(n, pod=pod)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["GPU-1a", "GPU-2b", "GPU-3c"]
    assert worker(2, 0, pod=pod)["CUDA_VISIBLE_DEVICES"] == "GPU-3c,GPU-1a"
    assert worker(0, 1, pod="GPU-1a,GPU-1a")["CUDA_VISIBLE_DEVICES"] == "GPU-1a", "CUDA refuses one that is named twice"
    assert worker(1, pod="")["CUDA_VISIBLE_DEVICES"] == "GPU-1a,GPU-2b,GPU-3c", "without slots of GPUs, as its pod says"


def test_a_spare_sees_those_of_the_place_that_it_takes(monkeypatch):
    for name, value in {names.ENV_DEVICES: "GPU-1a,GPU-2b", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    for name in (names.ENV_WORKER_ID, names.ENV_WORKER_RANK, names.ENV_WORKER_WORLD, names.ENV_WORKER_ATTEMPT):
        monkeypatch.setenv(name, "0")
    for name in (names.ENV_WORKER_SLOTS, names.ENV_WORKER_SPARE):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(spare, "Path", lambda path: SimpleNamespace(write_text=lambda *a, **k: None))
    place: Any = SimpleNamespace(worker="rollout/1", rank=1, world=2, attempt=3, slots=[1], config_json="{}")
    was = identity.WorkerIdentity(worker=WorkerId("spare/0"), role="rollout", kind="fake", rank=0, world=1, attempt=1)
    spare.become(was, place)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2b"
