"""What a worker has on its slots: of the host with whatever its children hold, of accelerators as their driver says."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

from rlinf_worker import memory
from rlinf_worker.memory import Footprint

MIB = 1 << 20
CHILD = """
import mmap, sys
held = bytearray(b"x") * (48 << 20)
file = mmap.mmap(int(sys.argv[1]), 32 << 20)
sum(file[::4096])
for line in sys.stdin:
    del held
    print("freed", flush=True)
"""


def said(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "freed\n"


def test_what_children_hold_counts_and_what_they_share_counts_once():
    fd = os.memfd_create("weights")
    os.truncate(fd, 32 * MIB)
    os.pwrite(fd, b"x" * (32 * MIB), 0)
    before = Footprint([]).now()
    assert before is not None
    command = [sys.executable, "-c", CHILD + "    break\nsys.stdin.read()", str(fd)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd])
        for _ in range(2)
    ]
    try:
        for child in children:
            said(child)
        shared = Footprint([]).now()
        assert shared is not None
        assert 32 * MIB <= shared - before < 2 * 32 * MIB, "two interpreters and one file"
    finally:
        for child in children:
            child.communicate()
        os.close(fd)
    after = Footprint([]).now()
    assert after is not None
    assert after - before < 16 * MIB


def test_a_child_that_frees_its_memory_is_seen_to():
    code = "held = bytearray(b'x') * (64 << 20)\nprint()\ninput()\ndel held\nprint()\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        levels = []
        for _ in range(2):
            child.stdout.readline()
            levels.append(memory.of_tree(os.getpid()) or 0)
            child.stdin.write(b"\n")
            child.stdin.flush()
    assert levels[0] - levels[1] == pytest.approx(64 * MIB, abs=4 * MIB)


def test_of_a_process_that_is_gone_nothing_is_known():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert memory.of_tree(child.pid) is None


class Library:
    """libnvidia-ml with two GPUs."""

    USED = {b"GPU-1a": 5000, b"GPU-2b": 700}

    def __init__(self) -> None:
        self.handles: list[int] = []

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: Any, device: Any) -> int:  # noqa: N802
        if name.value not in self.USED:
            return 6
        device._obj.value = 1 + list(self.USED).index(name.value)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        device._obj.value = 1 + index.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, found: Any) -> int:  # noqa: N802
        found._obj.used = list(self.USED.values())[device.value - 1]
        return 0


@pytest.mark.parametrize(
    ("devices", "used"),
    [(["GPU-2b"], 700), (["GPU-1a", "GPU-2b"], 5700), (["GPU-2b", "GPU-2b"], 700), (["1"], 700), (["GPU-9z"], None)],
)
def test_of_accelerators_those_of_the_workers_slots_count(monkeypatch, devices, used):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    assert Footprint(devices).now() == used


def test_where_nobody_answers_for_accelerators_nothing_is_known(monkeypatch):
    def missing(name):
        raise OSError(2, f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Footprint(["GPU-1a"]).now() is None


@pytest.mark.parametrize(
    ("devices", "before", "after", "kept"),
    [([], 900, 300, 300), (["0"], 900, 300, 200), (["0"], 900, 50, 0), ([], None, 300, None), (["0"], 900, None, None)],
)
def test_what_is_kept_on_an_accelerator_is_less_what_others_have_there(devices, before, after, kept):
    assert Footprint(devices).kept(before, after, said=800) == kept


@pytest.mark.parametrize(
    ("kept", "allowed", "is_said"),
    [(1100, 1000, False), (1101, 1000, True), (164, 100, False), (165, 100, True), (1 << 20, 0, False)],
)
def test_only_what_is_beyond_the_tolerance_is_said(kept, allowed, is_said):
    words = memory.excess("engine/0", kept=kept * MIB, allowed=allowed * MIB)
    assert bool(words) is is_said
    if is_said:
        assert words == (
            f"worker engine/0 has left its slots and keeps {kept} MiB on them, measured, and its plan allows {allowed} "
            "MiB; free more in offload(), or raise workers[].memory.offloaded of the plan"
        )
