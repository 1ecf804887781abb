"""Condition Valid of a spec that nobody foresaw: a number out of range, and rules that break over it."""

import logging

import pytest

from rlinf_api import supported
from rlinf_api.report import DriverState
from tests.builders import ppo_job


@pytest.fixture
def running():
    world = ppo_job().world().started()
    world.step()
    return world


def broken(manifest):
    raise ZeroDivisionError("division by zero")


def test_no_pods_at_all_is_a_sentence_and_the_job_goes_on_to_its_end(running):
    """What somebody writes who wants to scale a job down."""
    running.manifest["spec"]["pools"][0]["pods"] = 0
    decision = running.step()
    assert running.condition("Valid") == ("False", "InvalidSpec")
    assert running.message("Valid").startswith("spec.pools[sim].pods: got 0, wanted a whole number from 1 to 100000")
    assert not decision.delete_pods
    running.report(state=DriverState.COMPLETE, plan_revision=1, step=100).step()
    assert running.condition("Complete") == ("True", "FlowFinished")


def test_a_bug_in_the_rules_is_a_condition_and_the_job_goes_on_to_its_end(running, monkeypatch):
    monkeypatch.setattr(supported, "examine", broken)
    decision = running.step()
    assert running.condition("Valid") == ("False", "InternalError")
    assert "(ZeroDivisionError: division by zero), which is a bug in the operator" in running.message("Valid")
    assert not decision.delete_pods
    running.report(state=DriverState.COMPLETE, plan_revision=1, step=100).step()
    assert running.condition("Complete") == ("True", "FlowFinished")
    assert running.later(60).step().delete_pods, "worker pods go, as they always do"


def test_the_stack_of_such_a_bug_is_logged_once_and_not_in_each_pass(running, monkeypatch, caplog):
    monkeypatch.setattr(supported, "examine", broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            running.later(60).step()
    [record] = caplog.records
    assert record.exc_info is not None
    assert vars(record)["job"] == "team/math"


def test_a_job_is_valid_again_once_the_rules_hold(running, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(supported, "examine", broken)
        running.step()
    running.step()
    assert running.condition("Valid") == ("True", "Accepted")
