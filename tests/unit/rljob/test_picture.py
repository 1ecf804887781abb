"""timeline.svg: well formed, every moment where it belongs and in the colour of its role, of bounded size."""

import re
from xml.etree import ElementTree

import pytest

from rljob import picture
from rljob.timeline import Record, SpanPiece, StepTime

SVG = "{http://www.w3.org/2000/svg}"


def piece(worker, kind, t0, t1):
    return SpanPiece(100.0 + t0, 100.0 + t1, worker, kind)


def record(slots, *, turns=None, steps=((1, 0.0, 2.0), (2, 2.0, 4.0)), events=()):
    return Record(
        slots=slots,
        turns=turns or {},
        steps=[StepTime(n, 0, 100.0 + t0, 100.0 + t1) for n, t0, t1 in steps],
        events=list(events),
    )


SHARED = {
    "cpu/0/0": [
        piece("env/0", "compute", 0.0, 1.0),
        piece("env/0", "wait_turn", 1.0, 4.0),
        piece("train/0", "load", 1.0, 1.5),
        piece("train/0", "compute", 1.5, 3.0),
    ],
    "cpu/0/10": [piece("wide<0>/0", "wait_data", 0.0, 4.0)],
    "cpu/0/2": [piece("rest/0", "compute", 3.0, 3.5)],
}
PLAN = {"event": "plan", "time": 102.0, "revision": 2, "message": 'plan "2" & <more>'}


def drawn(made):
    return ElementTree.fromstring(picture.draw(made))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def test_a_column_holds_what_was_done_in_it_by_share():
    track = [piece("env/0", "compute", 0.0, 1.5), piece("env/0", "wait_data", 1.5, 3.5)]
    columns = picture.shares(track, 100.0, 104.0, 4)
    assert [dict(column) for column in columns] == [
        {("env", "compute"): pytest.approx(1.0)},
        {("env", "compute"): pytest.approx(0.5), ("", "wait_data"): pytest.approx(0.5)},
        {("", "wait_data"): pytest.approx(1.0)},
        {("", "wait_data"): pytest.approx(0.5)},
    ]


def test_a_piece_reaches_as_far_as_its_time():
    (path,) = [p for p in drawn(record(SHARED)).iter(f"{SVG}path") if p.findtext(f"{SVG}title") == "env compute"]
    shape = path.get("d", "")
    ((x, wide, high),) = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v([\d.]+)h-[\d.]+z", shape)  # one rectangle
    assert (float(x), float(wide), float(high)) == (picture.LEFT, picture.COLUMNS / 4, picture.ROW)
    assert path.get("fill") in picture.PALETTE


def test_roles_slots_steps_turns_and_plans_are_named_and_names_are_escaped():
    turns = {"cpu/0/0": [piece("env/0", "turn", 0.0, 1.0), piece("train/0", "turn", 1.0, 3.0)]}
    root = drawn(record(SHARED, turns=turns, events=[PLAN, {"event": "agent", "time": 101.0}]))
    shown = texts(root)
    assert {"env", "train", "rest", "wide<0>", "pod cpu/0", "1", "2", "plan 2"} <= set(shown)
    slots = [text.partition("  ")[0] for text in shown if text.startswith("slot")]
    assert slots == ["slot 0", "slot 2", "slot 10"], "in the order of their numbers"
    assert [text for text in shown if text.endswith("idle")] == ["25% idle", "88% idle", "100% idle"]
    assert 'plan "2" & <more>' in [element.text for element in root.iter(f"{SVG}title")]
    strips = [r for r in root.iter(f"{SVG}rect") if r.get("height") == str(picture.TURN - 2)]
    assert [(r.get("x"), r.get("width")) for r in strips] == [("170.0", "300.0"), ("470.0", "600.0")]


def test_what_lies_outside_of_the_steps_is_not_drawn_over_the_edge():
    far = {"cpu/0/0": [piece("env/0", "compute", -5.0, 9.0), piece("train/0", "compute", 9.0, 20.0)]}
    for shape in (p.get("d", "") for p in drawn(record(far)).iter(f"{SVG}path") if p.get("fill")):
        for x, wide in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", shape):
            assert picture.LEFT <= float(x) <= float(x) + float(wide) <= picture.LEFT + picture.COLUMNS + 0.1


def test_of_more_turns_than_columns_each_column_shows_who_had_most_of_it():
    turns = [piece(f"{'env' if n % 4 < 3 else 'train'}/0", "turn", n * 0.001, n * 0.001 + 0.001) for n in range(2000)]
    turns += [piece("train/0", "turn", 2.0, 4.0)]
    root = drawn(record(SHARED, turns={"cpu/0/0": turns}))
    strips = [r for r in root.iter(f"{SVG}rect") if r.get("height") == str(picture.TURN - 2)]
    assert len(strips) == picture.COLUMNS
    assert len({r.get("fill") for r in strips}) == 2


@pytest.mark.parametrize("slots", [1, 64, 128])
def test_a_picture_is_bounded_whatever_the_run(slots):
    pieces = [piece("env/0", "compute" if n % 3 else "comm", n * 0.01, n * 0.01 + 0.007) for n in range(400)]
    made = record({f"cpu/{n // 8}/{n % 8}": pieces for n in range(slots)})
    assert len(picture.draw(made)) < 5_000_000


@pytest.mark.parametrize("steps", [(), [(n, n * 0.001, n * 0.001 + 0.001) for n in range(5000)]])
def test_a_run_of_no_step_and_one_of_thousands_are_drawn(steps):
    root = drawn(record(SHARED, steps=steps))
    numbers = [text for text in texts(root) if text and text.isdigit()]
    assert len(numbers) == (0 if not steps else len(set(numbers)))
    assert len(numbers) < 40


def test_nothing_at_all_is_an_empty_picture():
    assert drawn(Record()).tag == f"{SVG}svg"


def test_what_xml_has_no_place_for_is_a_question_mark():
    made = record(SHARED, events=[{**PLAN, "message": "\x1b[31mred\x1b[0m \ud800 & <more>"}])
    titles = [element.text for element in drawn(made).iter(f"{SVG}title")]
    assert "?[31mred?[0m ? & <more>" in titles


def test_a_time_too_short_for_an_axis_is_drawn():
    moment = Record(slots={"cpu/0/0": [SpanPiece(1.7e9, 1.7e9, "env/0", "compute")]})
    assert drawn(moment).tag == f"{SVG}svg"
