"""`rljob graph WHERE [--svg FILE]`: who fed whom in a run, with how much, and how long each role was at work. From the
newest profile of its work dir, or the newest that is kept of a job of the cluster, so it is what really went, and not
what the flow declared.

    20 steps of revision 2, 0.144 s each
    env       3 workers  compute 0.089 s a step, 62% of it
    rollout   1 worker   compute 0.0063 s a step, 4% of it
    driver --segments--> env               3 units a step, 24 B
    env <--actions--> rollout              48 questions a step, 2.0 KB; answers 2.3 KB
    env --trajectories--> actor            3 units a step, 2.3 KB
    actor ==weights==> rollout             18 KB a step

For: app.py. Pure but for `measured`, which reads the profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from rlinf_api.errors import UserError
from rlinf_api.profile import ChannelProfile, Profile
from rljob.plan import Where
from rljob.reasons import measured

DRIVER: Final = "driver"
BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 170, 62, 210, 70, 24
UNITS: Final = ("B", "KB", "MB", "GB", "TB")
LEGEND_W: Final = 620
INK, GREY, BLUE, GREEN = "#222", "#8a8a8a", "#0072b2", "#009e73"
COLOURS: Final = {"Queue": INK, "Cycle": BLUE, "Weights": GREEN}
BACK: Final = "<!-- back -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    producer: str
    consumer: str
    name: str
    mode: str
    """Queue, Weights, or Cycle: the producer asks, the consumer answers."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRole:
    name: str
    workers: int
    compute_s: float
    share: float
    """The share of a step that one of its workers computed."""


def text(where: Where) -> str:
    return "\n".join(lines(measured(where)[-1]))


def write(where: Where, file: Path) -> None:
    """UserError where the place takes no file."""
    drawn = draw(measured(where)[-1])
    try:
        file.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written", got=error.strerror or str(error), next="give another --svg FILE"
        ) from error


# --- what a profile says ----------------------------------------------------------------------------------------------
def nodes(profile: Profile) -> dict[str, GraphRole]:
    """Roles in the order of the profile; of a role in several pools the mean of a worker."""
    found: dict[str, GraphRole] = {}
    for name in dict.fromkeys(role.name for role in profile.roles):
        parts = [role for role in profile.roles if role.name == name]
        workers = sum(part.workers for part in parts)
        took = sum(part.workers * part.seconds["compute"].value for part in parts if "compute" in part.seconds)
        share = took / workers / profile.step_seconds.value if profile.step_seconds.value else 0.0
        found[name] = GraphRole(name=name, workers=workers, compute_s=took / workers, share=share)
    return found


def edges(profile: Profile) -> list[GraphEdge]:
    """Queues as units pass them, then cycles, then weights. A cycle is one edge, from who asked first in the profile's
    order; what goes to the flow itself ends at the driver."""
    found, asked = list[GraphEdge](), dict[str, ChannelProfile]()
    for channel in profile.channels:
        ends = channel.producer or DRIVER, channel.consumer or DRIVER
        if channel.mode != "Cycle":
            label = f"{_count(channel.units.value, 'unit')} a step, {amount(channel.bytes.value)}"
            if channel.mode == "Weights":
                label = f"{amount(channel.bytes.value)} a step"
            found.append(
                GraphEdge(producer=ends[0], consumer=ends[1], name=channel.name, mode=channel.mode, label=label)
            )
        elif (question := asked.pop(channel.name, None)) is None:
            asked[channel.name] = channel
        else:
            label = f"{_count(question.units.value, 'question')} a step, {amount(question.bytes.value)}; "
            label += f"answers {amount(channel.bytes.value)}"
            ends = question.producer, question.consumer
            found.append(GraphEdge(producer=ends[0], consumer=ends[1], name=channel.name, mode="Cycle", label=label))
    return sorted(found, key=lambda edge: ("Queue", "Cycle", "Weights").index(edge.mode))


def _count(number: float, noun: str) -> str:
    return f"{number:.4g} {noun}{'' if number == 1 else 's'}"


def amount(size: float) -> str:
    """
    >>> amount(24), amount(2016), amount(15e9)
    ('24 B', '2.02 KB', '15 GB')
    """
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"


# --- as text ----------------------------------------------------------------------------------------------------------
def lines(profile: Profile) -> Iterator[str]:
    yield f"{profile.steps} steps of revision {profile.revision}, {profile.step_seconds.value:.4g} s each"
    roles, arrows = nodes(profile), edges(profile)
    width = max(map(len, roles))
    for node in roles.values():
        workers = f"{node.workers} worker{'s' if node.workers > 1 else ''}"
        yield f"{node.name:{width}}  {workers:10}  compute {node.compute_s:.4g} s a step, {node.share:.0%} of it"
    said = [_arrow(edge) for edge in arrows]
    width = max(map(len, said), default=0)
    for edge, arrow in zip(arrows, said, strict=True):
        yield f"{arrow:{width}}  {edge.label}"


def _arrow(edge: GraphEdge) -> str:
    left, right = {"Queue": ("--", "-->"), "Cycle": ("<--", "-->"), "Weights": ("==", "==>")}[edge.mode]
    return f"{edge.producer} {left}{edge.name}{right} {edge.consumer}"


# --- as a picture -----------------------------------------------------------------------------------------------------
def draw(profile: Profile) -> str:
    """Columns from left to right as units pass; who answers in a cycle stands below who asks; weights go back below."""
    roles, arrows = nodes(profile), edges(profile)
    at = places([DRIVER, *roles], arrows)
    width = 2 * MARGIN + max(x for x, _ in at.values()) + BOX_W
    under = max(y for _, y in at.values()) + BOX_H
    body: list[str] = []
    for edge in arrows:
        path = _path(edge, at, under=under + 16)
        if path.endswith(BACK):
            under += 12
        body.append(path.removesuffix(BACK))
    body += [part for name in at for part in _box(name, roles.get(name), at[name])]
    for number, edge in enumerate(arrows):
        body += _legend(edge, under + 40 + 20 * number)
    height = under + 40 + 20 * len(arrows)
    width = max(width, LEGEND_W)
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for name, colour in COLOURS.items()
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">',
            f'<defs>{heads}</defs><rect width="{width}" height="{height}" fill="white"/>', *body, "</svg>\n",
        ]
    )  # fmt: skip


def places(names: Sequence[str], arrows: Sequence[GraphEdge]) -> dict[str, tuple[int, int]]:
    """Left upper corners. A column behind the last one that feeds it; who only answers, in the column of its asker."""
    feeds = [(e.producer, e.consumer) for e in arrows if e.mode == "Queue" and e.consumer != DRIVER]
    column = dict.fromkeys(names, 0)
    for _ in names:  # as many rounds as a path may be long
        for producer, consumer in feeds:
            column[consumer] = max(column[consumer], min(len(names), column[producer] + 1))
    fed = {consumer for _, consumer in feeds}
    for edge in arrows:
        if edge.mode == "Cycle" and edge.consumer not in fed:
            column[edge.consumer] = column[edge.producer]
    rows: dict[int, int] = {}
    found = {}
    for name in names:
        row = rows.get(column[name], 0)
        rows[column[name]] = row + 1
        found[name] = MARGIN + column[name] * (BOX_W + GAP_X), MARGIN + row * (BOX_H + GAP_Y)
    return found


def _box(name: str, node: GraphRole | None, at: tuple[int, int]) -> list[str]:
    x, y = at
    found = [f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="6" fill="#f6f8fa" stroke="{GREY}"/>']
    said = [name] if node is None else [
        f"{name} x{node.workers}", f"compute {node.compute_s:.3g} s", f"{node.share:.0%} of a step"
    ]  # fmt: skip
    for number, line in enumerate(said):
        weight = ' font-weight="bold"' if not number else ""
        found.append(f'<text x="{x + 10}" y="{y + 18 + 17 * number}"{weight}>{escape(line)}</text>')
    if node is not None:
        full = (BOX_W - 2) * min(1.0, node.share)
        found.append(f'<rect x="{x + 1}" y="{y + BOX_H - 5}" width="{full:.1f}" height="4" fill="{BLUE}"/>')
    return found


def _path(edge: GraphEdge, at: Mapping[str, tuple[int, int]], *, under: int) -> str:
    """Straight where the next column or the box below is meant, else below everything; then it ends with BACK."""
    (x0, y0), (x1, y1) = at[edge.producer], at[edge.consumer]
    look = f'fill="none" stroke="{COLOURS[edge.mode]}" stroke-width="1.5" marker-end="url(#{edge.mode})"'
    look += f' marker-start="url(#{edge.mode})"' if edge.mode == "Cycle" else ""
    is_next, back = edge.mode != "Weights", ""
    if is_next and x1 > x0:
        way = f"M{x0 + BOX_W} {y0 + BOX_H // 2}L{x1} {y1 + BOX_H // 2}"
        middle = (x0 + BOX_W + x1) // 2, (y0 + y1 + BOX_H) // 2 - 6
    elif is_next and x0 == x1 and y0 != y1:
        way = f"M{x0 + BOX_W // 2} {min(y0, y1) + BOX_H}V{max(y0, y1)}"
        middle = x0 + BOX_W // 2 + 8, (y0 + y1 + BOX_H) // 2 + 4
    else:
        way, back = f"M{x0 + BOX_W - 20} {y0 + BOX_H}V{under}H{x1 + 20}V{y1 + BOX_H}", BACK
        middle = (x0 + x1 + BOX_W) // 2, under - 4
    anchor = "start" if x0 == x1 else "middle"
    name = f'<text x="{middle[0]}" y="{middle[1]}" text-anchor="{anchor}">{escape(edge.name)}</text>'
    return f'<path d="{way}" {look}/>{name}{back}'


def _legend(edge: GraphEdge, y: int) -> list[str]:
    said = f"{edge.name}, {edge.producer} to {edge.consumer}: {edge.label}"
    return [
        f'<path d="M{MARGIN} {y - 4}h24" stroke="{COLOURS[edge.mode]}" stroke-width="3"/>',
        f'<text x="{MARGIN + 32}" y="{y}">{escape(said)}</text>',
    ]
