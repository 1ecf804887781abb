"""The rows of `make bench-gpu`, on the CPU and in single megabytes: that they run, and measure what they say."""

import pytest

from tools.bench import gpu

pytestmark = pytest.mark.slow("each starts processes that import torch")


def test_a_tensor_goes_from_process_to_process():
    assert 0 < gpu.handover("cpu", 1, "host") < 5


def test_state_goes_and_comes_back_whole():
    assert gpu.offload("cpu", 4) > 0
    assert gpu.plain_copies("cpu", 4) > 0


def test_two_processes_take_turns_and_leave_nothing_behind():
    found = gpu.switches("cpu", 4, 12)
    assert found["turn_one_gpu"] > 0
    assert found["growth_200_switches"] < 16
