"""The only converter between protobuf and the frozen types of this package. Pure; a round trip is the identity."""

from __future__ import annotations

from typing import Final

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.report import DriverReport, DriverState, Failure, MemberReport

_STATES: Final = {
    DriverState.WAITING: job_pb2.WAITING,
    DriverState.STARTING: job_pb2.STARTING,
    DriverState.RUNNING: job_pb2.RUNNING,
    DriverState.RECOVERING: job_pb2.RECOVERING,
    DriverState.DRAINED: job_pb2.DRAINED,
    DriverState.COMPLETE: job_pb2.COMPLETE,
    DriverState.FAILED: job_pb2.FAILED,
}
_STATES_BACK: Final = {number: state for state, number in _STATES.items()}


def failure_from_pb(message: job_pb2.Failure | agents_pb2.Failure) -> Failure:
    return Failure(
        role=message.role,
        worker=message.worker,
        pod=message.pod,
        node=message.node,
        exit_code=message.exit_code,
        reason=message.reason,
        message=message.message,
    )


def failure_to_job_pb(failure: Failure) -> job_pb2.Failure:
    return job_pb2.Failure(
        role=failure.role,
        worker=failure.worker,
        pod=failure.pod,
        node=failure.node,
        exit_code=failure.exit_code,
        reason=failure.reason,
        message=failure.message,
    )


def failure_to_agent_pb(failure: Failure) -> agents_pb2.Failure:
    return agents_pb2.Failure(
        role=failure.role,
        worker=failure.worker,
        pod=failure.pod,
        node=failure.node,
        exit_code=failure.exit_code,
        reason=failure.reason,
        message=failure.message,
    )


def report_to_pb(report: DriverReport) -> job_pb2.JobStatus:
    return job_pb2.JobStatus(
        job_uid=report.job_uid,
        driver_attempt=report.driver_attempt,
        state=_STATES[report.state],
        reason=report.reason,
        message=report.message,
        step=report.step,
        steps=report.steps,
        branch=report.branch,
        plan_revision=report.plan_revision,
        plan_prepared=report.plan_prepared,
        plan_preparing=report.plan_preparing,
        plan_failed=report.plan_failed,
        plan_message=report.plan_message,
        plan_pause_s=report.plan_pause_s,
        plan_switches=report.plan_switches,
        members=[
            job_pb2.Member(
                worker=m.worker, pod=m.pod, node=m.node, attempt=m.attempt, phase=m.phase, restarts=m.restarts
            )
            for m in report.members
        ],
        missing=report.missing,
        first_failure=failure_to_job_pb(report.first_failure) if report.first_failure else None,
        restarts=report.restarts,
        metrics=report.metrics,
        checkpoint_uri=report.checkpoint_uri,
        checkpoint_step=report.checkpoint_step,
        step_seconds=report.step_seconds,
        sequence=report.sequence,
    )


def report_from_pb(message: job_pb2.JobStatus) -> DriverReport:
    return DriverReport(
        job_uid=message.job_uid,
        driver_attempt=message.driver_attempt,
        state=_STATES_BACK.get(message.state, DriverState.WAITING),
        reason=message.reason,
        message=message.message,
        step=message.step,
        steps=message.steps,
        branch=message.branch,
        plan_revision=message.plan_revision,
        plan_prepared=message.plan_prepared,
        plan_preparing=message.plan_preparing,
        plan_failed=message.plan_failed,
        plan_message=message.plan_message,
        plan_pause_s=message.plan_pause_s,
        plan_switches=message.plan_switches,
        members=tuple(
            MemberReport(worker=m.worker, pod=m.pod, node=m.node, attempt=m.attempt, phase=m.phase, restarts=m.restarts)
            for m in message.members
        ),
        missing=tuple(message.missing),
        first_failure=failure_from_pb(message.first_failure) if message.HasField("first_failure") else None,
        restarts=message.restarts,
        metrics=dict(message.metrics),
        checkpoint_uri=message.checkpoint_uri,
        checkpoint_step=message.checkpoint_step,
        step_seconds=message.step_seconds,
        sequence=message.sequence,
    )
