"""Bytes of one connection and its frames, without a connection: what is taken when, and what ends it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from rlinf_worker.links import frame, wire
from rlinf_worker.links.hello import Refusal
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import KIB, LinkSettings
from rlinf_worker.links.wire import Wire, tune


class Pipe(asyncio.Transport):
    """A transport that notes what it was told."""

    def __init__(self, **about: Any) -> None:
        self.about: dict[str, Any] = {"socket": Options(), "sockname": ("10.0.0.1", 7)} | about
        self.reading, self.closes, self.limits = True, 0, list[Any]()
        self.written = b""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.about.get(name)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits.append((high, low))

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closes > 0

    def close(self) -> None:
        self.closes += 1

    def write(self, data: Any) -> None:
        self.written += bytes(data)


class Options:
    def __init__(self) -> None:
        self.found: dict[tuple[int, int], int] = {}

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.found[level, option] = value


class Brings:
    """A lane that brings what it is asked for when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def receive(self, sequence: int, into: memoryview, arrived: Any) -> None:
        self.asked.append((sequence, into, arrived))


class Calls:
    def __init__(self, wire: Wire) -> None:
        self.arrivals = self.writables = 0
        self.notes, self.lost = list[bytes](), list[str]()
        wire.on_arrived, wire.on_writable = self.arrived, self.writable
        wire.on_note, wire.on_lost = self.notes.append, self.lost.append

    def arrived(self) -> None:
        self.arrivals += 1

    def writable(self) -> None:
        self.writables += 1


def give(wire: Wire, raw: bytes) -> None:
    """As the transport: as much at a time as the wire has room for."""
    while raw:
        room = wire.get_buffer(-1)
        count = min(len(raw), room.nbytes)
        room[:count] = raw[:count]
        raw = raw[count:]
        wire.buffer_updated(count)


def raw(head: bytes, size: int = 0, *, sequence: int = 0, kind: int = frame.DATA) -> bytes:
    """A frame of `size` bytes in all, if it is more than it needs."""
    bare = len(frame.of_message(Message(head), 0).prefix)
    return bytes(frame.of_message(Message(head, body=b"." * max(0, size - bare)), sequence, kind).prefix)


def announcement(nbytes: int, sequence: int = 0) -> bytes:
    out = frame.of_message(Message(b"big", body=b"", buffers=[memoryview(bytes(nbytes))]), sequence)
    return frame.announced(out)[0]


async def greeted(**settings: Any) -> tuple[Any, Pipe, Calls]:
    made, pipe = Wire(LinkSettings(**settings)), Pipe()
    made.connection_made(pipe)
    give(made, raw(b"hi", kind=frame.HELLO))
    assert bytes(await made.first_frame()) == b"hi"
    return made, pipe, Calls(made)


def heads(wire: Wire) -> list[bytes]:
    found = []
    while (taken := wire.take()) is not None:
        found.append(frame.to_message(taken.whole).head)
    return found


@pytest.mark.parametrize(("lost_after_s", "probes"), [(5.0, 4), (2.0, 1), (0.5, 1), (128.0, 127), (1000.0, 127)])
def test_an_idle_connection_is_probed_each_second_and_lost_in_time(lost_after_s, probes):
    options = Options()
    tune(options, lost_after_s)
    assert options.found == {
        (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): probes,
    }


@pytest.mark.parametrize(("context", "high"), [(None, 0), (object(), 64 * KIB)])
async def test_a_connection_is_tuned_and_told_of_when_it_is_there(context, high):
    told: list[Any] = []
    made, pipe = Wire(LinkSettings(), told.append), Pipe(sslcontext=context)
    made.connection_made(pipe)
    assert (told, pipe.limits, made.transport) == ([made], [(high, None)], pipe)
    assert pipe.about["socket"].found[socket.IPPROTO_TCP, socket.TCP_KEEPCNT] == 4
    assert made.here() == "10.0.0.1"
    made.close()
    made.close()
    assert pipe.closes == 1


async def test_frames_are_cut_out_of_whatever_pieces_they_come_in():
    made, _, calls = await greeted()
    sizes = (24, 25, 1000, 70_000, 65_536, 65_537, 30, 300_000)
    stream = b"".join(raw(b"%d" % size, size, sequence=n) for n, size in enumerate(sizes))
    for at in range(0, len(stream), 999):
        give(made, stream[at : at + 999])
    taken = []
    while (one := made.take()) is not None:
        taken.append(one)
    assert [one.sequence for one in taken] == list(range(8))
    assert [one.whole.nbytes for one in taken] == [26, 26, 1000, 70_000, 65_536, 65_537, 30, 300_000]
    assert (made.frame_bytes, made.take(), calls.lost) == (0, None, [])
    assert calls.arrivals >= 8


async def test_only_a_large_frame_gets_memory_of_its_own_and_no_more_is_offered_than_it_lacks():
    for size, room in ((65_536, wire.STAGING_BYTES - 100), (65_537, 65_437)):
        made, _, _ = await greeted()
        give(made, raw(b"x", size)[:100])
        assert made.get_buffer(-1).nbytes == room


async def test_the_staging_memory_is_used_from_its_beginning_again():
    made, _, _ = await greeted()
    half = wire.STAGING_BYTES // 2
    frames = b"".join(raw(b"x", 50_000, sequence=n) for n in range(4))
    give(made, frames[: half + 1])
    assert made.get_buffer(-1).nbytes == half - 1, "it lies in the first half still"
    give(made, frames[half + 1 : 150_010])
    assert made.get_buffer(-1).nbytes == wire.STAGING_BYTES - 10
    give(made, frames[150_010:])
    assert made.get_buffer(-1).nbytes == wire.STAGING_BYTES
    assert heads(made) == [b"x"] * 4


async def test_above_the_inbox_the_connection_is_not_read_until_half_of_it_is_taken():
    made, pipe, _ = await greeted(inbox_bytes=1000)
    give(made, raw(b"a", 500) + raw(b"b", 500))
    assert (pipe.reading, made.paused) == (True, False)
    give(made, raw(b"c", 200) + raw(b"d", 300))
    assert (pipe.reading, made.paused, made.frame_bytes) == (False, True, 1500)
    made.take()
    assert not pipe.reading
    made.take()
    assert (pipe.reading, made.paused, made.frame_bytes) == (True, False, 500)


async def test_a_connection_that_closes_is_not_read_again():
    made, pipe, _ = await greeted(inbox_bytes=10)
    give(made, raw(b"a"))
    pipe.closes = 1
    made.take()
    assert (pipe.reading, made.paused) == (False, False)


@pytest.mark.parametrize(("size", "taken"), [(23, False), (24, True), (1000, True), (1001, False)])
async def test_a_frame_is_as_long_as_its_fixed_part_at_least_and_the_bound_at_most(size, taken):
    made, _, calls = await greeted(max_message_bytes=1000)
    give(made, frame.FIXED.pack(size, 0, max(0, size - 24), 0, frame.DATA, 0) + bytes(max(0, size - 24)))
    if taken:
        assert (len(made.frames), made.lost) == (1, None)
    else:
        why = f"it sent no valid frame: a frame of {size} bytes, wanted at most 1000"
        assert (made.lost, calls.lost, len(made.frames)) == (why, [why], 0)


async def test_a_note_overtakes_and_is_no_frame():
    made, _, calls = await greeted()
    give(made, raw(b"a") + raw(b"for the lane", kind=frame.NOTE))
    assert (calls.notes, heads(made), made.frame_bytes) == ([b"for the lane"], [b"a"], 0)


# --- the lane ---


async def test_what_is_announced_keeps_its_place_and_is_ready_when_the_lane_has_brought_it():
    made, _, calls = await greeted()
    made.lane = lane = Brings()
    give(made, announcement(5000, 3) + raw(b"behind", sequence=4))
    ((sequence, area, arrived),) = lane.asked
    assert (sequence, area.nbytes, made.take()) == (3, 5000, None)
    assert made.frame_bytes == 5000 + len(announcement(5000)) + len(raw(b"behind"))
    before = calls.arrivals
    arrived()
    assert calls.arrivals == before + 1
    taken = made.take()
    assert (taken.kind, taken.sequence, taken.area) == (frame.BULK, 3, area)
    assert (heads(made), made.frame_bytes) == ([b"behind"], 0)


async def test_the_first_in_the_queue_is_always_brought_and_others_where_there_is_room():
    made, _, calls = await greeted(inbox_bytes=10_000)
    give(made, b"".join(announcement(4_900, n) for n in range(3)))
    lane = made.lane = Brings()
    made.fill()
    assert [job[0] for job in lane.asked] == [0, 1]
    before = calls.arrivals
    lane.asked[1][2]()
    assert calls.arrivals == before, "the second is not the next: nobody is woken for it"
    lane.asked[0][2]()
    assert calls.arrivals == before + 1
    made.take()
    assert [job[0] for job in lane.asked] == [0, 1, 2]
    tiny, _, _ = await greeted(inbox_bytes=10)
    tiny.lane = lane = Brings()
    give(tiny, announcement(4_900))
    assert [job[0] for job in lane.asked] == [0]


async def test_an_announcement_is_bounded_and_needs_a_lane_that_may_come():
    for nbytes, may_come, why in (
        (1000, True, None),
        (1001, True, "it sent no valid frame: a frame of 1001 bytes, wanted at most 1000"),
        (1000, False, "it sent no valid frame: it announced bulk data on a link without a lane"),
    ):
        made, _, _ = await greeted(max_message_bytes=1000)
        made.lane_may_come = may_come
        give(made, announcement(nbytes))
        assert made.lost == why


# --- the end ---


async def test_a_goodbye_is_the_end_and_counts_when_everything_before_it_is_here():
    made, _, calls = await greeted()
    give(made, raw(b"", kind=frame.GOODBYE))
    assert (made.closed_by_peer, made.lost, calls.lost) == (True, "the peer closed it", ["the peer closed it"])

    made, _, calls = await greeted()
    made.lane = lane = Brings()
    give(made, announcement(5000) + raw(b"", kind=frame.GOODBYE))
    assert (made.closed_by_peer, calls.lost) == (False, [])
    made.eof_received()
    assert calls.lost == [], "it ended in good order, and its last buffers are on the lane"
    lane.asked[0][2]()
    assert (made.closed_by_peer, calls.lost) == (True, ["the peer closed it"])

    made, _, calls = await greeted()
    give(made, announcement(5000) + raw(b"", kind=frame.GOODBYE))
    assert not made.closed_by_peer, "announced, and the lane is not even there"
    made.lane_lost("its bulk connection failed")
    assert (made.closed_by_peer, made.lost) == (False, "its bulk connection failed")


async def test_the_first_reason_stays_and_each_is_told():
    made, _, calls = await greeted()
    assert made.eof_received() is False
    assert not made.ended.done()
    made.connection_lost(ConnectionResetError("reset"))
    gone = "its process is gone (the connection ended without a goodbye)"
    assert (made.lost, calls.lost) == (gone, [gone, "the connection is gone: reset"])
    assert made.ended.done()
    made.connection_lost(None)
    assert calls.lost[2:] == ["the connection is gone"]
    with pytest.raises(ConnectionResetError, match="its process is gone"):
        made.here()


async def test_a_connection_without_an_address_is_gone():
    made = Wire(LinkSettings())
    made.connection_made(Pipe(sockname=None))
    with pytest.raises(ConnectionResetError, match=r"^the connection is gone$"):
        made.here()


async def test_who_writes_is_told_when_there_is_room_again():
    made, _, calls = await greeted()
    made.pause_writing()
    assert (made.writable, calls.writables) == (False, 0)
    made.resume_writing()
    assert (made.writable, calls.writables) == (True, 1)


# --- the hello ---


async def test_a_hello_is_waited_for_and_is_small():
    made = Wire(LinkSettings())
    made.connection_made(Pipe())
    waiting = asyncio.create_task(made.first_frame())
    await asyncio.sleep(0)
    hello = raw(b"hi", 4096, kind=frame.HELLO)
    give(made, hello[:4000])
    await asyncio.sleep(0)
    assert not waiting.done()
    give(made, hello[4000:])
    assert bytes(await asyncio.wait_for(waiting, 5)) == b"hi"
    assert made.frame_bytes == 0

    made = Wire(LinkSettings())
    made.connection_made(Pipe())
    waiting = asyncio.create_task(made.first_frame())
    await asyncio.sleep(0)
    give(made, raw(b"hi", 4097, kind=frame.HELLO)[:24])
    with pytest.raises(ConnectionError, match="a frame of 4097 bytes, wanted at most 4096"):
        await asyncio.wait_for(waiting, 5)


async def test_anything_else_before_a_hello_is_refused():
    made = Wire(LinkSettings())
    made.connection_made(Pipe())
    give(made, raw(b"hi"))
    with pytest.raises(Refusal, match=r"^got a frame of kind 1 before any hello$") as caught:
        await made.first_frame()
    assert caught.value.code == "garbage"


async def test_what_is_wrong_right_behind_a_hello_ends_the_connection_after_it():
    made, pipe = Wire(LinkSettings(max_message_bytes=1000)), Pipe()
    made.connection_made(pipe)
    give(made, raw(b"hi", kind=frame.HELLO) + raw(b"x", 1001))
    assert not pipe.reading
    assert bytes(await made.first_frame()) == b"hi"
    assert made.lost == "it sent no valid frame: a frame of 1001 bytes, wanted at most 1000"


async def test_what_an_end_says_first_is_a_frame_of_its_own_kind():
    made, pipe = Wire(LinkSettings()), Pipe()
    made.connection_made(pipe)
    made.say(b"hello")
    assert pipe.written == frame.FIXED.pack(29, 5, 0, 0, frame.HELLO, 0) + b"hello"
