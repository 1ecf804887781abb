"""Pods with more than one container: the main one, driver or agent, says how the pod is; whatever else runs in it does
not. As a kubelet writes them: with a living sidecar a pod is Running, with one whose image is missing it is Pending."""

import json
from datetime import timedelta

import pytest

from rlinf_api import names, times
from rlinf_api.report import DriverState
from rlinf_operator.clients import copies
from rlinf_operator.policies import pod_view
from rlinf_operator.reconcile.ending import LINGERS_S
from rlinf_operator.reconcile.state import DriverView
from tests.builders import NOW, World, ppo_job

DRIVER, WORKER = "math-driver-a1", "math-sim-1-a1"
RUNS = {"running": {"startedAt": times.text(NOW)}}
PULLS = {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}
GONE = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": times.text(NOW)}}
PLACES = ["first", "last"]


def running(**spec) -> World:
    world = ppo_job().with_spec(**spec).world().started()
    world.step()
    return world


def beside(world: World, pod: str, state=RUNS, *, place="first", phase="Running") -> World:
    """Another container in the pod, of which the kubelet speaks before or after ours."""
    status = world.pods[pod]["status"]
    other = {"name": "istio-proxy", "ready": state is RUNS, "state": state}
    listed = status["containerStatuses"]
    status["containerStatuses"] = [other, *listed] if place == "first" else [*listed, other]
    status["phase"] = phase
    return world


def unready(world: World, pod: str, *, reason="ContainersNotReady") -> World:
    ready = {"type": "Ready", "status": "False"} | ({"reason": reason} if reason else {})
    world.pods[pod]["status"]["conditions"] = [ready]
    return world


def view(world: World, pod: str):
    """Of the pod, and of the copy that the cache keeps of it: they must be the same."""
    found = {"kind": "Pod", **world.pods[pod]}
    seen = pod_view.view(found)
    assert pod_view.view(copies.of(copies.trimmed(found, metadata_only=False), indexed=()).read()) == seen
    return seen


# --- an end beside a living sidecar -----------------------------------------------------------------------------------
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("code", "reason", "cause"), [(137, "OOMKilled", "Program"), (1, "Error", "Program"), (76, "Error", "Stale")]
)
def test_an_agent_that_ended_is_replaced_while_its_sidecar_lives(place, code, reason, cause):
    world = running().exited(WORKER, code, reason=reason)
    decision = beside(world, WORKER, place=place).step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert [d.name for d in decision.delete_pods] == [WORKER]
    assert world.status.restarts == [f"{times.text(NOW)} {WORKER} {cause}"]


@pytest.mark.parametrize("pod", [DRIVER, WORKER])
def test_exit_code_64_fails_the_job_while_a_sidecar_lives(pod):
    world = running()
    world.link = None
    words = {"message": "no such env", "state": "Failed", "reason": "UserError"}
    beside(world.exited(pod, 64, words=json.dumps(words)), pod).step()
    assert world.condition("Failed") == ("True", "UserError")
    assert world.message("Failed") == "no such env"


def test_an_agent_that_exits_0_beside_a_sidecar_is_waited_for_no_longer_than_alone():
    world = beside(running().exited(WORKER, 0), WORKER)
    assert world.step().create_pods == ()
    world.later(world.settings.exit_zero_grace_s)
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-sim-1-a2"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("code", "words", "condition"),
    [
        (0, {"state": "Complete", "message": "100 steps are done", "step": 100}, ("Complete", "FlowFinished")),
        (0, {}, ("Complete", "FlowFinished")),
        (1, {"state": "Failed", "reason": "TooManyRestarts", "message": "often"}, ("Failed", "TooManyRestarts")),
    ],
)
def test_a_driver_that_ended_unheard_ends_the_job_while_its_sidecar_lives(place, code, words, condition):
    world = running()
    world.link = None  # the operator was away
    beside(world.exited(DRIVER, code, words=json.dumps(words)), DRIVER, place=place).step()
    kind, reason = condition
    assert world.condition(kind) == ("True", reason)
    assert world.condition("Running") == ("False", "Stopped")


def test_a_driver_that_was_killed_beside_a_sidecar_is_replaced():
    world = beside(running().exited(DRIVER, 137, reason="OOMKilled"), DRIVER)
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-driver-a2"]
    assert world.condition("Degraded") == ("True", "PodReplaced")


def test_a_drained_driver_beside_a_sidecar_is_drained():
    world = running().edit(suspend=True)
    world.link = None
    beside(world.exited(DRIVER, 0, words=json.dumps({"state": "Drained"})), DRIVER)
    deleted = {d.name for d in world.step().delete_pods}
    assert {DRIVER, WORKER} <= deleted
    assert world.condition("Suspended") == ("Unknown", "Draining")


def test_a_sidecar_that_failed_does_not_fail_a_driver_that_finished():
    world = running()
    world.link = None
    beside(world.exited(DRIVER, 0), DRIVER, GONE, phase="Failed").step()
    assert world.condition("Complete") == ("True", "FlowFinished")


@pytest.mark.parametrize("phase", ["Pending", "Running", "Failed"])
def test_an_agent_that_was_started_again_in_place_has_ended(phase):
    """containers[].restartPolicy of a template: its second life has the first one's attempt."""
    world = running()
    [own] = world.pods[WORKER]["status"]["containerStatuses"]
    own |= {"lastState": {"terminated": GONE["terminated"]}, "restartCount": 1}
    world.pods[WORKER]["status"]["phase"] = phase
    assert view(world, WORKER).phase == "Failed"
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-sim-1-a2"]


# --- at the end -------------------------------------------------------------------------------------------------------
def test_a_sidecar_does_not_keep_the_pods_of_a_job_that_has_ended():
    world = running().report(state=DriverState.COMPLETE, plan_revision=1)
    beside(world, WORKER).step()
    assert world.names() == [DRIVER]  # which says goodbye
    beside(world.exited(DRIVER, 0), DRIVER)
    decision = world.step()
    assert (decision.delete_pods, decision.requeue_after_s) == ((), LINGERS_S), "a kubelet says a pod's end later"
    world.later(LINGERS_S)
    assert [d.name for d in world.step().delete_pods] == [DRIVER]


def test_a_driver_whose_whole_pod_has_ended_stays_to_be_read():
    world = running().report(state=DriverState.COMPLETE, plan_revision=1)
    world.step()
    beside(world.exited(DRIVER, 0), DRIVER, GONE, phase="Failed")
    world.later(world.settings.finish_grace_s + 1)
    assert world.step().delete_pods == ()


# --- alive: nothing that the sidecar does -----------------------------------------------------------------------------
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("state", "phase"), [(RUNS, "Running"), (PULLS, "Pending"), (GONE, "Running")])
def test_what_a_sidecar_does_changes_nothing_of_a_pod_at_work(state, phase, place):
    world = running()
    for pod in (DRIVER, WORKER):
        unready(beside(world, pod, state, place=place, phase=phase), pod)
        seen = view(world, pod)
        assert (seen.phase, seen.ready, seen.at_work, seen.lingers) == ("Running", True, True, False)
    decision = world.step()
    assert (decision.create_pods, decision.delete_pods) == ((), ())
    assert world.condition("PodsReady") == ("True", "PodsReady")
    assert world.condition("Degraded") == ("False", "Healthy")


def test_a_pod_whose_node_is_not_heard_of_is_not_ready():
    world = unready(running(), WORKER, reason="")
    assert not view(world, WORKER).ready
    world.step()
    assert world.condition("PodsReady")[0] == "False"


def test_a_pod_that_ended_under_its_containers_is_not_at_work():
    """Its node was removed: nobody is left to say what became of them."""
    world = beside(running(), WORKER, phase="Failed")
    assert not view(world, WORKER).ready
    world.step()
    assert world.status.restarts == [f"{times.text(NOW)} {WORKER} Infrastructure"]


@pytest.mark.parametrize("listed", [[], [{"name": "istio-proxy", "state": RUNS}], [{"name": "agent"}]])
def test_without_a_word_of_the_main_container_the_pods_phase_counts(listed):
    world = running()
    for phase, wanted in (("Pending", "Pending"), ("Running", "Running"), ("Failed", "Failed"), ("Unknown", "Unknown")):
        world.pods[WORKER]["status"] |= {"phase": phase, "containerStatuses": listed}
        seen = view(world, WORKER)
        assert (seen.phase, seen.exit_code, seen.lingers) == (wanted, None, False)


# --- silence ----------------------------------------------------------------------------------------------------------
def test_a_driver_beside_a_sidecar_that_is_not_ready_is_silent_like_any_other():
    world = unready(beside(running(), DRIVER, GONE), DRIVER).silent(11)
    world.step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")
    world.silent(world.settings.driver_silent_deadline_s)
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-driver-a2"]


def test_a_driver_on_a_node_that_is_not_heard_of_is_silent_too():
    world = unready(running(), DRIVER, reason="").silent(11)
    world.step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")
    world.silent(world.settings.driver_silent_deadline_s)
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-driver-a2"]


def test_a_driver_that_nobody_has_heard_beside_a_sidecar_without_image_is_late_and_then_lost():
    world = ppo_job().world().created().all_ready()
    unready(beside(world, DRIVER, PULLS, phase="Pending"), DRIVER)
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_late_s)
    world.step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_silent_deadline_s)
    world.later(world.settings.driver_silent_deadline_s)
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-driver-a2"]


# --- native sidecars --------------------------------------------------------------------------------------------------
def native(world: World, pod: str, state, *, main, phase="Pending") -> World:
    """An init container with restartPolicy Always, and the main one in `main`."""
    found = world.pods[pod]
    found["spec"]["initContainers"] = [{"name": "istio-proxy", "restartPolicy": "Always"}, {"name": "fetch"}]
    fetched = {"terminated": {"exitCode": 0, "finishedAt": times.text(NOW)}}
    found["status"]["initContainerStatuses"] = [
        {"name": "istio-proxy", "state": state}, {"name": "fetch", "state": fetched}
    ]  # fmt: skip
    [own] = found["status"]["containerStatuses"]
    own["state"] = main
    found["status"]["phase"] = phase
    return world


def test_a_native_sidecar_that_crashed_fails_nothing():
    world = native(running(), WORKER, GONE, main={"waiting": {"reason": "PodInitializing"}})
    assert view(world, WORKER).failed_init == ""
    decision = world.step()
    assert (decision.create_pods, world.status.restarts) == ((), [])


def test_a_native_sidecar_that_keeps_its_pod_from_starting_is_named():
    loops = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    world = native(running(), WORKER, loops, main={"waiting": {"reason": "PodInitializing"}})
    world.pods[WORKER]["status"]["conditions"] = []
    assert view(world, WORKER).waiting_reason == "CrashLoopBackOff"
    world.now += timedelta(seconds=world.settings.pods_ready_deadline_s + 1)
    world.step()
    assert "CrashLoopBackOff init container istio-proxy: back-off 40s" in world.message("PodsReady")


def test_an_init_container_that_fails_behind_a_native_sidecar_is_the_one_that_is_named():
    world = native(running(), WORKER, RUNS, main={"waiting": {"reason": "PodInitializing"}}, phase="Failed")
    world.pods[WORKER]["status"]["initContainerStatuses"][1]["state"]["terminated"]["exitCode"] = 3
    assert view(world, WORKER).failed_init == "fetch"
    world.step()
    assert world.status.restarts == [f"{times.text(NOW)} {WORKER} Program"]


def test_an_agent_that_ended_beside_a_native_sidecar_is_replaced():
    world = running().exited(WORKER, names.EXIT_BUG)
    [own] = world.pods[WORKER]["status"]["containerStatuses"]
    native(world, WORKER, RUNS, main=own["state"], phase="Running")
    assert view(world, WORKER).lingers
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-sim-1-a2"]
