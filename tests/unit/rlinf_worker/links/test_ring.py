"""The ring against a model: any sizes, any interleaving of both sides, views that live as long as they like."""

from __future__ import annotations

import contextlib
import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_worker.links import frame, ring
from rlinf_worker.links.message import Message
from rlinf_worker.links.payload_arrays import on_host

RING = 8192


def make_ring(size=RING, copy_out_bytes=512):
    memory = mmap.mmap(-1, ring.mapping_bytes(size))
    freed = []
    writer = ring.RingWriter(memory)
    return writer, ring.RingReader(memory, copy_out_bytes=copy_out_bytes, on_free=lambda: freed.append(1)), memory


def out(number, size):
    body = bytes([number % 256]) * (size // 2)
    buffer = memoryview(bytes([(number + 1) % 256]) * (size - size // 2))
    return frame.of_message(Message(b"h%d" % number, body=body, buffers=[buffer] if size else ()), number & 0xFFFF)


def check(number, size, message):
    body, buffers = message.encoded()
    assert message.head == b"h%d" % number
    assert bytes(body) == bytes([number % 256]) * (size // 2)
    if size:
        assert bytes(buffers[0]) == bytes([(number + 1) % 256]) * (size - size // 2)


steps = st.lists(
    st.tuples(st.just("write"), st.integers(0, RING // 2 - 200))
    | st.tuples(st.just("write"), st.integers(0, 60))
    | st.tuples(st.just("read"), st.booleans())  # keep the views?
    | st.tuples(st.just("drop"), st.integers(0, 5)),
    max_size=80,
)


@given(steps)
@settings(max_examples=50, deadline=None)
def test_every_frame_comes_out_once_in_order_and_intact_while_it_is_viewed(steps):
    writer, reader, _ = make_ring()
    written: list[int] = []
    held: list[tuple[int, Message]] = []
    count = taken = 0
    message = Message(b"")
    for kind, arg in steps:
        if kind == "write":
            if writer.try_write(out(count, arg)):
                written.append(arg)
                count += 1
            else:
                assert held or taken < count, "an empty ring that nobody views must take any frame up to half of it"
        elif kind == "read":
            got = reader.take()
            assert (got is None) == (taken == count)
            if got is not None:
                assert got[1] == taken & 0xFFFF
                message = frame.to_message(got[2])
                check(taken, written[taken], message)
                if arg:
                    held.append((taken, message))
                taken += 1
                message = Message(b"")
                del got
        elif held:
            held.pop(arg % len(held))
        reader.reclaim()
        for number, message in held:
            check(number, written[number], message)
        message = Message(b"")  # the loop's own name must not keep a view that the next step drops
    held.clear()
    while (got := reader.take()) is not None:
        check(taken, written[taken], frame.to_message(got[2]))
        taken += 1
    del got
    del message
    reader.reclaim()
    assert taken == count
    assert writer._words[ring._TAIL] == writer._words[ring._HEAD], "all was given back"


@given(st.lists(st.integers(0, RING // 2 - 200), min_size=1, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_no_wake_up_is_lost_whatever_the_interleaving(sizes, random):
    """Each side sleeps exactly when it declared so, and runs again only if the other one rang."""
    writer, reader, _ = make_ring(copy_out_bytes=1 << 20)
    sent = received = 0
    writer_asleep = reader_asleep = False
    for _ in range(100_000):
        if received == len(sizes):
            return
        runnable = [name for name, asleep in (("w", writer_asleep), ("r", reader_asleep)) if not asleep]
        if sent == len(sizes) and "w" in runnable:
            runnable.remove("w")
        assert runnable, f"both sides sleep: {sent} sent, {received} received of {len(sizes)}"
        if random.choice(runnable) == "w":
            if writer.try_write(out(sent, sizes[sent])):
                sent += 1
                if writer.peer_asleep():
                    assert reader_asleep
                    reader.awake()
                    reader_asleep = False
            else:
                writer_asleep = writer.blocked(out(sent, sizes[sent]).total)
        else:
            got = reader.take()
            if got is not None:
                received += 1
                ring_now = reader.peer_blocked()
            else:
                reader_asleep = reader.sleep()
                ring_now = reader_asleep and reader.peer_blocked(even_if_little=True)
            if ring_now:
                assert writer_asleep
                writer.unblocked()
                writer_asleep = False
    pytest.fail("no end")


def test_a_reader_that_is_awake_costs_the_writer_no_doorbell():
    writer, reader, _ = make_ring()
    for number in range(5):
        writer.try_write(out(number, 10))
        assert not writer.peer_asleep()
    while reader.take():
        pass
    assert reader.sleep()
    writer.try_write(out(5, 10))
    assert writer.peer_asleep()
    writer.try_write(out(6, 10))
    assert not writer.peer_asleep(), "once for each sleep"


def test_views_keep_their_part_of_the_ring_until_the_last_one_is_gone():
    writer, reader, _ = make_ring(copy_out_bytes=0)
    size = RING // 2 - 200
    assert writer.try_write(out(0, size))
    assert writer.try_write(out(1, size))
    first = frame.to_message(reader.take()[2])
    second = frame.to_message(reader.take()[2])
    view = on_host(first.encoded()[1])[0][100:200]
    assert not writer.try_write(out(2, size))
    second.release()
    reader.reclaim()
    assert not writer.try_write(out(2, size)), "the second is free, but the first is before it"
    first.release()
    reader.reclaim()
    assert not writer.try_write(out(2, size)), "a slice of it still lives"
    assert bytes(view) == b"\x01" * 100
    del view
    reader.reclaim()
    assert writer.try_write(out(2, size))


@pytest.mark.parametrize("garbage", [b"\xff" * 24, bytes(24), frame.FIXED.pack(1 << 50, 0, 0, 0, frame.DATA, 0)])
def test_bytes_that_no_writer_wrote_are_noticed(garbage):
    writer, reader, memory = make_ring()
    writer.try_write(out(0, 100))
    memory[ring.HEADER_BYTES : ring.HEADER_BYTES + 24] = garbage
    with pytest.raises(ring.RingCorrupt):
        reader.take()


def test_memory_without_a_ring_in_it_is_refused():
    with pytest.raises(ring.RingCorrupt):
        ring.RingReader(mmap.mmap(-1, 16384), copy_out_bytes=0, on_free=lambda: None)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_an_error_and_nothing_worse(raw):
    if len(raw) >= frame.FIXED_BYTES:
        with contextlib.suppress(frame.FrameError):
            frame.to_message(memoryview(raw))
