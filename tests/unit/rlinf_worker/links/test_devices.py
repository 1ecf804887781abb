"""What is said of buffers on a GPU, and what is believed of it; with a torch that pretends to have one."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import msgspec
import pytest
import torch

from rlinf_worker.links import cuda, devices, meet_gpus, nccl
from rlinf_worker.links.beside import Beside
from rlinf_worker.links.cuda import Handle, IpcLane
from rlinf_worker.links.devices import BuffersBeside, Gpu
from rlinf_worker.links.message import Message
from rlinf_worker.links.payload_arrays import DeviceBuffer, Part, on_host
from rlinf_worker.links.settings import LinkSettings
from tests.unit.rlinf_worker.links import ipc_fake

GPU = Gpu(uuid="gpu-0", index=0)


def test_what_a_hello_says_of_a_gpu_is_one_or_it_is_none():
    assert Gpu.from_hello({"uuid": "g", "index": 3, "nccl": "2.27"}) == Gpu(uuid="g", index=3, nccl="2.27")
    assert Gpu.from_hello({"uuid": "g", "index": 3}) == Gpu(uuid="g", index=3, nccl="")
    for fields in (None, {}, {"uuid": "g"}, {"uuid": 1, "index": 0}, "gpu"):
        assert Gpu.from_hello(fields) is None


@pytest.mark.parametrize(("has_nccl", "nccl"), [(True, "2.27.3"), (False, ""), (None, "")])
def test_a_process_that_uses_its_gpu_says_which_and_with_which_nccl(monkeypatch, has_nccl, nccl):
    fake = types.SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 2,
        get_device_properties=lambda index: types.SimpleNamespace(uuid=f"uuid of {index}"),
        nccl=types.SimpleNamespace(version=lambda: (2, 27, 3)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=fake))
    distributed = None if has_nccl is None else types.SimpleNamespace(is_nccl_available=lambda: has_nccl)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    assert devices.here() == Gpu(uuid="uuid of 2", index=2, nccl=nccl)
    assert devices.of(LinkSettings()) == devices.here()
    assert devices.of(LinkSettings(gpu="host")) is None


def test_a_place_is_the_gpu_of_that_number_in_this_process():
    assert devices.place(3) == torch.device("cuda", 3)
    assert devices.device_index(types.SimpleNamespace(device=torch.device("cuda", 3))) == 3


def test_each_buffer_begins_at_a_multiple_of_256():
    assert devices.layout([]) == ([], 0)
    assert devices.layout([1, 256, 257, 3]) == ([0, 256, 512, 1024], 1027)


def test_a_message_is_split_and_joined_to_what_it_was():
    on_gpu = [torch.full((60,), 7, dtype=torch.uint8), torch.full((70,), 8, dtype=torch.uint8)]
    parts: list[Part] = [DeviceBuffer(on_gpu[0]), memoryview(b"host"), DeviceBuffer(on_gpu[1])]
    message = Message(b"h", body=b"body", buffers=parts)
    found = devices.device_buffers(message)
    assert found == [(0, parts[0]), (2, parts[2])]
    split = devices.split(message, found, 9)
    manifest = devices.manifest_of(split, max_bytes=130)
    assert manifest == BuffersBeside(9, ((0, 60), (2, 70)))
    assert manifest is not None
    assert (split.head, manifest.nbytes, list(on_host(split.encoded()[1]))) == (b"h", 130, [memoryview(b"host")])
    joined = devices.join(split, manifest, on_gpu)
    body, buffers = joined.encoded()
    assert (joined.head, body, [bytes(b) for b in on_host(buffers)]) == (
        b"h", b"body", [b"\7" * 60, b"host", b"\10" * 70],
    )  # fmt: skip
    assert devices.manifest_of(message, max_bytes=0) is None


def announced(places: Any, *, others: int = 0, cut: int = 0) -> Message:
    manifest = msgspec.msgpack.encode((7, places))
    body = b"\xc1" + len(manifest).to_bytes(4, "little") + manifest + b"body"
    return Message(b"h", body=body[: len(body) - cut], buffers=[memoryview(b"x")] * others)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (announced([(0, 1)], cut=8), "it announced GPU buffers in a way that cannot be read: "),
        (Message(b"h", body=b"\xc1abc"), "it announced GPU buffers in a way that cannot be read: "),
        (announced([]), "it announced GPU buffers at places [] among 0 others"),
        (announced([(1, 5), (0, 5)], others=1), "it announced GPU buffers at places [1, 0] among 1 others"),
        (announced([(0, 5), (0, 5)]), "it announced GPU buffers at places [0, 0] among 0 others"),
        (announced([(-1, 5)]), "it announced GPU buffers at places [-1] among 0 others"),
        (announced([(0, 5), (3, 5)], others=1), "it announced GPU buffers at places [0, 3] among 1 others"),
        (announced([(n, 5) for n in range(1, 31)]), f"at places {list(range(1, 21))} among 0 others"),
        (announced([(0, 5), (1, 0)]), "it announced GPU buffers of 5 bytes, wanted 1 to 100"),
        (announced([(0, 100), (1, 1)]), "it announced GPU buffers of 101 bytes, wanted 1 to 100"),
    ],
)
def test_an_announcement_that_cannot_be_is_a_sentence_with_its_numbers(message, sentence):
    with pytest.raises(ValueError, match="GPU buffers") as caught:
        devices.manifest_of(message, max_bytes=100)
    assert sentence in str(caught.value)


def test_the_least_and_the_most_that_may_be_announced():
    for places, others in (([(0, 1)], 0), ([(0, 99), (1, 1)], 0), ([(0, 5), (2, 5)], 1)):
        found = devices.manifest_of(announced(places, others=others), max_bytes=100)
        assert found == BuffersBeside(7, tuple(places))


# --- CUDA IPC --------------------------------------------------------------------------------------------------------
GOOD: list[Any] = [b"m" * 1024, 1000, 0, b"c" * 1024, 0, b"e" * 1024, True, 100]


@pytest.mark.parametrize(
    ("change", "is_good"),
    [
        ({}, True), ({0: b"m" * 1025}, False), ({3: b"c" * 1025}, False), ({5: b"e" * 1025}, False),
        ({7: 101}, False), ({1: 999}, False), ({7: 0, 1: 900}, True), ({2: 5}, True), ({2: -1}, False),
        ({4: 5}, True), ({4: -1}, False), ({7: -1}, False), ({6: False}, True),
    ],
)  # fmt: skip
def test_the_bounds_of_a_handle(change, is_good):
    fields = [change.get(at, value) for at, value in enumerate(GOOD)]
    if is_good:
        assert cuda.check(fields, 900) == Handle(*fields)
        return
    with pytest.raises(ValueError, match=r"^it sent a CUDA IPC handle of -?\d+ bytes for 900 at -?\d+$"):
        cuda.check(fields, 900)


class Link:
    def __init__(self) -> None:
        self.notes, self.why, self.rooms = list[Any](), list[str](), list[int]()
        self.beside = Beside(
            LinkSettings(),
            say=lambda note: self.notes.append(msgspec.msgpack.decode(note)),
            on_room=lambda: self.rooms.append(1), on_arrived=lambda: None, lost=self.why.append,
        )  # fmt: skip


@pytest.fixture
async def end(monkeypatch):
    ipc_fake.install(monkeypatch)
    link = Link()
    return link, IpcLane(GPU, link.beside)


def note(word: str, number: int, *extra: Any) -> bytes:
    return msgspec.msgpack.encode((word, number, list(extra)))


async def test_a_sender_shares_what_it_is_asked_for_and_lets_go_when_it_is_copied(end):
    link, lane = end
    lane.offer([torch.arange(100, dtype=torch.uint8)[10:]])
    lane.hear(note("done", 0))
    assert link.why == ["it sent a note 'done' on GPU buffers 0 out of turn"], "it has not even been shared"
    lane.hear(note("go", 0))
    assert link.notes == [["handles", 0, [b"handle-0", 100, 0, b"counter", 1, b"event", True, 10]]]
    lane.hear(note("done", 0))
    assert (lane.holds, link.rooms, len(link.why)) == (0, [1], 1)
    lane.hear(note("done", 0))
    assert len(link.why) == 2


async def test_several_buffers_are_shared_as_one_allocation(end):
    link, lane = end
    lane.offer([torch.full((300,), 1, dtype=torch.uint8), torch.full((5,), 2, dtype=torch.uint8)])
    lane.hear(note("go", 0))
    ((word, number, handle),) = link.notes
    assert (word, number, handle[1], handle[7]) == ("handles", 0, 517, 0)


async def test_a_receiver_takes_the_handle_that_it_asked_for_once(end, monkeypatch):
    link, lane = end
    threads: list[Any] = []

    def thread(**named: Any) -> Any:
        return types.SimpleNamespace(start=lambda: threads.append(named))

    monkeypatch.setattr(threading, "Thread", thread)
    handle = [b"m", 2000, 0, b"c", 0, b"e", True, 0]
    lane.hear(note("handles", 3, *handle))
    got: list[Any] = []
    lane.receive(3, [300, 5], got.append)
    assert link.notes == [["go", 3, []]]
    lane.hear(note("handles", 4, *handle))
    lane.hear(note("done", 3))
    assert len(link.why) == 3
    lane.hear(note("handles", 3, *handle))
    lane.hear(note("handles", 3, *handle))
    assert (len(link.why), len(threads)) == (4, 1)
    assert (threads[0]["name"], threads[0]["daemon"]) == ("cuda-ipc", True)
    number, _, whole, buffers, arrived = threads[0]["args"]
    assert (number, whole.nbytes, [buffer.nbytes for buffer in buffers]) == (3, 517, [300, 5])
    lane._copied(number, buffers, arrived, "")
    assert (link.notes[1:], got) == ([["done", 3, []]], [buffers])
    lane._copied(number, buffers, arrived, "it cannot")
    assert (link.why[4:], len(got)) == (["it cannot"], 1)
    lane.kill()
    lane._copied(number, buffers, arrived, "")
    assert (len(link.notes), len(got), len(link.why)) == (2, 1, 5)


async def test_a_handle_for_less_than_was_asked_for_breaks_the_link_and_is_not_opened(end, monkeypatch):
    link, lane = end
    monkeypatch.setattr(threading, "Thread", lambda **named: pytest.fail("it was opened"))
    lane.receive(0, [300], lambda buffers: None)
    lane.hear(note("handles", 0, b"m", 299, 0, b"c", 0, b"e", True, 0))
    assert link.why == ["it sent a CUDA IPC handle of 299 bytes for 300 at 0"]


async def test_an_ended_lane_lends_nothing_and_wants_nothing(end):
    link, lane = end
    lane.offer([torch.zeros(300, dtype=torch.uint8)])
    lane.hear(note("go", 0))
    lane.receive(0, [300], lambda buffers: None)
    lane.kill()
    assert lane.holds == 0
    lane.hear(note("handles", 0, *GOOD))
    lane.hear(note("done", 0))
    assert [why[:20] for why in link.why] == ["it sent a note 'hand", "it sent a note 'done"]


async def test_where_no_store_can_be_opened_both_ends_go_by_the_host(monkeypatch):
    async def no_store(host):
        return None

    theirs = Gpu(uuid="gpu-1", index=0, nccl="2.27")
    monkeypatch.setattr(devices, "here", lambda: Gpu(uuid="gpu-0", index=0, nccl="2.27"))
    monkeypatch.setattr(nccl, "open_store", no_store)
    hello = {"gpu": {"uuid": theirs.uuid, "index": theirs.index, "nccl": theirs.nccl}}
    said, _ = await meet_gpus.offer(hello, LinkSettings(), host="127.0.0.1", same_pod=False, may_be_plain=True)
    assert said == {"way": "host"}
