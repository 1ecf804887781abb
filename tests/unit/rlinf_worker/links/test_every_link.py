"""One suite that every link passes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_api.errors import InvariantBroken, RetryableError
from rlinf_worker.links import payload_arrays
from rlinf_worker.links.errors import LinkBroken, LinkClosed, MessageTooLarge, PayloadError
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings

KINDS = ["shm", "tcp", "tls", "bulk"]
SMALL = LinkSettings(
    ring_bytes=64 << 10, max_ring_bytes=64 << 10, outbox_bytes=64 << 10, inbox_bytes=64 << 10, linger_s=1.0
)
"""Little room everywhere, so that back-pressure, wrapping and chunks happen within a few messages."""


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


async def receive(link, count):
    async with asyncio.timeout(20):
        return [await link.recv() for _ in range(count)]


async def send_all(link, messages):
    for message in messages:
        await link.send(message)


async def until_full(link, message, limit=10_000):
    """Sends without waiting until the link refuses; how many it took."""
    for count in range(limit):
        if not link.send_nowait(message):
            for _ in range(20):  # TCP: let the kernel and the other end take what they take
                await asyncio.sleep(0.01)
                if link.send_nowait(message):
                    break
            else:
                return count
    pytest.fail(f"{limit} messages were accepted and nobody received")


async def waiting_send(link, message):
    """A send that finds no room, and how many were taken before it: a thread of either end may still make some."""
    accepted = await until_full(link, message)
    for count in range(accepted, 10_000):
        sending = asyncio.create_task(link.send(message))
        if not (await asyncio.wait([sending], timeout=0.1))[0]:
            return sending, count
    pytest.fail("every send found room and nobody received")


async def test_a_message_arrives_as_it_was_sent(kind, connect):
    a, b = await connect(kind)
    value = {"obs": np.arange(100_000, dtype="f4").reshape(100, 1000), "names": ("x", ["y", None, 1.5])}
    await a.send(Message(b"head", value))
    (message,) = await receive(b, 1)
    assert message.head == b"head"
    got = message.value()
    np.testing.assert_array_equal(got["obs"], value["obs"])
    assert got["names"] == value["names"]


async def test_messages_keep_their_order_in_both_directions_at_once(kind, connect):
    a, b = await connect(kind, SMALL)
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 40_000, 300)

    async def flood(link):
        for number, size in enumerate(sizes):
            await link.send(Message(b"%d" % number, np.full(size, number % 251, np.uint8)))

    async def check(link):
        for number, size in enumerate(sizes):
            with await link.recv() as message:
                assert message.head == b"%d" % number
                value = message.value()
                assert value.shape == (size,)
                assert (value == number % 251).all()

    async with asyncio.timeout(30):
        await asyncio.gather(flood(a), flood(b), check(a), check(b))


async def test_many_senders_are_served_in_the_order_of_their_calls(kind, connect):
    a, b = await connect(kind, SMALL)
    payload = np.zeros(20_000, np.uint8)
    senders = [asyncio.create_task(a.send(Message(b"%d" % i, payload))) for i in range(50)]
    heads = []
    for _ in senders:
        with (await receive(b, 1))[0] as message:
            heads.append(int(message.head))
    await asyncio.gather(*senders)
    assert heads == sorted(heads)


async def test_a_full_link_makes_the_sender_wait_until_the_receiver_takes(kind, connect):
    a, b = await connect(kind, SMALL)
    message = Message(b"x", np.zeros(10_000, np.uint8))
    waiting, accepted = await waiting_send(a, message)
    for _ in range(accepted):
        (await receive(b, 1))[0].release()
    async with asyncio.timeout(20):
        await waiting
    assert a.counters.send_wait_s > 0.04
    assert a.counters.sent_messages >= accepted + 1


async def test_a_message_larger_than_every_bound_on_the_way_arrives_whole(kind, connect):
    a, b = await connect(kind, SMALL)
    value = {"big": np.random.default_rng(0).integers(0, 255, 3_000_000, np.uint8), "small": b"after"}
    sending = asyncio.create_task(send_all(a, [Message(b"1", value), Message(b"2", "next")]))
    first, second = await receive(b, 2)
    await sending
    np.testing.assert_array_equal(first.value()["big"], value["big"])
    assert first.value()["small"] == b"after"
    assert second.value() == "next"


async def test_a_message_above_the_bound_is_refused_and_the_link_goes_on(kind, connect):
    a, b = await connect(kind, LinkSettings(max_message_bytes=100_000))
    with pytest.raises(MessageTooLarge, match="wanted at most 100000; split it"):
        await a.send(Message(b"", np.zeros(200_000, np.uint8)))
    await a.send(Message(b"ok", 1))
    assert (await receive(b, 1))[0].head == b"ok"
    assert (a.counters.refused_messages, a.counters.sent_messages) == (1, 1)


async def test_a_payload_that_cannot_travel_is_refused_and_the_link_goes_on(kind, connect):
    a, b = await connect(kind)
    with pytest.raises(PayloadError, match=r"payload\['fn'\]"):
        await a.send(Message(b"", {"fn": print}))
    await a.send(Message(b"ok", 1))
    assert (await receive(b, 1))[0].head == b"ok"
    assert (a.counters.refused_messages, a.counters.sent_messages) == (1, 1)


async def test_a_closed_link_gives_what_was_sent_and_then_says_that_it_was_closed(kind, connect):
    a, b = await connect(kind)
    for i in range(100):
        await a.send(Message(b"%d" % i, np.zeros(1000, np.uint8)))
    await a.close()
    assert [m.head for m in await receive(b, 100)] == [b"%d" % i for i in range(100)]
    with pytest.raises(LinkClosed, match=f"worker {a.me} is broken: the peer closed it; dial its next attempt"):
        await receive(b, 1)
    with pytest.raises(LinkClosed):
        await b.send(Message(b"", 1))


async def test_a_link_closed_here_refuses_everything(kind, connect):
    a, b = await connect(kind)
    await b.send(Message(b"unread", 1))
    await a.close()
    await a.close()
    for call in (a.send(Message(b"", 1)), a.recv()):
        with pytest.raises(LinkClosed, match="closed here"):
            await call
    with pytest.raises(LinkClosed):
        a.send_nowait(Message(b"", 1))


async def test_closing_wakes_everybody_who_waits(kind, connect):
    a, b = await connect(kind, SMALL)
    sending, _ = await waiting_send(a, Message(b"x", np.zeros(10_000, np.uint8)))
    receiving = asyncio.create_task(a.recv())
    watching = asyncio.create_task(a.wait_broken())
    await asyncio.sleep(0.02)
    a.abort("the driver says that its node is lost")
    for task in (sending, receiving):
        with pytest.raises(LinkBroken, match="its node is lost") as caught:
            async with asyncio.timeout(20):
                await task
        assert isinstance(caught.value, RetryableError)
    assert (await watching).why == "the driver says that its node is lost"
    async with asyncio.timeout(20):
        await b.wait_broken()


async def test_a_cancelled_recv_loses_no_message(kind, connect):
    a, b = await connect(kind)
    rng = np.random.default_rng(3)
    got: list[int] = []

    async def impatient():
        while len(got) < 300:
            try:
                async with asyncio.timeout(float(rng.uniform(0, 0.002))):
                    got.append((await b.recv()).value())
            except TimeoutError:
                continue

    async def send():
        for i in range(300):
            await a.send(Message(b"", i))
            if i % 10 == 0:
                await asyncio.sleep(float(rng.uniform(0, 0.002)))

    async with asyncio.timeout(20):
        await asyncio.gather(send(), impatient())
    assert got == list(range(300))


async def test_a_cancelled_send_arrives_whole_or_not_at_all(kind, connect):
    a, b = await connect(kind, SMALL)
    rng = np.random.default_rng(5)
    most = 200_000 if kind == "shm" else 4_000_000  # the kernel holds megabytes of a TCP connection
    done = []

    async def send():
        for i in range(60):
            try:
                async with asyncio.timeout(float(rng.uniform(0, 0.01))):
                    await a.send(Message(b"%d" % i, np.full(int(rng.integers(0, most)), i, np.uint8)))
                    done.append(i)
            except TimeoutError:
                continue
        await a.send(Message(b"end", None))

    async def check():
        seen: list[int] = []
        while True:
            with await b.recv() as message:
                if message.head == b"end":
                    return seen
                number = int(message.head)
                assert (message.value() == number).all()
                seen.append(number)
            await asyncio.sleep(float(rng.uniform(0, 0.003)))

    async with asyncio.timeout(30):
        _, seen = await asyncio.gather(send(), check())
    assert seen == sorted(set(seen))
    assert set(done) <= set(seen)
    assert len(done) < 60, "no send was cancelled: the test proves nothing"


async def test_a_flood_lets_the_event_loop_run(kind, connect):
    a, b = await connect(kind)
    beats = 0

    async def heart():
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    heart_task = asyncio.create_task(heart())
    await asyncio.gather(send_all(a, [Message(b"", i) for i in range(2000)]), receive(b, 2000))
    heart_task.cancel()
    assert beats >= 20


async def test_two_receivers_are_a_bug_that_is_named(kind, connect):
    _a, b = await connect(kind)
    first = asyncio.create_task(b.recv())
    await asyncio.sleep(0)
    with pytest.raises(InvariantBroken, match="one pump per link"):
        await b.recv()
    first.cancel()


async def test_both_ends_count_the_same(kind, connect):
    a, b = await connect(kind)
    for size in (0, 10, 5000, 200_000):
        await a.send(Message(b"head", np.zeros(size, np.uint8)))
    await receive(b, 4)
    assert a.counters.sent_messages == b.counters.received_messages == 4
    assert a.counters.sent_bytes == b.counters.received_bytes > 205_000


async def test_a_received_message_can_be_sent_on(kind, connect):
    a, b = await connect(kind)
    value = {"x": np.arange(50_000)}
    await a.send(Message(b"1", value))
    (message,) = await receive(b, 1)
    await b.send(message)
    (back,) = await receive(a, 1)
    np.testing.assert_array_equal(back.value()["x"], value["x"])


async def test_a_message_without_a_payload_is_only_its_head(kind, connect):
    a, b = await connect(kind)
    await a.send(Message(b"ack 7"))
    (message,) = await receive(b, 1)
    assert (message.head, message.value(), message.nbytes) == (b"ack 7", None, 5)


async def test_tensors_on_a_gpu_travel_with_everything_else(kind, connect, monkeypatch):
    """By way of the host, where the two ends share no GPU. (That there is a GPU is pretended; tests/gpu has one.)"""
    monkeypatch.setattr(payload_arrays, "device_kind", lambda tensor: "cuda")
    a, b = await connect(kind)
    value: dict[str, Any] = {
        "logits": torch.arange(300_000, dtype=torch.bfloat16).view(300, 1000).T,
        "n": 3,
        "empty": torch.empty(0),
    }
    await a.send(Message(b"", value))
    with (await receive(b, 1))[0] as message:
        got = message.value()
    assert torch.equal(got["logits"], value["logits"])
    assert (got["n"], got["empty"].shape) == (3, (0,))
