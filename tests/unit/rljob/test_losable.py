"""Standard output that takes nothing: a run goes on without it, and says so where it was asked for an answer."""

import io
import os

from rljob.losable import Losable


def test_what_a_full_disk_does_not_take_is_lost_and_what_it_takes_later_is_not(tmp_path):
    with open("/dev/full", "w") as full:
        said = Losable(full)
        for number in range(10_000):  # more than any buffer
            print(f"step {number}", file=said, flush=True)
        assert said.lost is not None
        assert said.lost.strerror == "No space left on device"
        with (tmp_path / "roomy").open("wb") as room:
            os.dup2(room.fileno(), full.fileno())
        print("the disk has room again", file=said, flush=True)
    assert (tmp_path / "roomy").read_text().endswith("the disk has room again\n")


def test_a_reader_that_has_gone_is_no_error_and_the_last_flush_finds_nowhere():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as broken:
        said = Losable(broken)
        print("step 1", file=said, flush=True)
        assert isinstance(said.lost, BrokenPipeError)
        said.end()
        broken.flush()  # Python's own at the end of the process


def test_letters_that_the_terminal_has_not_are_written_as_numbers():
    taken = io.BytesIO()
    terminal = io.TextIOWrapper(taken, encoding="ascii")
    print("job a in läufe/\udcff", file=Losable(terminal), flush=True)
    assert taken.getvalue() == b"job a in l\\xe4ufe/\\udcff\n"


def test_no_standard_output_at_all_is_one_that_takes_nothing():
    said = Losable(None)
    assert not said.isatty()
    print("step 1", file=said, flush=True)
    said.end()
