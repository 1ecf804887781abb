"""`rljob timeline WORKDIR`: where the time of a run went, as a file that Perfetto opens, and in words.

Reads what agents and driver leave in a work dir, of a run that has ended or still goes on:

    spans/<pod>.jsonl ──> one track per slot: at each moment the worker whose span comes first in spans.KINDS; and one
                          of its turns, as agents have granted and freed it
    metrics.jsonl     ──> the track of steps          events.jsonl ──> plan switches, restarts, branches

docs/timeline.md defines account and idle share. Not for: live figures (prometheus), what a plan predicts (scheduler).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_worker.spans import KINDS, RANK, TURN, exclusive
from rljob.local import room
from rljob.local.dump import write_atomically

FILE: Final = "timeline.json"
MAX_SPANS: Final = 1_000_000
"""Spans that are read, the newest of each pod: 400 MB of memory while the file is made."""
MAX_EVENTS: Final = 200_000
"""Events of the file: 40 MB, which a browser still opens. Where there would be more, pieces that are shorter than what
a screen shows are joined with their neighbours, more and more until it fits."""
FIRST_GRAIN_S: Final = 1e-4
_STEP_NUMBER: Final = re.compile(r"[0-9]{1,18}")  # str.isdigit() takes ² too, which int() does not
_SLOT: Final = re.compile(r"[^/]*/[0-9]{1,9}/[0-9]{1,9}")
WAITS: Final = frozenset({"wait_turn", "wait_data"})
COLOURS: Final = (
    "rail_response", "rail_animation", "rail_load", "thread_state_running", "cq_build_passed", "vsync_highlight_color",
    "thread_state_iowait", "rail_idle",
)  # fmt: skip
GREY: Final = "grey"
JOB_PROCESS: Final = 1

NUMBER: Final = (int, float)
MAX_NUMBER: Final = 1e15  # a clock's, in seconds, by far: more, NaN and infinity have no place on an axis
Fields = Mapping[str, type | tuple[type, ...]]
STEP: Final[Fields] = {"step": int, "branch": int, "time": NUMBER, "step_s": NUMBER}
EVENT: Final[Fields] = {"time": NUMBER}
SPAN: Final[Fields] = {"slot": str, "worker": str, "kind": str, "step": int, "t0": NUMBER, "t1": NUMBER}
TOTALS: Final[Fields] = {"agent_instrument_s": NUMBER}


def read_lines(path: Path, fields: Callable[[Mapping[str, Any]], Fields]) -> Iterator[dict[str, Any]]:
    """The lines of a .jsonl file; none where there is no file. `fields`: what such a line must have. One being written,
    or that was torn by a crash, is left out; one that is whole and not of a run is named with its number: what a
    timeline makes of the rest would be wrong without a word."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"{path} cannot be read", got=room.told(error, path), next="name a work dir that you may read"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            if wrong := _wrong(found, fields(found)):
                raise UserError(
                    f"{path}, line {number}, is of no run", got=wrong[0], wanted=wrong[1],
                    next="take that line out, or name the work dir of a run of this version",
                )  # fmt: skip
            yield found


def _wrong(line: Mapping[str, Any], fields: Fields) -> tuple[str, str] | None:
    """(got, wanted) of the first field that is not as it must be."""
    for name, kind in fields.items():
        value = line.get(name)
        if isinstance(value, kind) and (not isinstance(value, NUMBER) or abs(value) <= MAX_NUMBER):
            continue
        got = f"no {name!r}" if name not in line else f"{name} {value!r:.60}"
        return got, ("a word" if kind is str else "a number") + f" as {name!r}"
    return None


@dataclass(frozen=True, slots=True)
class SpanPiece:
    """What one span is, or a part of it."""

    t0: float
    t1: float
    worker: str
    kind: str

    @property
    def role(self) -> str:
        return self.worker.partition("/")[0]


@dataclass(frozen=True, slots=True)
class StepTime:
    number: int
    branch: int
    t0: float
    t1: float


@dataclass(slots=True)
class Record:
    """Everything of a work dir that a timeline is made of."""

    slots: dict[str, list[SpanPiece]] = field(default_factory=dict)
    """By slot: pool/ordinal/index."""
    turns: dict[str, list[SpanPiece]] = field(default_factory=dict)
    """By slot, where it changes hands: whose it was, from the grant until it was free again, with work in it or not."""
    steps: list[StepTime] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    instrument_s: dict[str, float] = field(default_factory=dict)
    """CPU that recording took, by worker, of the steps whose account is known; by role in a job of many workers."""
    accounted_s: float = 0.0
    """The time of these steps."""
    agent_instrument_s: float = 0.0
    """All agents' together, over the whole run."""
    lost_bytes: int = 0
    """Lost from span files, as the disk was full."""
    left_out: int = 0
    """Spans that were not read, or that no recorder had room for."""

    @property
    def begin(self) -> float:
        return self.steps[0].t0 if self.steps else min((p[0].t0 for p in self.slots.values() if p), default=0.0)

    @property
    def end(self) -> float:
        return self.steps[-1].t1 if self.steps else max((p[-1].t1 for p in self.slots.values() if p), default=0.0)


def steps_of(text: str) -> tuple[int | None, int | None]:
    """The bounds that --step says.

    >>> steps_of("3:5"), steps_of("7"), steps_of(":4"), steps_of("")
    ((3, 5), (7, 7), (None, 4), (None, None))
    """
    begin, colon, end = text.partition(":")
    if not all(part == "" or _STEP_NUMBER.fullmatch(part) for part in (begin, end)):
        raise UserError("--step cannot be read", got=repr(text), wanted="A:B", next="write for example --step 3:5")
    first = int(begin) if begin else None
    return first, (int(end) if end else None) if colon else first


# --- reading ----------------------------------------------------------------------------------------------------------
def read(work_dir: Path, *, first: int | None = None, last: int | None = None, max_spans: int = MAX_SPANS) -> Record:
    """Raises UserError where there is nothing to read. `first` and `last`: of steps, both included."""
    folder = work_dir / "spans"
    files = sorted(path for path in folder.glob("*.jsonl*")) if folder.is_dir() else []
    if not files:
        raise UserError(
            f"{work_dir} has no spans", wanted="the work dir of a run", next="name the folder that rljob run printed"
        )
    record = Record()
    lines = list(read_lines(work_dir / "metrics.jsonl", lambda _: STEP))
    record.steps = [step for step in _steps(lines) if _within(step.number, first, last)]
    _instrument(record, lines)
    if (first is not None or last is not None) and not record.steps:
        raise UserError(f"{work_dir} has no such step", got=f"{first or ''}:{last or ''}", next="look at metrics.jsonl")
    whole = first is None and last is None
    pods: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(files, reverse=True):  # NAME.1 is the older half
        pods[path.name.partition(".jsonl")[0]].append(path)
    for paths in pods.values():
        _spans(record, paths, whole=whole, limit=max_spans // len(pods))
    for pieces in (*record.slots.values(), *record.turns.values()):
        pieces.sort(key=lambda piece: piece.t0)
    events = read_lines(work_dir / "events.jsonl", lambda _: EVENT)
    record.events = [event for event in events if whole or record.begin <= event["time"] <= record.end]
    return record


def _within(number: int, first: int | None, last: int | None) -> bool:
    return (first is None or number >= first) and (last is None or number <= last)


def _instrument(record: Record, lines: Iterable[Mapping[str, Any]]) -> None:
    """A line has the accounts of the step before."""
    seconds = {(step.branch, step.number): step.t1 - step.t0 for step in record.steps}
    for line in lines:
        accounts = _mapping(_mapping(line.get("previous")).get("account"))
        lasted = seconds.get((line["branch"], line["step"] - 1))
        if accounts and lasted is not None:
            record.accounted_s += lasted
            for worker, account in accounts.items():
                known = record.instrument_s.get(worker, 0.0)
                record.instrument_s[worker] = known + _number(_mapping(account).get("instrument_s"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any, default: float = 0.0) -> float:
    return value if isinstance(value, NUMBER) else default


def _steps(lines: Iterable[Mapping[str, Any]]) -> Iterator[StepTime]:
    end = float("-inf")
    for line in lines:
        begin = max(end, line["time"] - line["step_s"])  # steps that are worked on at once still commit one by one
        end = max(begin, line["time"])
        yield StepTime(line["step"], line["branch"], begin, end)


def _spans(record: Record, paths: Sequence[Path], *, whole: bool, limit: int) -> None:
    kept: deque[dict[str, Any]] = deque(maxlen=limit)
    seen = 0
    agent_s, lost = 0.0, 0
    for path in paths:
        for line in read_lines(path, lambda line: TOTALS if "agent_instrument_s" in line else SPAN):
            if "agent_instrument_s" in line:
                agent_s = line["agent_instrument_s"]  # a running total of the pod
                lost = int(_number(line.get("lost_bytes"), lost))  # also one
                record.left_out += int(_number(line.get("dropped")))
                continue
            seen += 1
            kept.append(line)
    record.agent_instrument_s += agent_s
    record.lost_bytes += lost
    record.left_out += seen - len(kept)
    for line in kept:
        piece = SpanPiece(line["t0"], line["t1"], line["worker"], line["kind"])
        for part in [piece] if whole else within([piece], record.begin, record.end):
            for slot in str(line["slot"]).split(","):
                if slot not in record.slots and not _SLOT.fullmatch(slot):
                    raise UserError(f"{paths[0]} has a span of no slot", got=repr(slot), wanted="POOL/ORDINAL/INDEX")
                pieces = record.slots.setdefault(slot, [])
                (record.turns.setdefault(slot, []) if part.kind == TURN else pieces).append(part)


# --- accounts ---------------------------------------------------------------------------------------------------------
def once(pieces: Iterable[SpanPiece]) -> list[SpanPiece]:
    """The same time with each moment once: work before waiting, by KINDS, then by worker. In order of time."""
    pieces = list(pieces)
    order = sorted({_entry(p) for p in pieces})
    rank_of = {entry: rank for rank, entry in enumerate(order)}
    ranked = [(p.t0, p.t1, rank_of[_entry(p)]) for p in pieces]
    return [SpanPiece(t0, t0 + seconds, *order[rank][1:]) for t0, seconds, rank in exclusive(ranked)]


def _entry(piece: SpanPiece) -> tuple[int, str, str]:
    return (RANK.get(piece.kind, RANK["other"]), piece.worker, piece.kind)  # type: ignore[call-overload]


def accounts(record: Record) -> dict[str, dict[str, float]]:
    """By worker: seconds of each kind between the first step's begin and the last one's end; they add up to that."""
    by_worker: dict[str, set[SpanPiece]] = defaultdict(set)  # a worker on two slots has its spans in both
    for pieces in record.slots.values():
        for piece in within(pieces, record.begin, record.end):
            by_worker[piece.worker].add(piece)
    found: dict[str, dict[str, float]] = {}
    for worker, mine in sorted(by_worker.items(), key=lambda entry: _natural(entry[0])):
        seconds = dict.fromkeys(map(str, KINDS), 0.0)
        for piece in once(mine):
            seconds[piece.kind] = seconds.get(piece.kind, 0.0) + piece.t1 - piece.t0
        seconds["other"] += max(0.0, record.end - record.begin - sum(seconds.values()))
        found[worker] = seconds
    return found


def within(pieces: Iterable[SpanPiece], begin: float, end: float) -> Iterator[SpanPiece]:
    """What of them lies in that time."""
    for piece in pieces:
        if piece.t1 > begin and piece.t0 < end:
            yield SpanPiece(max(piece.t0, begin), min(piece.t1, end), piece.worker, piece.kind)


def idle_shares(record: Record) -> dict[str, float]:
    """By slot: the share of the time between the first step's begin and the last one's end in which no worker on it had
    a span but waits."""
    window = record.end - record.begin
    found = {}
    for slot, pieces in sorted(record.slots.items(), key=lambda entry: _natural(entry[0])):
        work = [(p.t0, p.t1, 0) for p in within(pieces, record.begin, record.end) if p.kind not in WAITS]
        busy = sum(seconds for _, seconds, _ in exclusive(work))
        found[slot] = 1.0 - busy / window if window > 0 else 0.0
    return found


def _natural(name: str) -> tuple[str, ...]:
    return tuple(part.zfill(6) if part.isdigit() else part for part in name.split("/"))


# --- the file ---------------------------------------------------------------------------------------------------------
def trace(record: Record) -> dict[str, Any]:
    """In the JSON format of Chrome's trace events; times in microseconds from the first event on."""
    tracks, turns = {slot: once(pieces) for slot, pieces in record.slots.items()}, record.turns
    starts = [pieces[0].t0 for pieces in (*tracks.values(), *turns.values()) if pieces]
    origin = min([record.begin, *starts])
    grain, room = 0.0, max(1, MAX_EVENTS - len(record.steps) - len(record.events))
    while sum(map(len, (*tracks.values(), *turns.values()))) > room:
        grain = grain * 2 or FIRST_GRAIN_S
        tracks = {slot: coarser(pieces, grain) for slot, pieces in tracks.items()}
        turns = {slot: coarser(pieces, grain) for slot, pieces in turns.items()}
    colours = _colours(record)
    events = [*_names(tracks, turns), *_job_events(record, origin)]
    for (pid, tid), slot in _places(tracks).items():
        for piece in tracks[slot]:
            name = piece.role if piece.kind == "compute" else f"{piece.role} {piece.kind}"
            colour = GREY if piece.kind in WAITS else colours[piece.role]
            args = {"worker": piece.worker, "kind": piece.kind}
            events.append(_slice(name, piece, pid=pid, tid=tid, origin=origin, cname=colour, args=args))
        for turn in turns.get(slot, ()):
            name, args = f"turn of {turn.role}", {"worker": turn.worker}
            events.append(_slice(name, turn, pid=pid, tid=tid + 1, origin=origin, cname=colours[turn.role], args=args))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"origin": origin, "joined_below_s": grain, "spans_left_out": record.left_out},
    }


def coarser(pieces: Sequence[SpanPiece], grain: float) -> list[SpanPiece]:
    """With every piece shorter than `grain` given to the one before it."""
    found: list[SpanPiece] = []
    for piece in pieces:
        before = found[-1] if found else None
        near = before is not None and piece.t0 - before.t1 < grain
        same = before is not None and (before.worker, before.kind) == (piece.worker, piece.kind)
        if before is not None and near and (same or piece.t1 - piece.t0 < grain):
            found[-1] = SpanPiece(before.t0, piece.t1, before.worker, before.kind)
        else:
            found.append(piece)
    return found


def _places(tracks: Iterable[str]) -> dict[tuple[int, int], str]:
    """(pid, tid) of each slot: a process per pod, a thread per slot, and the next number for its turns."""
    found: dict[tuple[int, int], str] = {}
    pods: dict[str, int] = {}
    for slot in sorted(tracks, key=_natural):
        pod, _, index = slot.rpartition("/")
        pid = pods.setdefault(pod, JOB_PROCESS + 1 + len(pods))
        found[(pid, 1 + 2 * int(index))] = slot
    return found


def _names(tracks: Iterable[str], shared: Container[str]) -> Iterator[dict[str, Any]]:
    def named(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    yield named("process_name", "job", JOB_PROCESS)
    yield named("thread_name", "steps", JOB_PROCESS, 1)
    yield named("thread_name", "events", JOB_PROCESS, 2)
    places = _places(tracks)
    for pid, pod in {pid: slot.rpartition("/")[0] for (pid, _), slot in places.items()}.items():
        yield named("process_name", f"pod {pod}", pid)
    for (pid, tid), slot in places.items():
        yield named("thread_name", f"slot {slot}", pid, tid)
        if slot in shared:
            yield named("thread_name", f"turns of {slot}", pid, tid + 1)


def _colours(record: Record) -> dict[str, str]:
    """By role, in the order of their names: the same in every timeline of a job."""
    roles = sorted({p.role for pieces in (*record.slots.values(), *record.turns.values()) for p in pieces})
    return {role: COLOURS[number % len(COLOURS)] for number, role in enumerate(roles)}


def _job_events(record: Record, origin: float) -> Iterator[dict[str, Any]]:
    for step in record.steps:
        yield {
            "ph": "X", "name": f"step {step.number}", "cat": "step", "pid": JOB_PROCESS, "tid": 1,
            "ts": _micros(step.t0 - origin), "dur": _micros(step.t1 - origin) - _micros(step.t0 - origin),
            "args": {"branch": step.branch},
        }  # fmt: skip
    for event in record.events:
        everywhere = str(event.get("event", "")).startswith("plan")
        yield {
            "ph": "i", "name": str(event.get("event", "")), "cat": "event", "pid": JOB_PROCESS, "tid": 2,
            "ts": _micros(event["time"] - origin), "s": "g" if everywhere else "t",
            "args": {"message": str(event.get("message", ""))[:500]},
        }  # fmt: skip


def _slice(
    name: str, piece: SpanPiece, *, pid: int, tid: int, origin: float, cname: str, args: Mapping[str, Any]
) -> dict[str, Any]:
    begin = _micros(piece.t0 - origin)
    return {
        "ph": "X", "name": name, "cat": piece.kind, "pid": pid, "tid": tid, "ts": begin,
        "dur": _micros(piece.t1 - origin) - begin, "cname": cname, "args": args,
    }  # fmt: skip


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def write(record: Record, path: Path) -> int:
    """Bytes written. The old file stays until the new one is whole."""
    text = json.dumps(trace(record), separators=(",", ":"))
    put(path, text)
    return len(text)


def put(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        place = OSError(error.errno, error.strerror, str(path))  # and not the name that it has until it is whole
        raise UserError(
            f"the timeline cannot be written as {path}", got=room.told(place, path),
            next="make room or its folder, or name another file with --output",
        ) from error  # fmt: skip


def pair(output: Path) -> tuple[Path, Path]:
    """The trace, and the picture beside it."""
    if not output.name or output.is_dir() or output.suffix.lower() == ".svg":
        raise UserError(
            "--output is the name of the trace", got=f"{output}, " + ("a folder" if output.is_dir() else "a picture"),
            wanted="a file such as t.json, beside which t.svg is made", next="write for example --output t.json",
        )  # fmt: skip
    return output, output.with_suffix(".svg")


# --- words ------------------------------------------------------------------------------------------------------------
def summary(record: Record) -> list[str]:
    """Lines for a person."""
    window = record.end - record.begin
    count = len(record.steps)
    lines = [f"{count} steps in {window:.2f} s, {window / count if count else 0:.4f} s each"]
    shown = [str(kind) for kind in KINDS]
    lines.append("share of the time in %".ljust(24) + "".join(kind.rjust(10) for kind in shown))
    for worker, seconds in accounts(record).items():
        cells = "".join(f"{100 * seconds.get(kind, 0.0) / window if window else 0:10.1f}" for kind in shown)
        lines.append(worker.ljust(24) + cells)
    lines.append("idle share of each slot in %")
    lines += [f"{slot.ljust(24)}{100 * share:10.1f}" for slot, share in idle_shares(record).items()]
    lines.append(f"plans put in force: {len(plans(record))}")
    lines += _cost(record)
    if record.lost_bytes:
        lines.append(f"{record.lost_bytes / 1e6:.1f} MB of spans are missing: the disk was full")
    if record.left_out:
        lines.append(f"{record.left_out} spans are missing: there was no room for them, or only the newest were read")
    return lines


def plans(record: Record) -> list[int]:
    """Revisions in the order in which they came into force. A driver that begins anew says which one is, and what it
    has to finish is said twice."""
    told = [event.get("revision", -1) for event in record.events if event.get("event") == "plan"]
    return [revision for revision, before in zip(told, [None, *told], strict=False) if revision != before]


def _cost(record: Record) -> Iterator[str]:
    """The cost of a worker on the mean, and of the one that has most. In a job of many, whose accounts are added up by
    role, it is the mean of the role that has most."""
    names = {piece.worker for pieces in record.slots.values() for piece in pieces}
    of_role = Counter(name.partition("/")[0] for name in names)
    count = {key: 1 if "/" in key else max(1, of_role[key]) for key in record.instrument_s}
    if record.accounted_s <= 0:
        return
    mean = sum(record.instrument_s.values()) / sum(count.values())
    most, who = max((seconds / count[key], key) for key, seconds in record.instrument_s.items())
    whose = who if "/" in who else f"the mean of {count[who]} workers of {who}"
    yield (
        f"recording took {100 * mean / record.accounted_s:.2f}% of the steps' time in CPU of a worker, at most "
        f"{100 * most / record.accounted_s:.2f}% ({whose}); {record.agent_instrument_s:.3f} s of all agents"
    )
