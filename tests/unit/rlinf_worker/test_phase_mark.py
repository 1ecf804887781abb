"""The file in which a worker's phase stands. That an agent looks there: integration/test_actor_gang.py."""

import pytest

from rlinf_worker import phase_mark
from rlinf_worker.phase_mark import Mark


@pytest.fixture
def writer(tmp_path):
    made = phase_mark.Writer(str(tmp_path))
    yield made
    made.close()


def test_the_last_phase_is_read_as_it_was_written(tmp_path, writer):
    assert phase_mark.read(tmp_path) is None, "nothing was declared"
    writer.write(Mark("a phase with a long name", 3600.5, 12345678.9))
    writer.write(Mark("step", 20.0, 12345679.0))
    assert phase_mark.read(tmp_path) == Mark("step", 20.0, 12345679.0)


def test_a_phase_of_any_length_takes_one_line_of_the_same_size(tmp_path, writer):
    writer.write(Mark("ü" * 500, 1.0, 2.0))
    assert (tmp_path / phase_mark.FILE).stat().st_size == 128
    writer.write(Mark("load", 1.0, 3.0))
    assert phase_mark.read(tmp_path) == Mark("load", 1.0, 3.0)


@pytest.mark.parametrize("text", ["", "1.0", "1.0 2.0", "now 2.0 step", "1.0 soon step"])
def test_what_is_no_mark_is_none(tmp_path, text):
    (tmp_path / phase_mark.FILE).write_text(text)
    assert phase_mark.read(tmp_path) is None
