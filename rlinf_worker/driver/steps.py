"""The ledger of steps: which are open, which units each needs, who has done its part, what the weights are called.
Pure; the driver's one source of truth about progress, and the place where a step commits exactly once.

    open(step) ──every rank of every gang: done(step, gang, rank, keys)──> commit ──> version (branch, step)
         ▲                                                                        │
         └────────────────────────── rewind(version): a new branch ◄── a gang lost

What entered the gradient must be what the step's tickets were to become, each unit once: anything else is a bug in us,
and stops the job loudly instead of training on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.queues.expected import Ended

TicketsOf = Callable[[str], tuple[str, ...]]


def _own(key: str) -> tuple[str, ...]:
    """A unit that has its ticket's key."""
    return (key,)


@dataclass(slots=True)
class GangPart:
    """What one gang has to train on in a step, and what its ranks have."""

    wanted: dict[str, int | None] = field(default_factory=dict)  # by ticket: how many units come of it
    ended: dict[str, Ended] = field(default_factory=dict)  # what filters dropped, as the gang was told
    done: dict[int, tuple[tuple[str, ...], Mapping[str, float]]] = field(default_factory=dict)  # by rank

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(sorted(key for keys, _ in self.done.values() for key in keys))

    def check(self, step: int, tickets_of: TicketsOf) -> None:
        """Raises InvariantBroken unless every unit is there once, and of every ticket as many as come of it."""
        units = Counter(self.keys)
        of_tickets = Counter(ticket for key in units for ticket in tickets_of(key))
        for ended in self.ended.values():
            of_tickets.update(dict.fromkeys(ended.tickets, ended.units))
        extra = [key for key, count in units.items() if count > 1 or not self.wanted.keys() >= set(tickets_of(key))]
        counted = {ticket: count for ticket, count in self.wanted.items() if count is not None}
        missing = sorted(ticket for ticket, count in counted.items() if of_tickets[ticket] < count)
        extra += [ticket for ticket, count in counted.items() if of_tickets[ticket] > count]
        if extra or missing:
            raise InvariantBroken(
                f"step {step} trained on other units than it was opened with",
                got=f"{units.total()} units, unexpected or twice: {sorted(set(extra))[:5]}",
                wanted=f"those of {len(self.wanted)} tickets, missing: {missing[:5]}",
            )


@dataclass(slots=True)
class OpenStep:
    number: int
    branch: int
    opened_at: float
    tickets: dict[str, int | None] = field(default_factory=dict)  # all that the flow has put for it
    gangs: dict[str, GangPart] = field(default_factory=dict)  # by role
    rare: bool = False  # some of these tickets are of few steps
    sealed: bool = False  # the flow has put everything
    flow_state: str = "{}"  # the flow's own by then, as JSON

    def part(self, gang: str) -> GangPart:
        return self.gangs.setdefault(gang, GangPart())

    def is_done(self, worlds: Mapping[str, int]) -> bool:
        """By every rank of every gang. `worlds`: how many each has."""
        return all(self.part(gang).done.keys() == set(range(world)) for gang, world in worlds.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    step: int
    version: PolicyVersion
    keys: Mapping[str, tuple[str, ...]]
    """By gang: what it has trained on."""
    metrics: Mapping[str, float]
    seconds: float
    rare: bool
    """It has rare tickets, or a step has that was open with it: they are worked on ahead."""
    checkpoint: bool
    last: bool


class StepLedger:
    def __init__(self, *, steps: int, max_staleness: int, checkpoint_every: int) -> None:
        self.steps = steps
        self.max_staleness = max_staleness
        self.checkpoint_every = checkpoint_every
        self.version = PolicyVersion(0, 0)
        self.highest_branch = 0
        self.flow_state: dict[str, Any] = {}  # the flow's own as the last step that counts was put
        self._drain_to: int | None = None  # the step behind which a drain ends
        self._open: dict[int, OpenStep] = {}
        self._last_commit_at: float | None = None

    # --- opening ----------------------------------------------------------------------------------------------------
    @property
    def committed(self) -> int:
        return self.version.number

    @property
    def finished(self) -> bool:
        return self.committed >= self.steps

    @property
    def draining(self) -> bool:
        return self._drain_to is not None

    def drain(self) -> None:
        """End behind the steps that are open; behind the next one where none is."""
        if self._drain_to is None:
            self._drain_to = max(self._open, default=self.committed + 1)

    def aim(self, *, steps: int, checkpoint_every: int) -> None:
        """Other numbers than it began with. Steps that are open are done, and one more where none is: only a step that
        commits can be the last, and only the last is sure to be saved. What has ended has ended."""
        if not self.finished:
            self.steps = max(steps, max(self._open, default=self.committed + 1))
        self.checkpoint_every = checkpoint_every

    def end(self) -> None:
        """What has committed was the last step."""
        self._drain_to = self.committed

    def may_open(self, step: int) -> bool:
        """Staleness bound: step n may begin when n - 1 - max_staleness has committed."""
        if step > self.steps or (self._drain_to is not None and step > self._drain_to):
            return False
        return self.committed >= step - 1 - self.max_staleness

    def open(self, step: int, *, now: float) -> OpenStep:
        if step <= self.committed:
            raise InvariantBroken(f"step {step} was opened after step {self.committed} had committed")
        return self._open.setdefault(step, OpenStep(number=step, branch=self.version.branch, opened_at=now))

    def get(self, step: int) -> OpenStep | None:
        return self._open.get(step)

    @property
    def open_steps(self) -> tuple[OpenStep, ...]:
        return tuple(self._open[n] for n in sorted(self._open))

    # --- committing -------------------------------------------------------------------------------------------------
    def done(
        self,
        step: int,
        *,
        branch: int,
        gang: str,
        rank: int,
        keys: Iterable[str],
        metrics: Mapping[str, float],
        ended: Iterable[Ended] = (),
    ) -> bool:
        """One rank's part. False where it is of a dead branch or an already committed step: the rank is told the
        commit again. Idempotent."""
        entry = self._open.get(step)
        if entry is None or entry.branch != branch:
            return False
        part = entry.part(gang)
        part.done[rank] = (tuple(keys), dict(metrics))
        part.ended.update((one.key, one) for one in ended)
        return True

    def commit(
        self,
        step: int,
        *,
        worlds: Mapping[str, int],
        now: float,
        tickets_of: Callable[[str], TicketsOf] = lambda _gang: _own,
    ) -> Committed | None:
        """Commit if every rank of every gang has done its part and it is the next step. `worlds`: ranks of each gang.
        `tickets_of`: of a unit's key, as a gang knows it."""
        entry = self._open.get(step)
        if entry is None or step != self.committed + 1 or not entry.sealed or not entry.is_done(worlds):
            return None
        for gang in worlds:
            entry.part(gang).check(step, tickets_of(gang))
        del self._open[step]
        self.version = PolicyVersion(entry.branch, step)
        self.flow_state = json.loads(entry.flow_state)
        seconds = now - (
            entry.opened_at if self._last_commit_at is None else max(entry.opened_at, self._last_commit_at)
        )
        self._last_commit_at = now
        last = self.finished or (self._drain_to is not None and step >= self._drain_to)
        return Committed(
            step=step,
            version=self.version,
            keys={gang: entry.part(gang).keys for gang in worlds},
            metrics=_numbers_of({gang: entry.part(gang) for gang in worlds}),
            seconds=seconds,
            rare=entry.rare or any(later.rare for later in self._open.values()),
            checkpoint=last or self.has_checkpoint(step),
            last=last,
        )

    def has_checkpoint(self, step: int) -> bool:
        """Whether step's commit asks for one, a drain aside: known to every driver."""
        return step >= self.steps or step % self.checkpoint_every == 0

    # --- recovery ---------------------------------------------------------------------------------------------------
    def rewind(self, version: PolicyVersion, *, state_json: str = "") -> PolicyVersion:
        """The gang stands on these restored weights; what came after is void. `state_json`: as it was kept with them.
        Returns the new branch's version."""
        self.flow_state = flow_state_of(state_json)
        self.highest_branch = max(self.highest_branch, self.version.branch, version.branch) + 1
        self.version = PolicyVersion(self.highest_branch, version.number)
        self._open.clear()
        self._last_commit_at = None
        if self._drain_to is not None:  # the steps that were open then are not worth making again
            self._drain_to = self.committed + 1
        return self.version

    def give_up(self) -> None:
        """What is open can never end. The gang says by what it restores which steps are made again (`rewind`)."""
        self._open.clear()

    def adopt(self, version: PolicyVersion, *, state_json: str = "") -> bool:
        """A new driver learns from the gang what has committed; nothing is void. True where this is news."""
        self.heard_of(version.branch)
        if version <= self.version:
            return False
        self.version, self.flow_state = version, flow_state_of(state_json)
        if self._drain_to is not None:  # it was asked for before anybody knew where the job stands
            self._drain_to = max(self._drain_to, version.number + 1)
        for number in [n for n in self._open if n <= version.number]:
            del self._open[number]
        return True

    def heard_of(self, branch: int) -> None:
        """Somebody has something of this branch: no branch that is opened later may be called the same."""
        self.highest_branch = max(self.highest_branch, branch)

    def state_json(self, *, seed: int) -> str:
        """driver.json of a checkpoint: data position, versions, and what the flow keeps. Environments keep no state
        across a restart, and random numbers are drawn by (seed, key), so nothing else has to be kept."""
        told = {"format": 1, "step": self.committed, "branch": self.version.branch, "seed": seed}
        return json.dumps(told | ({"flow": self.flow_state} if self.flow_state else {}))


def flow_state_of(state_json: str) -> dict[str, Any]:
    """What a flow kept, of driver.json; nothing of one that was written before there was any."""
    found = json.loads(state_json or "{}").get("flow", {})
    return dict(found) if isinstance(found, dict) else {}


def _numbers_of(parts: Mapping[str, GangPart]) -> dict[str, float]:
    """The first gang's under their own names; those of the others are called after their gang.

    >>> one, other = GangPart(done={0: ((), {"loss": 1.0})}), GangPart(done={0: ((), {"loss": 3.0})})
    >>> _numbers_of({"actor": one, "critic": other})
    {'loss': 1.0, 'critic_loss': 3.0}
    """
    found: dict[str, float] = {}
    for number, (gang, part) in enumerate(parts.items()):
        merged = merge_metrics([metrics for _, metrics in part.done.values()])
        found |= {f"{gang}_{name}" if number else name: value for name, value in merged.items()}
    return found


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Ranks' numbers as one: sums where the name says so, means otherwise.

    >>> merge_metrics([{"loss": 1.0, "units_count": 2}, {"loss": 3.0, "units_count": 2}])
    {'loss': 2.0, 'units_count': 4.0}
    """
    names = list(dict.fromkeys(name for part in parts for name in part))
    merged = {}
    for name in names:
        values = [float(part[name]) for part in parts if name in part]
        merged[name] = sum(values) if name.endswith(("_sum", "_count")) else sum(values) / len(values)
    return merged
