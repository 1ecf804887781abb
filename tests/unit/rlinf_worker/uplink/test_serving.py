"""The end of an uplink that serves, against real callers with certificates over loopback."""

import asyncio
import contextlib
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import pytest

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api.errors import Stale
from rlinf_worker.uplink import dialling
from rlinf_worker.uplink.outbox import FRAME_BYTES, UNWEIGHED, Lasts, Outbox, in_frames
from rlinf_worker.uplink.serving import Frames, Guests, serve
from tests.fakes.certs import Authority
from tests.fakes.uplink import DIALECT, QUICK, Part, Relay, word

JOB = "5f2c"
FRAMES = Frames(
    method="Connect",
    unpack=lambda frame: frame.messages,
    pack=lambda batch: (pb.DriverBatch(messages=part) for part in in_frames(batch)),
)


def told(text):
    return pb.DriverMessage(fact=pb.Fact(name=str(text)))


class Site(channels_pb2_grpc.ChannelsServicer):
    """A server whose host is a script: it knows a peer by its worker."""

    def __init__(self, tls: rpc.TlsFolder) -> None:
        self._tls, self.hello_timeout_s, self.limit = tls, 20.0, 20_000
        self.raises: Exception | None = None
        self.parts: list[str] = []
        self.boxes: dict[str, Outbox[Any]] = {}
        self.guests = Guests[str]()
        self.said: list[tuple[str, int]] = []
        self.more: list[bool] = []
        self.left: list[tuple[str, Outbox[Any]]] = []
        self.address, self.channels = "", list[grpc.aio.Channel]()

    async def __aenter__(self):
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        channels_pb2_grpc.add_ChannelsServicer_to_server(self, self._server)
        self.port = rpc.bind(self._server, "127.0.0.1:0", tls=self._tls)
        await self._server.start()
        return self

    async def __aexit__(self, *_):
        for channel in self.channels:
            await channel.close()
        await self._server.stop(0)

    async def Connect(self, request_iterator, context):  # noqa: N802
        frames = serve(
            request_iterator,
            context,
            frames=FRAMES,
            reception=self,
            hello_timeout_s=self.hello_timeout_s,
            unread=self.limit,
        )
        async with contextlib.aclosing(frames):
            async for frame in frames:
                yield frame

    def key(self, hello):
        return hello.worker

    async def admit(self, hello, part, outbox):
        self.parts.append(part)
        self.guests.enter(hello.worker, outbox, hello.attempt)
        self.boxes[hello.worker] = outbox
        outbox.put(pb.DriverMessage(welcome=pb.Welcome(driver_attempt=1, protocol=names.PROTOCOL)))
        if self.raises is not None:
            raise self.raises

    def refused(self, hello, error):
        assert self.left, "it is gone by then"
        return pb.DriverMessage(refusal=pb.Refusal(message=str(error), exit_code=names.EXIT_STALE))

    def heard(self, key, message, *, more):
        self.said.append((key, message.report.step))
        self.more.append(more)

    def gone(self, key, outbox):
        self.left.append((key, outbox))

    # --- callers ------------------------------------------------------------------------------------------------------
    async def call(self, tls, *, port=0):
        address = f"127.0.0.1:{port or self.port}"
        channel = await dialling.to_driver(address, tls=tls, job_uid=JOB)()
        self.channels.append(channel)
        return channels_pb2_grpc.ChannelsStub(channel).Connect(timeout=50)

    async def guest(self, tls, *, worker="env/0", port=0):
        """A caller that has been welcomed."""
        call: Any = await self.call(tls, port=port)
        await call.write(pb.WorkerBatch(messages=[pb.WorkerMessage(hello=pb.Hello(worker=worker))]))
        (welcome,) = (await call.read()).messages
        assert welcome.WhichOneof("kind") == "welcome"
        return call


async def until(condition, *, within_s=20.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    root, authority = tmp_path_factory.mktemp("tls"), Authority()
    return {
        part: rpc.TlsFolder(authority.folder(root / part, part=name, job_uid=JOB))
        for part, name in (("driver", names.COMPONENT_DRIVER), ("pool", "pool:sim"))
    }


@pytest.fixture
async def site(certs):
    async with Site(certs["driver"]) as made:
        yield made


# --- from a hello to the end ------------------------------------------------------------------------------------------
async def test_a_peer_is_admitted_by_its_certificate_and_both_sides_are_heard_in_order(site, certs):
    call = await site.guest(certs["pool"])
    assert site.parts == ["pool:sim"]
    for number in range(3):
        site.boxes["env/0"].put(told(number))
    await call.write(pb.WorkerBatch(messages=[word(1), word(2)]))
    await call.write(pb.WorkerBatch(messages=[word(3)]))
    (batch,) = [await call.read()]
    assert [m.fact.name for m in batch.messages] == ["0", "1", "2"], "what waits is one frame"
    await until(lambda: site.said == [("env/0", 1), ("env/0", 2), ("env/0", 3)])
    assert site.more == [True, False, False], "the second frame may come in an hour"
    assert site.left == []
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await until(lambda: site.left == [("env/0", site.boxes["env/0"])])


@pytest.mark.parametrize("way", ["cancel", "frozen"])
async def test_a_peer_that_is_gone_without_a_word_is_noticed(site, certs, way):
    async with Relay(site.port) as relay:
        call = await site.guest(certs["pool"], port=relay.port)
        if way == "cancel":
            call.cancel()
        else:
            relay.freeze()
        await until(lambda: site.left, within_s=6.0)
        assert [key for key, _ in site.left] == ["env/0"]


async def test_a_caller_that_says_no_hello_in_time_may_come_again(site, certs):
    site.hello_timeout_s = 0.2
    call = await site.call(certs["pool"])
    with pytest.raises(grpc.aio.AioRpcError, match=r"Connect heard no hello for 0\.2 s") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (site.parts, site.left) == ([], [])


async def test_a_caller_that_says_something_else_first_is_wrong(site, certs):
    call = await site.call(certs["pool"])
    await call.write(pb.WorkerBatch(messages=[word(1)]))
    with pytest.raises(grpc.aio.AioRpcError, match="the first message of Connect must be a hello") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (site.parts, site.said, site.left) == ([], [], [])


async def test_a_refused_peer_is_told_so_once_and_nothing_of_it_stays(site, certs):
    site.raises = Stale("attempt 2 has taken its place")
    call = await site.call(certs["pool"])
    await call.write(pb.WorkerBatch(messages=[pb.WorkerMessage(hello=pb.Hello(worker="env/0")), word(1)]))
    (only,) = (await call.read()).messages
    assert (only.refusal.message, only.refusal.exit_code) == ("attempt 2 has taken its place", names.EXIT_STALE)
    assert await call.read() is grpc.aio.EOF
    assert site.left == [("env/0", site.boxes["env/0"])], "also of one that was half admitted"
    assert site.said == []


async def test_of_a_hello_that_meets_a_bug_nothing_stays_either(site, certs):
    site.raises = KeyError("env/0")
    call = await site.call(certs["pool"])
    await call.write(pb.WorkerBatch(messages=[pb.WorkerMessage(hello=pb.Hello(worker="env/0"))]))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert [key for key, _ in site.left] == ["env/0"]


# --- one stream per peer ----------------------------------------------------------------------------------------------
async def test_a_second_stream_of_a_peer_takes_the_place_of_its_first(site, certs):
    first = await site.guest(certs["pool"])
    old = site.boxes["env/0"]
    old.put(told(1))
    other = await site.guest(certs["pool"], worker="env/1")
    second = await site.guest(certs["pool"])
    new = site.boxes["env/0"]
    assert (await first.read()).messages == [told(1)], "what was in it still comes"
    assert await first.read() is grpc.aio.EOF
    await until(lambda: site.left == [("env/0", old)])
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await first.write(pb.WorkerBatch(messages=[word(1)]))
    await second.write(pb.WorkerBatch(messages=[word(2)]))
    await other.write(pb.WorkerBatch(messages=[word(3)]))
    await until(lambda: sorted(site.said) == [("env/0", 2), ("env/1", 3)])
    assert (new.closed, len(site.left)) == (None, 1)


async def test_what_the_peer_of_a_closed_stream_still_says_counts_no_more(site, certs):
    call = await site.guest(certs["pool"])
    for _ in range(60):  # more than the peer's window takes: the stream stays while it does not read
        site.boxes["env/0"].put(told("x" * 400_000))
    await asyncio.sleep(0.1)
    site.boxes["env/0"].close("it was given up")
    await call.write(pb.WorkerBatch(messages=[word(1)]))
    await asyncio.sleep(0.2)
    assert site.said == []
    assert site.left == []


async def test_a_peer_that_is_dismissed_keeps_its_stream_and_is_heard_no_more(site, certs):
    call = await site.guest(certs["pool"])
    site.guests.dismiss("env/0")
    site.boxes["env/0"].put(told(1))
    assert (await call.read()).messages == [told(1)]
    await call.write(pb.WorkerBatch(messages=[word(1)]))
    await call.done_writing()
    await until(lambda: [key for key, _ in site.left] == ["env/0"])
    assert (site.said, site.guests) == ([], {})


@pytest.mark.parametrize(("count", "size"), [(1, 9_000_000), (UNWEIGHED, 1_500_000), (40, 400_000), (5000, 100)])
def test_no_frame_of_many_messages_is_larger_than_a_call_may_carry(count, size):
    """A peer that was away for a moment is told much at once."""
    batch = [told(f"{n}".ljust(size)) for n in range(count)]
    frames = list(in_frames(batch))
    assert [message for frame in frames for message in frame] == batch
    assert all(pb.DriverBatch(messages=frame).ByteSize() < rpc.MAX_MESSAGE_BYTES for frame in frames)
    weights = [sum(message.ByteSize() for message in frame) for frame in frames]
    assert len(frames) == 1 or min(weights[:-1]) >= FRAME_BYTES, "and in no more frames than needed"
    assert list(in_frames([])) == []


async def test_a_peer_that_does_not_read_is_disconnected_and_hears_what_was_said_until_then(site, certs):
    site.limit = 50
    call = await site.guest(certs["pool"])
    for number in range(200):
        site.boxes["env/0"].put(told(number))
    assert site.boxes["env/0"].closed == "the other end left 50 messages unread"
    heard = [int(m.fact.name) for m in (await call.read()).messages]
    assert heard == list(range(51))
    assert await call.read() is grpc.aio.EOF


# --- both ends --------------------------------------------------------------------------------------------------------
async def test_an_uplink_comes_again_when_its_stream_is_closed_and_nothing_is_lost_that_lasts(site, certs):
    part = Part()
    uplink: dialling.Uplink[pb.WorkerMessage, pb.DriverMessage] = dialling.Uplink(
        part,
        wire=DIALECT,
        dial=dialling.to_driver(f"127.0.0.1:{site.port}", tls=certs["pool"], job_uid=JOB),
        who="worker env/0",
        address="the driver",
        settings=QUICK,
        write_timeout_s=5.0,
        kept=10,
        clock=monotonic,
    )
    part.hello = lambda **_: pb.WorkerMessage(hello=pb.Hello(worker="env/0"))  # type: ignore[method-assign]
    running = asyncio.create_task(uplink.run())
    await until(lambda: uplink.is_connected)
    for number in range(3):
        uplink.tell(word(number), lasts=Lasts.JOB)
        await until(lambda number=number: ("env/0", number) in site.said)
        streams = uplink.streams
        site.boxes["env/0"].close("the test says so")
        await until(lambda streams=streams: uplink.streams > streams)
    assert await uplink.close(timeout_s=20.0) == 0
    await asyncio.wait_for(running, 5.0)
    assert site.said == [("env/0", 0), ("env/0", 1), ("env/0", 2)]
    await until(lambda: len(site.left) == 4)
