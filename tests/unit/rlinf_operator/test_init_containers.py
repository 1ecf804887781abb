"""Init containers of a user's template: one that fails, or that has no image, is named and is the program's own."""

import pytest

from rlinf_api import names, times
from tests.builders import World, ppo_job

POD = "math-sim-1-a1"


def running(**spec) -> World:
    world = ppo_job().with_spec(**spec).world().started()
    world.step()
    return world


def initializing(world, pod, *states, phase="Pending"):
    """Statuses as a kubelet writes them: `states` of the init containers fetch and unpack, none of the main one."""
    status = world.pods[pod]["status"]
    status |= {"phase": phase, "conditions": [{"type": "Initialized", "status": "False"}]}
    status["initContainerStatuses"] = [
        {"name": name, "state": state} for name, state in zip(("fetch", "unpack"), states, strict=False)
    ]
    status["containerStatuses"] = [{"name": "agent", "state": {"waiting": {"reason": "PodInitializing"}}}]
    return world


def ended(world, code, *, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": times.text(world.now)}}


def failed(world, code, **how):
    done = ended(world, 0, reason="Completed")
    return initializing(world, POD, done, ended(world, code, **how), phase="Failed")


def test_one_that_fails_is_named_counted_as_the_programs_and_tried_again():
    world = running()
    decision = failed(world, 3, message="no such data set").step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert world.status.restarts == [f"{times.text(world.now)} {POD} Program"]
    first = world.status.first_failure
    assert first is not None
    assert (first.pod, first.node, first.exit_code, first.reason) == (POD, "n1", 3, "InitFailed")
    assert first.message == "init container unpack: no such data set"
    assert "init container unpack: no such data set" in decision.events[0].message


def test_one_that_always_fails_ends_the_job_within_max_restarts():
    world = failed(running(failurePolicy={"maxRestarts": 0}), 1)
    world.step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert "pods ended by themselves" in world.message("Failed")
    assert world.status.first_failure is not None
    assert world.status.first_failure.message == "init container unpack ended with exit code 1"


@pytest.mark.parametrize("code", [names.EXIT_USER_ERROR, names.EXIT_STALE, names.EXIT_RETRYABLE, names.EXIT_BUG])
def test_its_exit_codes_are_not_those_of_the_runtime(code):
    """It is a program of the user's: 64 would end the job, and 76 would be tried again for ever."""
    world = failed(running(), code, message='{"reason": "DriverAbsent"}')
    world.step()
    assert world.status.restarts[0].endswith("Program")
    assert not any(c.type == "Failed" for c in world.status.conditions)


def test_one_that_is_killed_for_its_memory_says_so():
    world = failed(running(), 137, reason="OOMKilled")
    world.step()
    assert world.status.first_failure is not None
    assert world.status.first_failure.reason == "OOMKilled"


def test_a_node_that_dies_under_one_is_still_a_lost_node():
    world = failed(running(), 255, reason="Unknown")
    world.step()
    assert world.status.restarts[0].endswith("Infrastructure")
    world = failed(running(), 137)
    world.pods[POD]["status"]["reason"] = "Evicted"
    world.step()
    assert world.status.restarts[0].endswith("Infrastructure")


def test_an_image_that_cannot_be_had_is_a_condition():
    world = ppo_job().world().planned().created().all_ready()
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image tools:9"}}
    initializing(world, POD, waiting, {"waiting": {"reason": "PodInitializing"}})
    world.step()
    assert world.condition("PodsReady") == ("False", "ImageUnavailable")
    assert "init container fetch: Back-off pulling image tools:9" in world.message("PodsReady")


def test_a_sidecar_that_is_stopped_after_the_agent_is_not_what_ended_the_pod():
    world = running().exited(POD, 1, words="a bug")
    world.pods[POD]["status"]["initContainerStatuses"] = [{"name": "proxy", "state": ended(world, 143)}]
    world.step()
    first = world.status.first_failure
    assert first is not None
    assert (first.exit_code, first.message) == (1, "a bug")
