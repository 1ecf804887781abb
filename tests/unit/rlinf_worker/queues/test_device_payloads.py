"""Payloads on an accelerator, which a producer keeps there until its turn ends or somebody asks. The accelerator is a
fake; the last test has a real one."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest

from rlinf_api.names import WorkerId
from rlinf_worker.links.message import Message
from rlinf_worker.links.payload import register
from rlinf_worker.queues import devices
from rlinf_worker.queues.shelf import Shelf, ShelvedPayload
from rlinf_worker.queues.units import Age, UnitId, UnitInfo


class OnDevice:
    """1,000 bytes of a fake device."""

    alive = 0

    def __init__(self, text: str) -> None:
        self.text = text
        OnDevice.alive += 1

    def __del__(self) -> None:
        OnDevice.alive -= 1


class FakeDevice(devices.TorchCuda):
    copies = 0

    def may_be_used(self) -> bool:
        return True

    def owns(self, value: Any) -> bool:
        return isinstance(value, OnDevice)

    def nbytes(self, value: Any) -> int:
        return 1000

    def to_host(self, value: Any) -> Any:
        self.copies += 1
        return value.text


@register
@dataclass(frozen=True)
class Sample:
    tokens: Any
    note: str


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(devices, "DEVICE", fake)
    OnDevice.alive = 0
    return fake


def unit(key: str, size: int) -> UnitInfo:
    return UnitInfo(key=key, branch=0, step=1, size_bytes=size, producer=WorkerId("m/0"))


def put(shelf: Shelf, key: str, value: Any) -> bool:
    kept = ShelvedPayload(value)
    if not shelf.lets_in(kept.nbytes, shelf.place(Age(0, 1))):
        return False
    return shelf.add(unit(key, kept.nbytes), kept)


def kept_of(shelf: Shelf, uid: UnitId) -> ShelvedPayload:
    kept = shelf.get(uid)
    assert kept is not None
    return kept


def on_device(shelf: Shelf) -> int:
    return sum(kept_of(shelf, unit.id).device_bytes for unit in shelf.units())


def value_of(kept: ShelvedPayload) -> Any:
    body, buffers = kept.encoded()
    return Message(b"", body=body, buffers=buffers).value()


def test_what_lies_on_a_device_is_found_and_moved_wherever_it_is_in_a_payload(device):
    payload = {"a": [OnDevice("x"), 1], "b": (Sample(OnDevice("y"), "n"), None), 3: "plain"}
    assert devices.on_device(payload) == 2000
    host = devices.to_host(payload)
    assert host == {"a": ["x", 1], "b": (Sample("y", "n"), None), 3: "plain"}
    assert devices.on_device(host) == 0
    plain = {"c": [1, 2]}
    assert devices.to_host(plain) is plain, "nothing is rebuilt for nothing"


def test_at_the_end_of_a_turn_what_is_kept_leaves_the_device(device):
    shelf = Shelf(capacity_units=10, capacity_bytes=10_000)
    assert put(shelf, "a", {"t": OnDevice("A")})
    assert put(shelf, "b", {"t": "host"})
    assert (OnDevice.alive, device.copies) == (1, 0), "kept as it is"
    assert shelf.spill() > 0
    assert (OnDevice.alive, on_device(shelf)) == (0, 0)
    assert shelf.spill() == 0
    assert value_of(kept_of(shelf, UnitId(0, "a"))) == {"t": "A"}


def test_a_payload_that_is_asked_for_first_is_copied_once(device):
    shelf = Shelf(capacity_units=10, capacity_bytes=10_000)
    put(shelf, "a", OnDevice("A"))
    kept = kept_of(shelf, UnitId(0, "a"))
    assert value_of(kept) == "A"
    assert value_of(kept) == "A"
    assert device.copies == 1
    assert OnDevice.alive == 0


def test_the_channels_bytes_bound_what_is_kept_on_the_device_and_what_a_turn_leaves_on_the_host(device):
    """So that a turn's end never needs more host memory than the channel has: the producer waits before."""
    shelf = Shelf(capacity_units=100, capacity_bytes=5_000)
    let_in = [key for key in "abcdefgh" if put(shelf, key, OnDevice(key))]
    assert 0 < shelf.kept_bytes <= 5_000
    assert len(let_in) < 8
    shelf.spill()
    assert shelf.kept_bytes <= 5_000
    assert not put(shelf, "z", OnDevice("z")), "spilled units are still kept: back-pressure"
    shelf.release([UnitId(0, key) for key in let_in])
    assert put(shelf, "z", OnDevice("z"))


def test_a_tensor_weighs_what_its_numbers_do():
    torch: Any = pytest.importorskip("torch", reason="about torch's tensors")
    assert devices.TorchCuda().nbytes(torch.zeros(3, 5, dtype=torch.float16)) == 30


def test_what_torch_makes_besides_tensors_lies_on_no_device():
    """They are plain leaves of a payload: a copy to the host would end in an AttributeError inside of it."""
    torch: Any = pytest.importorskip("torch", reason="about torch's values")
    device = devices.TorchCuda()
    assert [device.owns(value) for value in (torch.float32, torch.device("cuda"), torch.zeros(1))] == [False] * 3


def test_torch_tensors_of_a_gpu_leave_it_at_the_end_of_a_turn():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed here")
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU that torch can use")
    shelf = Shelf(capacity_units=10, capacity_bytes=1 << 30)
    before = torch.cuda.memory_allocated()
    expected = torch.arange(1 << 20, dtype=torch.float32)
    put(shelf, "a", {"t": expected.cuda(), "n": 3})
    assert on_device(shelf) == 4 << 20
    assert shelf.spill() == 4 << 20
    assert torch.cuda.memory_allocated() == before
    received = value_of(kept_of(shelf, UnitId(0, "a")))
    assert torch.equal(torch.as_tensor(received["t"]), expected)
