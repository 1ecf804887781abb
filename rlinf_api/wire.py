"""The only converter between protobuf and the frozen types of this package. Pure; a round trip is the identity.

A field has the same name on both sides, so only what has another type is spelled out here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.report import DriverReport, DriverState, Failure, Goal, Ruling

_STATES: Final = {state: job_pb2.State.Value(state.name) for state in DriverState}
_STATES_BACK: Final = {number: state for state, number in _STATES.items()}


def failure_from_pb(message: job_pb2.Failure | agents_pb2.Failure) -> Failure:
    return Failure(**_values(message, Failure))


def failure_to_agent_pb(failure: Failure) -> agents_pb2.Failure:
    return agents_pb2.Failure(**_values(failure, Failure))


def goal_to_pb(goal: Goal) -> job_pb2.Goal:
    return job_pb2.Goal(**_values(goal, Goal))


def goal_from_pb(message: job_pb2.Goal) -> Goal:
    return Goal(**_values(message, Goal))


def report_to_pb(report: DriverReport) -> job_pb2.JobStatus:
    first = report.first_failure
    typed = {
        "state": _STATES[report.state],
        "first_failure": job_pb2.Failure(**_values(first, Failure)) if first else None,
        "goal": goal_to_pb(report.goal) if report.goal else None,
        "rulings": [
            job_pb2.Ruling(action=r.action, rule=r.rule, failure=job_pb2.Failure(**_values(r.failure, Failure)))
            for r in report.rulings
        ],
    }
    return job_pb2.JobStatus(**(_values(report, DriverReport) | typed))


def report_from_pb(message: job_pb2.JobStatus) -> DriverReport:
    typed = {
        "state": _STATES_BACK.get(message.state, DriverState.WAITING),
        "missing": tuple(message.missing),
        "silent_agents": tuple(message.silent_agents),
        "metrics": dict(message.metrics),
        "first_failure": failure_from_pb(message.first_failure) if message.HasField("first_failure") else None,
        "goal": goal_from_pb(message.goal) if message.HasField("goal") else None,
        "rulings": tuple(
            Ruling(action=r.action, rule=r.rule, failure=failure_from_pb(r.failure)) for r in message.rulings
        ),
    }
    return DriverReport(**(_values(message, DriverReport) | typed))


def _values(source: object, kind: type) -> dict[str, Any]:
    """What it has of the fields of the frozen type."""
    return {field.name: getattr(source, field.name) for field in fields(kind)}
