"""The JSON of a benchmark, and the tables made of it: for a terminal and for docs/bench."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from tools.bench.harness import ROOT, Result, missed

UNCOMMITTED: Final = "+changes"
"""The end of a commit's name whose tree had changes beside it."""


def machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def _gpus() -> list[str]:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return []
    return asked.stdout.split("\n")[:-1] if asked.returncode == 0 else []


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changes = UNCOMMITTED if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "none") + changes


def write(path: Path, results: Sequence[Result], *, keep_others: bool) -> list[dict[str, Any]]:
    """keep_others: rows of an earlier run that were not asked for this time stay, each with its own commit."""
    rows = [result.as_json() for result in results]
    if keep_others and path.exists():
        new = {row["row"] for row in rows}
        rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["row"] not in new] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return rows


HEADER = ("row", "value", "min..max", "bar", "reference", "ratio", "")


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Bars missed last, where the eye ends up."""
    return [_cells(row) for row in sorted(rows, key=missed)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    sign = ">=" if row["better"] == "higher" else "<="
    reference = row["reference"]
    return (
        row["row"],
        f"{number(row['value'])} {row['unit']}",
        f"{number(row['min'])}..{number(row['max'])}",
        "" if row["bar"] is None else f"{sign} {number(row['bar'])}",
        "" if reference is None else f"{number(reference['value'])} ({reference['name']})",
        "" if row["ratio"] is None else f"{row['ratio']:.2f}x",
        "MISSED" if missed(row) else "",
    )


def number(value: float) -> str:
    """Four digits that mean something, no exponent where people read it: 0.01234, 12.34, 123,456."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEADER, *cells(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *cells(rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
