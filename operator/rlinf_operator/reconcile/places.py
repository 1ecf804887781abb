"""Which pods to create and which to delete: exactly one live pod per wanted place, under the highest attempt. Pure.

The rules, and what rests on them:

* A healthy pod of a wanted place is never deleted; it is one by (place, life, recorded inputs), never by a rendering.
* Of several pods of a place the highest attempt counts: driver and agents refuse lower ones, so they are leaving.
* A pod that ended is entered into status.restarts under its own name before it is deleted: counted once, never lost.
  It stays until its successor is made, so that a place without any pod is one whose pod somebody else took away.
* So does a live pod whose inputs changed, unless a quota refuses its successor: then it goes first, and an entry of
  its place with cause Stale, kept until the successor is here, says that nobody took it away.
* New pods of one pass share one attempt number, above every number ever seen. Only a job's (or a life's) first pods are
  made under a number that a repeated pass computes again, so that a crash in the middle ends in 409s and not in twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rlinf_api import conditions, failure_rules, names, times
from rlinf_api.conditions import Reason
from rlinf_api.job import FailureAction, FailureRule
from rlinf_api.report import Failure
from rlinf_operator.manifests import metadata
from rlinf_operator.policies import failure, restart, rules
from rlinf_operator.policies.failure import Cause, Verdict
from rlinf_operator.policies.pod_view import PodPlace, PodView
from rlinf_operator.policies.restart import Restart
from rlinf_operator.policies.rules import Ruled
from rlinf_operator.reconcile.state import DeletePod, Observed
from rlinf_operator.settings import OperatorSettings

SILENT_GRACE_S = 1
"""The grace period of a pod whose agent is silent, in seconds. Not 0: the API server would forget a pod that its node
still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The places of a job as its plans want them, each with the hash of the inputs that its pod must be made from."""

    inputs: Mapping[PodPlace, str]
    life: int
    fresh: bool
    """First pods of the job or of this life: what is missing was never there."""
    earlier: frozenset[PodPlace] = frozenset()
    """Places that the status has counted before: one of these without a pod has lost it."""
    in_doubt: frozenset[str] = frozenset()
    """Pods that ended and are left as they are, by name, until it is clear of which plan they are."""
    max_restarts: int
    window_s: float
    rules: tuple[FailureRule, ...] = ()
    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The roles of each pool, by its name: a failure of its pods that names nobody is theirs."""
    told: Mapping[str, Ruled] = field(default_factory=dict)
    """What the driver says of pods that live, by name: a worker of theirs met a rule, or their agent is silent, and the
    pod is to be replaced."""
    told_again_s: float | None = None
    """In how many seconds it says so of another, if nothing changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    reason: Reason
    message: str
    failure: Failure | None = None


@dataclass(slots=True, kw_only=True)
class Pods:
    """What became of each place. Filled while the places are looked at; read-only afterwards."""

    driver_ready: bool = False
    live: dict[PodPlace, PodView] = field(default_factory=dict)
    create: list[PodPlace] = field(default_factory=list)
    attempt: int = 0
    """The attempt of the pods to be created, and the highest given out."""
    delete: list[DeletePod] = field(default_factory=list)
    restarts: tuple[Restart, ...] = ()
    ended: list[tuple[PodView, Verdict]] = field(default_factory=list)
    """Pods that ended since the last pass: they become events and the first failure."""
    waiting: list[PodPlace] = field(default_factory=list)
    """Places whose next pod waits for its pause to pass, or for what the driver says of the one that ended."""
    ruled: list[Ruled] = field(default_factory=list)
    """What rules of failurePolicy say of pods since the last pass: they become events."""
    failed: JobFailure | None = None
    look_again_s: float | None = None

    def the_job_is_to(self, action: FailureAction) -> Ruled | None:
        return next((ruled for ruled in self.ruled if ruled.met.action is action), None)

    @property
    def driver(self) -> PodView | None:
        return next((p for place, p in self.live.items() if not place.pool), None)


def settle(observed: Observed, wanted: Wanted, *, now: datetime, settings: OperatorSettings) -> Pods:
    own = [p for p in observed.pods if p.component == names.COMPONENT_DRIVER and p.life == wanted.life]
    found = Pods(driver_ready=any(p.ready for p in own), look_again_s=wanted.told_again_s)
    entries = restart.recent(
        restart.read(observed.status.restarts), now=now, window_s=wanted.window_s, here={p.name for p in observed.pods}
    )
    by_place: dict[PodPlace, list[PodView]] = {place: [] for place in sorted(wanted.inputs)}
    for pod in sorted(observed.pods, key=lambda p: (p.place, -p.attempt, p.name)):
        if pod.place in by_place and pod.life == wanted.life:
            by_place[pod.place].append(pod)
        else:
            _delete(
                found,
                pod,
                "no plan wants it" if pod.life == wanted.life else "it belongs to an earlier life of the job",
            )
    missing: list[PodPlace] = []
    for place, pods in by_place.items():
        if pods and pods[0].name in wanted.in_doubt:
            found.waiting.append(place)
            continue
        dead, entries = _look_at(found, place, pods, wanted=wanted, entries=entries, now=now, settings=settings)
        if dead:
            missing.append(place)
    entries = _without_room_made(entries, found, job=observed.job.name)
    if found.failed is None and missing:
        entries = _replace(found, observed, missing, wanted=wanted, entries=entries, now=now, settings=settings)
    found.restarts = entries
    highest = max([observed.status.attempt, *(p.attempt for p in observed.pods)])
    if found.create:
        first = observed.status.attempt + 1
        places = frozenset(found.create)
        taken = any(p.attempt >= first and p.place in places for p in observed.pods)
        found.attempt = first if wanted.fresh and not taken else highest + 1
    found.attempt = max(found.attempt, highest)
    return found


def look_on(observed: Observed, *, now: datetime, settings: OperatorSettings, stopping: bool = False) -> Pods:
    """For a job whose pods are not replaced: what became of those that its status counts, each as it was made. A pod
    that ended is counted once, as ever. Nothing is made, replaced or taken away, and nothing fails the job.
    `stopping`: pods that are deleted or exit 0 end as they should, and are left out."""
    counted = [
        PodPlace(component=names.COMPONENT_WORKER, pool=pool.name, ordinal=ordinal)
        for pool in observed.status.pools
        for ordinal in range(pool.desired)
    ]
    by_place: dict[PodPlace, list[PodView]] = {place: [] for place in counted}
    if observed.pods or counted:
        by_place[PodPlace(component=names.COMPONENT_DRIVER)] = []
    for pod in sorted(observed.pods, key=lambda p: (-p.attempt, p.name)):
        ends_well = pod.deleted_at is not None or pod.phase == "Succeeded"
        if pod.life == observed.status.life and not (stopping and ends_well):
            by_place.setdefault(pod.place, []).append(pod)
    drivers = by_place.get(PodPlace(component=names.COMPONENT_DRIVER), [])
    found = Pods(driver_ready=any(p.ready for p in drivers), attempt=observed.status.attempt)
    entries = restart.read(observed.status.restarts)  # the window is the spec's to say
    for place, pods in sorted(by_place.items()):
        wanted = Wanted(
            inputs={place: pods[0].inputs if pods else ""}, life=observed.status.life, fresh=False,
            max_restarts=0, window_s=0.0,
        )  # fmt: skip
        dead, entries = _look_at(found, place, pods, wanted=wanted, entries=entries, now=now, settings=settings)
        if dead:
            found.waiting.append(place)
    found.restarts = entries[-restart.MAX_ENTRIES :]
    found.delete.clear()
    found.failed = None
    return found


def _look_at(
    found: Pods,
    place: PodPlace,
    pods: list[PodView],
    *,
    wanted: Wanted,
    entries: tuple[Restart, ...],
    now: datetime,
    settings: OperatorSettings,
) -> tuple[bool, tuple[Restart, ...]]:
    """Whether the place needs a new pod, and the entries with what ended here."""
    for number, pod in enumerate(pods):
        verdict = failure.judge(
            pod, now=now, exit_zero_grace_s=settings.exit_zero_grace_s, driver_ready=found.driver_ready
        )
        if verdict.look_again_s is not None:
            found.look_again_s = times.soonest(found.look_again_s, verdict.look_again_s)
        newest = number == 0
        current = pod.inputs == wanted.inputs[place]
        ruled = None
        if newest and current:
            ruled = wanted.told.get(pod.name) if verdict.alive else None
            roles = wanted.roles.get(pod.pool, ())
            ruled = ruled or rules.of_pod(pod, verdict, rules=wanted.rules, roles=roles, now=now)
            after_s = rules.look_again_s(pod, verdict, rules=wanted.rules, now=now)
            found.look_again_s = times.soonest(found.look_again_s, after_s)
        if ruled is not None:
            entries = _obey(found, ruled, entries=entries, now=now)
            continue
        if newest and verdict.alive and current:
            found.live[place] = pod
            continue
        if verdict.alive:
            changed = metadata.moved(pod.inputs, wanted.inputs[place])
            why = changed if newest else f"attempt {pods[0].attempt} has replaced it"
            _delete(found, pod, why, for_successor=newest, makes_room=pod.name.rpartition("-a")[0] if newest else "")
            continue
        superseded = not newest or (pod.deleted_at is not None and not current)
        by_operator = superseded and verdict.cause is Cause.INFRASTRUCTURE  # then deleted: no loss
        if not by_operator and all(e.pod != pod.name for e in entries):
            at = min(now, pod.finished_at or now)  # a pass that comes late makes no pause longer
            entries = (*entries, Restart(at=at, pod=pod.name, cause=verdict.cause))
            found.ended.append((pod, verdict))
        if newest and verdict.cause is Cause.USER:
            found.failed = found.failed or _user_failure(pod, verdict)
        if not newest:
            _delete(found, pod, f"attempt {pods[0].attempt} has replaced it")
    return place not in found.live, entries


def _obey(found: Pods, ruled: Ruled, *, entries: tuple[Restart, ...], now: datetime) -> tuple[Restart, ...]:
    """What a rule says of the pod of a place, which is over: the place needs another, if the job goes on."""
    pod, action = ruled.pod, ruled.met.action
    if action is FailureAction.FAIL_JOB and found.failed is None:
        found.failed = JobFailure(reason=Reason.FAILURE_RULE, message=ruled.message, failure=ruled.failure)
    if pod.name in {e.pod for e in entries}:
        return entries
    at = min(now, pod.finished_at or now)
    found.ruled.append(ruled)
    if pod.has_ended:
        verdict = Verdict(alive=False, cause=ruled.cause, failure=ruled.failure)
        found.ended.append((pod, verdict))
    return (*entries, Restart(at=at, pod=pod.name, cause=ruled.cause, rule=ruled.met.key))


def _replace(
    found: Pods,
    observed: Observed,
    missing: list[PodPlace],
    *,
    wanted: Wanted,
    entries: tuple[Restart, ...],
    now: datetime,
    settings: OperatorSettings,
) -> tuple[Restart, ...]:
    by_key = failure_rules.by_key(wanted.rules)
    begins_s = _of_the_whole(entries, by_key, life=wanted.life, now=now) if wanted.fresh else 0.0
    if begins_s > 0:
        found.look_again_s = times.soonest(found.look_again_s, begins_s)
        found.waiting.extend(missing)
        missing = []
    here: dict[PodPlace, list[PodView]] = {}
    for pod in observed.pods if missing else ():
        here.setdefault(pod.place, []).append(pod)
    known, by_stem = {e.pod for e in entries}, _by_stem(entries)
    for place in missing:
        stem = f"{observed.job.name}-{place}"
        of_place = by_stem.get(stem, ())
        made_room = any(_made_room(e, stem) for e in of_place)
        own = [e for e in of_place if e.cause != Cause.RULED and not _made_room(e, stem)]
        has_pod = any(p.life == wanted.life for p in here.get(place, ()))
        vanished = not has_pod and not wanted.fresh and place in wanted.earlier and not made_room
        before = len(own) if vanished else len(own) - 1
        pause_s = restart.delay_s(max(0, before), max_s=settings.restart_delay_max_s)
        rule = by_key.get(own[-1].rule) if own and not vanished else None
        if rule is not None and rule.back_off_seconds:
            pause_s = failure_rules.pause_s(rule, sum(1 for e in own if e.rule == own[-1].rule) - 1)
        # An entry ahead of the clock: that was put back. Its pause would grow by the step; it is taken to be over.
        latest = max((e.at for e in own if e.at <= now), default=None)
        if latest is not None and latest + timedelta(seconds=pause_s) > now:
            left_s = (latest + timedelta(seconds=pause_s) - now).total_seconds()
            found.look_again_s = times.soonest(found.look_again_s, left_s)
            found.waiting.append(place)
            continue
        if vanished:
            entries = (*entries, Restart(at=now, pod=stem, cause=Cause.INFRASTRUCTURE))
        found.create.append(place)
        for pod in here.get(place, ()):
            if pod.name in known:
                alive = not pod.has_ended  # then it counts in a quota that may refuse its successor
                told = wanted.told.get(pod.name)
                is_silent = alive and told is not None and told.failure.reason == rules.AGENT_SILENT
                why = "a rule of failurePolicy replaces it" if alive else "it ended and is replaced"
                why = "its agent is silent" if is_silent else why
                room = stem if alive else ""
                # Nobody in it hears the word to end, and what it holds its successor may need.
                grace_s = SILENT_GRACE_S if is_silent else None
                _delete(found, pod, why, for_successor=True, makes_room=room, grace_period_s=grace_s)
    problem = restart.exceeded(
        restart.recent(entries, now=now, window_s=wanted.window_s),
        max_restarts=wanted.max_restarts,
        infrastructure_restarts=restart.allowed(
            len(wanted.inputs), least=settings.infrastructure_restarts, per_pod=settings.infrastructure_restarts_per_pod
        ),
        rules=wanted.rules,
    )
    if problem:
        failures = [*(ruled.failure for ruled in found.ruled), *(verdict.failure for _, verdict in found.ended)]
        last = next((failure_ for failure_ in reversed(failures) if failure_), None)
        why = f"; the last was {last.pod} ({last.reason}: {last.message})" if last is not None and last.message else ""
        found.failed = JobFailure(reason=Reason.TOO_MANY_RESTARTS, message=problem + why, failure=last)
        found.create.clear()
        found.delete.clear()
    return entries


def _of_the_whole(entries: Sequence[Restart], by_key: Mapping[str, FailureRule], *, life: int, now: datetime) -> float:
    """Seconds until a life that a rule has begun may have its first pods."""
    newest = restart.newest_life(entries)
    rule = by_key.get(newest.rule) if newest is not None else None
    if newest is None or newest.life != life or rule is None or not rule.back_off_seconds or newest.at > now:
        return 0.0
    earlier = sum(1 for e in entries if e.life and e.rule == newest.rule) - 1
    return failure_rules.pause_s(rule, earlier) - (now - newest.at).total_seconds()


def _without_room_made(entries: tuple[Restart, ...], found: Pods, *, job: str) -> tuple[Restart, ...]:
    """Without those of pods that made room for successors which are here by now."""
    if not any(e.cause == Cause.STALE for e in entries):
        return entries
    here = {f"{job}-{place}" for place in found.live}
    return tuple(e for e in entries if not (e.cause == Cause.STALE and e.pod in here))


def _made_room(entry: Restart, stem: str) -> bool:
    """Whether it says that the operator took the place's pod away (DeletePod.makes_room), which is no loss."""
    return entry.cause == Cause.STALE and entry.pod == stem


def _by_stem(entries: Iterable[Restart]) -> dict[str, list[Restart]]:
    """The entries of each place, by what its pods are called without their attempt."""
    found: dict[str, list[Restart]] = {}
    for entry in entries:
        stem, _, attempt = entry.pod.rpartition("-a")
        found.setdefault(stem if attempt.isdecimal() else entry.pod, []).append(entry)
    return found


def is_of_pool(pod: str, job: str, pool: str) -> bool:
    """
    >>> [is_of_pool(pod, "math", "gpu") for pod in ("math-gpu-2", "math-gpu-2-a7", "math-gpu-2-0-a7")]
    [True, True, False]
    """
    stem = f"{job}-{pool}-"
    ordinal, _, attempt = pod[len(stem) :].partition("-a")
    return pod.startswith(stem) and ordinal.isdecimal() and (not attempt or attempt.isdecimal())


def which_ended(pods: Pods, *, job: str, since: datetime | None) -> Callable[[PodPlace], bool]:
    """Whether a pod of a place is among those that count as ended, in the life that began at `since`."""
    ended = {entry.pod for entry in pods.restarts if since is None or entry.at >= since}
    ended |= {stem for stem, _, attempt in (pod.rpartition("-a") for pod in ended) if attempt.isdecimal()}
    return lambda place: f"{job}-{place}" in ended


def _delete(
    found: Pods, pod: PodView, why: str, *, for_successor: bool = False, makes_room: str = "",
    grace_period_s: int | None = None,
) -> None:  # fmt: skip
    if pod.deleted_at is None:
        found.delete.append(
            DeletePod(
                name=pod.name, uid=pod.uid, why=why, for_successor=for_successor, makes_room=makes_room,
                grace_period_s=grace_period_s,
            )
        )  # fmt: skip


def _user_failure(pod: PodView, verdict: Verdict) -> JobFailure:
    words = verdict.failure
    message = words.message if words and words.message else ""
    message = message or f"pod {pod.name} exited with {pod.exit_code}: the manifest or the user's code must change"
    return JobFailure(reason=conditions.of_user(words.reason if words else ""), message=message, failure=words)


def summary(pods: Iterable[PodView]) -> str:
    """ "math-gpu-1-a1 (node n7), math-gpu-2-a1"; a long list is cut, its length said."""
    return listed([f"{p.name} (node {p.node})" if p.node else p.name for p in pods])


def listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")
