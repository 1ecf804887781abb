"""What the operator decides about a job from pass to pass, as text: a whole decision is one thing to compare.

    story = Story(ppo_job().world())
    story.step("the job is made")
    story.world.all_ready()
    story.step("its pods are ready")
    story.holds(Path(__file__).parent / "stories" / "start.txt")

Each pass is a heading, the lines of the status that it changed (- before, + after), and all else that it does (>). A
file that differs is shown whole by the test; whoever meant the change copies it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf_api import job as api
from rlinf_api import names
from rlinf_operator.manifests.asking import OrderKind
from rlinf_operator.reconcile.state import Decision
from tests.builders import World


class Story:
    def __init__(self, world: World) -> None:
        self.world = world
        self._lines: list[str] = []
        self._known = list(_status(world.status))

    def step(self, what: str) -> Decision:
        """One pass, fully applied."""
        decision = self.world.step()
        for name, status in decision.plan_statuses:
            self.world.plans = [replace(p, status=status) if p.name == name else p for p in self.world.plans]
        new = list(_status(decision.status))
        self._lines.append(f"== {what}")
        self._lines += [f"- {line}" for line in self._known if line not in new]
        self._lines += [f"+ {line}" for line in new if line not in self._known]
        self._lines += [f"> {line}" for line in _acts(decision)]
        self._known = new
        return decision

    def holds(self, file: Path) -> None:
        told = "\n".join(self._lines) + "\n"
        assert told == (file.read_text(encoding="utf-8") if file.exists() else ""), f"{file.name} is now:\n{told}"


def _status(status: api.RLJobStatus) -> Iterator[str]:
    fields = api.dump(status)
    for c in fields.pop("conditions", []):
        yield "{type} {status} {reason} since {lastTransitionTime} g{observedGeneration}: {message}".format(
            **{"message": ""} | c
        )
    yield from _flat("", fields)


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{path}.{key}" if path else key, part)
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for part in value:
            yield f"{path} " + " ".join(f"{key}={part[key]}" for key in part)
    else:
        text = str(value)
        yield f"{path}: {text}" if len(text) < 300 else f"{path}: {text[:20]}... {len(text)} characters"


def _acts(decision: Decision) -> Iterator[str]:
    if decision.request_plan:
        yield f"ask for a plan: {decision.request_plan} above {decision.highest_revision}"
    for made in (decision.service, decision.network_policy):
        if made is not None:
            yield f"write {made['kind']} {made['metadata']['name']}"
    if decision.delete_network_policy:
        yield f"delete NetworkPolicy {decision.delete_network_policy}"
    if decision.certificates:
        yield f"certificates of {', '.join(decision.certificates)}, renewed: {decision.renew_certificates}"
    if decision.write_config:
        yield "write the ConfigMap"
    for pod in decision.create_pods:
        meta = pod["metadata"]
        first = [e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == names.ENV_FIRST_OF_LIFE]
        late = ", late" if meta["name"] in decision.late_pods else ""
        life = f"{meta['annotations'][names.ANNOTATION_LIFE]}{', its first' * (first == ['1'])}"
        yield f"make {meta['name']} of life {life}{late}"
    for gone in decision.delete_pods:
        room = f", makes room as {gone.makes_room}" if gone.makes_room else ""
        yield f"delete {gone.name} {gone.uid}: {gone.why}{', for its successor' * gone.for_successor}{room}"
    if (order := decision.instruct) is not None:
        yield f"tell {order.target}: {' '.join(order.steps)} revision {order.plan.revision} after {order.switches}"
    if decision.drain is not None:
        yield f"drain {decision.drain.target} within {decision.drain.deadline_s:g} s"
    for name, status in decision.plan_statuses:
        for c in status.conditions:
            yield f"{name} {c.type} {c.status} {c.reason} g{c.observed_generation}: {c.message}"
    if (told := decision.queue) is not None:
        sets = ", ".join(f"{s.name} {s.count}" + (f" (or {s.least})" if s.least else "") for s in told.pod_sets)
        ended = f"succeeded {told.succeeded}: {told.message}" if told.kind is OrderKind.FINISH else ""
        yield " ".join(filter(None, ("queue:", str(told.kind), told.queue, sets, ended)))
    if decision.delete_job:
        yield "delete the job"
    for event in decision.events:
        yield f"event {event.type} {event.reason} of {event.pod or 'the job'}: {event.message}"
    for event in decision.events_of_made:
        yield f"event of what is made: {event.type} {event.reason}: {event.message}"
    if decision.requeue_after_s is not None:
        yield f"look again in {decision.requeue_after_s:.10g} s"
