"""Timed spans of a worker: the one record that timeline, metrics and profile are made of.

A span is {slot, role, worker, kind, step, version, t0, t1}, with how much was worked on (`amount`) or what was waited
for (`on`). The recorder belongs to one worker process and is called from its event loop; it holds at most `capacity`
spans and counts what it had to drop.

Spans of one worker overlap: one task waits while another computes. The *account* of a step has each moment once, under
the kind that comes first in KINDS, so that it adds up to the step; a moment of waiting is of the channel whose wait
ended first, as what came there ended it: docs/timeline.md. The *sums* of a step (sums.py) go with its account.

    add(...), begin(...).end() ──> spans ──flush()──> agent: timeline
                                ├─> open window ──close_step(at)──> SpanAccount ──> driver
                                └─> sums ─────────────take()──────> Summed ───────> driver: profile
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from rlinf_worker.sums import NO_END, NOTHING, Amount, End, Sums

SpanKind = Literal["compute", "load", "offload", "weights", "comm", "other", "wait_turn", "wait_data"]
KINDS: Final[tuple[SpanKind, ...]] = (
    "compute",
    "load",
    "offload",
    "weights",
    "comm",
    "other",
    "wait_turn",
    "wait_data",
)
"""In the order in which a moment that several spans cover is counted: work before waiting."""
TURN: Final = "turn"
"""Kind of what an agent writes among its workers' spans: from the grant of slots that change hands until they are free
again. Of no account: what is done in a turn has spans of its own."""
RANK: Final = {kind: rank for rank, kind in enumerate(KINDS)}
COMPUTE: Final = RANK["compute"]
FIRST_WAIT: Final = RANK["wait_turn"]  # it and all ranks above
ON: Final = RANK["wait_data"]
"""In a window, the rank of a wait for data is this plus the number of its channel's end; and MAX_ENDS more while it
goes on, so that waits that have ended come before it."""
MAX_ENDS: Final = 64  # of channels, that one worker has; of more the waits count as of none
RANKS: Final = ON + 2 * MAX_ENDS
STRETCHES: Final = 256
"""Stretches of work in the account of a step, 4 KB of message: what workers of one slot did is put together from
them."""
CAPACITY: Final = 10_000  # spans between two flushes (0.5 s): 50 us each at most, which no role reaches
KEPT_S: Final = 2.0
"""What is older than this is added up: a step's end is heard of within it. The window of a long step stays small."""
COMPRESS_AT: Final = 2_000  # spans in the open window: adding up takes a millisecond
TOUCHING_S: Final = 1e-6  # two pieces touch: what floating point makes of times since the epoch
_span = tuple.__new__  # half of what the call of a NamedTuple takes
SAMPLE: Final = 32
"""One in so many of `add` and `released` is timed by the CPU clock, whose call of 0.3 us costs as much as the add."""
CLOCK_S: Final = min(-(time.thread_time() - time.thread_time()) for _ in range(32))
"""What a call of that clock takes, 0.3 us to 2 us, which is a part of what it times."""


class Span(NamedTuple):
    kind: SpanKind
    step: int
    version: int
    t0: float  # seconds since the epoch
    t1: float
    amount: Amount | None = None
    on: End = NO_END


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanAccount:
    """Where one worker's time of one step went. `seconds` add up to `window_s`; what no span covers is `other`."""

    step: int
    branch: int
    window_s: float
    seconds: dict[SpanKind, float]
    instrument_s: float
    """CPU that the recorder took meanwhile."""
    busy_s: float = 0.0
    """Under a span that is no wait."""
    busy: tuple[tuple[float, float], ...] = ()
    """When, in seconds from the window's begin."""
    between_s: float = 0.0
    """Waiting for data before the window, which belongs to no step, as where steps are made again. First step: 0."""
    waits: dict[End, float] = field(default_factory=dict)
    """The seconds of `wait_data` by what was waited for; they add up to these. Without a channel: for what is not of
    one, such as the next turn."""


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has begun. `end` it once."""

    _recorder: Recorder
    kind: SpanKind
    step: int
    t0: float
    on: End = NO_END

    def lasts(self) -> float:
        """Seconds until now."""
        return self._recorder.now() - self.t0

    def end(self, *, version: int = -1, amount: Amount | None = None) -> float:
        """Its seconds."""
        recorder = self._recorder
        recorder.open.discard(self)
        t1 = recorder.now()
        recorder.add(self.kind, self.t0, t1, step=self.step, version=version, amount=amount, on=self.on)
        recorder.on_end()
        return t1 - self.t0


@dataclass(slots=True)
class _Window:
    """The step that is under way: what was added up until `begin`, and spans since."""

    begin: float
    started: float
    spans: list[tuple[float, float, int]] = field(default_factory=list)
    totals: list[float] = field(default_factory=lambda: [0.0] * RANKS)
    busy: list[tuple[float, float]] = field(default_factory=list)

    def add(self, pieces: Iterable[tuple[float, float, int]]) -> None:
        """Pieces of an account, in the order of time. The inner loop of recording: a hundred a step, or a thousand."""
        totals, busy = self.totals, self.busy
        for t0, seconds, rank in pieces:
            totals[rank] += seconds
            if rank >= FIRST_WAIT:
                continue
            if busy and t0 <= busy[-1][1] + TOUCHING_S:
                busy[-1] = (busy[-1][0], t0 + seconds)
                continue
            busy.append((t0, t0 + seconds))
            if len(busy) > 2 * STRETCHES:
                self.busy = busy = stretches(busy, STRETCHES)

    def begin_anew(self, at: float) -> None:
        self.started, self.totals, self.busy = at, [0.0] * RANKS, []


class Recorder:
    """`with recorder.begin("compute", step=3)...end()`; `seconds[kind]` are running totals, `exclusive` those of the
    account, complete up to the last step's end."""

    def __init__(self, *, capacity: int = CAPACITY, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._capacity = capacity
        self._spans: list[Span] = []
        self.dropped = 0
        self.open: set[OpenSpan] = set()
        self.on_end: Callable[[], None] = lambda: None
        """Called when a span that `begin` made has ended."""
        self.sums = Sums()
        self._ends: dict[End, int] = {NO_END: 0}
        self._waited_until = float("-inf")  # the end of the last wait for data
        self._gaps: list[tuple[float, float]] = []  # before it: what no wait that has ended is of
        self._taken = (-1, -1)  # branch and step of what was taken last
        self._counted: Counter[End] = Counter()  # what was taken of that step
        self.seconds: dict[SpanKind, float] = dict.fromkeys(KINDS, 0.0)
        self.exclusive: dict[SpanKind, float] = dict.fromkeys(KINDS, 0.0)
        self.instrument_s = 0.0
        """CPU seconds that recording took, as far as it was measured; `add` by samples."""
        self._adds = 0
        self._told_instrument_s = 0.0
        self._has_closed = False
        now = clock()
        self._window = _Window(begin=now, started=now)

    def now(self) -> float:
        return self._clock()

    # --- recording ----------------------------------------------------------------------------------------------------
    def begin(self, kind: SpanKind, *, step: int = -1, on: End = NO_END) -> OpenSpan:
        span = OpenSpan(self, kind, step, self._clock(), on)
        self.open.add(span)
        return span

    def add(
        self,
        kind: SpanKind,
        t0: float,
        t1: float,
        *,
        step: int = -1,
        version: int = -1,
        amount: Amount | None = None,
        on: End = NO_END,
    ) -> None:
        self._adds += 1
        is_timed = self._adds % SAMPLE == 0
        before = time.thread_time() if is_timed else 0.0
        self.seconds[kind] += t1 - t0
        if len(self._spans) < self._capacity:
            self._spans.append(_span(Span, (kind, step, version, t0, t1, amount, on)))
        else:
            self.dropped += 1
        window, rank = self._window, RANK[kind]
        if rank == ON:
            number = self._ends.get(on)
            rank += self._number(on) if number is None else number
            if t0 < self._waited_until:
                self._fill(t0, rank)
                t0 = self._waited_until
            elif t0 > self._waited_until:
                self._gaps.append((self._waited_until, t0))
            if t1 > self._waited_until:
                self._waited_until = t1
        elif rank == COMPUTE:
            self.sums.worked(t1 - t0, amount or NOTHING)
        window.spans.append((t0, t1, rank))
        if len(window.spans) >= COMPRESS_AT:
            self._compress(self._clock() - KEPT_S)
        if is_timed:
            self._took(time.thread_time() - before)

    def _took(self, seconds: float) -> None:
        """What was timed, for all that were not; the clock's own calls for themselves."""
        self.instrument_s += SAMPLE * max(0.0, seconds - CLOCK_S) + 2 * CLOCK_S

    def _fill(self, t0: float, rank: int) -> None:
        """From t0 on, what no wait that ended before is of."""
        gaps, spans = self._gaps, self._window.spans
        while gaps and gaps[-1][1] > t0:
            begin, end = gaps.pop()
            if begin < t0:
                gaps.append((begin, t0))
                begin = t0
            spans.append((begin, end, rank))
            if begin == t0:
                return

    def _number(self, on: End) -> int:
        number = self._ends.get(on)
        if number is None and len(self._ends) < MAX_ENDS:
            number = self._ends[on] = len(self._ends)
        return number or 0

    def took(self, step: int, branch: int, on: End) -> None:
        """Something of the step has come to this worker's hand. Of each item, so it looks at the newest step alone."""
        if self._taken != (branch, step):
            self._taken = branch, step
            self._counted = self.sums.took(step, branch, at=self._clock())
        self._counted[on] += 1

    def released(self, channel: str, step: int, branch: int) -> None:
        """A unit of the step was handed on."""
        self._adds += 1
        is_timed = self._adds % SAMPLE == 0
        before = time.thread_time() if is_timed else 0.0
        self.sums.released(channel, step, branch, at=self._clock(), since=self._window.started)
        if is_timed:
            self._took(time.thread_time() - before)

    def so_far(self) -> dict[SpanKind, float]:
        """`seconds`, with those of spans that are open: a wait is seen while it lasts."""
        found = dict(self.seconds)
        for span in self.open:
            found[span.kind] += span.lasts()
        return found

    def flush(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    # --- accounts -----------------------------------------------------------------------------------------------------
    def close_step(self, step: int, *, branch: int, at: float, lasted_s: float = float("inf")) -> SpanAccount:
        """The account of a step that ended at `at`: from the last step's end, or from its own begin where that was
        later. `at` becomes the begin of the next."""
        before = time.thread_time()
        window = self._window
        at, between_s = max(at, window.begin), 0.0
        if at - lasted_s > window.begin:  # before the first step, or between two: of no step
            self._compress(at - lasted_s)
            between_s = sum(window.totals[ON:]) if self._has_closed else 0.0
            window.begin_anew(window.begin)
        self._compress(at)
        totals = window.totals
        waits = {on: s for on, n in self._ends.items() if (s := totals[ON + n] + totals[ON + MAX_ENDS + n])}
        seconds = dict(zip(KINDS, [*totals[:ON], sum(waits.values())], strict=True))
        window_s = at - window.started
        busy_s = sum(totals[:FIRST_WAIT])
        busy = [(t0 - window.started, t1 - window.started) for t0, t1 in stretches(window.busy, STRETCHES)]
        seconds["other"] += max(0.0, window_s - sum(seconds.values()))
        for kind, value in seconds.items():
            self.exclusive[kind] += value
        window.begin_anew(at)
        self.instrument_s += time.thread_time() - before
        instrument_s = self.instrument_s - self._told_instrument_s
        self._told_instrument_s = self.instrument_s
        self._has_closed = True
        return SpanAccount(
            step=step,
            branch=branch,
            window_s=window_s,
            seconds=seconds,
            instrument_s=instrument_s,
            busy_s=busy_s,
            busy=tuple(busy),
            between_s=between_s,
            waits=waits,
        )

    def _compress(self, until: float) -> None:
        """Adds up what lies before `until`; a span that is still open counts as far."""
        window = self._window
        if until <= window.begin:
            return
        running = [(span.t0, until, self._running(span)) for span in self.open]
        window.add(exclusive(_clip([*window.spans, *running], window.begin, until)))
        window.spans = [span for span in window.spans if span[1] > until]
        if len(window.spans) >= COMPRESS_AT:  # all of the last seconds: nothing may wait for their end
            del window.spans[: COMPRESS_AT // 2]
            self.dropped += COMPRESS_AT // 2
        window.begin = until
        self._gaps = [gap for gap in self._gaps if gap[1] > until]

    def _running(self, span: OpenSpan) -> int:
        """The rank of a span that is open. Nobody knows yet whether a wait is the next to end."""
        rank = RANK[span.kind]
        return rank if rank != ON else ON + MAX_ENDS + self._number(span.on)


def stretches(busy: list[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most so many: the shortest gaps are closed.

    >>> stretches([(0.0, 1.0), (1.1, 2.0), (5.0, 6.0)], 2)
    [(0.0, 2.0), (5.0, 6.0)]
    """
    if len(busy) <= limit:
        return busy
    gaps = sorted(range(1, len(busy)), key=lambda n: busy[n - 1][1] - busy[n][0])[: limit - 1]  # the longest first
    bounds = [0, *sorted(gaps), len(busy)]
    return [(busy[a][0], busy[b - 1][1]) for a, b in itertools.pairwise(bounds)]


def _clip(spans: Iterable[tuple[float, float, int]], begin: float, end: float) -> Iterator[tuple[float, float, int]]:
    for span in spans:
        t0, t1, rank = span
        if t0 >= begin and t1 <= end:  # nearly all
            yield span
        elif t1 > begin and t0 < end:
            yield max(t0, begin), min(t1, end), rank


def exclusive(spans: Iterable[tuple[float, float, int]]) -> Iterator[tuple[float, float, int]]:
    """(t0, seconds, rank) of pieces that do not overlap: of spans that cover the same moment, the lowest rank has it.

    >>> [(t0, s, rank) for t0, s, rank in exclusive([(0.0, 4.0, 7), (1.0, 2.0, 0)])]
    [(0.0, 1.0, 7), (1.0, 1.0, 0), (2.0, 2.0, 7)]
    """
    edges: list[tuple[float, int, int]] = []
    highest = 0
    for t0, t1, rank in spans:
        if t1 > t0:
            edges.append((t0, 1, rank))
            edges.append((t1, -1, rank))
            if rank > highest:
                highest = rank
    edges.sort()
    covering = [0] * (1 + highest)
    ranks = 0  # a bit for each that covers the moment
    since, current = 0.0, -1
    for at, change, rank in edges:
        count = covering[rank] = covering[rank] + change
        ranks = ranks | 1 << rank if count else ranks & ~(1 << rank)
        lowest = (ranks & -ranks).bit_length() - 1
        if lowest != current:
            if current >= 0 and at > since:
                yield since, at - since, current
            since, current = at, lowest
