"""State that leaves a GPU and comes back, and two processes that take turns on one (`make test-gpu`)."""

from __future__ import annotations

import pytest
import torch

from tools.bench import gpu
from tools.bench.gpu_parts import peer

pytestmark = pytest.mark.gpu  # conftest skips these with a sentence where there is no device


def test_state_leaves_the_gpu_and_comes_back_bit_for_bit():
    peer.use("cuda:0")
    before = torch.cuda.memory_reserved("cuda:0")
    holder = peer.Holder("cuda:0", 256)
    for _ in range(3):
        holder.do("offload")
        assert holder.host.bytes_now() == 0
        assert torch.cuda.memory_reserved("cuda:0") - before < 64 * peer.MIB
        holder.do("load")
        assert holder.is_whole()


def test_two_processes_on_one_gpu_change_200_times_without_growth():
    found = gpu.switches("cuda:0", 256, 200)
    assert found["growth_200_switches"] < 16


def test_one_gb_is_handed_over_by_cuda_ipc():
    assert gpu.handover("cuda:0", 1024, "ipc") < 1.0
