"""What `make bench-gpu` measures, on a machine with an NVIDIA GPU; without one it says so and runs nothing.

    ipc_1gb              1 GB from process to process on one GPU, through a link: from send until the receiver holds it
    offload_8gb          8 GB off the GPU and back through pinned memory (HostCopy), against plain copies of such memory
    turn_one_gpu         one process's 1 GB leaves, then another's comes: from the first byte out until the last one in
    growth_200_switches  what 200 such changes leave behind, of the GPU's memory or the host's, whichever is more

`ARGS=--small` runs the same on the CPU, in megabytes: whether it works, not how well.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.settings import LinkSettings
from tools.bench.gpu_parts import peer
from tools.bench.harness import BenchError, Reference, Row

ANSWER_S: Final = 120.0
HANDOVERS: Final = 20
SWITCHES: Final = 200
SETTLED: Final = 20
"""Switches before memory is looked at: caches are filled by then."""


class Peer:
    """The other process; `ask` writes a line and reads its answer."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, what: str, device: str, mib: int) -> Iterator[Peer]:
        words = [sys.executable, "-m", "tools.bench.gpu_parts.peer", what, device, str(mib)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process)
                assert process.stdin is not None
                process.stdin.close()
                process.wait(timeout=ANSWER_S)
            finally:
                process.kill()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the other process ended with code {self._process.wait(timeout=ANSWER_S)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear()


# --- rows ------------------------------------------------------------------------------------------------------------


def handover(device: str, mib: int, lane: str) -> float:
    """Median seconds of one tensor."""
    with tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder:
        return asyncio.run(_handover(device, mib, lane, folder))


async def _handover(device: str, mib: int, lane: str, folder: str) -> float:
    peer.use(device)
    me = Identity(job=peer.JOB, worker="receiver", attempt=0)
    listener = await Listener.open(
        me, pod_uid="pod", run_dir=folder, shm_dir="/dev/shm", host=None, settings=LinkSettings()
    )
    took: list[float] = []
    try:
        with Peer.start("handover", device, mib) as sender:
            sender.tell(json.dumps(listener.endpoint.to_dict()))
            link: Any = await asyncio.wait_for(listener.accept(), ANSWER_S)
            ready = await asyncio.to_thread(sender.hear)
            if ready["lane"] != lane:
                raise BenchError(f"the tensor goes by {ready['lane']!r}, and {lane!r} is to be measured")
            for number in range(HANDOVERS):
                sender.tell(str(number))
                with await asyncio.wait_for(link.recv(), ANSWER_S) as message:
                    block = message.value()["block"]
                    _wait_for(device)
                    ended = time.monotonic()
                    if block.device != torch.ones(1, device=device).device or float(block[-1]) != 1.0:
                        raise BenchError(f"got a tensor on {block.device} that ends in {float(block[-1])}, wanted ones")
                    del block
                took.append(ended - (await asyncio.to_thread(sender.hear))["began"])
            await link.close()
    finally:
        await listener.close()
    return sorted(took)[len(took) // 2]


def copy_on_device(device: str, mib: int) -> float:
    """Seconds of a plain copy of the same bytes."""
    source = torch.ones(mib * peer.MIB // 4, device=device, dtype=torch.float32)
    target = torch.zeros_like(source)
    return _median_of(lambda: target.copy_(source), device)


def offload(device: str, mib: int) -> float:
    """GB/s there and back, warm."""
    holder = peer.Holder(device, mib)
    _wait_for(device)

    def there_and_back() -> None:
        holder.host.offload()
        holder.host.load()

    seconds = _median_of(there_and_back, device)
    if not holder.is_whole():
        raise BenchError("what came back is not what went")
    return 2 * mib * peer.MIB / 1e9 / seconds


def plain_copies(device: str, mib: int) -> float:
    """GB/s there and back, of tensors of the same sizes whose memory stays."""
    size = mib * peer.MIB // peer.PARTS // 4
    there = [torch.ones(size, device=device, dtype=torch.float32) for _ in range(peer.PARTS)]
    pinned = device.startswith("cuda")
    here = [torch.zeros(size, dtype=torch.float32, pin_memory=pinned) for _ in range(peer.PARTS)]

    def there_and_back() -> None:
        for host, tensor in zip(here, there, strict=True):
            host.copy_(tensor, non_blocking=pinned)
        _wait_for(device)
        for host, tensor in zip(here, there, strict=True):
            tensor.copy_(host, non_blocking=pinned)

    return 2 * mib * peer.MIB / 1e9 / _median_of(there_and_back, device)


def switches(device: str, mib: int, count: int) -> dict[str, float]:
    """Two processes take turns on the device; `count` changes."""
    with Peer.start("holder", device, mib) as a, Peer.start("holder", device, mib) as b:
        for holder in (a, b):
            holder.hear()
        on, off = a, b
        on.ask("load")
        took, least = [], {}
        for number in range(count):
            began = time.monotonic()
            left = on.ask("offload")
            came = off.ask("load")
            took.append(came["at"] - began)
            if device.startswith("cuda") and left["device_mib"] >= mib:
                raise BenchError(f"{left['device_mib']:.0f} MiB of the GPU are still taken by who has left it")
            if number == min(SETTLED, count // 2):
                least = _memory(left, came)
            on, off = off, on
        if not on.ask("look")["whole"]:
            raise BenchError("what came back is not what went")
        most = _memory(left, came)
    growth = max(most[what] - least[what] for what in least)
    return {"turn_one_gpu": 1000 * sorted(took)[len(took) // 2], "growth_200_switches": max(0.0, growth)}


def _memory(*answers: dict[str, Any]) -> dict[str, float]:
    return {what: sum(answer[what] for answer in answers) for what in ("device_mib", "host_mib")}


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _median_of(work: Any, device: str, times: int = 7) -> float:
    work()
    took = []
    for _ in range(times):
        _wait_for(device)
        began = time.perf_counter()
        work()
        _wait_for(device)
        took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


def rows() -> list[Row]:
    if not torch.cuda.is_available():
        raise BenchError("no NVIDIA GPU on this machine, and every row needs one; ARGS=--small tries them on the CPU")
    return _rows("cuda:0", lane="ipc", gb=1024, changes=SWITCHES)


def small_rows() -> list[Row]:
    return _rows("cpu", lane="host", gb=4, changes=10)


def _rows(device: str, *, lane: str, gb: int, changes: int) -> list[Row]:
    """`gb`: how many MiB stand for a GB."""
    plain = Reference(name="torch copy_ on the device", measure=functools.partial(copy_on_device, device, gb))
    pinned = Reference(name="torch copy_ of pinned memory", measure=functools.partial(plain_copies, device, 8 * gb))
    change = functools.partial(switches, device, gb, changes)
    there_and_back = functools.partial(offload, device, 8 * gb)
    return [
        Row(
            name="ipc_1gb", unit="s", better="lower", subject=functools.partial(handover, device, gb, lane),
            reference=plain,
        ),
        Row(
            name="offload_8gb", unit="GB/s", better="higher", bar_ratio=0.8 if device != "cpu" else None,
            subject=there_and_back, reference=pinned,
        ),
        Row(name="turn_one_gpu", unit="ms", better="lower", subject=change),
        Row(name="growth_200_switches", unit="MiB", better="lower", bar=16, subject=change),
    ]  # fmt: skip
