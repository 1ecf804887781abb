"""Both ends of an uplink without gRPC: what a dialling end says and hears in which order, and whom a host knows."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from time import monotonic
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.uplink import dialling, outbox
from rlinf_worker.uplink.dialling import Dialect, DriverAbsent, RefusedByDriver, Uplink
from rlinf_worker.uplink.outbox import Kept, Lasts, Outbox, Told, in_frames
from rlinf_worker.uplink.serving import Guest, Guests
from tests.fakes.uplink import QUICK, Part, word

WELCOME = pb.DriverMessage(welcome=pb.Welcome(driver_attempt=4, protocol=names.PROTOCOL))
BEGIN = pb.DriverMessage(begin=pb.Begin())


class Call:
    """A stream in memory. `said`: frames that were written; `says`: frames of the driver, None: it ends the stream."""

    def __init__(self, *says: Any) -> None:
        self.said, self.cancels, self.is_done = list[Any](), 0, False
        self.half_closed = asyncio.Event()
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        for frame in says:
            self.says.put_nowait(frame)
        self.write_error: Exception | None = None

    async def write(self, frame: Any) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.said.append(frame)

    async def read(self) -> Any:
        found = await self.says.get()
        if isinstance(found, Exception):
            raise found
        return grpc.aio.EOF if found is None else found

    async def done_writing(self) -> None:
        self.half_closed.set()
        self.says.put_nowait(None)

    def done(self) -> bool:
        return self.is_done

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "the driver restarts"

    def cancel(self) -> None:
        self.cancels += 1


class Channel:
    def __init__(self, call: Call) -> None:
        self.call, self.closes = call, 0

    async def close(self) -> None:
        self.closes += 1


class Ends:
    """An uplink whose streams are these calls, one after the other; the last one's end is the end of the test."""

    def __init__(self, *calls: Call, frame_messages: int | None = None, **more: Any) -> None:
        self.calls, self.channels, self.part = list(calls), list[Channel](), Part()
        wire: Dialect[Any, Any] = Dialect(
            call=lambda channel: cast(Any, channel).call,
            pack=lambda batch: batch,
            unpack=lambda frame: frame,
            frame_messages=frame_messages,
        )
        given: dict[str, Any] = {"settings": QUICK, "kept": 100, "clock": monotonic, "jitter": lambda: 0.0} | more
        self.uplink: Uplink[Any, Any] = Uplink(
            self.part, wire=wire, dial=self.dial, who="worker env/0", address="driver:7", write_timeout_s=5.0, **given
        )

    async def dial(self) -> Any:
        if not self.calls:
            raise OSError("nobody is there")
        self.channels.append(Channel(self.calls.pop(0)))
        return self.channels[-1]

    def steps(self, call: Call) -> list[list[int]]:
        """Numbers of the words in each frame behind the hello."""
        return [[message.report.step for message in frame] for frame in call.said[1:]]


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_stream_is_a_hello_a_welcome_what_waited_and_what_is_told(caplog):
    caplog.set_level(logging.INFO, logger=dialling.__name__)
    call = Call([WELCOME, BEGIN])
    ends = Ends(call)
    uplink = ends.uplink
    uplink.tell(word(0))
    uplink.tell(word(1), lasts=Lasts.JOB)
    uplink.repeat("k", word(2))
    assert (uplink.is_connected, uplink.streams, uplink.frames, uplink.driverless_s) == (False, 0, 0, 0.0)
    running = asyncio.create_task(uplink.run())
    await until(lambda: ends.steps(call) == [[2, 1]])
    assert [message.WhichOneof("kind") for message in call.said[0]] == ["hello"]
    uplink.tell(word(3))
    await until(lambda: ends.steps(call) == [[2, 1], [3]])
    assert (ends.part.welcomes, ends.part.heard) == ([(4, False)], ["begin"])
    assert (uplink.is_connected, uplink.streams, uplink.frames) == (True, 1, 2)
    assert uplink.highest_driver_attempt == 4
    assert await uplink.close(timeout_s=5.0) == 0
    await asyncio.wait_for(running, 5)
    assert call.half_closed.is_set()
    assert (call.cancels, [channel.closes for channel in ends.channels], uplink.is_connected) == (1, [1], False)
    (record,) = [r for r in caplog.records if r.message == "connected to the driver"]
    assert (record.__dict__["driver_attempt"], record.__dict__["at"]) == (4, "driver:7")


async def test_a_service_that_takes_one_message_a_frame_gets_one_and_all_before_the_close():
    call = Call([WELCOME])
    ends = Ends(call, frame_messages=1)
    running = asyncio.create_task(ends.uplink.run())
    await until(lambda: ends.uplink.is_connected)
    for number in range(4):
        ends.uplink.tell(word(number))
    closing = asyncio.create_task(ends.uplink.close(timeout_s=5.0))
    assert await closing == 0
    await asyncio.wait_for(running, 5)
    assert ends.steps(call) == [[0], [1], [2], [3]]


async def test_a_stream_that_is_cut_is_made_again_and_says_why(caplog):
    first, second = Call([WELCOME]), Call([WELCOME])
    ends = Ends(first, second)
    ends.uplink.cut("before there is one: nothing")
    running = asyncio.create_task(ends.uplink.run())
    await until(lambda: ends.uplink.is_connected)
    ends.uplink.cut("the test says so")
    ends.uplink.cut("too late to say why")
    await until(lambda: ends.uplink.streams == 2)
    said = [(r.message, r.__dict__.get("why"), r.__dict__.get("error")) for r in caplog.records]
    assert ("the stream to the driver is given up", "the test says so", None) in said
    assert ("driver lost; dialling again", None, "the test says so") in said
    assert (first.cancels, ends.channels[0].closes, ends.part.hellos) == (1, 1, 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


LAST = pb.DriverMessage(refusal=pb.Refusal(message="go", exit_code=names.EXIT_OK))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ([None], "driver driver:7 hung up: got no status, wanted a welcome"),
        ([[BEGIN]], "the driver speaks out of turn: got begin, wanted one welcome, first"),
        ([[WELCOME, WELCOME]], "the driver speaks out of turn: got welcome, wanted one welcome, first"),
        (
            [[pb.DriverMessage(refusal=pb.Refusal(message="no plan", exit_code=names.EXIT_RETRYABLE))]],
            "the driver says to come again: no plan",
        ),
        (
            [[pb.DriverMessage(welcome=pb.Welcome(driver_attempt=2, protocol=names.PROTOCOL))]],
            "a driver that has been replaced welcomes us: got driver attempt 2, wanted 3 or more; "
            "it must exit, as a newer one drives this job",
        ),
        ([[WELCOME], None], "the driver ended the stream"),
    ],
)
async def test_why_a_stream_ended_that_is_made_again(says, why, caplog):
    caplog.set_level(logging.DEBUG, logger=dialling.__name__)
    ends = Ends(Call(*says), Call([LAST]))
    ends.uplink.highest_driver_attempt = 3
    with pytest.raises(RefusedByDriver) as caught:
        await asyncio.wait_for(ends.uplink.run(), 5)
    assert (caught.value.said, caught.value.exit_code) == ("go", names.EXIT_OK)
    lost = [r.__dict__["error"] for r in caplog.records if r.message.startswith(("driver lost", "driver not reached"))]
    assert lost == [why]


async def test_a_call_that_has_ended_when_it_is_written_says_by_which_status(caplog):
    caplog.set_level(logging.DEBUG, logger=dialling.__name__)
    gone = Call()
    gone.write_error, gone.is_done = asyncio.InvalidStateError("RPC already finished."), True
    with pytest.raises(RefusedByDriver):
        await asyncio.wait_for(Ends(gone, Call([LAST])).uplink.run(), 5)
    (record,) = [r for r in caplog.records if r.message == "driver not reached"]
    assert record.__dict__["error"] == ("the stream of driver driver:7 has ended: got UNAVAILABLE: the driver restarts")


async def test_a_refusal_in_the_middle_of_a_stream_is_the_end_whatever_its_code():
    refusal = pb.DriverMessage(refusal=pb.Refusal(message="go", exit_code=names.EXIT_RETRYABLE))
    with pytest.raises(RefusedByDriver, match="the driver refuses worker env/0: go"):
        await asyncio.wait_for(Ends(Call([WELCOME, refusal])).uplink.run(), 5)


async def test_without_a_driver_it_ends_with_what_the_last_try_met():
    ends = Ends(settings=dataclasses.replace(QUICK, driver_absence_timeout_s=0.0))
    with pytest.raises(DriverAbsent) as caught:
        await asyncio.wait_for(ends.uplink.run(), 5)
    assert str(caught.value) == (
        "no driver for 0 s at driver:7: got nobody is there, wanted a driver that welcomes worker env/0; "
        "see why the driver pod of the job does not run"
    )


async def test_a_new_driver_is_one_of_a_higher_attempt_and_not_the_very_first():
    def welcome(attempt: int) -> Call:
        return Call([pb.DriverMessage(welcome=pb.Welcome(driver_attempt=attempt, protocol=names.PROTOCOL))], None)

    ends = Ends(welcome(1), welcome(1), welcome(2), Call([LAST]))
    with pytest.raises(RefusedByDriver):
        await asyncio.wait_for(ends.uplink.run(), 5)
    assert ends.part.welcomes == [(1, False), (1, False), (2, True)]


# --- what waits -------------------------------------------------------------------------------------------------------
class Weighs:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        return self.nbytes


def test_a_frame_ends_with_the_message_that_brings_it_to_its_weight(monkeypatch):
    monkeypatch.setattr(outbox, "FRAME_BYTES", 100)
    monkeypatch.setattr(outbox, "UNWEIGHED", 2)

    def weights(*sizes: int) -> list[list[int]]:
        return [[one.nbytes for one in frame] for frame in in_frames([Weighs(size) for size in sizes])]

    assert weights(500, 500) == [[500, 500]], "so few are not weighed"
    assert weights(99, 1, 99, 2, 3) == [[99, 1], [99, 2], [3]]
    assert weights(50, 49, 500, 1) == [[50, 49, 500], [1]]
    assert weights(1, 1, 100) == [[1, 1, 100]]
    assert weights() == []


async def test_an_outbox_is_full_with_one_more_than_its_bound():
    box: Outbox[int] = Outbox(limit=2)
    for number in range(2):
        box.put(number)
    assert (box.closed, box.waiting, box.deaf) == (None, 2, False)
    box.put(2)
    assert (box.closed, box.waiting) == ("the other end left 2 messages unread", 3)
    assert box.take(3) == [0, 1, 2]


async def test_who_waits_for_an_outbox_is_woken_by_its_close():
    box: Outbox[int] = Outbox()
    draining, filled = asyncio.create_task(box.drain()), asyncio.create_task(Outbox.filled(box))
    await asyncio.sleep(0)
    box.close("over")
    assert await asyncio.wait_for(draining, 5) == []
    await asyncio.wait_for(filled, 5)


def test_what_is_kept_is_as_many_as_the_bound():
    kept: Kept[int] = Kept(limit=2)
    kept.add(Told(number, Lasts.JOB) for number in range(2))
    kept.repeat("a", 10)
    kept.repeat("b", 11)
    kept.repeat("a", 12)
    assert kept.dropped == 0
    assert kept.welcomed([], is_same_driver=True) == [
        Told(11, is_repeated=True), Told(12, is_repeated=True), Told(0, Lasts.JOB), Told(1, Lasts.JOB),
    ]  # fmt: skip


# --- whom a host knows ------------------------------------------------------------------------------------------------
def test_a_guest_is_told_things_until_it_leaves_or_is_sent_away():
    guests, first, second = Guests[str](), Outbox[Any](), Outbox[Any]()
    guests.tell("a", 0)
    guests.close("a", "of nobody")
    guests.dismiss("a")
    guests.enter("a", first, 1)
    guests.tell("a", 1)
    assert guests == {"a": Guest(first, 1)}
    guests.enter("a", second, 2)
    assert (first.closed, guests) == ("a newer connection of this peer came", {"a": Guest(second, 2)})
    assert not guests.left("a", first)
    guests.tell("a", 2)
    assert (first.take(), second.take()) == ([1], [2])
    assert (guests.left("b", second), guests.left("a", second), guests.left("a", second)) == (False, True, False)
    guests.enter("a", second, 3)
    guests.close("a", "it is replaced")
    assert (second.closed, guests) == ("it is replaced", {})
    third = Outbox[Any]()
    guests.enter("c", third, 1)
    guests.dismiss("c")
    guests.tell("c", 3)
    assert (third.deaf, third.closed, third.waiting, guests) == (True, None, 0, {})
