"""One message as bytes: where each thing lies, how it is cut and announced, and what is no frame."""

from __future__ import annotations

import re
import struct

import pytest

from rlinf_worker.links import frame
from rlinf_worker.links.frame import FrameError
from rlinf_worker.links.message import Message
from rlinf_worker.links.payload_arrays import on_host

HEAD, BODY = b"head", b"body!"


def message(*sizes):
    return Message(HEAD, body=BODY, buffers=[memoryview(bytes([n + 1]) * size) for n, size in enumerate(sizes)])


def whole(out):
    return memoryview(b"".join(bytes(piece) for piece in out.pieces()))


def fixed(raw):
    return struct.unpack_from("<QIIIHH", raw)


def test_a_message_without_buffers_is_its_fixed_part_its_head_and_its_body():
    out = frame.of_message(message(), 7)
    assert whole(out) == struct.pack("<QIIIHH", 33, 4, 5, 0, 1, 7) + HEAD + BODY
    assert (out.total, out.buffers, out.tensors, out.align) == (33, (), [], 64)
    assert fixed(frame.of_message(message(), 8, frame.SWITCH).prefix)[4:] == (4, 8)


def test_buffers_come_behind_their_sizes_each_at_a_multiple_of_64_with_zeros_between():
    out = frame.of_message(message(65, 64, 3), 9)
    raw = bytes(whole(out))
    assert out.total == len(raw) == 64 + 128 + 64 + 3
    assert raw[:57] == struct.pack("<QIIIHH3Q", 259, 4, 5, 3, 1, 9, 65, 64, 3) + HEAD + BODY
    assert raw[57:] == bytes(7) + b"\1" * 65 + bytes(63) + b"\2" * 64 + b"\3" * 3
    back = frame.to_message(memoryview(raw))
    body, buffers = back.encoded()
    assert (back.head, body, [bytes(b) for b in on_host(buffers)]) == (HEAD, BODY, [b"\1" * 65, b"\2" * 64, b"\3" * 3])


def test_chunks_carry_the_whole_frame_in_pieces_of_the_asked_size_and_number_themselves():
    out = frame.of_message(message(65, 64, 3), 65_535)
    parts = list(frame.chunks(out, 100, 65_535))
    assert [fixed(part.prefix) for part in parts] == [
        (124, 0, 0, 0, frame.CHUNK, 65_535), (124, 0, 0, 0, frame.CHUNK, 0), (83, 0, 0, 0, frame.CHUNK, 1),
    ]  # fmt: skip
    assert [part.total for part in parts] == [124, 124, 83]
    assert {part.align for part in parts} == {1}
    assert b"".join(bytes(piece) for part in parts for piece in part.buffers) == whole(out)
    assert [part.total for part in frame.chunks(out, 259, 0)] == [283], "no empty one behind an exact fit"


def test_an_announcement_is_the_frame_without_its_buffers_which_begin_at_0_on_the_lane():
    out = frame.of_message(message(65, 64, 3), 9)
    announcement, pieces, nbytes = frame.announced(out)
    assert announcement == struct.pack("<QIIIHH3Q", 57, 4, 5, 3, frame.BULK, 9, 65, 64, 3) + HEAD + BODY
    area = b"".join(bytes(piece) for piece in pieces)
    assert area == b"\1" * 65 + bytes(63) + b"\2" * 64 + b"\3" * 3
    assert nbytes == len(area) == frame.bulk_bytes(memoryview(announcement)) == 195
    back = frame.to_message(memoryview(announcement), memoryview(area))
    assert [bytes(b) for b in on_host(back.encoded()[1])] == [b"\1" * 65, b"\2" * 64, b"\3" * 3]


def packed(total, head, body, count, rest):
    return memoryview(struct.pack("<QIIIHH", total, head, body, count, 1, 0) + rest)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (packed(33, 4, 5, 0, b"x" * 8), "32 bytes whose fixed part says 33 = 24+4+5 and 0 buffers"),
        (packed(32, 4, 5, 0, b"x" * 8), "32 bytes whose fixed part says 32 = 24+4+5 and 0 buffers"),
        (packed(34, 4, 5, 0, b"x" * 10), "34 bytes whose fixed part says 34 = 24+4+5 and 0 buffers"),
        (packed(32, 0, 1, 1, bytes(8)), "32 bytes whose fixed part says 32 = 32+0+1 and 1 buffers"),
        (packed(64, 0, 0, 1, struct.pack("<Q", 1) + bytes(32)), "1 buffers end at 65 of 64"),
        (packed(66, 0, 0, 1, struct.pack("<Q", 1) + bytes(34)), "1 buffers end at 65 of 66"),
        (packed(24, 0, 0, 1 << 28, b""), "24 bytes whose fixed part says 24"),
    ],
)
def test_bytes_that_contradict_themselves_are_no_frame_and_the_sentence_has_the_numbers(raw, sentence):
    with pytest.raises(FrameError, match=re.escape(sentence)):
        frame.to_message(raw)


def test_more_buffers_than_the_bound_are_refused_though_the_bytes_would_do(monkeypatch):
    monkeypatch.setattr(frame, "MAX_BUFFERS", 2)
    frame.to_message(whole(frame.of_message(message(1, 1), 0)))
    with pytest.raises(FrameError, match="and 3 buffers"):
        frame.to_message(whole(frame.of_message(message(1, 1, 1), 0)))


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (packed(33, 4, 5, 0, HEAD + BODY), "an announcement of 33 bytes that ends at 33, with 0 buffers"),
        (packed(33, 0, 0, 1, bytes(9)), "an announcement of 33 bytes that ends at 32, with 1 buffers"),
    ],
)
def test_an_announcement_of_nothing_or_with_more_behind_it_is_none(raw, sentence):
    with pytest.raises(FrameError, match=sentence):
        frame.bulk_bytes(raw)
