"""Storage that leaves a slot is really free, and comes back bit for bit under the same tensors."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlinf_worker import memory
from rlinf_worker.algorithms import offloading
from rlinf_worker.algorithms.offloading import HostCopy


def trained(device="cpu"):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer


def step(model, optimizer, device="cpu"):
    generator = torch.Generator().manual_seed(7)
    loss = model(torch.rand(32, 64, generator=generator).to(device)).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def copy_of(model, optimizer):
    return HostCopy(lambda: [*offloading.of_module(model), *offloading.of_optimizer(optimizer)])


def bits(model, optimizer):
    tensors = [*offloading.of_module(model), *offloading.of_optimizer(optimizer)]
    return [t.to_local().clone() if hasattr(t, "to_local") else t.clone() for t in tensors]


def test_storage_is_freed_and_comes_back_bit_for_bit():
    model, optimizer = trained()
    step(model, optimizer)
    host, before = copy_of(model, optimizer), bits(model, optimizer)
    had = host.bytes_now()
    assert had > 4 * 3 * 64 * 256, "parameters, gradients and two moments"
    host.offload()
    assert host.bytes_now() == 0
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    host.load()
    assert host.bytes_now() == had
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model, optimizer), strict=True))


def test_training_goes_on_as_if_nothing_had_been():
    model, optimizer = trained()
    other, other_optimizer = trained()
    host = copy_of(model, optimizer)
    for _ in range(5):
        assert step(model, optimizer) == step(other, other_optimizer)
        host.offload()
        host.load()
    assert all(torch.equal(a, b) for a, b in zip(bits(model, optimizer), bits(other, other_optimizer), strict=True))


def test_twice_is_once_and_nothing_grows():
    model, optimizer = trained()
    step(model, optimizer)
    host = copy_of(model, optimizer)
    had = host.bytes_now()
    host.load()
    for _ in range(50):
        host.offload()
        host.offload()
        host.load()
        host.load()
    assert host.bytes_now() == had


def test_tensors_that_share_a_storage_are_moved_once():
    base = torch.arange(1000.0)
    views = [base, base[10:20], base.view(10, 100)]
    host = HostCopy(lambda: views)
    assert host.bytes_now() == 4000
    host.offload()
    assert host.bytes_now() == 0
    host.load()
    assert torch.equal(base.view(10, 100)[3], torch.arange(300.0, 400.0))


def resident():
    found = memory.of_tree(os.getpid())
    assert found is not None
    return found


def test_a_cpus_memory_leaves_the_resident_set_for_the_disk():
    tensors = [torch.rand(1 << 20) for _ in range(32)]
    kept = [tensor.clone() for tensor in tensors[:2]]
    host, before = HostCopy(lambda: tensors), resident()
    host.offload()
    left = resident()
    assert before - left >= 0.8 * (128 << 20)
    host.load()
    assert resident() - left >= 0.8 * (128 << 20)
    assert all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=False))


def test_what_finds_no_room_on_the_disk_stays_where_it_is_and_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    tensor = torch.arange(1000.0)
    host = HostCopy(lambda: [tensor])
    host.offload()
    assert host.bytes_now() == 4000
    assert "free some, or set TMPDIR" in caplog.text
    host.load()
    assert torch.equal(tensor, torch.arange(1000.0))


def test_a_file_that_was_cut_is_named():
    tensor = torch.arange(1000.0)
    host = HostCopy(lambda: [tensor])
    host.offload()
    assert host._file is not None
    host._file.truncate(100)
    with pytest.raises(OSError, match="ends 3900 bytes too early"):
        host.load()


def test_what_fsdp_has_sharded_leaves_and_comes_back(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, _ = trained()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        plain, plain_optimizer = trained()
        host = copy_of(model, optimizer)
        for _ in range(3):
            assert step(model, optimizer) == pytest.approx(step(plain, plain_optimizer), rel=1e-6)
            had = host.bytes_now()
            host.offload()
            assert host.bytes_now() == 0
            host.load()
            assert host.bytes_now() == had
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves memory of an accelerator, and this machine has none")
def test_an_accelerators_memory_is_free_for_others_and_comes_back():
    model, optimizer = trained("cuda")
    step(model, optimizer, "cuda")
    host, before = copy_of(model, optimizer), bits(model, optimizer)
    torch.cuda.empty_cache()
    level = torch.cuda.memory_reserved()
    host.offload()
    assert host.bytes_now() == 0
    assert torch.cuda.memory_reserved() < level
    host.load()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model, optimizer), strict=True))
