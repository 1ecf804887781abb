"""What was learnt, for people: a sentence of a row, and docs/learning/reasoning.{json,md,svg}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BEGIN, END = "<!-- rows -->", "<!-- /rows -->"
WIDTH, HEIGHT, EDGE, NAMES = 720, 400, 40, 150
LINE = 14
"""The distance of the names beside the curves, from one to the next."""
COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
Line = Mapping[str, Any]


def sentence(line: Line) -> str:
    """
    >>> sentence({"row": "a", "first": 0.4, "last": 0.951, "wanted": 0.93, "script_last": 0.94, "ok": True, "job_s": 9})
    'a: 0.400 in the first step, 0.951 in the last ones, wanted 0.93, the script 0.940: met (9 s)'
    """
    script = f", the script {line['script_last']:.3f}" if "script_last" in line else ""
    said = "met" if line["ok"] else "MISSED"
    return (
        f"{line['row']}: {line['first']:.3f} in the first step, {line['last']:.3f} in the last ones, "
        f"wanted {line['wanted']}{script}: {said} ({line['job_s']:g} s)"
    )


def table(lines: Sequence[Line]) -> str:
    head = "| row | first step | last steps | script | wanted | | job, s |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(
        f"| {line['row']} | {line['first']:.3f} | {line['last']:.3f} | "
        f"{format(line['script_last'], '.3f') if 'script_last' in line else ''} | {line['wanted']} | "
        f"{'met' if line['ok'] else 'missed'} | {line['job_s']:.0f} |\n"
        for line in lines
    )


def picture(lines: Sequence[Line]) -> str:
    """Rewards by step: jobs as lines, scripts dashed."""
    longest = max(len(line["curve"]) for line in lines)

    def path(curve: Sequence[float], colour: str, dashes: str) -> str:
        step = (WIDTH - 2 * EDGE) / max(1, longest - 1)
        places = [(EDGE + n * step, HEIGHT - EDGE - y * (HEIGHT - 2 * EDGE)) for n, y in enumerate(curve)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5"{dashes} points="{points}"/>'

    parts = []
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(path(line["curve"], colour, ""))
        if "script" in line:
            parts.append(path(line["script"], colour, ' stroke-dasharray="4 4"'))
        at = EDGE + LINE * number
        parts.append(f'<text x="{WIDTH - EDGE + 12}" y="{at}" font-size="11" fill="{colour}">{line["row"]}</text>')
    for value in (0.0, 0.5, 1.0):
        y = HEIGHT - EDGE - value * (HEIGHT - 2 * EDGE)
        parts.append(f'<text x="4" y="{y:.0f}" font-size="12">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 12}" font-size="12">step {longest}</text>')
    inner = "\n".join(parts)
    tall = max(HEIGHT, 2 * EDGE + LINE * len(lines))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + NAMES} {tall}">\n{inner}\n</svg>\n'


def publish(lines: Sequence[Line], *, at: Path, order: Sequence[str]) -> None:
    """`lines` beside what the page has of other rows, in this order; rows that are not in it are left out."""
    at.mkdir(parents=True, exist_ok=True)
    path = at / "reasoning.json"
    known = {line["row"]: line for line in (json.loads(path.read_text(encoding="utf-8")) if path.exists() else [])}
    known |= {line["row"]: line for line in lines}
    lines = [known[name] for name in order if name in known]
    said = ",\n".join(json.dumps(line) for line in lines)
    path.write_text(f"[\n{said}\n]\n", encoding="utf-8")
    (at / "reasoning.svg").write_text(picture(lines), encoding="utf-8")
    page = (at / "reasoning.md").read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    (at / "reasoning.md").write_text(f"{before}{BEGIN}\n{table(lines)}{END}{after}", encoding="utf-8")
