"""Which rule of spec.failurePolicy.rules a failure meets, and which rules can mean nothing. Pure.

`met` is asked by the driver of workers that ended (their pod lives on), and by the operator of pods. The first rule of
which all that it names is true of the failure; none: what docs/recovery.md says of every job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api.job import FailureAction, FailureKind, FailureRule, Problem, RLJobSpec

RESTARTS: Final = (FailureAction.RESTART_WORKER, FailureAction.RESTART_POD, FailureAction.RESTART_JOB)
WAITS: Final = (FailureKind.IMAGE_PULL, FailureKind.UNSCHEDULABLE)
"""Kinds of failure of a pod that has not ended, and may still begin."""
MOST_PAUSES: Final = 8
"""A back-off grows to so many times its first pause."""
_KINDS: Final = {
    "OOMKilled": FailureKind.OOM_KILLED,
    "Evicted": FailureKind.EVICTED,
    "EvictionByEvictionAPI": FailureKind.EVICTED,  # kubectl drain
    "PreemptionByScheduler": FailureKind.EVICTED,
    "TerminationByKubelet": FailureKind.EVICTED,  # pressure on its node, or a node that shuts down
    "NodeShutdown": FailureKind.EVICTED,
    "NodeLost": FailureKind.NODE_LOST,
    "DeletionByTaintManager": FailureKind.NODE_LOST,
    "DeletionByPodGC": FailureKind.NODE_LOST,
    "ImagePull": FailureKind.IMAGE_PULL,
    "Unschedulable": FailureKind.UNSCHEDULABLE,
    "DeadlineExceeded": FailureKind.DEADLINE_EXCEEDED,  # the pod's own activeDeadlineSeconds
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    rule: FailureRule
    key: str
    """What counts go by (`key_of`)."""
    called: str
    """What messages go by (`called`)."""

    @property
    def action(self) -> FailureAction:
        return self.rule.action

    @property
    def told(self) -> str:
        """
        >>> Met(rule=FailureRule(action=FailureAction.FAIL_JOB), key="#a6f1c5e0", called="0").told
        "rule '0' of spec.failurePolicy says FailJob"
        """
        return f"rule {self.called!r} of spec.failurePolicy says {self.action}"


def key_of(rule: FailureRule) -> str:
    """Its name, or a hash of what it meets and what follows. What is counted outlives edits, by which a place in the
    list may be another rule's. Bound and pause may be edited, and what was counted counts on."""
    meets = [rule.role, rule.pool, sorted(rule.exit_codes), sorted(rule.reasons), rule.after_seconds, rule.action]
    return rule.name or f"#{hashlib.sha256(json.dumps(meets).encode()).hexdigest()[:8]}"


def by_key(rules: Sequence[FailureRule]) -> dict[str, FailureRule]:
    """The rules by their keys. Of two with one key the first counts: the other one meets nothing."""
    return {key_of(rule): rule for rule in reversed(rules)}


def called(rules: Sequence[FailureRule], key: str) -> str:
    """Its name, or its place in the list from 0, as API servers name it; its key, where an edit has taken it away."""
    return next((_called(rule, position) for position, rule in enumerate(rules) if key_of(rule) == key), key)


def _called(rule: FailureRule, position: int) -> str:
    return rule.name or str(position)


def met(
    rules: Sequence[FailureRule],
    *,
    roles: Collection[str],
    pool: str,
    exit_code: int,
    reason: str,
    waited_s: float = float("inf"),
) -> Met | None:
    """`roles`: whose failure it is; a pod's, where nobody was named, is one of each role of its pool. `exit_code`: 0 or
    less where there is none. `waited_s`: how long a pod that has not begun waits for its node or image.

    >>> rules = [FailureRule(role="env", exit_codes=[3], action=FailureAction.FAIL_JOB)]
    >>> [met(rules, roles=["env"], pool="sim", exit_code=code, reason="") is not None for code in (3, 4)]
    [True, False]
    """
    kind = _KINDS.get(reason)
    for position, rule in enumerate(rules):
        if rule.reasons:
            fits = kind in rule.reasons and (kind not in WAITS or waited_s >= rule.after_seconds)
        else:
            fits = kind not in WAITS
        if (
            fits
            and (not rule.role or rule.role in roles)
            and (not rule.pool or rule.pool == pool)
            and (not rule.exit_codes or exit_code in rule.exit_codes)
        ):
            return Met(rule=rule, key=key_of(rule), called=_called(rule, position))
    return None


def pause_s(rule: FailureRule, earlier: int) -> float:
    """
    >>> rule = FailureRule(action=FailureAction.RESTART_POD, back_off_seconds=10)
    >>> [pause_s(rule, earlier) for earlier in range(6)]
    [10.0, 20.0, 40.0, 80.0, 80.0, 80.0]
    """
    return float(rule.back_off_seconds * min(2 ** min(earlier, 30), MOST_PAUSES))


# --- what can mean nothing; the same is CEL in job.py -----------------------------------------------------------------
def check(spec: RLJobSpec) -> Iterator[Problem]:
    rules = spec.failure_policy.rules
    pools = {pool.name: pool.roles for pool in spec.pools}
    roles = [role.name for role in spec.roles]
    for position, rule in enumerate(rules):
        field = f"spec.failurePolicy.rules[{_called(rule, position)}]"
        if rule.role and rule.role not in roles:
            message = f"got {rule.role!r}, which is none of spec.roles ({', '.join(roles)}); correct it"
            yield Problem(field=f"{field}.role", message=message)
        if rule.pool and rule.pool not in pools:
            message = f"got {rule.pool!r}, which is none of spec.pools ({', '.join(pools)}); correct it"
            yield Problem(field=f"{field}.pool", message=message)
        elif rule.pool and rule.role in roles and rule.role not in pools[rule.pool]:
            message = f"pool {rule.pool!r} does not run role {rule.role!r}, so the rule meets nothing; correct one"
            yield Problem(field=field, message=message)
        if rule.max_restarts is not None and rule.action not in RESTARTS:
            message = f"got {rule.max_restarts}, but action {rule.action} counts no restarts; remove it, or write "
            yield Problem(field=f"{field}.maxRestarts", message=message + " or ".join(RESTARTS))
        if rule.back_off_seconds and rule.action in (FailureAction.FAIL_JOB, FailureAction.SUSPEND):
            message = f"got {rule.back_off_seconds}, but action {rule.action} starts nothing again; remove it"
            yield Problem(field=f"{field}.backOffSeconds", message=message)
        of_pods = [str(kind) for kind in rule.reasons if kind is not FailureKind.OOM_KILLED]
        if rule.action is FailureAction.RESTART_WORKER and of_pods:
            message = f"got RestartWorker, but {', '.join(of_pods)} is of a whole pod; write RestartPod"
            yield Problem(field=f"{field}.action", message=message)
        if rule.exit_codes and of_pods:
            message = f"has exitCodes and {', '.join(of_pods)}, which is no exit, so it meets nothing; write two rules"
            yield Problem(field=field, message=message)
        if len(set(rule.exit_codes)) < len(rule.exit_codes) or len(set(rule.reasons)) < len(rule.reasons):
            yield Problem(field=field, message="names an exit code or a reason twice; remove one")
        if rule.name and any(other.name == rule.name for other in rules[:position]):
            yield Problem(field=f"{field}.name", message=f"{rule.name!r} is the name of another rule; rename one")
        if position + 1 < len(rules) and not (rule.role or rule.pool or rule.exit_codes or rule.reasons):
            behind = f"{len(rules) - position - 1} rules stand behind it and are never looked at; move it to the end"
            yield Problem(field=field, message=f"names nothing and so meets every failure, but {behind}")
