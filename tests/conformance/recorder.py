"""The sequence of a job's condition transitions, from a watch, and its normal form.

A transition is "Type=Status/Reason". What a back end may do otherwise by right, and what makes it the same again:

1. *One write may carry several transitions* where a slower system makes several writes. Within a write they stand in
   the order of RANKS, in which a slower system would have written them.
2. *News comes by two messengers*: of pods from the kubelet (OF_PODS), of workers from the driver (OF_DRIVER). Which of
   two comes first says nothing, so each may stand before or after the other; the normal form takes the one of lower
   rank first. Everything else keeps its order, and Running=True/Stepping and every end stand after both.
3. *A recovery is one*, by whichever messenger it is heard of: from Degraded=True until Running=True/Stepping has come
   and Degraded is False, the reasons of Degraded are told once each, and a Degraded=False in between (the pod is ready
   again, the driver has not yet said that it misses a worker) is none.
4. *A plan that is made and not yet read* is none: a pass that comes before the watch of plans says WaitingForPlan of a
   job whose spec is valid. The normal form has the first word about that plan in its place.

Everything else must be equal: which types, which statuses, which reasons, how often, in which order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.conformance.world import Manifest

Transition = str
RANKS: Final = (
    "Valid", "Suspended", "Admitted", "PodsReady", "Degraded=True/PodReplaced", "Running=False/WaitingForWorkers",
    "PlanApplied", "Running", "Profiled", "Degraded", "Complete", "Failed",
)  # fmt: skip
OF_PODS: Final = frozenset(
    {"PodsReady=False/PodsStarting", "PodsReady=True/PodsReady", "Degraded=True/PodReplaced", "Degraded=False/Healthy"}
)
OF_DRIVER: Final = frozenset(
    {
        "PlanApplied=Unknown/PlanPending", "PlanApplied=True/PlanInForce", "Running=Unknown/WaitingForDriver",
        "Running=False/WaitingForWorkers", "Running=False/Recovering", "Degraded=True/WorkerRestarting",
    }
)  # fmt: skip
STEPPING: Final = "Running=True/Stepping"
WITH_A_PLAN: Final = {
    "PodsReady=Unknown/WaitingForPlan": "PodsReady=False/PodsStarting",
    "PlanApplied=Unknown/WaitingForPlan": "PlanApplied=Unknown/PlanPending",
    "Running=Unknown/WaitingForPlan": "Running=Unknown/WaitingForDriver",
}


def normal(writes: Sequence[Sequence[Transition]]) -> list[Transition]:
    """
    >>> normal([["Complete=True/FlowFinished", "Running=False/Stopped"]])
    ['Running=False/Stopped', 'Complete=True/FlowFinished']
    >>> normal([["PlanApplied=True/PlanInForce"], ["PodsReady=True/PodsReady"], ["Running=True/Stepping"]])
    ['PodsReady=True/PodsReady', 'PlanApplied=True/PlanInForce', 'Running=True/Stepping']
    """
    left = _recoveries(_plan_read([change for write in writes for change in sorted(write, key=_rank)]))
    found: list[Transition] = []
    while left:
        free = [i for i, change in enumerate(left) if all(_either_way(change, earlier) for earlier in left[:i])]
        found.append(left.pop(min(free, key=lambda i: (_rank(left[i]), i))))
    return found


def _plan_read(flat: list[Transition]) -> list[Transition]:
    """Rule 4."""
    if flat[:1] != ["Valid=True/Accepted"] or not {*WITH_A_PLAN, *WITH_A_PLAN.values()} <= set(flat):
        return flat
    firsts = [flat.index(change) for change in WITH_A_PLAN.values()]
    return [WITH_A_PLAN.get(change, change) for at, change in enumerate(flat) if at not in firsts]


def _recoveries(flat: list[Transition]) -> list[Transition]:
    """Rule 3."""
    kept: list[Transition] = []
    told: set[Transition] = set()  # of the recovery that goes on
    well_at = -1  # where the end of the recovery stands in `kept`, if it is one
    stepping = False
    for change in flat:
        if change.startswith("Degraded=True/"):
            if told and well_at >= 0 and not stepping:
                del kept[well_at]
            elif well_at >= 0:
                told = set()
            well_at = -1
            stepping = False
            if change in told:
                continue
            told.add(change)
        elif change == "Degraded=False/Healthy" and told:
            well_at = len(kept)
        elif change == STEPPING:
            stepping = True
        kept.append(change)
    return kept


def _either_way(a: Transition, b: Transition) -> bool:
    if a.partition("=")[0] == b.partition("=")[0] and not (a.startswith("Degraded=True") and b.startswith(a[:13])):
        return False
    return (a in OF_PODS and b in OF_DRIVER) or (a in OF_DRIVER and b in OF_PODS)


def _rank(change: Transition) -> int:
    kind = change.partition("=")[0]
    return RANKS.index(change) if change in RANKS else RANKS.index(kind)


def conditions(job: Manifest) -> dict[str, str]:
    """Type to "Status/Reason"."""
    listed = (job.get("status") or {}).get("conditions") or []
    return {c["type"]: f"{c['status']}/{c['reason']}" for c in listed}


def has(job: Manifest, text: str) -> bool:
    """Whether a condition is as "Running=True" or "Running=True/Stepping" says."""
    kind, _, wanted = text.partition("=")
    found = conditions(job).get(kind, "")
    return found == wanted or found.partition("/")[0] == wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What one event of the watch said of a job."""

    job: Manifest
    gone: bool


@dataclass(slots=True)
class Track:
    """One job object: a job made again under its name is another."""

    uid: str
    states: list[State] = field(default_factory=list)
    """All of them, as many as the job has status writes in a scenario's time."""
    writes: list[list[Transition]] = field(default_factory=list)

    @property
    def latest(self) -> Manifest:
        return self.states[-1].job if self.states else {}


class Recorder:
    """Fed with every change of a watch; `tracks["a"]` is the first job of that name, `tracks["a#2"]` the second."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}
        self._changed = asyncio.Event()

    def feed(self, kind: str, job: Manifest) -> None:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        label = next((label for label, track in self.tracks.items() if track.uid == uid), "")
        if not label:
            earlier = sum(1 for label in self.tracks if label.partition("#")[0] == name)
            label = f"{name}#{earlier + 1}" if earlier else name
            self.tracks[label] = Track(uid=uid)
        track = self.tracks[label]
        before, after = conditions(track.latest), conditions(job)
        if write := [f"{kind}={value}" for kind, value in after.items() if before.get(kind) != value]:
            track.writes.append(write)
        track.states.append(State(job=job, gone=kind == "DELETED"))
        self._changed.set()

    async def until(
        self, label: str, holds: Callable[[State], object], *, what: str, timeout_s: float, since: int = 0
    ) -> int:
        """Number of the first state, from number `since` on, of which it holds. Each is looked at, also one that was
        over before anybody looked: two events may be read at once."""
        at = since
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    states = self.tracks[label].states if label in self.tracks else []
                    while at < len(states):
                        if holds(states[at]):
                            return at
                        at += 1
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            track = self.tracks.get(label)
            seen = conditions(track.latest) if track else "no such job"
            step = (track.latest.get("status") or {}).get("step") if track else None
            raise AssertionError(f"not within {timeout_s:g} s: {what}; job {label} at step {step}: {seen}") from None
