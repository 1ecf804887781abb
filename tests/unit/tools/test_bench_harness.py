"""How rows are run: alternation, bars, what a broken subject says. No clock and no real measurement."""

import json

import pytest

from tools.bench import harness, idle, report
from tools.bench.__main__ import main
from tools.bench.harness import BenchError, Reference, Row


def run(*rows, runs=5, wait=lambda: 1.0):
    return harness.run(rows, runs=runs, wait_until_idle=wait, commit="c0ffee", say=lambda _: None)


def from_list(values):
    remaining = list(values)
    return lambda: remaining.pop(0)


def test_subject_and_reference_run_alternately_each_after_an_idle_wait():
    calls = []

    def note(what, value):
        def measure():
            calls.append(what)
            return value

        return measure

    def wait():
        calls.append("idle")
        return 0.97

    row = Row(
        name="a", unit="s", better="lower", subject=note("s", 1), reference=Reference(name="r", measure=note("r", 2))
    )
    run(row, wait=wait)
    assert calls == ["idle", "s", "idle", "r"] * 5


def test_the_json_has_exactly_the_agreed_shape():
    row = Row(
        name="channel_1kb",
        unit="msg/s",
        better="higher",
        bar=5000,
        subject=from_list([9000, 9120, 9200, 8000, 9500]),
        reference=Reference(name="pipe", measure=from_list([4000, 4560, 5000, 4600, 4100])),
    )
    idle_shares = from_list([0.99, 0.95, 0.98, 0.97, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99])
    [result] = run(row, wait=idle_shares)
    assert result.as_json() == {
        "row": "channel_1kb",
        "value": 9120.0,
        "unit": "msg/s",
        "min": 8000.0,
        "max": 9500.0,
        "runs": 5,
        "better": "higher",
        "bar": 5000,
        "reference": {"name": "pipe", "value": 4560.0},
        "ratio": 2.0,
        "idle_before": 0.95,
        "commit": "c0ffee",
    }


def test_a_bar_as_a_ratio_becomes_a_bar_in_the_rows_unit():
    row = Row(
        name="steps",
        unit="steps/s",
        better="higher",
        bar_ratio=1.2,
        subject=lambda: 110.0,
        reference=Reference(name="SB3", measure=lambda: 100.0),
    )
    [result] = run(row)
    assert result.bar == pytest.approx(120)
    assert harness.missed(result.as_json())


@pytest.mark.parametrize(
    ("better", "value", "is_missed"),
    [("higher", 9, True), ("higher", 10, False), ("lower", 11, True), ("lower", 10, False)],
)
def test_a_bar_is_met_when_the_value_reaches_it(better, value, is_missed):
    assert harness.missed({"better": better, "value": value, "bar": 10}) is is_missed
    assert not harness.missed({"better": better, "value": value, "bar": None})


def test_rows_of_one_subject_are_measured_by_one_call():
    calls = []

    def both():
        calls.append(1)
        return {"a": 1.0, "b": 2.0}

    first, second = run(
        Row(name="a", unit="s", better="lower", subject=both), Row(name="b", unit="s", better="lower", subject=both)
    )
    assert (first.value, second.value, len(calls)) == (1.0, 2.0, 5)


def test_a_failing_subject_ends_the_benchmark_under_its_rows_name():
    def broken():
        raise RuntimeError("port 7000 is taken")

    with pytest.raises(BenchError, match="row a: the subject failed: RuntimeError: port 7000 is taken"):
        run(Row(name="a", unit="s", better="lower", subject=broken))


def test_fewer_than_five_runs_and_doubled_names_are_refused():
    row = Row(name="a", unit="s", better="lower", subject=lambda: 1.0)
    with pytest.raises(BenchError, match="3 runs asked for, but a median needs at least 5"):
        run(row, runs=3)
    with pytest.raises(BenchError, match="two rows are named 'a'; rename one"):
        run(row, row)


def test_a_ratio_without_a_reference_is_refused_where_it_is_written():
    with pytest.raises(BenchError, match="no reference; add reference="):
        Row(name="a", unit="s", better="lower", subject=lambda: 1.0, bar_ratio=1.2)


def test_bars_missed_come_last_in_the_table(tmp_path):
    rows = [
        Row(name="slow", unit="s", better="lower", bar=1, subject=lambda: 2.0),
        Row(name="quick", unit="s", better="lower", bar=1, subject=lambda: 0.5),
    ]
    written = report.write(tmp_path / "x.json", run(*rows), keep_others=False)
    lines = report.text_table(written).splitlines()
    assert lines[1].startswith("quick")
    assert lines[2].startswith("slow")
    assert lines[2].endswith("MISSED")
    assert json.loads((tmp_path / "x.json").read_text())["machine"]["cpus"] >= 1


def test_a_row_run_alone_keeps_the_others_of_the_file(tmp_path):
    path = tmp_path / "x.json"
    report.write(
        path, run(*(Row(name=n, unit="s", better="lower", subject=lambda: 1.0) for n in "ab")), keep_others=False
    )
    report.write(path, run(Row(name="b", unit="s", better="lower", subject=lambda: 3.0)), keep_others=True)
    assert {row["row"]: row["value"] for row in json.loads(path.read_text())["rows"]} == {"a": 1.0, "b": 3.0}


def test_idle_needs_quiet_windows_in_a_row():
    shares = from_list([0.95, 0.50, 0.96, 0.97])
    assert idle.Patience(idle_share=shares, clock=lambda: 0.0, say=lambda _: None).wait() == 0.96


def test_a_machine_that_stays_busy_is_named_once_and_the_run_begins_with_what_was_measured():
    now = iter(range(0, 1000, 10))
    said: list[str] = []
    shares = from_list([0.1] * 20)
    patience = idle.Patience(total_s=60, idle_share=shares, clock=lambda: float(next(now)), say=said.append)
    assert patience.wait() == 0.1
    used = next(now) / 10
    assert patience.wait() == 0.1
    assert next(now) / 10 - used < 4, "the minute is the benchmark's, not each run's"
    assert len(said) == 1
    assert "10% of its CPUs are, 93% wanted" in said[0]


def test_results_are_told_of_as_soon_as_they_are_there():
    told: list[tuple[str, int]] = []

    def broken():
        raise RuntimeError("no cluster")

    rows = [
        Row(name="a", unit="s", better="lower", subject=lambda: 1.0, runs=1),
        Row(name="b", unit="s", better="lower", subject=broken),
    ]
    with pytest.raises(BenchError, match="row b"):
        harness.run(
            rows, wait_until_idle=lambda: 1.0, commit="c0ffee", say=lambda _: None,
            done=lambda results: told.extend((r.row.name, r.as_json()["runs"]) for r in results),
        )  # fmt: skip
    assert told == [("a", 1)]


def test_rows_that_are_not_there_and_sizes_that_are_not_there_are_named(capsys):
    assert main(["foundation", "--row", "nonesuch"]) == 2
    assert "foundation has no row ['nonesuch']; it has ['cartpole_steps_to_475'" in capsys.readouterr().err
    assert main(["foundation", "--small"]) == 2
    assert "tools.bench.foundation has no small size" in capsys.readouterr().err


def test_a_command_row_measures_its_seconds_or_what_it_prints():
    assert harness.command(["true"])() != 0
    assert harness.command(["echo", "42"], value=float)() == 42.0
    with pytest.raises(BenchError, match="exited with 1"):
        harness.command(["false"])()


def test_an_unknown_benchmark_names_those_there_are(capsys):
    assert main(["nonesuch"]) == 2
    assert "there is no benchmark 'nonesuch'; there are" in capsys.readouterr().err
