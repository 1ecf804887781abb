"""The file of events, read by TensorFlow's rules, and beside a record that TensorBoard 2.21 has written."""

import struct

import pytest

from rlinf_worker.roles.actor import event_file
from rlinf_worker.roles.actor.event_file import NAME, EventFile, crc32c

WRITTEN_BY_TENSORBOARD = bytes.fromhex(
    "1b000000000000001a0d9e1309000000000000294010ac022a0d0a0b0a046c6f7373150000003f200d6fea"
)


def masked(data):
    found = crc32c(data)
    return ((found >> 15 | found << 17) + 0xA282EAD8) % 2**32


def records(data):
    """Each event; a checksum that is wrong fails."""
    while data:
        (length, check), data = struct.unpack("<QI", data[:12]), data[12:]
        assert check == masked(struct.pack("<Q", length))
        event, (check,), data = data[:length], struct.unpack("<I", data[length : length + 4]), data[length + 4 :]
        assert check == masked(event)
        yield event


def varint(data):
    found = shift = 0
    for at, byte in enumerate(data):
        found |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return found, data[at + 1 :]
    raise AssertionError("a number that does not end")


def fields(data):
    """[(number, value)] of a message of protobuf."""
    found = []
    while data:
        key, data = varint(data)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, data = varint(data)
        elif wire == 1:
            (value,), data = struct.unpack("<d", data[:8]), data[8:]
        elif wire == 5:
            (value,), data = struct.unpack("<f", data[:4]), data[4:]
        else:
            length, data = varint(data)
            value, data = data[:length], data[length:]
        found.append((number, value))
    return found


def scalars(event):
    """(step, {tag: value}) of an event with numbers; None of another."""
    one = dict(fields(event))
    if 5 not in one:
        return None
    values = [dict(fields(value)) for _, value in fields(one[5])]
    return one[2], {value[1].decode(): value[2] for value in values}


def test_each_step_is_an_event_with_its_numbers(tmp_path):
    events = EventFile(tmp_path / "tb", clock=lambda: 12.5)
    for step in (1, 300):
        events.write(step, {"reward_mean": 0.25 * step, "tokens_count": 512.0})
    events.close()
    first, session, *rest = records((tmp_path / "tb" / NAME).read_bytes())
    assert dict(fields(first)) == {1: 12.5, 3: b"brain.Event:2"}
    assert dict(fields(session)) == {1: 12.5, 2: 1, 7: b"\x08\x01"}, "TensorBoard forgets what is of step 1 and later"
    assert [scalars(event) for event in rest] == [
        (1, {"reward_mean": 0.25, "tokens_count": 512.0}), (300, {"reward_mean": 75.0, "tokens_count": 512.0}),
    ]  # fmt: skip


def test_a_record_is_the_one_that_tensorboard_writes(tmp_path):
    """RecordWriter of an Event with wall_time 12.5, step 300 and one simple_value."""
    events = EventFile(tmp_path, clock=lambda: 12.5)
    events.write(300, {"loss": 0.5})
    events.close()
    assert (tmp_path / NAME).read_bytes().endswith(WRITTEN_BY_TENSORBOARD)


def test_another_life_appends_and_says_from_which_step_on_it_is_anew(tmp_path):
    for steps in ((1, 2, 3), (2, 3)):
        events = EventFile(tmp_path)
        for step in steps:
            events.write(step, {"loss": float(step)})
        events.close()
    told = list(records((tmp_path / NAME).read_bytes()))
    begins = [dict(fields(event))[2] for event in told if 7 in dict(fields(event))]
    assert begins == [1, 2]
    assert [found[0] for event in told if (found := scalars(event))] == [1, 2, 3, 2, 3]


def test_it_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "MOST_BYTES", 2000)
    events = EventFile(tmp_path)
    for step in range(1, 200):
        events.write(step, {"loss": 1.0})
    events.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [NAME, f"{NAME}.1"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert [scalars(event)[0] for event in records((tmp_path / NAME).read_bytes())][-1] == 199


@pytest.mark.parametrize(("data", "wanted"), [(b"", 0), (b"123456789", 0xE3069283), (b"\x00" * 32, 0x8A9136AA)])
def test_the_checksum_is_castagnolis(data, wanted):
    """The last two are of RFC 3720, B.4, and of the catalogue of checksums."""
    assert crc32c(data) == wanted
