"""Which RLRuntime a job is made with: the one of now while no step could be lost, else the one that it began with.
Pure; observe asks it before anything else looks at the spec.

| the job | its runtime |
|---|---|
| has no pod yet, is suspended, or waits in its queue | as it is now; without it the job waits |
| starts | as it is now, as an edit is taken then, too; without it as it began |
| is at work | as it began; that it is another one by now is said |
| is over | as it began |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_api import edits, runtimes, unknown
from rlinf_api.conditions import JobState, Reason
from rlinf_api.job import RLJobStatus, RuntimeStatus
from rlinf_api.runtimes import RLRuntimeSpec, RuntimeFound


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeView:
    """`kept`: what the status names from now on, and `spec` the same as a model; None: the job must wait."""

    kept: RuntimeStatus | None
    spec: RLRuntimeSpec | None = None
    reason: Reason = Reason.ACCEPTED
    """Why it must wait, or RuntimeChanged."""
    message: str = ""


def keeps(name: str, status: RLJobStatus) -> bool:
    """Whether the job goes on with the runtime that it began with, whatever stands under its name by now."""
    raw = {"attempt": status.attempt, "state": status.state}
    return _began_with(name, status) is not None and not edits.is_free(raw)


def as_it_began(status: RLJobStatus) -> RuntimeView | None:
    """Of a job that is over, or at work while nobody says what stands there by now."""
    kept = status.runtime
    return RuntimeView(kept=kept, spec=runtimes.kept_spec(kept.spec)) if kept is not None else None


def judge(found: RuntimeFound, status: RLJobStatus) -> RuntimeView:
    """`found`: what stands under the name that the spec has now."""
    kept = _began_with(found.name, status)
    spec = runtimes.kept_spec(kept.spec) if kept is not None else None
    may_go_on = keeps(found.name, status) or (status.attempt > 0 and status.state == JobState.STARTING)
    if kept is not None and spec is not None and may_go_on and (found.spec is None or keeps(found.name, status)):
        if found.spec is not None and _said(found.spec) == _said(spec):
            return RuntimeView(kept=kept, spec=spec)
        return RuntimeView(kept=kept, spec=spec, reason=Reason.RUNTIME_CHANGED, message=_changed(found))
    if found.spec is None:
        return RuntimeView(kept=status.runtime, reason=found.reason, message=found.message)
    taken = RuntimeStatus(name=found.name, generation=found.generation, spec=_said(found.spec))
    return RuntimeView(kept=taken, spec=found.spec)


def _began_with(name: str, status: RLJobStatus) -> RuntimeStatus | None:
    kept = status.runtime
    return kept if kept is not None and kept.name == name else None


def _said(spec: RLRuntimeSpec) -> dict[str, Any]:
    return unknown.compact(spec)


def _changed(found: RuntimeFound) -> str:
    what = "has changed" if found.spec is not None else f"cannot be used any more ({found.message})"
    remedy = "suspend the job and resume it to have what it says now"
    if found.spec is None:
        remedy = "repair it before the job is suspended and resumed, which needs it"
    return f"{runtimes.KIND} {found.name!r} {what} since the job began, which goes on with what it began with; {remedy}"
