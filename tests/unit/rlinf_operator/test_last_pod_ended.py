"""Event PodEnded of the pod whose end is that of its job."""

from rlinf_api.report import Failure
from tests.builders import ppo_job


def running(**spec):
    world = ppo_job().with_spec(**spec).world().started()
    world.step()
    return world


def test_the_pod_that_ends_its_job_gets_its_event_like_any_other():
    decision = running().exited("math-sim-0-a1", 64, words=Failure(role="env", message="no such environment")).step()
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", "math-sim-0-a1")]
    assert "no such environment" in decision.events[0].message


def test_the_last_of_too_many_pods_gets_its_event_once():
    world = running(failurePolicy={"maxRestarts": 0}).exited("math-sim-1-a1", 1)
    decision = world.step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", "math-sim-1-a1")]
    assert world.later(1).step().events == ()
