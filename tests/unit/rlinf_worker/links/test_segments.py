"""Shared memory without a name, and the sentences where there is none; a ring's doorbells at their bounds."""

from __future__ import annotations

import errno
import mmap
import os
import types

import pytest

from rlinf_worker.links import frame, ring, segments
from rlinf_worker.links.errors import ShmTooSmall
from rlinf_worker.links.message import Message
from tests.unit.rlinf_worker.links.test_ring import make_ring


@pytest.mark.parametrize(
    ("system", "machine", "why"),
    [
        ("Linux", "x86_64", None),
        ("Linux", "AMD64", None),
        ("Darwin", "x86_64", "shared-memory links need Linux (memfd, eventfd), this is Darwin"),
        (
            "Linux", "aarch64",
            "shared-memory links rely on x86's memory order, this is aarch64; TCP is used instead",
        ),
    ],
)  # fmt: skip
def test_which_machines_have_shared_memory_links(monkeypatch, system, machine, why):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert segments.supported() == why


@pytest.mark.parametrize("without", [None, errno.EOPNOTSUPP, errno.EISDIR])
def test_a_segment_has_its_size_and_no_name_also_where_the_kernel_cannot_make_it_so(tmp_path, monkeypatch, without):
    if without is not None:
        asked, real = [], os.open

        def open_(path, flags, *mode, **named):
            if path == str(tmp_path):
                asked.append(flags)
                raise OSError(without, "not supported")
            return real(path, flags, *mode, **named)

        monkeypatch.setattr(os, "open", open_)
    fd = segments.make_segment(str(tmp_path), 8192)
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks * 512 >= 8192, os.listdir(tmp_path)) == (8192, True, [])
    assert not os.get_inheritable(fd)
    memory = segments.map_segment(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert len(memory) == 8192
    memory.close()


def test_a_directory_that_cannot_be_written_is_a_whole_sentence(tmp_path):
    with pytest.raises(ShmTooSmall) as caught:
        segments.make_segment(str(tmp_path / "none"), 1)
    assert str(caught.value) == (
        f"cannot make shared memory in {tmp_path / 'none'}: got No such file or directory, wanted a writable tmpfs; "
        "mount a Memory emptyDir there"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG])
def test_a_directory_without_room_is_a_whole_sentence_and_nothing_stays_open(tmp_path, monkeypatch, number):
    fds = len(os.listdir("/proc/self/fd"))

    def full(fd, offset, length):
        assert (offset, length) == (0, 8192)
        raise OSError(number, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    about = types.SimpleNamespace(f_bavail=2, f_frsize=4096, f_blocks=3)
    monkeypatch.setattr(os, "statvfs", lambda path: about)
    with pytest.raises(ShmTooSmall) as caught:
        segments.make_segment(str(tmp_path), 8192)
    assert str(caught.value) == (
        f"no room for a ring in {tmp_path}: got 8192 of 12288 bytes free, wanted 8192 bytes; "
        f"raise the size limit of the volume at {tmp_path}, or lower ring_bytes"
    )
    assert len(os.listdir("/proc/self/fd")) == fds


def test_any_other_failure_of_the_kernel_is_told_as_it_is(tmp_path, monkeypatch):
    def fail(fd, offset, length):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="broken") as caught:
        segments.make_segment(str(tmp_path), 8192)
    assert not isinstance(caught.value, ShmTooSmall)


def calls_of_madvise(monkeypatch, nbytes, answer=0):
    calls = []

    def madvise(start, length, advice):
        calls.append((start, length, advice))
        return answer

    monkeypatch.setattr(segments, "_libc", types.SimpleNamespace(madvise=madvise))
    with mmap.mmap(-1, nbytes) as memory:
        segments.populate(memory)
    return [(start - calls[0][0], length, advice) for start, length, advice in calls]


def test_a_large_mapping_is_filled_in_steps_to_its_end_and_a_small_one_was_filled_when_it_was_made(monkeypatch):
    step, page = 4 << 20, 4096
    assert calls_of_madvise(monkeypatch, step) == []
    assert calls_of_madvise(monkeypatch, 2 * step + page) == [(0, step, 23), (step, step, 23), (2 * step, page, 23)]
    assert calls_of_madvise(monkeypatch, 2 * step, answer=-1) == [(0, step, 23)], "a kernel that does not know it"


# --- the ring's words -------------------------------------------------------------------------------------------------


def of_size(total):
    return frame.of_message(Message(b"", body=bytes(total - frame.FIXED_BYTES)), 0)


def test_a_ring_has_a_size_that_it_can_be_of():
    assert ring.mapping_bytes(4096) == 8192
    for size in (4096 - 64, 4096 + 32):
        with pytest.raises(ValueError, match=f"ring of {size} bytes, wanted a multiple of 64 from 4096"):
            ring.RingWriter(mmap.mmap(-1, 4096 + size))
    writer = ring.RingWriter(mmap.mmap(-1, 4096 + 4096 + 64))
    assert (writer.size, writer.max_frame) == (4160, 2080)


def test_a_ring_of_another_size_than_its_segment_is_refused():
    memory = mmap.mmap(-1, 4096 + 8192)
    writer = ring.RingWriter(memory)
    ring.RingReader(memory, copy_out_bytes=0, on_free=lambda: None)
    writer._words[ring._SIZE] = 4096
    with pytest.raises(ring.RingCorrupt, match="a ring of 4096 bytes in a segment of 12288"):
        ring.RingReader(memory, copy_out_bytes=0, on_free=lambda: None)


def test_a_ring_takes_frames_to_its_last_byte_and_no_more():
    writer, reader, _ = make_ring(size=4096, copy_out_bytes=4096)
    for _ in range(2):
        assert writer.try_write(of_size(2048))
    assert not writer.try_write(of_size(24))
    assert reader.take()[2].nbytes == 2048
    assert writer.try_write(of_size(2048))
    assert not writer.try_write(of_size(24))


def test_up_to_the_bound_a_frame_is_copied_out_and_above_it_is_lent():
    writer, reader, _ = make_ring(copy_out_bytes=512)
    for total, lent in ((512, 0), (513, 1)):
        assert writer.try_write(of_size(total))
        kind, sequence, view = reader.take()
        assert (kind, sequence, view.nbytes, reader.lent) == (frame.DATA, 0, total, lent)
    del view
    assert (reader.lent, reader.reclaim(), reader.reclaim()) == (0, True, False)


def test_a_writer_that_waits_is_woken_when_a_quarter_of_the_ring_is_free_or_the_reader_sleeps():
    writer, reader, _ = make_ring(size=4096, copy_out_bytes=4096)
    while writer.try_write(of_size(64)):
        pass
    assert not reader.peer_blocked(even_if_little=True), "nobody waits yet"
    assert writer.blocked(64)
    for _ in range(15):
        reader.take()
        assert not reader.peer_blocked()
    reader.take()
    assert reader.peer_blocked()
    assert not reader.peer_blocked(), "once for each wait"
    writer.unblocked()
    while writer.try_write(of_size(64)):
        pass
    assert writer.blocked(64)
    reader.take()
    assert not reader.peer_blocked()
    assert reader.peer_blocked(even_if_little=True)
    assert not reader.peer_blocked(even_if_little=True)


def test_a_writer_that_waits_for_more_than_a_quarter_is_woken_when_its_frame_fits():
    writer, reader, _ = make_ring(size=4096, copy_out_bytes=4096)
    while writer.try_write(of_size(64)):
        pass
    assert writer.blocked(2048)
    for _ in range(31):
        reader.take()
        assert not reader.peer_blocked()
    reader.take()
    assert reader.peer_blocked()
    assert not writer.blocked(2048), "there is room now"
    assert writer.try_write(of_size(2048))


def test_who_sleeps_is_rung_for_anew_each_time_and_who_is_awake_never():
    writer, reader, _ = make_ring()
    for _ in range(3):
        assert reader.sleep()
        assert reader.sleep(), "said twice, it sleeps still"
        writer.try_write(of_size(64))
        assert (writer.peer_asleep(), writer.peer_asleep()) == (True, False)
        reader.awake()
        reader.awake()
        assert not writer.peer_asleep()
        assert (reader.empty(), reader.sleep()) == (False, False)
        reader.take()
        assert reader.empty()


def test_a_frame_that_ends_outside_of_what_was_written_is_noticed():
    for total in (23, 65, 4096):
        writer, reader, _ = make_ring()
        writer.try_write(of_size(64))
        frame.FIXED.pack_into(writer._data, 0, total, 0, 0, 0, frame.DATA, 0)
        with pytest.raises(ring.RingCorrupt, match=f"a frame of {total} bytes at 0, where the ring ends at 64"):
            reader.take()
