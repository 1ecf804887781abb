"""rljob timeline: a track per slot without overlaps, accounts that add up to the steps, idle shares as docs/timeline.md
defines them, and a file of bounded size."""

import json
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner

from rlinf_api.errors import UserError
from rljob import timeline
from rljob.app import app

T0 = 1_000_000.0


def span(worker, kind, t0, t1, *, slot, step=1):
    role = worker.partition("/")[0]
    times = {"t0": T0 + t0, "t1": T0 + t1}
    return {"slot": slot, "role": role, "worker": worker, "kind": kind, "step": step, "version": 0, **times}


def work_dir(tmp_path, spans, *, steps=((1, 2.0), (2, 4.0)), events=()):
    """Steps of two seconds each by (number, end)."""
    (tmp_path / "spans").mkdir()
    lines = [json.dumps(line) for line in spans]
    (tmp_path / "spans" / "job-cpu-0-a1.jsonl").write_text("\n".join([*lines, '{"torn']))
    metrics = [{"step": n, "branch": 0, "time": T0 + end, "step_s": 2.0} for n, end in steps]
    metrics[-1]["previous"] = {"account": {"env/0": {"compute": 1.0, "instrument_s": 0.004}}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


SPANS = [
    span("env/0", "compute", 0.0, 1.0, slot="cpu/0/0"),
    span("env/0", "wait_data", 0.5, 4.0, slot="cpu/0/0"),
    span("train/0", "load", 1.0, 1.5, slot="cpu/0/0"),
    span("train/0", "compute", 1.5, 3.0, slot="cpu/0/0"),
    span("train/0", "wait_turn", 0.0, 1.0, slot="cpu/0/0"),
    span("env/0", "weights", 3.0, 3.0001, slot="cpu/0/0"),
    span("wide/0", "compute", 0.0, 3.0, slot="cpu/0/1,cpu/0/2"),
    span("env/0", "turn", 0.0, 1.0, slot="cpu/0/0", step=-1),
    span("train/0", "turn", 1.0, 3.0, slot="cpu/0/0", step=-1),
    span("idler/0", "turn", 3.0, 3.5, slot="cpu/0/0", step=-1),
]


def test_an_account_counts_each_moment_once_and_adds_up_to_the_steps(tmp_path):
    found = timeline.accounts(timeline.read(work_dir(tmp_path, SPANS)))
    assert found["env/0"]["compute"] == pytest.approx(1.0)
    assert found["env/0"]["wait_data"] == pytest.approx(3.0, abs=1e-3), "the half second beside compute is compute's"
    assert found["train/0"]["other"] == pytest.approx(1.0), "what no span covers"
    assert found["wide/0"]["compute"] == pytest.approx(3.0), "once, though it has two slots"
    for seconds in found.values():
        assert sum(seconds.values()) == pytest.approx(4.0)


def test_a_slot_is_idle_while_all_of_its_workers_wait_or_do_nothing(tmp_path):
    shares = timeline.idle_shares(timeline.read(work_dir(tmp_path, SPANS)))
    assert shares == {
        "cpu/0/0": pytest.approx(0.25, abs=1e-3),
        "cpu/0/1": pytest.approx(0.25),
        "cpu/0/2": pytest.approx(0.25),
    }


def tracks(found):
    by_track: dict[tuple[int, int], list[Any]] = {}
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            by_track.setdefault((event["pid"], event["tid"]), []).append(event)
    return by_track


def test_nothing_overlaps_within_a_track_and_a_role_has_one_colour(tmp_path):
    found = timeline.trace(timeline.read(work_dir(tmp_path, SPANS)))
    for events in tracks(found).values():
        events.sort(key=lambda event: event["ts"])
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]
    colours: dict[str, set[str]] = {}
    for event in (e for events in tracks(found).values() for e in events if e["cat"] == "compute"):
        colours.setdefault(event["name"], set()).add(event["cname"])
    assert {role: len(names) for role, names in colours.items()} == {"env": 1, "train": 1, "wide": 1}
    assert len({name for names in colours.values() for name in names}) == 3
    names = [e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M"]
    wanted = ["job", "steps", "events", "pod cpu/0", "slot cpu/0/0", "turns of cpu/0/0", "slot cpu/0/1", "slot cpu/0/2"]
    assert names == wanted


def test_turns_are_shown_as_they_were_granted_and_freed_with_work_in_them_or_not(tmp_path):
    found = timeline.trace(timeline.read(work_dir(tmp_path, SPANS)))
    turns = [(e["name"], e["ts"], e["dur"]) for events in tracks(found).values() for e in events if e["cat"] == "turn"]
    assert turns == [
        ("turn of env", 0, 1_000_000),
        ("turn of train", 1_000_000, 2_000_000),
        ("turn of idler", 3_000_000, 500_000),
    ]
    idle = timeline.idle_shares(timeline.read(tmp_path))
    assert idle["cpu/0/0"] == pytest.approx(0.25, abs=1e-3), "to have the slots is no work"
    assert "idler/0" not in timeline.accounts(timeline.read(tmp_path))


def test_a_slot_that_nobody_used_in_its_turn_has_a_track(tmp_path):
    record = timeline.read(work_dir(tmp_path, [span("env/0", "turn", 0.5, 1.0, slot="cpu/0/0")]))
    assert timeline.idle_shares(record) == {"cpu/0/0": 1.0}
    (turn,) = [e for events in tracks(timeline.trace(record)).values() for e in events if e["cat"] == "turn"]
    assert (turn["name"], turn["ts"], turn["dur"]) == ("turn of env", 500_000, 500_000)


def test_turns_count_against_the_bound_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_EVENTS", 200)
    many = [span(f"r{n % 2}/0", "turn", n * 1e-3, (n + 1) * 1e-3, slot="cpu/0/0") for n in range(3000)]
    found = timeline.trace(timeline.read(work_dir(tmp_path, many)))
    assert len(found["traceEvents"]) <= 200 + 10, "and the names of tracks"


@pytest.mark.parametrize(
    ("told", "count"),
    [
        pytest.param([1], 1, id="the first"),
        pytest.param([1, 1, 1], 1, id="a new driver says again which one is in force"),
        pytest.param([1, 2, 2], 2, id="one that the next driver finishes"),
        pytest.param([1, 2, 1], 3, id="the older one once more"),
    ],
)
def test_plans_are_counted_and_not_how_often_they_are_told(tmp_path, told, count):
    events = [{"time": T0 + n, "event": "plan", "revision": revision} for n, revision in enumerate(told)]
    events += [{"time": T0 + 9, "event": "plan-prepare", "revision": 9}]
    assert f"plans put in force: {count}" in timeline.summary(timeline.read(work_dir(tmp_path, SPANS, events=events)))


def test_the_cost_of_recording_in_a_job_of_many_workers_is_that_of_one(tmp_path):
    """Their accounts are sums by role."""
    many = [span(f"env/{n}", "compute", 0.0, 1.0, slot=f"cpu/0/{n}") for n in range(70)]
    folder = work_dir(tmp_path, [*many, span("train/0", "compute", 0.0, 1.0, slot="cpu/0/70")])
    line = {"step": 2, "branch": 0, "time": T0 + 4.0, "step_s": 2.0}
    accounts = {"env": {"compute": 70.0, "instrument_s": 0.7}, "train": {"compute": 1.0, "instrument_s": 0.004}}
    first = {"step": 1, "branch": 0, "time": T0 + 2.0, "step_s": 2.0}
    lines = [first, {**line, "previous": {"account": accounts}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (said,) = [one for one in timeline.summary(timeline.read(folder)) if one.startswith("recording")]
    assert "took 0.50% of the steps' time in CPU of a worker, at most 0.50% (the mean of 70 workers of env)" in said


def test_steps_have_a_track_and_plans_are_seen_everywhere(tmp_path):
    events = [
        {"time": T0 + 0.1, "event": "plan", "message": "plan revision 2 is in force"},
        {"time": T0 + 0.2, "event": "worker-exited", "message": "env/0 ended"},
    ]
    record = timeline.read(work_dir(tmp_path, SPANS, events=events))
    found = timeline.trace(record)
    steps = [(e["name"], e["ts"], e["dur"]) for e in tracks(found)[(1, 1)]]
    assert steps == [("step 1", 0, 2_000_000), ("step 2", 2_000_000, 2_000_000)]
    marks = {e["name"]: e["s"] for e in found["traceEvents"] if e["ph"] == "i"}
    assert marks == {"plan": "g", "worker-exited": "t"}
    assert "plans put in force: 1" in timeline.summary(record)


def test_only_the_wanted_steps_are_drawn(tmp_path):
    record = timeline.read(work_dir(tmp_path, SPANS), first=2, last=2)
    assert (record.begin, record.end) == (T0 + 2.0, T0 + 4.0)
    assert timeline.accounts(record)["train/0"]["compute"] == pytest.approx(1.0)
    with pytest.raises(UserError, match="has no such step: got 7:"):
        timeline.read(tmp_path, first=7)


def test_the_file_is_bounded_and_long_pieces_survive(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_EVENTS", 200)
    short = [
        span("env/0", "compute" if n % 2 else "comm", 1.0 + n * 1e-4, 1.0 + (n + 1) * 1e-4, slot="cpu/0/0")
        for n in range(5000)
    ]
    long = [span("env/0", "load", 0.0, 0.9, slot="cpu/0/0"), span("env/0", "load", 2.0, 3.0, slot="cpu/0/0")]
    record = timeline.read(work_dir(tmp_path, [*short, *long]))
    found = timeline.trace(record)
    assert len(found["traceEvents"]) <= 200 + 10, "and the names of tracks"
    loads = [e["dur"] for events in tracks(found).values() for e in events if e["name"] == "env load"]
    assert loads[0] >= 900_000
    assert loads[-1] >= 1_000_000
    assert found["otherData"]["joined_below_s"] > 0


def test_the_newest_spans_are_read_where_there_are_too_many(tmp_path):
    record = timeline.read(work_dir(tmp_path, SPANS), max_spans=2)
    assert record.left_out == 8
    assert "8 spans are missing" in timeline.summary(record)[-1]


def test_the_cost_of_recording_is_told(tmp_path):
    record = timeline.read(work_dir(tmp_path, SPANS))
    assert any("recording took 0.20% of the steps' time" in line for line in timeline.summary(record))


def test_a_folder_without_spans_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no spans: wanted the work dir of a run"):
        timeline.read(tmp_path)


@pytest.mark.parametrize("text", ["a", "1:b", "-1:2", "\u00b2", "1:\u0663", "9" * 5000])
def test_a_range_of_steps_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="--step cannot be read"):
        timeline.steps_of(text)


def test_running_totals_of_an_agent_go_on_in_the_next_file_and_what_the_disk_did_not_take_is_said(tmp_path):
    folder = work_dir(tmp_path, SPANS)
    told = {"agent_instrument_s": 0.5, "dropped": 2}
    (folder / "spans" / "job-cpu-0-a1.jsonl.1").write_text(json.dumps(told) + "\n")
    with (folder / "spans" / "job-cpu-0-a1.jsonl").open("a") as file:
        file.write("\n" + json.dumps({**told, "agent_instrument_s": 0.75, "lost_bytes": 2_500_000}) + "\n")
    record = timeline.read(folder)
    assert (record.agent_instrument_s, record.lost_bytes, record.left_out) == (0.75, 2_500_000, 4)
    assert "2.5 MB of spans are missing: the disk was full" in timeline.summary(record)


SOUND = {
    "metrics.jsonl": {"step": 3, "branch": 0, "time": T0 + 6.0, "step_s": 2.0},
    "events.jsonl": {"time": T0, "event": "plan"},
    "spans/job-cpu-0-a1.jsonl": span("env/0", "compute", 0.0, 1.0, slot="cpu/0/0"),
}


@pytest.mark.parametrize(
    ("file", "changed", "sentence"),
    [
        (
            "metrics.jsonl",
            {"time": None},
            "is of no run: got time None, wanted a number as 'time'; take that line out, or",
        ),
        ("metrics.jsonl", {"step_s": "2"}, "got step_s '2', wanted a number"),
        ("metrics.jsonl", {"branch": []}, r"got branch \[\], wanted a number"),
        ("metrics.jsonl", {"time": float("nan")}, "got time nan, wanted a number"),
        ("events.jsonl", {"time": float("inf")}, "got time inf, wanted a number"),
        ("spans/job-cpu-0-a1.jsonl", {"slot": 7}, "got slot 7, wanted a word as 'slot'"),
        (
            "spans/job-cpu-0-a1.jsonl",
            {"slot": "cpu/0/x"},
            "has a span of no slot: got 'cpu/0/x', wanted POOL/ORDINAL/INDEX",
        ),
        ("spans/job-cpu-0-a1.jsonl", {"t1": 10**400}, "got t1 10000000"),
        ("spans/job-cpu-0-a1.jsonl", {"agent_instrument_s": "much"}, "wanted a number as 'agent_instrument_s'"),
    ],
)
def test_a_line_that_no_run_writes_is_named_with_its_file(tmp_path, file, changed, sentence):
    folder = work_dir(tmp_path, SPANS, events=[SOUND["events.jsonl"]])
    with (folder / file).open("a") as appended:
        appended.write("\n" + json.dumps(SOUND[file] | changed) + "\n")
    with pytest.raises(UserError, match=sentence) as refused:
        timeline.read(folder)
    assert str(folder / file) in str(refused.value)


def test_a_line_without_its_time_is_named_with_its_number(tmp_path):
    folder = work_dir(tmp_path, SPANS)
    with (folder / "metrics.jsonl").open("a") as appended:
        appended.write('{"step": 3, "branch": 0, "step_s": 2.0}\n')
    with pytest.raises(
        UserError, match=r"metrics\.jsonl, line 3, is of no run: got no 'time', wanted a number as 'time'"
    ):
        timeline.read(folder)


def test_accounts_of_another_shape_are_none(tmp_path):
    folder = work_dir(tmp_path, SPANS)
    line = {"step": 3, "branch": 0, "time": T0 + 6.0, "step_s": 2.0}
    odd = [[1], {"account": [1]}, {"account": {"env/0": 7}}, {"account": {"env/0": {"instrument_s": "much"}}}]
    lines = [{**line, "step": 3 + n, "time": T0 + 6.0 + n, "previous": previous} for n, previous in enumerate(odd)]
    with (folder / "metrics.jsonl").open("a") as appended:
        appended.writelines(json.dumps(one) + "\n" for one in lines)
    assert timeline.read(folder).instrument_s == {"env/0": 0.004}


def command(*arguments):
    done = CliRunner().invoke(app, ["timeline", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_the_picture_never_takes_the_place_of_the_trace(tmp_path):
    folder = work_dir(tmp_path, SPANS)
    made = command(folder, "--output", tmp_path / "t.json")
    assert made.exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    for name in ("t.svg", "t.SVG"):
        refused = command(folder, "--output", tmp_path / name)
        assert refused.exit_code == 2
        assert f"--output is the name of the trace: got {tmp_path}/{name}, a picture, wanted a file" in refused.stderr
    assert command(folder, "--output", tmp_path).stderr.startswith("--output is the name of the trace: got")
    assert command(folder, "--output", "/").exit_code == 2


def test_a_place_that_takes_no_timeline_is_told_with_what_to_do(tmp_path):
    place = tmp_path / "no" / "t.json"
    refused = command(work_dir(tmp_path, SPANS), "--output", place)
    assert refused.exit_code == 2
    what = f"the timeline cannot be written as {place}: got No such file or directory ({place})"
    assert refused.stderr == f"{what}; make room or its folder, or name another file with --output\n"


def test_a_file_that_may_not_be_read_is_told(tmp_path):
    folder = work_dir(tmp_path, SPANS)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    refused = command(folder)
    assert refused.exit_code == 2
    assert f"{folder}/metrics.jsonl cannot be read: got Is a directory" in refused.stderr
