"""Figures in docs/bench are those of the JSON beside them."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from tools.bench import publish, report
from tools.bench.harness import BenchError

RESULTS = sorted(publish.DOCS.glob("*.json"))


def test_there_are_results():
    assert RESULTS


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_page_shows_the_figures_of_its_result(result: Path):
    text = result.with_suffix(".md").read_text(encoding="utf-8")
    wanted = publish.with_figures(text, json.loads(result.read_text(encoding="utf-8")))
    assert text == wanted, f"run `.venv/bin/python -m tools.bench {result.stem} --publish`"


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_row_is_published_with_the_bar_that_the_benchmark_has(result: Path):
    """Else a page says "met" of a bar that was raised since."""
    rows = {row.name: row for row in import_module(f"tools.bench.{result.stem}").rows()}
    for published in json.loads(result.read_text(encoding="utf-8"))["rows"]:
        own = rows[published["row"]]
        bar = own.bar if own.bar_ratio is None else own.bar_ratio * published["reference"]["value"]
        assert published["bar"] == bar, published["row"]


def row(**fields):
    known = {
        "row": "a", "value": 12.0, "unit": "s", "min": 11.0, "max": 13.0, "runs": 5, "better": "lower", "bar": 10,
        "reference": None, "ratio": None, "idle_before": 0.5, "commit": "c0ffee",
    }  # fmt: skip
    return known | fields


MACHINE = {"cpus": 2, "cpu": "x", "memory_gib": 24.0, "system": "Linux 6", "python": "3.11.7", "gpus": []}


def test_publishing_copies_the_result_and_writes_its_table_with_missed_bars_last(tmp_path: Path):
    source = tmp_path / "result.json"
    source.write_text(json.dumps({"machine": MACHINE, "rows": [row(), row(row="b", value=9.0)]}))
    page = tmp_path / "x.md"
    page.write_text(f"# X\n\n{publish.BEGIN}\nold\n{publish.END}\n\nwords\n")
    publish.publish("x", source=source, docs=tmp_path)
    lines = page.read_text().splitlines()
    assert "| `b` | 9 s | 11 to 13 | 5 | ≤ 10 | met | 50% | c0ffee |" in lines
    assert [line for line in lines if line.startswith("| `")][-1].startswith("| `a` | 12 s")
    assert "old" not in lines
    assert lines[-1] == "words"
    assert json.loads((tmp_path / "x.json").read_text())["machine"] == MACHINE


def test_rows_of_a_tree_that_nobody_has_are_refused_by_name_unless_they_stand_there(tmp_path: Path):
    source, uncommitted = tmp_path / "result.json", "c0ffee" + report.UNCOMMITTED
    (tmp_path / "x.md").write_text(f"# X\n\n{publish.BEGIN}\n{publish.END}\n")
    source.write_text(json.dumps({"machine": MACHINE, "rows": [row(commit=uncommitted), row(row="b")]}))
    with pytest.raises(BenchError, match="uncommitted changes: a; commit"):
        publish.publish("x", source=source, docs=tmp_path)
    (tmp_path / "x.json").write_text(source.read_text())  # from before there was this rule
    publish.publish("x", source=source, docs=tmp_path)
    assert uncommitted in (tmp_path / "x.md").read_text()


def test_a_page_without_a_place_for_figures_is_refused(tmp_path: Path):
    with pytest.raises(BenchError, match="is not there; write it"):
        publish.publish("x", source=tmp_path / "r.json", docs=tmp_path)
    with pytest.raises(BenchError, match="has no lines"):
        publish.with_figures("# X\n", {"machine": MACHINE, "rows": []})
