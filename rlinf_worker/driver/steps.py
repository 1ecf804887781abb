"""The ledger of steps: which are open, which units each needs, who has done its part, what the weights are called.
Pure; the driver's one source of truth about progress, and the place where a step commits exactly once.

    open(step, keys) ──every rank: done(step, rank, keys)──> commit ──> version (branch, step)
         ▲                                                     │
         └──────────────── rewind(version): a new branch ◄── actor lost

The multiset of lineage keys that entered the gradient must be the one the step was opened with: anything else is a bug
in us, and stops the job loudly instead of training on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels.protocol import PolicyVersion


@dataclass(slots=True)
class OpenStep:
    number: int
    branch: int
    opened_at: float
    keys: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)  # of the keys: what filters dropped, as the gang was told
    sealed: bool = False  # the flow has put everything
    done: dict[int, tuple[tuple[str, ...], Mapping[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    step: int
    version: PolicyVersion
    keys: tuple[str, ...]
    metrics: Mapping[str, float]
    seconds: float
    checkpoint: bool
    last: bool


class StepLedger:
    def __init__(self, *, steps: int, max_staleness: int, checkpoint_every: int) -> None:
        self.steps = steps
        self.max_staleness = max_staleness
        self.checkpoint_every = checkpoint_every
        self.version = PolicyVersion(0, 0)
        self.highest_branch = 0
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
        rank: int,
        keys: Iterable[str],
        metrics: Mapping[str, float],
        ended: Iterable[str] = (),
    ) -> bool:
        """One rank's part. False where it is of a dead branch or an already committed step: the rank is told the
        commit again. Idempotent."""
        entry = self._open.get(step)
        if entry is None or entry.branch != branch:
            return False
        entry.done[rank] = (tuple(keys), dict(metrics))
        entry.ended.update(ended)
        return True

    def commit(self, step: int, *, world: int, now: float) -> Committed | None:
        """Commit if every rank of the gang has done its part and it is the next step."""
        entry = self._open.get(step)
        if entry is None or step != self.committed + 1 or not entry.sealed or set(entry.done) != set(range(world)):
            return None
        consumed, wanted = sorted(key for keys, _ in entry.done.values() for key in keys), entry.keys - entry.ended
        if consumed != sorted(wanted):
            extra = [k for k in consumed if consumed.count(k) > 1 or k not in wanted][:5]
            missing = sorted(wanted - set(consumed))[:5]
            raise InvariantBroken(
                f"step {step} trained on other units than it was opened with",
                got=f"{len(consumed)} units, unexpected or twice: {extra}",
                wanted=f"{len(wanted)} units, missing: {missing}",
            )
        del self._open[step]
        self.version = PolicyVersion(entry.branch, step)
        seconds = now - (
            entry.opened_at if self._last_commit_at is None else max(entry.opened_at, self._last_commit_at)
        )
        self._last_commit_at = now
        last = self.finished or (self._drain_to is not None and step >= self._drain_to)
        return Committed(
            step=step,
            version=self.version,
            keys=tuple(consumed),
            metrics=merge_metrics([metrics for _, metrics in entry.done.values()]),
            seconds=seconds,
            checkpoint=last or self.has_checkpoint(step),
            last=last,
        )

    def has_checkpoint(self, step: int) -> bool:
        """Whether step's commit asks for one, a drain aside: known to every driver."""
        return step >= self.steps or step % self.checkpoint_every == 0

    # --- recovery ---------------------------------------------------------------------------------------------------
    def rewind(self, version: PolicyVersion) -> PolicyVersion:
        """The gang stands on these restored weights; what came after is void. Returns the new branch's version."""
        self.highest_branch = max(self.highest_branch, self.version.branch, version.branch) + 1
        self.version = PolicyVersion(self.highest_branch, version.number)
        self._open.clear()
        self._last_commit_at = None
        if self._drain_to is not None:  # the steps that were open then are not worth making again
            self._drain_to = self.committed + 1
        return self.version

    def adopt(self, version: PolicyVersion) -> bool:
        """A new driver learns from the gang what has committed; nothing is void. True where this is news."""
        self.heard_of(version.branch)
        if version <= self.version:
            return False
        self.version = version
        if self._drain_to is not None:  # it was asked for before anybody knew where the job stands
            self._drain_to = max(self._drain_to, version.number + 1)
        for number in [n for n in self._open if n <= version.number]:
            del self._open[number]
        return True

    def heard_of(self, branch: int) -> None:
        """Somebody has something of this branch: no branch that is opened later may be called the same."""
        self.highest_branch = max(self.highest_branch, branch)

    def state_json(self, *, seed: int) -> str:
        """driver.json of a checkpoint: data position and versions. Environments keep no state across a restart, and
        random numbers are drawn by (seed, key), so nothing else has to be kept."""
        return json.dumps({"format": 1, "step": self.committed, "branch": self.version.branch, "seed": seed})


def merge_metrics(parts: list[Mapping[str, float]]) -> dict[str, float]:
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
