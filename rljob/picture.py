"""timeline.svg: where the time of a run went, as one picture that any browser shows and nothing has to be loaded for.

For: `rljob timeline` and the end of `rljob run`. Each slot is a row of columns; a column is a stretch of the time, and
is filled from below with what the slot did in it, by share: work in the role's colour, waits in grey, nothing where
nobody had a span. So a long run is a chart of utilisation, and a few steps (`--step 3:5`) show each piece. Pure but
for `write`.

    steps     | 1 | 2 | 3 |                    every step, or as many as there is room for
    pod cpu/0   slot 0  ▂▂█▂▂█▂▂  89% idle     lines through all: plans that came into force
                turns   ━━━ ━━━                whose turn it was, where roles share the slot
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from rlinf_worker.spans import KINDS
from rljob.timeline import WAITS, Record, SpanPiece, idle_shares, once, put, within

FILE: Final = "timeline.svg"
COLUMNS: Final = 1200
"""Columns of one pixel, in which a row of a small job is drawn."""
MAX_CELLS: Final = 30_000
"""Columns of all slots together: 3 MB of picture. 64 slots have 468 each."""
PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#5f5fc4")
"""Okabe and Ito's, which people see apart who do not see all colours; its yellow is too light on white."""
OPACITY: Final[Mapping[str, float]] = {
    "compute": 1.0, "load": 0.75, "offload": 0.75, "weights": 0.55, "comm": 0.4, "other": 0.25,
}  # fmt: skip
GREYS: Final[Mapping[str, str]] = {"wait_turn": "#bdbdbd", "wait_data": "#e4e4e4"}
LEFT, RIGHT, ROW, GAP, TURN, HEAD = 170, 90, 28, 5, 6, 18
_NOT_IN_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
WIDTH: Final = LEFT + COLUMNS + RIGHT

Look = tuple[str, str]
"""(role, kind); of waits the role is not told apart."""


def draw(record: Record) -> str:
    begin, end = record.begin, max(record.end, record.begin + 1e-6)
    roles = sorted({p.role for pieces in (*record.slots.values(), *record.turns.values()) for p in pieces})
    colours = {role: PALETTE[number % len(PALETTE)] for number, role in enumerate(roles)}
    idle = idle_shares(record)  # in the order of the slots' names
    columns = max(60, min(COLUMNS, MAX_CELLS // max(1, len(idle))))
    body, y, pod = [*_legend(roles, colours), *_steps(record, begin, end)], 92, ""
    top = y - HEAD
    for slot, share in idle.items():
        its_pod, _, index = slot.rpartition("/")
        if its_pod != pod:
            pod, y = its_pod, y + HEAD
            body.append(_text(8, y - 6, f"pod {pod}", weight="bold"))
        track = list(within(once(record.slots[slot]), begin, end))
        body.append(_text(20, y + 18, f"slot {index}  {', '.join(dict.fromkeys(p.role for p in track))}"[:26]))
        body.append(f'<rect x="{LEFT}" y="{y}" width="{COLUMNS}" height="{ROW}" fill="#fafafa" stroke="#ddd"/>')
        body += _row(shares(track, begin, end, columns), colours, y)
        body.append(_text(LEFT + COLUMNS + 8, y + 18, f"{100 * share:.0f}% idle"))
        y += ROW
        for role, x, width in _strip(record.turns.get(slot, ()), begin, end, columns):
            look = f'height="{TURN - 2}" fill="{colours[role]}"'
            body.append(f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" {look}/>')
        y += TURN + GAP
    body += [*_axis(begin, end, y), *_plans(record, begin, end, top, y)]
    height = y + 30
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>\n",
    ])  # fmt: skip


def shares(track: Iterable[SpanPiece], begin: float, end: float, columns: int) -> list[dict[Look, float]]:
    """For each column, which share of it went where. The pieces do not overlap."""
    found: list[dict[Look, float]] = [defaultdict(float) for _ in range(columns)]
    width = (end - begin) / columns
    for piece in track:
        look = ("" if piece.kind in WAITS else piece.role, piece.kind)
        t0, t1 = max(0.0, (piece.t0 - begin) / width), min(float(columns), (piece.t1 - begin) / width)
        column = int(t0)
        while t0 < t1 and column < columns:
            upto = min(t1, column + 1.0)
            found[column][look] += upto - t0
            t0, column = upto, column + 1
    return found


def _strip(turns: Sequence[SpanPiece], begin: float, end: float, columns: int) -> Iterator[tuple[str, float, float]]:
    """(role, x, width) of whose turn it was: each turn, or where there are more than columns, who had most of each."""
    shown = list(within(turns, begin, end))
    if len(shown) <= columns:
        for turn in shown:
            x0, x1 = (LEFT + COLUMNS * (t - begin) / (end - begin) for t in (turn.t0, turn.t1))
            yield turn.role, x0, max(x1 - x0, 0.3)
        return
    width = COLUMNS / columns
    for number, column in enumerate(shares(shown, begin, end, columns)):
        if column:
            (role, _), _ = max(column.items(), key=lambda entry: entry[1])
            yield role, LEFT + number * width, width


def _row(columns: Sequence[Mapping[Look, float]], colours: Mapping[str, str], y: int) -> Iterator[str]:
    """A path per look: neighbours of the same height are one rectangle."""
    order = [(role, str(kind)) for kind in KINDS if kind not in WAITS for role in colours]
    order += [("", str(kind)) for kind in KINDS if kind in WAITS]
    width = COLUMNS / len(columns)
    paths: dict[Look, list[list[float]]] = defaultdict(list)  # x, width, from, height
    for number, column in enumerate(columns):
        below = 0.0
        for look in order:
            height = round(ROW * column.get(look, 0.0), 1)
            if height <= 0.0:
                continue
            x, base = number * width, round(below, 1)
            last = paths[look][-1] if paths[look] else None
            if last is not None and abs(last[0] + last[1] - x) < 1e-6 and last[2:] == [base, height]:
                last[1] += width
            else:
                paths[look].append([x, width, base, height])
            below += height
    for (role, kind), rectangles in paths.items():
        fill = GREYS[kind] if not role else colours[role]
        shape = "".join(
            f"M{LEFT + x:.5g} {y + ROW - base - height:.5g}h{wide:.5g}v{height:g}h-{wide:.5g}z"
            for x, wide, base, height in rectangles
        )
        title = f"<title>{_escaped(f'{role} {kind}'.strip())}</title>"
        yield f'<path fill="{fill}" fill-opacity="{OPACITY.get(kind, 1.0)}" d="{shape}">{title}</path>'


def _legend(roles: Sequence[str], colours: Mapping[str, str]) -> Iterator[str]:
    looks = {kind: ("#444", opacity) for kind, opacity in OPACITY.items()}
    looks |= {kind: (grey, 1.0) for kind, grey in GREYS.items()} | {"no span": ("#fafafa", 1.0)}
    for y, title, shown in (
        (24, "roles", {role: (colours[role], 1.0) for role in roles}),
        (48, "what they did", looks),
    ):
        yield _text(8, y, title)
        x = float(LEFT)
        for name, (fill, opacity) in shown.items():
            style = f'fill="{fill}" fill-opacity="{opacity}" stroke="#bbb" stroke-width="0.5"'
            yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" {style}/>'
            yield _text(x + 19, y, name if title == "roles" else name.replace("_", " "))
            x += 40 + 7.5 * len(name)


def _steps(record: Record, begin: float, end: float) -> Iterator[str]:
    """Every second one shaded; a number where there is room for it."""
    yield _text(8, 79, "steps")
    scale, free = COLUMNS / (end - begin), 0.0
    if len(record.steps) <= COLUMNS // 2:
        for number, step in enumerate(record.steps):
            x, width = LEFT + (step.t0 - begin) * scale, (step.t1 - step.t0) * scale
            shade = "#dfe7ef" if number % 2 else "#c4d3e2"
            yield f'<rect x="{x:.1f}" y="66" width="{width:.1f}" height="18" fill="{shade}"/>'
    for step in record.steps:  # over all of the shades
        x, room = LEFT + (step.t0 - begin) * scale, 7.5 * len(str(step.number)) + 6
        if free <= x < LEFT + COLUMNS - room:
            free = x + room + (0 if (step.t1 - step.t0) * scale >= room else 60)
            yield _text(x + 3, 79, str(step.number))


def _axis(begin: float, end: float, y: int) -> Iterator[str]:
    raw = (end - begin) / 10
    unit = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else next((u for u in (0.1, 0.01, 1e-3, 1e-4) if u <= raw), 1e-7)
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    for number in range(int((end - begin) / step) + 1):
        x = LEFT + COLUMNS * number * step / (end - begin)
        yield f'<path stroke="#999" d="M{x:.1f} {y}v5"/>'
        yield _text(x - 6, y + 18, f"{number * step:.6g} s")


def _plans(record: Record, begin: float, end: float, top: int, bottom: int) -> Iterator[str]:
    for event in record.events:
        if event.get("event") == "plan" and begin <= event["time"] <= end:
            x = LEFT + COLUMNS * (event["time"] - begin) / (end - begin)
            yield f'<path stroke="#d00" stroke-dasharray="4 3" d="M{x:.1f} {top}V{bottom}">'
            yield f"<title>{_escaped(str(event.get('message', '')))}</title></path>"
            yield _text(x + 3, top + 24, f"plan {event.get('revision', '')}", colour="#d00")


def _escaped(text: str) -> str:
    """What XML has no place for, such as the colours of a terminal in a message, is a question mark."""
    return escape(_NOT_IN_XML.sub("?", text))


def _text(x: float, y: float, text: str, *, weight: str = "normal", colour: str = "#222") -> str:
    style = f' font-weight="{weight}"' if weight != "normal" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{style}>{_escaped(text)}</text>'


def write(record: Record, path: Path) -> None:
    """The old file stays until the new one is whole."""
    put(path, draw(record))
