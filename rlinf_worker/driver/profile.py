"""What the workers have measured, added up by role and pool: the profile of the steps under the plan in force.

    account ──heard()──> its step ──committed(), at the commit of the next──> of_report ──> reports (reporting.py)
                                                                         └──> of_plan ────> profile.json

A profile goes out for each of the first `profileSteps` steps of a plan, then of a block of BLOCK steps, by which the
plan is judged; then every `profile_interval_s`, and sooner of a block that took longer or shorter than the last one,
from its first step that did.
Left out are steps in which somebody was lost, as what they took is no property of the job, and the one before, whose
account may be lost too; those with an evaluation or a save in them, as no other step has that, and steps that are made
again behind a checkpoint, as they are in it already.
Pure but for the clock of the job. Not for: fitting anything, or deciding by it (the scheduler's).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import ValidationError

from rlinf_api import profile as api
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.plan import JobRef
from rlinf_api.slots import PlacedWorker
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.steps import Committed
from rlinf_worker.driver.topology import Topology
from rlinf_worker.spans import KINDS
from rlinf_worker.sums import KEPT, quantiles

STEPS_KEPT: Final = 16  # a step's accounts are added up at the commit of the next
REPORTS_KEPT: Final = 8  # for a scheduler that is away; the newest say most, and more come
SAMPLES: Final = 4096  # release times of a channel that are kept until they are put together: half a MB
SIZES: Final = 64  # of batches of one role, that are told apart: four times a worker's
BLOCK: Final = 5
"""Steps that say at 99% whether a plan does what it should; a drift is reported after so many."""
DEPARTS: Final = 0.10  # of the step's time, up or down, from which on a block does not wait for the interval
GAP_S: Final = 1.0
"""Between two reports of a job whose steps take milliseconds and jump about."""
ACCEPTED, REFUSED, UNANSWERED = "accepted", "refused", "unanswered"
OUTCOMES: Final = (ACCEPTED, REFUSED, UNANSWERED, "overtaken", "contradictory")
"""What becomes of a report. The last two were not sent: a newer one took its place, or workers' numbers made none."""
Pool = tuple[str, str]  # role, pool
Route = tuple[str, str, str]  # channel, producer, consumer


@dataclass(slots=True)
class Stat:
    """
    >>> stat = Stat(); stat.add(1.0); stat.add(3.0)
    >>> stat.number()
    Number(value=2.0, spread=1.4142135623730951, count=2, how='measured')
    """

    count: int = 0
    total: float = 0.0
    squared: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squared += value * value

    def merge(self, other: Stat) -> None:
        self.count += other.count
        self.total += other.total
        self.squared += other.squared

    def number(self, *, of: int = 0) -> api.Number:
        """`of`: measurements, those included in which there was nothing of it."""
        count = max(of, self.count)
        if not count:
            return api.Number(value=0.0, count=0)
        mean = self.total / count
        square = max(0.0, self.squared - count * mean * mean)
        return api.Number(value=mean, spread=math.sqrt(square / (count - 1)) if count > 1 else 0.0, count=count)


@dataclass(slots=True)
class _End:
    units: float = 0.0
    bytes: float = 0.0
    wait: Stat = field(default_factory=Stat)

    def add(self, units: float, nbytes: float, wait: Stat) -> None:
        self.units += units
        self.bytes += nbytes
        self.wait.merge(wait)


@dataclass(slots=True)
class _Released:
    count: int = 0
    samples: list[tuple[float, float]] = field(default_factory=list)  # seconds, for how many units they stand

    def add(self, count: int, samples: Sequence[tuple[float, float]]) -> None:
        self.count += count
        self.samples += samples
        if len(self.samples) > SAMPLES:
            self.samples = [(seconds, self.count / KEPT) for seconds in quantiles(self.samples)]


@dataclass(slots=True)
class _Role:
    """The workers of a role in one pool, in one step or several."""

    slots: int
    workers: set[WorkerId] = field(default_factory=set)
    accounts: int = 0
    seconds: dict[str, Stat] = field(default_factory=lambda: {str(kind): Stat() for kind in KINDS})
    batches: dict[float, pb.Batches] = field(default_factory=dict)
    moves: dict[str, pb.Moves] = field(default_factory=dict)
    ends: dict[tuple[str, str], _End] = field(default_factory=dict)
    released: dict[str, _Released] = field(default_factory=dict)
    memory: pb.Memory = field(default_factory=pb.Memory)
    least_comm_s: float = math.inf
    """The least `comm` of the workers of one step: what the last of a gang's ranks to come takes, as all others wait
    for it too."""

    def add(self, worker: WorkerId, account: pb.Account) -> None:
        self.workers.add(worker)
        self.accounts += 1
        self.least_comm_s = min(self.least_comm_s, account.seconds.get("comm", 0.0))
        for kind, stat in self.seconds.items():
            stat.add(account.seconds.get(kind, 0.0))
        self._add(account.batches, account.moves, account.memory)
        for traffic in account.traffic:
            wait = Stat(1, traffic.wait_s, traffic.wait_s**2)
            self.ends.setdefault((traffic.channel, traffic.side), _End()).add(traffic.items, traffic.bytes, wait)
        for said in account.releases:
            if said.seconds and said.count > 0:
                weight = said.count / len(said.seconds)
                self.released.setdefault(said.channel, _Released()).add(said.count, [(s, weight) for s in said.seconds])

    def merge_step(self, step: _Role) -> None:
        self.merge(step)
        if step.accounts > 1 and step.least_comm_s > 0:
            least_s = step.least_comm_s
            exchange = pb.Moves(what="exchange", count=1, seconds=least_s, seconds_squared=least_s**2)
            self._add((), (exchange,), pb.Memory())

    def merge(self, other: _Role) -> None:
        self.workers |= other.workers
        self.accounts += other.accounts
        for kind, stat in self.seconds.items():
            stat.merge(other.seconds[kind])
        self._add(other.batches.values(), other.moves.values(), other.memory)
        for key, end in other.ends.items():
            self.ends.setdefault(key, _End()).add(end.units, end.bytes, end.wait)
        for channel, released in other.released.items():
            self.released.setdefault(channel, _Released()).add(released.count, released.samples)

    def _add(self, batches: Iterable[pb.Batches], moves: Iterable[pb.Moves], memory: pb.Memory) -> None:
        for some in batches:
            if some.count > 0:
                size = self._size(some.size)
                _add_up(self.batches.setdefault(size, pb.Batches(size=size)), some, besides="size")
        for move in moves:
            if move.count > 0:
                _add_up(self.moves.setdefault(move.what, pb.Moves(what=move.what)), move, besides="what")
        for name in _MEMORY:
            setattr(self.memory, name, max(getattr(self.memory, name), getattr(memory, name)))

    def _size(self, size: float) -> float:
        """Beyond so many sizes by powers of two, as the workers themselves have it."""
        is_told_apart = size in self.batches or len(self.batches) < SIZES
        return size if is_told_apart else 2.0 ** math.floor(math.log2(size)) if size >= 1 else 0.0

    def profile(self, name: str, pool: str, *, start: Stat) -> api.RoleProfile:
        return api.RoleProfile(
            name=name,
            pool=pool,
            workers=len(self.workers),
            slots_per_worker=self.slots,
            seconds={kind: stat.number() for kind, stat in self.seconds.items() if stat.total != 0},
            batches=[_batch(self.batches[size]) for size in sorted(self.batches)],
            moves=[
                *(_move(self.moves[what]) for what in sorted(self.moves)),
                *([api.Move(what="start", seconds=start.number())] if start.count else []),
            ],
            ends=[
                api.EndProfile(
                    channel=channel,
                    side=_SIDES.get(side, ""),
                    units=end.units / self.accounts,
                    bytes=end.bytes / self.accounts,
                    wait_seconds=end.wait.number(of=self.accounts),
                )
                for (channel, side), end in sorted(self.ends.items())
            ],
            releases=[
                api.Releases(channel=channel, count=found.count, seconds=quantiles(found.samples))
                for channel, found in sorted(self.released.items())
            ],
            memory=api.MemoryProfile(**{name: getattr(self.memory, name) for name in _MEMORY}),
        )


_MEMORY: Final = ("resident", "peak", "offloaded", "process", "process_peak")
_SIDES: Final[Mapping[str, Literal["producer", "consumer"]]] = {"producer": "producer", "consumer": "consumer"}


def _add_up(total: pb.Batches | pb.Moves, more: pb.Batches | pb.Moves, *, besides: str) -> None:
    for fd, value in more.ListFields():
        if fd.name != besides:
            setattr(total, fd.name, getattr(total, fd.name) + value)


def _mean(said: pb.Batches | pb.Moves) -> api.Number:
    return Stat(said.count, said.seconds, said.seconds_squared).number()


def _batch(said: pb.Batches) -> api.Batch:
    count = said.count
    return api.Batch(
        size=said.size,
        seconds=_mean(said),
        units=said.units / count,
        tokens=said.tokens / count,
        tokens_squared=said.tokens_squared / count,
        token_seconds=said.token_seconds / count,
    )


def _move(said: pb.Moves) -> api.Move:
    return api.Move(what=said.what, seconds=_mean(said), bytes=max(0.0, said.bytes / said.count))


@dataclass(slots=True)
class _Went:
    """From one role to another, in one step. `items` and `bytes` went in their time; with staleness these
    are not their units: a role works ahead, on several steps' behind a change of plan, and on none at the end."""

    units: float = 0.0
    items: float = 0.0
    bytes: float = 0.0


@dataclass(slots=True)
class _Step:
    """What has been said of one step so far."""

    roles: dict[Pool, _Role] = field(default_factory=dict)
    routes: dict[Route, _Went] = field(default_factory=dict)

    def add(self, placed: PlacedWorker, account: pb.Account, *, topology: Topology) -> None:
        key = placed.role, placed.pod[0]
        if (role := self.roles.get(key)) is None:
            role = self.roles[key] = _Role(slots=len(placed.slots))
        if placed.id in role.workers:
            return  # told again
        role.add(placed.id, account)
        weights = {weights.channel for weights in topology.weights}
        for traffic in account.traffic:
            units = traffic.items if traffic.channel in weights else traffic.of_step
            if (traffic.items or units) and (route := route_of(topology, traffic.channel, placed.role, traffic.side)):
                went = self.routes.setdefault(route, _Went())
                went.units, went.items = went.units + units, went.items + traffic.items
                went.bytes += traffic.bytes


@dataclass(slots=True)
class _Sent:
    """The same of several steps: units as they vary, and the bytes of an item."""

    units: Stat = field(default_factory=Stat)
    items: float = 0.0
    bytes: float = 0.0

    def add(self, went: _Went) -> None:
        self.units.add(went.units)
        self.items += went.items
        self.bytes += went.bytes

    def merge(self, other: _Sent) -> None:
        self.units.merge(other.units)
        self.items += other.items
        self.bytes += other.bytes

    def bytes_of_a_step(self, *, of: int) -> api.Number:
        units, each = self.units.number(of=of), self.bytes / self.items if self.items else 0.0
        return api.Number(value=units.value * each, spread=units.spread * each, count=units.count)


class Totals:
    """What was measured in some steps under one plan."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self.first = self.last = 0
        self.steps = Stat()
        self.roles: dict[Pool, _Role] = {}
        self._routes: dict[Route, _Sent] = {}

    def add(self, step: int, said: _Step, *, seconds: float) -> None:
        self.first, self.last = self.first or step, step
        self.steps.add(seconds)
        for pool, role in said.roles.items():
            self.roles.setdefault(pool, _Role(slots=role.slots)).merge_step(role)
        for route, went in said.routes.items():
            self._routes.setdefault(route, _Sent()).add(went)

    def merge(self, later: Totals) -> None:
        """Those of later steps."""
        self.last = later.last
        self.steps.merge(later.steps)
        for pool, role in later.roles.items():
            self.roles.setdefault(pool, _Role(slots=role.slots)).merge(role)
        for route, sent in later._routes.items():
            self._routes.setdefault(route, _Sent()).merge(sent)

    def profile(
        self, job: JobRef, *, key: str, topology: Topology, starts: Mapping[str, Stat], checkpoints: bool = True
    ) -> api.Profile:
        """`starts`: how long workers of a role took to be ready. `checkpoints`: whether the job writes any."""
        modes = modes_of(topology)
        return api.Profile(
            key=key,
            job=job,
            revision=self.revision,
            first_step=self.first,
            last_step=self.last,
            steps=self.steps.count,
            step_seconds=self.steps.number(),
            checkpoints=checkpoints,
            roles=[role.profile(*pool, start=starts.get(pool[0], Stat())) for pool, role in sorted(self.roles.items())],
            channels=[
                api.ChannelProfile(
                    name=route[0],
                    mode=modes[route[0]],
                    producer=route[1],
                    consumer=route[2],
                    units=sent.units.number(of=self.steps.count),
                    bytes=sent.bytes_of_a_step(of=self.steps.count),
                )
                for route, sent in sorted(self._routes.items(), key=lambda found: found[0])
            ],
        )


def modes_of(topology: Topology) -> dict[str, Literal["Queue", "Cycle", "Weights"]]:
    found: dict[str, Literal["Queue", "Cycle", "Weights"]] = {}
    found |= {cycle.channel: "Cycle" for cycle in topology.cycles}
    found |= {queue.channel: "Queue" for queue in (*topology.queues, *topology.results)}
    return found | {weights.channel: "Weights" for weights in topology.weights}


def route_of(topology: Topology, channel: str, role: str, side: str) -> Route | None:
    """Who fed whom by what that end counted: what was taken counts, and what nobody takes where it was made.

    >>> route_of(Topology(), "weights", "rollout", "consumer") is None
    True
    """
    for cycle in topology.cycles:
        if cycle.channel == channel and side == "consumer":  # a question, or an answer
            other = cycle.asker if role == cycle.answerer else cycle.answerer
            return channel, other, role
    for queue in (*topology.queues, *topology.results):
        if queue.channel == channel and side == ("consumer" if queue.consumer else "producer"):
            return channel, queue.producer, queue.consumer
    for weights in topology.weights:
        if weights.channel == channel and side == "consumer":
            return channel, weights.producer, weights.consumer
    return None


@dataclass(frozen=True, slots=True)
class _Closed:
    """A step whose accounts are on their way."""

    branch: int
    step: int
    seconds: float
    revision: int
    is_calm: bool
    losses: int


@dataclass(frozen=True, slots=True)
class Killed:
    """Workers that the kernel killed for memory since plan `revision` is in force, by role. It is told without steps:
    those in which somebody is lost are in no profile, so that of such a plan there may never be one."""

    revision: int
    of_role: Mapping[str, int]


class ProfileBook:
    """One per driver. `losses`: changes as somebody is lost, goes away or is back. `is_away`: whether somebody is."""

    def __init__(self, job: Job, *, losses: Callable[[], int], is_away: Callable[[], bool]) -> None:
        self._job, self._losses, self._is_away = job, losses, is_away
        self._key = api.key_of(job.spec)
        self._said: dict[tuple[int, int], _Step] = {}  # by branch and step
        self._closed: _Closed | None = None
        self._of_report: Totals | None = None
        self._of_plan: Totals | None = None
        # At the commit before; where nobody can know, as of a driver before this one, its step is not calm.
        self._was: tuple[int, int] | None = (0, 0) if job.is_first else None
        self._steps = 0  # of the plan, that are in it
        self._told = 0  # reports of single steps under this plan
        self._is_saved = False  # the step committed last; that takes its time of the one behind it
        self._in_a_row = Counter[str]()  # steps by now that have something which others may not have
        self._starts: dict[str, Stat] = {}  # by role; of all plans
        self._block: list[Totals] = []  # one for each of its steps
        self._usual_s = 0.0  # a step, in the last block that was reported; 0: none of several steps was, of this plan
        self._told_at = job.clock()
        self.reports: deque[api.Profile] = deque(maxlen=REPORTS_KEPT)
        self._killed = Killed(0, {})
        self._has_killed = False  # it is not told yet
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.scheduler_away = False
        """It took no answer for the last report, however often that was sent."""
        self.on_report: Callable[[], None] = lambda: None

    def went(self, outcome: str) -> None:
        """What became of a report: ACCEPTED, REFUSED or UNANSWERED."""
        self.outcomes[outcome] += 1
        self.scheduler_away = outcome == UNANSWERED

    def take(self) -> api.Profile | Killed | None:
        """What is to be told next."""
        if self._has_killed:
            self._has_killed = False
            return self._killed
        return self.reports.popleft() if self.reports else None

    # --- what is heard ------------------------------------------------------------------------------------------------
    def heard(self, placed: PlacedWorker, account: pb.Account) -> None:
        """Added up at once: thousands of accounts do not wait for the commit."""
        age = account.branch, account.step
        self._said.setdefault(age, _Step()).add(placed, account, topology=self._job.topology)
        while len(self._said) > STEPS_KEPT:
            del self._said[min(self._said)]

    def committed(self, done: Committed) -> None:
        """The step before has been closed by all by now."""
        self._settle()
        job = self._job
        was, self._was = self._was, (self._losses(), job.ledger.version.branch)
        is_rare = self._is_rare(done)
        is_calm = self._was == was and not self._is_away() and not is_rare
        self._closed = _Closed(done.version.branch, done.step, done.seconds, job.revision, is_calm, self._was[0])

    def killed(self, role: str) -> None:
        """A worker of it, for memory."""
        revision, known = self._job.revision, self._killed
        before = known.of_role if known.revision == revision else {}
        self._killed, self._has_killed = Killed(revision, {**before, role: before.get(role, 0) + 1}), True
        self.on_report()

    def end(self) -> None:
        """The job's: what has not been told yet."""
        self._settle()
        self._tell_all()

    def _is_rare(self, done: Committed) -> bool:
        """Whether its time had what few steps have: rare tickets, or the save behind the step before. What has been in
        more steps in a row than one of these can be in is in every step."""
        for what, is_there in (("tickets", done.rare), ("save", self._is_saved)):
            self._in_a_row[what] = self._in_a_row[what] + 1 if is_there else 0
        self._is_saved = done.checkpoint
        return any(0 < steps <= 1 + self._job.ledger.max_staleness for steps in self._in_a_row.values())

    # --- adding up ----------------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        closed, self._closed = self._closed, None
        if closed is None:
            return
        said = self._said.pop((closed.branch, closed.step), None)
        if self._of_plan is None or self._of_plan.revision != closed.revision:
            self._tell_all()
            self._of_plan, self._told, self._steps = Totals(closed.revision), 0, 0
            self._usual_s = 0.0
        is_whole = closed.losses == self._losses()  # who is lost by now may have had to say what it did
        if not closed.is_calm or not is_whole or said is None or closed.step <= self._of_plan.last:
            return
        self._steps += 1
        if self._steps == 2:
            self._of_plan = Totals(closed.revision)  # the first one warmed up
        self._block.append(Totals(closed.revision))
        for totals in (self._block[-1], self._of_plan):
            totals.add(closed.step, said, seconds=closed.seconds)
        is_single = self._told < self._job.spec.placement.profile_steps
        self._told += is_single
        is_over = self._job.clock() - self._told_at >= self._job.settings.profile_interval_s
        if is_single or is_over or len(self._block) >= BLOCK:
            self._close_block(is_single=is_single, is_over=is_over)

    def _close_block(self, *, is_single: bool, is_over: bool) -> None:
        """Apart from the steps before it where it took longer or shorter than they did: together they would hide it. It
        begins with the first step that did, or a plan would be looked for by a mixture of both."""
        block, self._block = self._block, []
        mean_s = math.fsum(step.steps.total for step in block) / len(block)
        is_off, is_first = not self._job.spec.placement.profile_steps, not self._usual_s
        departs = not is_off and not is_first and self._departs(mean_s)
        is_told = departs and not is_single and self._job.clock() - self._told_at >= GAP_S
        as_usual = next((n for n, step in enumerate(block) if self._departs(step.steps.total)), 0) if is_told else 0
        if as_usual:
            self._add_up(block[:as_usual])
            self._block = block[as_usual:]
            if is_over:
                self._tell()
            return
        if is_told:
            self._tell()
        self._add_up(block)
        if is_single or is_over or is_told or (is_first and not is_off):
            self._usual_s = 0.0 if is_single else mean_s
            self._tell()

    def _departs(self, seconds: float) -> bool:
        return abs(seconds - self._usual_s) > DEPARTS * self._usual_s

    def _add_up(self, steps: Sequence[Totals]) -> None:
        for step in steps:
            if self._of_report is None:
                self._of_report = step
            else:
                self._of_report.merge(step)

    @property
    def measured(self) -> api.Number:
        """The steps of the plan in force, but the first where there are others."""
        of_plan = self._of_plan
        if of_plan is None or of_plan.revision != self._job.revision:
            return api.Number(value=0.0, count=0)
        return of_plan.steps.number()

    def started(self, role: str, *, seconds: float) -> None:
        """A worker is ready, so long after its start was asked for."""
        self._starts.setdefault(role, Stat()).add(max(0.0, seconds))

    def _tell_all(self) -> None:
        block, self._block = self._block, []
        self._add_up(block)
        self._tell()

    def _tell(self) -> None:
        totals, self._of_report = self._of_report, None
        if totals is None or self._of_plan is None:
            return
        self._told_at = self._job.clock()
        self.outcomes["overtaken"] += len(self.reports) == self.reports.maxlen
        try:
            self.reports.append(self._profile(totals))
            self._job.output.profile(self._profile(self._of_plan).to_json())
        except ValidationError as error:  # a worker measured what cannot be: a clock that was set back
            self.outcomes["contradictory"] += 1
            self._of_plan = Totals(totals.revision)  # what is in it would be in all that follow
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            self._job.event("profile", f"steps {totals.first} to {totals.last} are left out: {where}: {first['msg']}")
            return
        self.on_report()

    def _profile(self, totals: Totals) -> api.Profile:
        job = self._job
        return totals.profile(
            JobRef(name=job.name, uid=job.uid),
            key=self._key,
            topology=job.topology,
            starts=self._starts,
            checkpoints=bool(job.checkpoint_uri),
        )
