"""Raw gloo between two processes, the reference of the rows about weights and about links between pods: a broadcast of
float32 tensors, and one tensor sent.

`broadcast_s` and `send_rate` start both processes, `main` is what each of them runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from rlinf_worker.weights import copying
from tools.bench.harness import ROOT, BenchError

WARM_SENDS: Final = 4


def broadcast_s(*, mb: int, tensors: int, warm: int, times: int) -> float:
    """Median seconds of one broadcast of all tensors, as the sender sees it, with a barrier behind."""
    return _run("broadcast", mb, tensors, warm, times, tells=0)


def send_rate(*, nbytes: int, times: int) -> float:
    """Bytes per second over `times` tensors, by the receiver's clock, memory warm at both ends."""
    return _run("send", nbytes, times, tells=1)


def _run(what: str, *numbers: int, tells: int) -> float:
    """Runs two processes, and returns what the one of rank `tells` prints."""
    with tempfile.TemporaryDirectory(prefix="rlinf-gloo-") as folder:
        module = [sys.executable, "-m", "tools.bench.runtime_parts.raw_gloo"]
        command = [*module, what, f"{folder}/store", *map(str, numbers)]
        env = {**os.environ, "GLIBC_TUNABLES": copying.TUNABLES}  # as our workers have it; it makes no difference here
        none = subprocess.DEVNULL
        other = subprocess.Popen([*command, str(1 - tells)], cwd=ROOT, env=env, stdin=none, stdout=none)
        try:
            done = subprocess.run(
                [*command, str(tells)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            other.kill()
            other.wait()
        if done.returncode != 0:
            raise BenchError(f"gloo's {what} exited with {done.returncode}: {done.stderr.strip()[-500:]}")
        return float(done.stdout.split()[-1])


def _broadcast(mb: int, tensors: int, warm: int, times: int, rank: int) -> float:
    values = [torch.full(((mb << 20) // tensors // 4,), float(rank)) for _ in range(tensors)]
    took = []
    for _ in range(warm + times):
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.broadcast(value, 0, async_op=True) for value in values]:
            work.wait()
        dist.barrier()
        took.append(time.perf_counter() - began)
    return statistics.median(took[warm:])


def _send(nbytes: int, times: int, rank: int) -> float:
    tensor = torch.ones(nbytes // 4)
    for number in range(WARM_SENDS + times):
        if number == WARM_SENDS:
            dist.barrier()
            began = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    return times * nbytes / (time.perf_counter() - began)


WAYS: Final[dict[str, Callable[..., float]]] = {"broadcast": _broadcast, "send": _send}


def main(what: str, store: str, *numbers: int) -> None:
    """`numbers`: those of the measurement, and the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=numbers[-1], world_size=2)
    print(WAYS[what](*numbers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
