"""The lane of GPU buffers beside a link, without a link: what is lent, what is asked for, what comes out of turn."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from rlinf_worker.links import beside, devices, payload_arrays
from rlinf_worker.links.beside import Beside, DeviceLane
from rlinf_worker.links.devices import BuffersBeside, Gpu
from rlinf_worker.links.frame import to_message
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings

GPU = Gpu(uuid="gpu-0", index=0)


class Heard:
    """Stands for the link: what it was told."""

    def __init__(self, **settings: Any) -> None:
        self.notes, self.why = list[Any](), list[str]()
        self.rooms = self.arrivals = 0
        self.beside = Beside(
            LinkSettings(bulk_from_bytes=100, **settings),
            say=lambda note: self.notes.append(msgspec.msgpack.decode(note)),
            on_room=self.room, on_arrived=self.arrived, lost=self.why.append,
        )  # fmt: skip

    def room(self) -> None:
        self.rooms += 1

    def arrived(self) -> None:
        self.arrivals += 1


class ScriptedLane(DeviceLane):
    def __init__(self, beside: Beside, gpu: Gpu = GPU) -> None:
        super().__init__(gpu, beside)
        self.given, self.others, self.wanted = list[Any](), list[Any](), list[Any]()
        self.kills, self.knows, self.full = 0, True, ""

    def give(self, number: int, tensors: list[Any]) -> None:
        self.given.append((number, tensors))

    def heard(self, word: str, number: int, extra: list[Any]) -> bool:
        self.others.append((word, number, extra))
        return self.knows

    def receive(self, number: int, sizes: list[int], arrived: Any) -> None:
        if self.full:
            raise RuntimeError(self.full)
        self.wanted.append((number, sizes, arrived))

    def kill(self) -> None:
        self.kills += 1


def note(word: str, number: int, extra: list[Any] | None = None) -> bytes:
    return msgspec.msgpack.encode((word, number, extra or []))


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    """Tensors of 50 bytes and more pass for ones on the GPU of that index."""
    monkeypatch.setattr(payload_arrays, "device_kind", lambda tensor: "cuda" if tensor.nbytes >= 50 else "cpu")
    monkeypatch.setattr(devices, "device_index", lambda tensor: 1 if tensor[0] == 9 else 0)


@pytest.fixture
def link():
    return Heard()


@pytest.fixture
def lane(link):
    made = ScriptedLane(link.beside)
    link.beside.expect()
    link.beside.have(made)
    return made


def bytes_on_gpu(nbytes: int, fill: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


# --- sending ---


def test_what_is_offered_is_numbered_lent_and_asked_for_once_in_its_order(link, lane):
    first, second = [bytes_on_gpu(60)], [bytes_on_gpu(70)]
    lane.offer(first)
    lane.offer(second)
    assert (lane.next, lane.holds) == (2, 2)
    lane.hear(note("go", 0))
    assert [lane.is_asked_for(number) for number in (0, 1, 2)] == [True, False, False]
    lane.hear(memoryview(note("go", 1)))
    assert [(number, tensors[0].nbytes) for number, tensors in lane.given] == [(0, 60), (1, 70)]
    lane.let_go(1)
    lane.let_go(1)
    lane.let_go(7)
    assert [lane.is_asked_for(number) for number in (0, 1, 2)] == [True, False, False]
    assert (lane.holds, link.rooms, link.why, lane.others) == (1, 1, [], [])


@pytest.mark.parametrize(
    ("held", "asked", "number"), [(2, [], 1), (2, [0], 0), (2, [0], 2), (2, [0, 1], 2), (2, [0, 1], -1), (0, [], -1)]
)
def test_a_message_is_asked_for_in_its_turn_or_the_link_breaks(link, lane, held, asked, number):
    for _ in range(held):
        lane.offer([bytes_on_gpu(60)])
    for one in asked:
        lane.hear(note("go", one))
    assert link.why == []
    lane.hear(note("go", number))
    assert link.why == [f"it sent a note 'go' on GPU buffers {number} out of turn"]
    assert [given for given, _ in lane.given] == asked


def test_other_notes_are_the_lanes_and_break_the_link_where_it_does_not_want_them_now(link, lane):
    lane.hear(note("done", 3, [1, b"x"]))
    assert (lane.others, link.why) == ([("done", 3, [1, b"x"])], [])
    lane.knows = False
    lane.hear(note("w" * 40, 4))
    assert link.why == [f"it sent a note {'w' * 20!r} on GPU buffers 4 out of turn"]
    lane.hear(b"\xc1")
    assert link.why[1].startswith("it sent a note on GPU buffers that cannot be read: ")
    assert len(lane.others) == 2


def test_what_a_lane_says_is_a_word_a_number_and_what_belongs_to_it(link, lane):
    lane.say("done", 3)
    lane.say("handles", 4, [b"m", 1])
    assert link.notes == [["done", 3, []], ["handles", 4, [b"m", 1]]]


def test_gpu_memory_is_lent_up_to_the_bounds_in_bytes_and_in_messages_and_one_message_always(lane, monkeypatch):
    monkeypatch.setattr(beside, "HELD_BYTES", 200)
    monkeypatch.setattr(beside, "HELD_MESSAGES", 3)
    assert lane.has_room(10_000)
    lane.offer([bytes_on_gpu(60), bytes_on_gpu(60)])
    assert (lane.has_room(80), lane.has_room(81)) == (True, False)
    lane.offer([bytes_on_gpu(60)])
    assert (lane.has_room(20), lane.has_room(21)) == (True, False)
    lane.let_go(0)
    assert (lane.has_room(140), lane.has_room(141)) == (True, False)
    lane.offer([bytes_on_gpu(1)])
    lane.offer([bytes_on_gpu(1)])
    assert not lane.has_room(0), "three messages are held"
    for number in (1, 2, 3):
        lane.let_go(number)
    assert (lane.holds, lane.has_room(10_000)) == (0, True)


def test_large_buffers_of_this_gpu_go_beside_and_the_frame_says_which_they_are(link, lane):
    value = [bytes_on_gpu(5_000), b"y" * 5_000, bytes_on_gpu(60)]
    lane.next = 4
    out = link.beside.framed(Message(b"h", value), 65_537)
    assert [tensor.nbytes for tensor in out.tensors] == [5_000, 60]
    assert {tensor.dtype for tensor in out.tensors} == {torch.uint8}
    message = to_message(memoryview(b"".join(bytes(piece) for piece in out.pieces())))
    assert devices.manifest_of(message, max_bytes=5_060) == BuffersBeside(4, ((0, 5_000), (2, 60)))
    assert [part.nbytes for part in message.encoded()[1]] == [5_000]
    assert out.prefix[22:24] == b"\1\0", "the sequence is modulo 65,536"
    assert lane.holds == 0, "nothing is lent before the frame is on its way"
    assert link.beside.framed(Message(b"h", 1), 65_537).prefix[22:24] == b"\1\0"


@pytest.mark.parametrize(
    ("value", "goes_beside"),
    [
        ([bytes_on_gpu(50), bytes_on_gpu(50)], True),
        ([bytes_on_gpu(50), bytes_on_gpu(49)], False),
        ([bytes_on_gpu(99)], False),
        ([bytes_on_gpu(100)], True),
        ([bytes_on_gpu(100), bytes_on_gpu(100, fill=9)], False),
        (b"x" * 6_000, False),
    ],
    ids=["together enough", "one is on the host", "too little", "just enough", "one is on another GPU", "no tensor"],
)
def test_which_messages_take_the_lane(link, lane, value, goes_beside):
    assert bool(link.beside.framed(Message(b"", value), 0).tensors) == goes_beside


def test_a_frame_fits_where_the_lane_has_room_for_all_of_its_tensors(link, lane, monkeypatch):
    monkeypatch.setattr(beside, "HELD_BYTES", 300)
    out = link.beside.framed(Message(b"", [bytes_on_gpu(60), bytes_on_gpu(61)]), 0)
    link.beside.offer([bytes_on_gpu(179)])
    assert link.beside.fits(out)
    link.beside.offer([bytes_on_gpu(1)])
    assert (lane.holds, link.beside.fits(out)) == (2, False)
    assert link.beside.fits(link.beside.framed(Message(b"", 1), 0)), "nothing of it goes by the lane"
    link.beside.lane = None
    assert link.beside.fits(out)
    link.beside.offer([bytes_on_gpu(1)])
    assert lane.holds == 2


async def test_before_a_goodbye_what_was_offered_is_waited_for(link, lane):
    lane.offer([bytes_on_gpu(60)])
    leaving = asyncio.create_task(link.beside.leave())
    await asyncio.sleep(0.005)
    assert not leaving.done()
    lane.let_go(0)
    await asyncio.wait_for(leaving, 5)
    assert link.why == []


async def test_a_peer_that_does_not_take_what_was_offered_costs_the_linger_and_the_link():
    link = Heard(linger_s=0.0)
    link.beside.have(lane := ScriptedLane(link.beside))
    lane.offer([bytes_on_gpu(60)])
    lane.offer([bytes_on_gpu(60)])
    await asyncio.wait_for(link.beside.leave(), 5)
    assert link.why == ["2 messages on a GPU were not taken within 0 s"]


async def test_nobody_is_waited_for_behind_the_end(link, lane):
    lane.offer([bytes_on_gpu(60)])
    link.beside.end()
    await asyncio.wait_for(link.beside.leave(), 1)
    assert (lane.kills, link.why) == (1, [])


# --- receiving ---


def announced(number: int = 0, places: tuple[tuple[int, int], ...] = ((0, 60),)) -> Message:
    body, parts = Message(b"h", [bytes_on_gpu(size) for _, size in places]).encoded()
    found = [(at, part) for at, part in enumerate(parts) if isinstance(part, payload_arrays.DeviceBuffer)]
    return devices.split(Message(b"h", body=body, buffers=parts), found, number)


def test_a_message_is_whole_when_its_buffers_are_here_and_nothing_overtakes_it(link, lane):
    waiting = [announced(5, ((0, 60), (1, 70))), Message(b"behind", 1)]
    pop = iter([*waiting, None, None])
    assert link.beside.next(lambda: next(pop)) is None
    assert link.beside.arriving
    ((number, sizes, arrived),) = lane.wanted
    assert (number, sizes) == (5, [60, 70])
    assert link.beside.next(lambda: pytest.fail("it is not its turn")) is None
    arrived([bytes_on_gpu(60, 3), bytes_on_gpu(70, 4)])
    assert link.arrivals == 1
    message = link.beside.next(lambda: pytest.fail("it is not its turn"))
    assert [int(tensor[0]) for tensor in message.value()] == [3, 4]
    assert (message.head, link.beside.arriving) == (b"h", False)
    assert link.beside.next(lambda: next(pop)).head == b"behind"
    assert link.beside.next(lambda: next(pop)) is None
    assert (len(lane.wanted), link.why) == (1, [])


def test_buffers_announced_while_the_lane_is_made_are_asked_for_once_it_is_there(link):
    link.beside.expect()
    assert (link.beside.expected, link.beside.coming) == (True, True)
    assert link.beside.next(announced) is None
    link.beside.have(lane := ScriptedLane(link.beside))
    assert [wanted[:2] for wanted in lane.wanted] == [(0, [60])]
    assert (link.beside.coming, link.why) == (False, [])


def test_buffers_announced_to_an_end_without_a_lane_break_the_link(link):
    link.beside.expect()
    assert link.beside.next(announced) is None
    link.beside.have(None)
    assert link.why == ["it announced GPU buffers, and this end has no lane for them"]


def test_a_gpu_without_room_for_what_was_announced_breaks_the_link(link, lane):
    lane.full = "CUDA out of memory" + "!" * 300
    assert link.beside.next(announced) is None
    full = lane.full[:200]
    assert link.why == [f"this end has no room for its 60 bytes on the GPU: {full}"]


def test_an_announcement_that_cannot_be_breaks_the_link(link, lane):
    assert link.beside.next(lambda: Message(b"h", body=devices.MARK + b"x")) is None
    assert [why[:60] for why in link.why] == ["it announced GPU buffers in a way that cannot be read: unpac"]
    assert not link.beside.arriving
    larger = Heard(max_message_bytes=59)
    assert larger.beside.next(announced) is None
    assert larger.why == ["it announced GPU buffers of 60 bytes, wanted 1 to 59"]


def test_behind_the_end_of_the_link_a_lane_that_comes_is_ended_and_what_arrives_is_nothing(link, lane):
    assert link.beside.next(announced) is None
    link.beside.end()
    lane.wanted[0][2]([bytes_on_gpu(60)])
    assert (link.arrivals, lane.kills) == (0, 1)
    late = ScriptedLane(link.beside)
    link.beside.have(late)
    assert (late.kills, link.beside.lane) == (1, lane)
    link.beside.have(None)
    assert (link.beside.lane, link.why) == (None, [])


def test_the_end_of_the_link_gives_up_a_lane_that_is_being_made(link):
    gone = []
    link.beside.expect(lambda: gone.append(1))
    link.beside.end()
    assert (gone, link.beside.coming, link.beside.lane) == ([1], False, None)
    link.beside.hear(note("go", 0))
    assert link.why == [], "a note to no lane is nobody's"
