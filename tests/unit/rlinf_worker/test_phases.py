"""How long a phase may last, and the file it stands in. That an agent looks there: integration/test_actor_gang.py."""

import pytest

from rlinf_worker import phases
from rlinf_worker.phases import Mark, Phases
from rlinf_worker.settings import Settings


def test_the_deadline_of_a_phase_follows_its_steps():
    made = Phases(Settings())
    assert made.deadline_s() == Settings().start_deadline_s
    made.enter("step")
    assert made.deadline_s() == 20.0
    for seconds in (1.0, 5.0, 9.0):
        made.note_step(seconds)
    assert made.deadline_s() == 50.0
    made.enter("load", deadline_s=7.0)
    assert made.deadline_s() == 7.0


def test_of_what_is_done_at_once_the_latest_deadline_holds():
    """Tasks of a role work beside each other, and any of them may block the loop."""
    made, said = Phases(Settings()), list[tuple[str, float]]()
    made.on_change = lambda: said.append((made.phase, made.deadline_s()))
    made.enter("step", deadline_s=5.0)
    loading, computing = made.during("load"), made.during("step")
    with loading:
        computing.__enter__()
        assert made.phase == "load"
    assert (made.phase, made.deadline_s()) == ("step", 5.0), "as declared: a span of the same phase changes nothing"
    made.enter("idle")
    computing.__exit__(None, None, None)
    assert said == [("step", 5.0), ("load", Settings().load_deadline_s), ("step", 5.0), ("idle", 20.0)]


@pytest.fixture
def writer(tmp_path):
    made = phases.MarkWriter(str(tmp_path))
    yield made
    made.close()


def test_the_last_phase_is_read_as_it_was_written(tmp_path, writer):
    assert phases.read(tmp_path) is None, "nothing was declared"
    writer.write(Mark("a phase with a long name", 3600.5, 12345678.9))
    writer.write(Mark("step", 20.0, 12345679.0))
    assert phases.read(tmp_path) == Mark("step", 20.0, 12345679.0)


def test_a_phase_of_any_length_takes_one_line_of_the_same_size(tmp_path, writer):
    writer.write(Mark("ü" * 500, 1.0, 2.0))
    assert (tmp_path / phases.FILE).stat().st_size == 128
    writer.write(Mark("load", 1.0, 3.0))
    assert phases.read(tmp_path) == Mark("load", 1.0, 3.0)


@pytest.mark.parametrize("text", ["", "1.0", "1.0 2.0", "now 2.0 step", "1.0 soon step"])
def test_what_is_no_mark_is_none(tmp_path, text):
    (tmp_path / phases.FILE).write_text(text)
    assert phases.read(tmp_path) is None


def test_a_mark_is_the_owners_alone_and_so_exact(tmp_path, writer):
    writer.write(Mark("step", 20.12345, 7.98765))
    assert (tmp_path / phases.FILE).stat().st_mode & 0o777 == 0o600
    assert phases.read(tmp_path) == Mark("step", 20.123, 7.988)
    other = phases.MarkWriter(str(tmp_path))
    other.close()
    assert phases.read(tmp_path) == Mark("step", 20.123, 7.988), "who opens it takes nothing away"


def test_the_same_phase_again_is_no_change_and_another_deadline_is():
    made, said = Phases(Settings()), list[str]()
    made.on_change = lambda: said.append(f"{made.phase} {made.deadline_s():g}")
    made.enter("start")
    made.enter("step", deadline_s=5.0)
    made.enter("step", deadline_s=5.0)
    made.enter("step", deadline_s=6.0)
    with made.during("stop"), made.during("load"), made.during("stop"):
        assert made.phase == "load"
    assert said == ["step 5", "step 6", "stop 10", "load 300", "stop 10", "step 6"]


def test_the_median_is_of_the_last_steps():
    made = Phases(Settings())
    made.enter("step")
    for _ in range(100):
        made.note_step(1000.0)
    for _ in range(phases.STEPS_KEPT // 2 + 1):
        made.note_step(3.0)
    assert made.deadline_s() == 30.0
