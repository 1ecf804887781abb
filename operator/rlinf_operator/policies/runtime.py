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

from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rlinf_api import edits, runtimes, sentences, unknown
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
    """The runtime that a job began with, where it is over, or at work while nobody says what stands there by now."""
    return _kept(status.runtime) if status.runtime is not None else None


def judge(found: RuntimeFound, status: RLJobStatus) -> RuntimeView:
    """`found`: what stands under the name that the spec has now."""
    kept, at_work = _began_with(found.name, status), keeps(found.name, status)
    starts = status.attempt > 0 and status.state == JobState.STARTING
    if kept is not None and (at_work or (starts and found.spec is None)):
        view = _kept(kept)
        if view.spec is None or (found.spec is not None and _said(found.spec) == _said(view.spec)):
            return view
        return replace(view, reason=Reason.RUNTIME_CHANGED, message=_changed(found))
    if found.spec is None:
        return RuntimeView(kept=status.runtime, reason=found.reason, message=found.message)
    taken = RuntimeStatus(name=found.name, generation=found.generation, spec=_said(found.spec))
    return RuntimeView(kept=taken, spec=found.spec)


def _kept(kept: RuntimeStatus) -> RuntimeView:
    """What only the operator writes: it cannot be read where somebody else did, or where a field has other bounds."""
    try:
        return RuntimeView(kept=kept, spec=runtimes.kept_spec(kept.spec))
    except ValidationError as error:
        why = "; ".join(map(str, sentences.problems(error, RLRuntimeSpec, value=kept.spec, prefix="spec")))
        remedy = f"suspend the job and resume it to have what {runtimes.KIND} {kept.name!r} says now"
        message = f"status.runtime, which the job began with, cannot be read any more ({why}); {remedy}"
        return RuntimeView(kept=kept, reason=Reason.RUNTIME_INVALID, message=message)


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
