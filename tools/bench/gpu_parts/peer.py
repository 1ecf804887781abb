"""The other process of a row of `make bench-gpu`: `python -m tools.bench.gpu_parts.peer WHAT DEVICE MIB`.

    handover   dials the link whose endpoint is the first line of its input, and sends one tensor per further line
    holder     state of MIB on the device, which it offloads and loads by HostCopy, one word of its input each

Answers one line of JSON for each line that it reads, and ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from rlinf_worker.algorithms.offloading import HostCopy
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import dial
from rlinf_worker.links.message import Message

MIB = 1 << 20
JOB = "bench-gpu"
PARTS = 16
"""Tensors that the state of a holder is made of: as many as a small model's layers."""


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def use(device: str) -> None:
    """Makes the context before anything is measured, and before a hello asks for the GPU."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.ones(1, device=device)


def memory_mib(device: str) -> dict[str, float]:
    """What this process has of the device, torch's caches included, and of the host."""
    reserved = torch.cuda.memory_reserved(device) if device.startswith("cuda") else 0
    return {"device_mib": reserved / MIB, "host_mib": psutil.Process().memory_info().rss / MIB}


class Holder:
    """State on a device that goes away and comes back."""

    def __init__(self, device: str, mib: int) -> None:
        self.device = device
        self.tensors = [
            torch.full((mib * MIB // PARTS // 4,), float(k), device=device, dtype=torch.float32) for k in range(PARTS)
        ]
        self.host = HostCopy(lambda: self.tensors)

    def do(self, word: str) -> dict[str, Any]:
        began = time.monotonic()
        if word == "offload":
            self.host.offload()
        elif word == "load":
            self.host.load()
        else:
            return {"whole": self.is_whole(), **memory_mib(self.device)}
        return {"seconds": time.monotonic() - began, "at": time.monotonic(), **memory_mib(self.device)}

    def is_whole(self) -> bool:
        return all(bool((tensor == float(k)).all()) for k, tensor in enumerate(self.tensors))


async def handover(device: str, mib: int, lines: Iterator[str]) -> None:
    me = Identity(job=JOB, worker="sender", attempt=0)
    link: Any = await dial(Endpoint.from_dict(json.loads(next(lines))), me, pod_uid="pod", shm_dir="/dev/shm")
    async with asyncio.timeout(60):
        while link.beside.coming:  # noqa: ASYNC110  (nobody but a benchmark waits for it)
            await asyncio.sleep(0.01)
    block = torch.ones(mib * MIB // 4, device=device, dtype=torch.float32)
    say(lane=link.beside.lane.kind if link.beside.lane is not None else "host")
    while line := await asyncio.to_thread(next, lines, ""):
        began = time.monotonic()
        await link.send(Message(line.strip().encode(), {"block": block}))
        say(began=began)
    await link.close()


def main() -> None:
    what, device, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    use(device)
    lines = iter(sys.stdin.readline, "")
    if what == "handover":
        asyncio.run(handover(device, mib, lines))
        return
    holder = Holder(device, mib)
    holder.do("offload")
    say(ready=True)
    for line in lines:
        say(**holder.do(line.strip()))


if __name__ == "__main__":
    main()
