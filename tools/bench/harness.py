"""Runs rows and makes results of them. It knows no clock, idle detector or file: those are given to it."""

import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent.parent
LEAST_RUNS = 5

Values = float | Mapping[str, float]
Measure = Callable[[], Values]


class BenchError(Exception):
    """A benchmark cannot be run as it is written, or a run of it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    name: str
    """What it is, with its version: it goes into the tables."""
    measure: Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    unit: str
    better: Literal["higher", "lower"]
    subject: Measure
    bar: float | None = None
    bar_ratio: float | None = None
    """A bar as a multiple of the reference: 1.2 is '20% more than the reference' (0.8 where lower is better)."""
    reference: Reference | None = None
    runs: int | None = None
    """How often, where it is not the benchmark's usual number: 1 for what takes minutes; the JSON says so."""

    def __post_init__(self) -> None:
        if self.bar is not None and self.bar_ratio is not None:
            raise BenchError(f"row {self.name!r} has bar={self.bar} and bar_ratio={self.bar_ratio}; give one of them")
        if self.bar_ratio is not None and self.reference is None:
            raise BenchError(f"row {self.name!r} has bar_ratio={self.bar_ratio} but no reference; add reference=...")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    row: Row
    values: Sequence[float]
    reference_values: Sequence[float]
    idle_before: float
    commit: str

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def reference_value(self) -> float | None:
        return statistics.median(self.reference_values) if self.reference_values else None

    @property
    def bar(self) -> float | None:
        if self.row.bar_ratio is not None and self.reference_value is not None:
            return self.row.bar_ratio * self.reference_value
        return self.row.bar

    def as_json(self) -> dict[str, Any]:
        reference = None
        if self.row.reference is not None:
            reference = {"name": self.row.reference.name, "value": self.reference_value}
        return {
            "row": self.row.name,
            "value": self.value,
            "unit": self.row.unit,
            "min": min(self.values),
            "max": max(self.values),
            "runs": len(self.values),
            "better": self.row.better,
            "bar": self.bar,
            "reference": reference,
            "ratio": self.value / self.reference_value if self.reference_value else None,
            "idle_before": round(self.idle_before, 3),
            "commit": self.commit,
        }


@dataclass(slots=True)
class _Case:
    """Rows that one subject measures together."""

    rows: list[Row]
    values: dict[str, list[float]] = field(default_factory=dict)
    reference_values: dict[str, list[float]] = field(default_factory=dict)
    idle_before: float = 1.0


def run(
    rows: Iterable[Row],
    *,
    runs: int = LEAST_RUNS,
    wait_until_idle: Callable[[], float],
    commit: str,
    say: Callable[[str], None],
    done: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """`done` is told of the results of each subject once they are there: what was measured outlives a later failure."""
    if runs < LEAST_RUNS:
        raise BenchError(f"{runs} runs asked for, but a median needs at least {LEAST_RUNS}; give --runs {LEAST_RUNS}")
    results: list[Result] = []
    for case in _cases(rows):
        names = [row.name for row in case.rows]
        reference = case.rows[0].reference
        times = min((row.runs for row in case.rows if row.runs is not None), default=runs)
        for number in range(1, times + 1):
            turns = [("subject", case.rows[0].subject, case.values)]
            if reference is not None:
                turns.append((f"reference {reference.name}", reference.measure, case.reference_values))
            for who, measure, into in turns:
                case.idle_before = min(case.idle_before, wait_until_idle())
                got = _measure(measure, names=names, who=who)
                for name in names:
                    into.setdefault(name, []).append(got[name])
                say(f"{', '.join(names)}: run {number} of {times}, {who}: {_numbers(got[name] for name in names)}")
        measured = [
            Result(
                row=row,
                values=case.values[row.name],
                reference_values=case.reference_values.get(row.name, []),
                idle_before=case.idle_before,
                commit=commit,
            )
            for row in case.rows
        ]
        results += measured
        done(measured)
    return results


def _cases(rows: Iterable[Row]) -> list[_Case]:
    cases: dict[tuple[int, int | None], _Case] = {}
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            raise BenchError(f"two rows are named {row.name!r}; rename one, names are the key of the JSON")
        seen.add(row.name)
        key = (id(row.subject), id(row.reference.measure) if row.reference else None)
        cases.setdefault(key, _Case([])).rows.append(row)
    return list(cases.values())


def _measure(measure: Measure, *, names: Sequence[str], who: str) -> Mapping[str, float]:
    try:
        got = measure()
    except Exception as err:
        raise BenchError(f"row {', '.join(names)}: the {who} failed: {type(err).__name__}: {err}") from err
    if isinstance(got, Mapping):
        missing = [name for name in names if name not in got]
        if missing:
            raise BenchError(f"the {who} of {', '.join(names)} returned {sorted(got)}, without {', '.join(missing)}")
        return {name: float(got[name]) for name in names}
    if len(names) > 1:
        raise BenchError(f"rows {', '.join(names)} share one {who}, which returned {got}; return row name -> value")
    return {names[0]: float(got)}


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def missed(row: Mapping[str, Any]) -> bool:
    """Whether a row, as it is in the JSON, misses its bar."""
    if row["bar"] is None:
        return False
    return bool(row["value"] < row["bar"] if row["better"] == "higher" else row["value"] > row["bar"])


def command(
    arguments: Sequence[str], *, value: Callable[[str], Values] | None = None, timeout_s: float = 600
) -> Measure:
    """A run is a command from the repository's root: its wall seconds, or value(stdout) of its output."""

    def measure() -> Values:
        started = time.perf_counter()
        done = subprocess.run(
            arguments,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        took_s = time.perf_counter() - started
        if done.returncode != 0:
            raise BenchError(f"{' '.join(arguments)} exited with {done.returncode}: {done.stderr.strip()[-500:]}")
        return took_s if value is None else value(done.stdout)

    return measure
