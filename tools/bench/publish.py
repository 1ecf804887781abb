"""Results that docs quote: `python -m tools.bench NAME --publish` copies build/bench/NAME.json to docs/bench/ and
writes its table into docs/bench/NAME.md, between the two comments that mark it. Nobody types a figure into a document.

A test compares each page's table with the JSON beside it (tests/shipped/test_bench_docs.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.harness import ROOT, BenchError, missed
from tools.bench.report import UNCOMMITTED, number

DOCS = ROOT / "docs" / "bench"
BEGIN, END = "<!-- figures: do not edit, see tools/bench/publish.py -->", "<!-- end of figures -->"
HEADER = ("row", "value", "lowest to highest", "runs", "bar", "", "CPUs idle before", "commit")


def publish(name: str, *, source: Path, docs: Path = DOCS) -> Path:
    """The page, which must exist: a table without words about how it was measured says little."""
    page = docs / f"{name}.md"
    if not page.is_file():
        raise BenchError(f"{page} is not there; write it, with a line {BEGIN!r} and a line {END!r} around its table")
    text = source.read_text(encoding="utf-8")
    _refuse_what_nobody_has(json.loads(text), docs / f"{name}.json")
    (docs / f"{name}.json").write_text(text, encoding="utf-8")
    page.write_text(with_figures(page.read_text(encoding="utf-8"), json.loads(text)), encoding="utf-8")
    return page


def _refuse_what_nobody_has(result: dict[str, Any], published: Path) -> None:
    """A row of a tree that was not committed can be measured again by nobody."""
    known = json.loads(published.read_text(encoding="utf-8"))["rows"] if published.is_file() else []
    if rows := [row["row"] for row in result["rows"] if row["commit"].endswith(UNCOMMITTED) and row not in known]:
        raise BenchError(f"rows of a tree with uncommitted changes: {', '.join(rows)}; commit, and measure them again")


def with_figures(page: str, result: dict[str, Any]) -> str:
    """The page with the table of this result."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError(f"a page of docs/bench has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{figures(result)}\n\n{END}{after}"


def figures(result: dict[str, Any]) -> str:
    """A sentence about the machine and the table, bars missed last."""
    machine = result["machine"]
    said = (
        f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}."
    )
    lines = [HEADER, ("---",) * len(HEADER), *(_cells(row) for row in sorted(result["rows"], key=missed))]
    return said + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: dict[str, Any]) -> Sequence[str]:
    sign = "≥" if row["better"] == "higher" else "≤"
    bar = "" if row["bar"] is None else f"{sign} {number(row['bar'])}"
    verdict = "" if row["bar"] is None else ("**missed**" if missed(row) else "met")
    return (
        f"`{row['row']}`", f"{number(row['value'])} {row['unit']}", f"{number(row['min'])} to {number(row['max'])}",
        str(row["runs"]), bar, verdict, f"{row['idle_before']:.0%}", row["commit"],
    )  # fmt: skip
