"""Raw gloo: a broadcast of float32 tensors from one process to another, the reference of the weights benchmark."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from rlinf_worker.weights import copying
from tools.bench.harness import ROOT, BenchError


def measure(*, mb: int, tensors: int, warm: int, times: int) -> float:
    """Median seconds of one broadcast of all tensors, as the sender sees it, with a barrier behind."""
    with tempfile.TemporaryDirectory(prefix="rlinf-gloo-") as folder:
        numbers = [str(n) for n in (mb, tensors, warm, times)]
        command = [sys.executable, "-m", "tools.bench.runtime_parts.gloo_broadcast", f"{folder}/store", *numbers]
        env = {**os.environ, "GLIBC_TUNABLES": copying.TUNABLES}  # as our workers have it; it makes no difference here
        out = subprocess.DEVNULL
        other = subprocess.Popen([*command, "1"], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out)
        try:
            done = subprocess.run(
                [*command, "0"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            other.kill()
            other.wait()
        if done.returncode != 0:
            raise BenchError(f"gloo's broadcast exited with {done.returncode}: {done.stderr.strip()[-500:]}")
        return float(done.stdout.split()[-1])


def main(store: str, mb: int, tensors: int, warm: int, times: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    values = [torch.full(((mb << 20) // tensors // 4,), float(rank)) for _ in range(tensors)]
    took = []
    for _ in range(warm + times):
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.broadcast(value, 0, async_op=True) for value in values]:
            work.wait()
        dist.barrier()
        took.append(time.perf_counter() - began)
    print(statistics.median(took[warm:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(int(n) for n in sys.argv[2:]))
