"""What a driver says comes out as it went in: every field, and the absence of what may be absent."""

from dataclasses import fields, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlinf_api import wire
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.report import DriverReport, DriverState, Failure, Goal, Ruling

WORDS = st.text(max_size=9)
NUMBERS = st.integers(0, 1 << 30)
SECONDS = st.floats(0, 1e9)
FAILURES = st.builds(
    Failure, role=WORDS, worker=st.integers(-1, 99), pod=WORDS, node=WORDS, exit_code=st.integers(-128, 255),
    reason=WORDS, message=WORDS,
)  # fmt: skip
GOALS = st.builds(Goal, steps=NUMBERS, every_steps=NUMBERS, keep=NUMBERS)
RULINGS = st.builds(Ruling, action=WORDS, rule=WORDS, failure=FAILURES)
OF_A_TYPE = {"bool": st.booleans(), "str": WORDS, "int": NUMBERS, "float": SECONDS}


@st.composite
def reports(draw):
    """Every field is drawn, also one that comes later."""
    known = {
        "state": st.sampled_from(DriverState),
        "rulings": st.lists(RULINGS, max_size=3).map(tuple),
        "missing": st.lists(WORDS, max_size=3).map(tuple), "silent_agents": st.lists(WORDS, max_size=3).map(tuple),
        "first_failure": st.none() | FAILURES,
        "metrics": st.dictionaries(WORDS, SECONDS, max_size=3), "goal": st.none() | GOALS,
    }  # fmt: skip
    drawn = {f.name: known[f.name] if f.name in known else OF_A_TYPE[str(f.type)] for f in fields(DriverReport)}
    return DriverReport(**{name: draw(strategy) for name, strategy in drawn.items()})


@given(report=reports())
@settings(deadline=None)
def test_a_report_is_the_same_at_the_other_end(report):
    sent = wire.report_to_pb(report).SerializeToString()
    assert wire.report_from_pb(job_pb2.JobStatus.FromString(sent)) == report


@given(failure=FAILURES, goal=GOALS)
@settings(deadline=None)
def test_a_failure_and_a_goal_are_the_same_at_the_other_end(failure, goal):
    assert wire.failure_from_pb(wire.failure_to_agent_pb(failure)) == failure
    assert wire.goal_from_pb(wire.goal_to_pb(goal)) == goal


def test_a_failure_that_says_nothing_is_one():
    report = DriverReport(job_uid="u", driver_attempt=1, state=DriverState.FAILED, first_failure=Failure())
    assert wire.report_from_pb(wire.report_to_pb(report)).first_failure == Failure()
    assert wire.report_from_pb(wire.report_to_pb(replace(report, first_failure=None))).first_failure is None


@pytest.mark.parametrize("state", list(DriverState))
def test_every_state_has_a_number_and_one_of_a_newer_driver_is_taken_for_waiting(state):
    report = DriverReport(job_uid="u", driver_attempt=1, state=state)
    assert wire.report_from_pb(wire.report_to_pb(report)).state is state
    message = wire.report_to_pb(report)
    message.state = 99  # type: ignore[assignment]
    assert wire.report_from_pb(message).state is DriverState.WAITING
