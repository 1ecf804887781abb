"""Raw gloo: a float32 tensor sent from one process to another, the reference of the links between pods."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from typing import Final

import torch
import torch.distributed as dist

from tools.bench.harness import ROOT, BenchError

WARM: Final = 4


def measure(*, nbytes: int, times: int) -> float:
    """Bytes per second over `times` tensors, by the receiver's clock, memory warm at both ends."""
    with tempfile.TemporaryDirectory(prefix="rlinf-gloo-") as folder:
        module = "tools.bench.runtime_parts.gloo_send"
        command = [sys.executable, "-m", module, f"{folder}/store", str(nbytes), str(times)]
        other = subprocess.Popen([*command, "0"], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            done = subprocess.run([*command, "1"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        finally:
            other.kill()
            other.wait()
        if done.returncode != 0:
            raise BenchError(f"gloo's send exited with {done.returncode}: {done.stderr.strip()[-500:]}")
        return float(done.stdout.split()[-1])


def main(store: str, nbytes: int, times: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tensor = torch.ones(nbytes // 4)
    for number in range(WARM + times):
        if number == WARM:
            dist.barrier()
            began = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    print(times * nbytes / (time.perf_counter() - began))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(int(n) for n in sys.argv[2:]))
