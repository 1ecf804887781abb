"""How often and how soon pods are replaced. Pure; the count is the status' list of replaced pods, nothing else.

An entry is "TIME POD CAUSE[:RULE]". It names the pod, so that a pass which repeats after a crash cannot count it twice,
and it is written before the pod is deleted, so that none is forgotten. A whole job that a rule restarts is an entry,
too, of `life/N` in the place of a pod: it says which life there must be, until the status does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from rlinf_api import failure_rules, times
from rlinf_api.job import FailureRule
from rlinf_operator.policies.failure import Cause

MAX_ENTRIES: Final = 1000  # the CRD's bound; a job that replaced more within its window has failed long ago
UNCOUNTED: Final = frozenset({Cause.STALE, Cause.NO_DRIVER, Cause.RULED})
_LIFE: Final = "life/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    at: datetime
    pod: str
    cause: str
    rule: str = ""
    """Key of the rule of failurePolicy that it met (failure_rules.key_of)."""

    def __str__(self) -> str:
        return f"{times.text(self.at)} {self.pod} {self.cause}" + (f":{self.rule}" if self.rule else "")

    @property
    def life(self) -> int:
        """The number of the life that this restart of the whole job begins; 0: the entry is of a pod."""
        number = self.pod.removeprefix(_LIFE)
        return int(number) if self.pod.startswith(_LIFE) and number.isdecimal() else 0


def of_job(life: int, *, at: datetime, rule: str) -> Restart:
    return Restart(at=at, pod=f"{_LIFE}{life}", cause=Cause.PROGRAM, rule=rule)


def newest_life(entries: Iterable[Restart]) -> Restart | None:
    """The entry of the last restart of the whole job."""
    return max((entry for entry in entries if entry.life), key=lambda entry: entry.life, default=None)


def read(entries: Iterable[str]) -> tuple[Restart, ...]:
    """Entries that cannot be read (a newer operator's) are kept out of the count, not guessed at."""
    found = []
    for entry in entries:
        parts = entry.split(" ")
        at = times.parse(parts[0]) if len(parts) == 3 else None
        if at is not None:
            cause, _, rule = parts[2].partition(":")
            found.append(Restart(at=at, pod=parts[1], cause=cause, rule=rule))
    return tuple(found)


def recent(
    entries: Sequence[Restart], *, now: datetime, window_s: float, here: Collection[str] = ()
) -> tuple[Restart, ...]:
    """Those of the window and of pods that are still `here`, oldest first: one that ended stays until its successor is
    made, and without its entry would be new. Where they are too many, those that do not count go first."""
    since = now - timedelta(seconds=window_s)
    found = (e for e in entries if e.at > since or e.pod in here)
    kept = sorted(found, key=lambda e: (e.cause not in UNCOUNTED, e.at, e.pod))
    return tuple(sorted(kept[-MAX_ENTRIES:], key=lambda e: (e.at, e.pod)))


def allowed(pods: int, *, least: int, per_pod: int) -> int:
    """Losses of pods to infrastructure that a job of so many pods may have within its window.

    >>> [allowed(pods, least=100, per_pod=3) for pods in (4, 40, 5000)]
    [100, 120, 999]
    """
    return min(max(least, per_pod * pods), MAX_ENTRIES - 1)  # more cannot be counted


def exceeded(
    entries: Sequence[Restart], *, max_restarts: int, infrastructure_restarts: int, rules: Sequence[FailureRule] = ()
) -> str:
    """Why there may be no further replacement; empty where there may. Workers inside pods are the driver's count.
    `rules`: those of the spec, of which some count by themselves."""
    by_key = failure_rules.by_key(rules)
    bounded = {key: most for key, rule in by_key.items() if (most := rule.max_restarts) is not None}
    for key, most in bounded.items():
        own = sum(1 for e in entries if e.rule == key and e.cause not in UNCOUNTED)
        if own > most:
            called = failure_rules.called(rules, key)
            return (
                f"{own} failures met rule {called!r} of spec.failurePolicy, whose maxRestarts is {most}; "
                "look at firstFailure, then repair the cause or raise it"
            )
    entries = [e for e in entries if e.rule not in bounded]
    program = sum(1 for e in entries if e.cause == Cause.PROGRAM)
    if program > max_restarts:
        return (
            f"{program} pods ended by themselves, failurePolicy.maxRestarts is {max_restarts}; "
            "look at firstFailure, then repair the cause or raise spec.failurePolicy.maxRestarts"
        )
    infrastructure = sum(1 for e in entries if e.cause == Cause.INFRASTRUCTURE)
    if infrastructure > infrastructure_restarts:
        return (
            f"{infrastructure} pods were lost to nodes, evictions or deletion, the operator allows "
            f"{infrastructure_restarts}; find out what takes them away, then make the job again"
        )
    return ""


def delay_s(earlier: int, *, max_s: float) -> float:
    """Pause before a place's pod is replaced, by how many of its pods were replaced within the window.

    >>> [delay_s(n, max_s=60) for n in range(8)]
    [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    """
    return 0.0 if earlier == 0 else float(min(max_s, 2 ** (earlier - 1)))
