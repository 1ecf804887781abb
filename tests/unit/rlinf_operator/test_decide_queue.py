"""A job with a queue: no pod before it is admitted, pods where its share says, drained when its place is taken back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf_api.conditions import Condition, Status, state_of
from rlinf_api.job import FailureAction, RLJobStatus
from rlinf_api.report import DriverState
from rlinf_operator.manifests import asking
from rlinf_operator.manifests.asking import OrderKind, PlaceInQueue, PodGang, QueueStanding, QueueView, Share
from rlinf_operator.policies import queueing
from rlinf_operator.reconcile.events import of_transition
from tests import builders_plans
from tests.builders import World, ppo_job
from tests.stories import Story

STORIES = Path(__file__).parent / "stories"
TOLERATION = {"key": "gpu", "operator": "Exists"}
SHARES = {
    "driver": Share(count=1, node_selector={"kind": "cheap"}),
    "sim": Share(count=2, node_selector={"kind": "fast"}, tolerations=(TOLERATION,)),
    "train": Share(count=1, labels={"provisioned": "yes"}, annotations={"note": "a"}),
}


def _asked_for() -> str:
    world = ppo_job().with_spec(checkpoint={"uri": "/c"}).world().planned()
    sets = asking.pod_sets(world.job, ppo_job().parsed(), {"sim": 2, "train": 1}, settings=world.settings)
    return asking.inputs(sets)


ASKED_FOR = _asked_for()


def place(standing: QueueStanding, *, queue: str = "team", **fields: Any) -> QueueView:
    shares = SHARES if standing is QueueStanding.GRANTED else {}
    holds = standing in (QueueStanding.GRANTED, QueueStanding.WITHDRAWN)
    known: dict[str, Any] = {"holds": holds, "shares": shares, "asked": ASKED_FOR} | fields
    found = PlaceInQueue(name="rljob-math", uid="w1", queue=queue, standing=standing, **known)
    return QueueView(queue="team", provider="kueue", place=found)


ASKED = QueueView(queue="team", provider="kueue")
NOBODY = QueueView(queue="team", provider="")


def queued(job=None, **spec: Any) -> World:
    world = (job or ppo_job()).with_spec(**({"checkpoint": {"uri": "/c"}} | spec)).world()
    world.queue = ASKED
    return world


def admitted(**spec: Any) -> World:
    world = queued(**spec)
    world.step()
    world.step()
    world.queue = place(QueueStanding.GRANTED)
    world.created().all_ready().report(plan_revision=1, plan_switches=1, step=5)
    world.step()
    world.queue = place(QueueStanding.GRANTED, ready=True)
    return world


def order(world: World) -> OrderKind | None:
    told = world.step().queue
    return told.kind if told is not None else None


def drained(world: World) -> World:
    """Its driver has done what it was told."""
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7, checkpoint_uri="/c", checkpoint_step=7)
    world.step()
    world.link = None
    return world


def test_the_life_of_a_job_in_a_queue():
    story = Story(queued())
    world = story.world
    story.step("the job is made")
    story.step("its plan is there")
    world.queue = place(QueueStanding.WAITS, message="couldn't assign flavors (Pending)")
    story.step("it waits")
    world.queue = place(QueueStanding.GRANTED, message="ClusterQueue all")
    story.step("it is admitted")
    world.all_ready().report(plan_revision=1, plan_switches=1, step=5)
    story.step("it steps")
    world.queue = place(QueueStanding.WITHDRAWN, message="preempted (Preempted)")
    world.later(10)
    story.step("it is evicted")
    world.later(10).report(state=DriverState.DRAINED, plan_revision=1, step=7, checkpoint_uri="/c", checkpoint_step=7)
    story.step("it is drained")
    world.link = None
    story.step("its pods are gone")
    world.queue = place(QueueStanding.WAITS, message="preempted (Pending)")
    story.step("it gave its quota back")
    world.queue = place(QueueStanding.GRANTED, message="ClusterQueue all")
    world.later(100)
    story.step("it is admitted again")
    world.all_ready().report(state=DriverState.COMPLETE, plan_revision=1, step=100)
    story.step("it is complete")
    for name in world.names():
        if "driver" in name:
            world.exited(name, 0)
    story.step("its workers are gone")
    story.holds(STORIES / "queued.txt")


def test_without_a_provider_there_is_no_pod():
    world = queued()
    world.queue = NOBODY
    for _ in range(3):
        decision = world.step()
        assert (decision.create_pods, decision.queue, decision.requeue_after_s) == ((), None, 30.0)
    assert world.condition("Admitted") == ("False", "NoProvider")
    assert "kueue.x-k8s.io/queue-name is 'team'" in world.message("Admitted")
    assert str(state_of(world.status.conditions)) == "Queued"
    world.queue = ASKED
    assert order(world) is OrderKind.ASK, "it has come"


def test_a_job_that_has_pods_keeps_them_when_its_provider_goes():
    world = admitted()
    world.queue = NOBODY
    decision = world.step()
    assert (decision.delete_pods, decision.drain, decision.queue) == ((), None, None)
    assert world.condition("Admitted") == ("False", "NoProvider")
    assert world.condition("Running") == ("True", "Stepping")


def test_a_job_without_a_queue_says_so_and_tells_nobody():
    world = ppo_job().world().started()
    assert world.step().queue is None
    assert world.condition("Admitted") == ("True", "NoQueue")


def test_the_queue_is_asked_once_for_the_pods_of_the_first_plan():
    world = queued()
    first = world.step()
    assert (first.request_plan, first.queue) == ("Initial", None), "nobody knows how many"
    asked = world.step().queue
    assert asked is not None
    assert (asked.kind, asked.queue) == (OrderKind.ASK, "team")
    assert [(s.name, s.count, s.least) for s in asked.pod_sets] == [
        ("driver", 1, None),
        ("sim", 2, None),
        ("train", 1, None),
    ]
    container = asked.pod_sets[1].template["spec"]["containers"][0]
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "8Gi"}
    assert set(container) <= {"name", "image", "resources"}
    world.queue = place(QueueStanding.WAITS)
    assert order(world) is None
    assert world.names() == []


def test_an_edit_of_a_job_that_waits_changes_what_it_asks_for_and_an_upgrade_does_not():
    world = queued()
    world.step()
    asked = world.step().queue
    assert asked is not None
    world.queue = place(QueueStanding.WAITS, asked=asking.inputs(asked.pod_sets))
    assert order(world) is None
    world.settings = replace(world.settings, worker_image="rlinf-worker:next", driver_image="rlinf-driver:next")
    assert order(world) is None
    pools = [
        {**p, "slots": {"perPod": 4, "cpu": "2"}} if p["name"] == "sim" else p for p in world.manifest["spec"]["pools"]
    ]
    world.edit(pools=pools)
    told = world.step().queue
    assert told is not None
    assert told.kind is OrderKind.CHANGE
    assert told.pod_sets[1].template["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "8"
    world.queue = place(QueueStanding.WAITS, asked="older", holds=True)
    assert order(world) is None, "it cannot be changed while quota is reserved"


def test_of_pools_that_may_shrink_one_says_so():
    world = queued(builders_plans.job())
    world.planned()
    wide = world.plans[0].spec
    assert wide is not None
    pools = [p.model_copy(update={"pods": 3}) if p.name == "sim" else p for p in wide.pools]
    world.plans = [replace(world.plans[0], spec=wide.model_copy(update={"pools": pools}))]
    asked = world.step().queue
    assert asked is not None
    assert [(s.name, s.count, s.least) for s in asked.pod_sets] == [
        ("driver", 1, None),
        ("sim", 3, 1),
        ("train", 1, None),
    ]


def test_pods_go_where_the_share_of_their_set_says():
    world = queued()
    world.step()
    world.step()
    world.queue = place(QueueStanding.GRANTED)
    made = {p["metadata"]["name"]: p for p in world.step().create_pods}
    driver, sim, train = made["math-driver-a1"], made["math-sim-0-a1"], made["math-train-0-a1"]
    assert [p["spec"].get("nodeSelector") for p in (driver, sim, train)] == [{"kind": "cheap"}, {"kind": "fast"}, None]
    assert TOLERATION in sim["spec"]["tolerations"]
    assert TOLERATION not in driver["spec"]["tolerations"]
    assert len(sim["spec"]["tolerations"]) == len(driver["spec"]["tolerations"]) + 1, "ours stay"
    assert train["metadata"]["labels"]["provisioned"] == "yes"
    assert train["metadata"]["labels"]["rlinf.io/job"] == "math"
    assert train["metadata"]["annotations"]["note"] == "a"


def test_the_provider_is_told_once_that_all_pods_are_ready():
    world = queued()
    world.step()
    world.step()
    world.queue = place(QueueStanding.GRANTED)
    assert [order(world) for _ in range(2)] == [None, None]
    world.all_ready()
    assert order(world) is OrderKind.READY
    world.queue = place(QueueStanding.GRANTED, ready=True)
    assert order(world) is None
    world.queue = NOBODY
    assert order(world) is None


def test_the_provider_is_told_of_a_lost_pod_that_finds_no_node_and_of_no_other():
    world = admitted()
    world.queue = place(QueueStanding.GRANTED, ready=True)
    world.exited("math-sim-0-a1", 1).later(60)
    for _ in range(3):
        assert order(world) is None, "another starts"
    world.waiting("math-sim-0-a2", unschedulable="0/3 nodes are available")
    told = world.step().queue
    assert told is not None
    assert told.kind is OrderKind.LACKS
    assert "no node has room for math-sim-0-a2: 0/3 nodes are available" in told.message
    world.queue = place(QueueStanding.GRANTED, ready=False)
    assert order(world) is None
    world.ready("math-sim-0-a2")
    assert order(world) is OrderKind.READY


def test_who_places_pods_itself_is_told_of_none():
    found = place(QueueStanding.GRANTED, ready=True)
    assert found.place is not None
    told = queueing.of_running(found, has_pods=True, ready=False, lacks="no node")
    assert told is not None
    assert told.kind is OrderKind.LACKS
    gang = replace(found.place, gang=PodGang(name="rljob-math", size=4))
    assert queueing.of_running(replace(found, place=gang), has_pods=True, ready=False, lacks="no node") is None


def test_a_replaced_pod_goes_there_too():
    world = admitted()
    world.exited("math-sim-0-a1", 1).later(60)
    made = [p for _ in range(3) for p in world.step().create_pods]
    assert [p["spec"]["nodeSelector"] for p in made] == [{"kind": "fast"}]


@pytest.mark.parametrize(
    "standing", [QueueStanding.WITHDRAWN, QueueStanding.STOPPED, QueueStanding.WAITS, QueueStanding.GOING, None]
)
def test_a_job_whose_place_is_taken_back_is_drained(standing):
    world = admitted()
    world.queue = place(standing) if standing else ASKED
    decision = world.step()
    assert (decision.drain is not None, decision.delete_pods, decision.queue) == (True, (), None)
    assert world.condition("Suspended") == ("Unknown", "Draining")
    assert world.condition("Admitted") == ("False", "Deactivated" if standing is QueueStanding.STOPPED else "Evicted")
    assert len(drained(world).names()) == 0


def test_quota_is_given_back_when_the_pods_are_gone_and_not_before():
    world = admitted()
    world.queue = place(QueueStanding.WITHDRAWN)
    assert order(world) is None
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7, checkpoint_uri="/c", checkpoint_step=7)
    assert order(world) is None, "its pods are being deleted"
    world.link = None
    assert order(world) is OrderKind.GIVE_BACK
    world.queue = place(QueueStanding.WAITS)
    assert order(world) is None
    assert world.condition("Suspended") == ("True", "SuspendedByQueue")
    assert world.status.state == "Queued"


def test_a_deactivated_job_gives_back_and_stays():
    world = admitted()
    world.queue = place(QueueStanding.STOPPED, holds=True, message="by hand (Deactivated)")
    world.step()
    drained(world)
    assert order(world) is OrderKind.GIVE_BACK
    world.queue = place(QueueStanding.STOPPED)
    assert order(world) is None
    assert world.status.state == "Suspended"
    assert "set spec.active of Workload rljob-math to true" in world.message("Suspended")
    world.queue = place(QueueStanding.GRANTED)
    assert len(world.step().create_pods) == 4
    assert world.status.life == 2


def test_a_place_that_was_deleted_is_asked_for_anew_after_the_pods_are_gone():
    world = admitted()
    world.queue = ASKED
    assert order(world) is None
    drained(world)
    assert order(world) is OrderKind.ASK
    assert world.condition("Admitted") == ("False", "Queued")


def test_another_priority_counts_for_a_job_that_waits_and_not_for_one_that_runs():
    world = queued()
    world.step()
    asked = world.step().queue
    assert asked is not None
    world.queue = replace(place(QueueStanding.WAITS, asked=asking.inputs(asked.pod_sets)), priority="urgent")
    told = world.step().queue
    assert told is not None
    assert (told.kind, told.pod_sets) == (OrderKind.CHANGE, asked.pod_sets)
    world = admitted()
    assert world.queue is not None
    world.queue = replace(world.queue, priority="urgent")
    assert order(world) is not OrderKind.CHANGE


def test_a_place_that_somebody_finished_is_left_and_asked_for_anew():
    world = admitted()
    world.queue = place(QueueStanding.GRANTED, finished=True)
    world.step()
    assert order(drained(world)) is OrderKind.LEAVE


def test_another_queue_is_moved_to_by_a_job_that_waits_and_not_by_one_that_runs():
    world = queued()
    world.step()
    world.queue = place(QueueStanding.WAITS, queue="other")
    told = world.step().queue
    assert told is not None
    assert (told.kind, told.queue) == (OrderKind.CHANGE, "team")
    world = admitted()
    world.queue = place(QueueStanding.GRANTED, queue="other", ready=True)
    assert order(world) is None
    assert world.condition("Running") == ("True", "Stepping")
    assert "suspend the job to move it" in world.message("Admitted")


@pytest.mark.parametrize("by", ["its user", "a rule"])
def test_a_job_that_is_suspended_leaves_its_queue_when_its_pods_are_gone(by):
    rules = [{"exitCodes": [7], "action": FailureAction.SUSPEND}] if by == "a rule" else []
    world = admitted(failurePolicy={"rules": rules})
    if rules:
        world.exited("math-sim-0-a1", 7)
    else:
        world.edit(suspend=True)
    assert order(world) is None
    assert order(drained(world)) is OrderKind.LEAVE
    assert world.condition("Admitted") == ("False", "Stopped")
    world.queue = ASKED
    assert order(world) is None, "it does not ask while it is suspended"
    world.edit(suspend=False, flow={"name": "ppo", "steps": 200})
    assert order(world) is OrderKind.ASK
    assert world.names() == []
    assert world.condition("Suspended") == ("True", "SuspendedByQueue")


def test_a_suspended_job_keeps_a_place_that_somebody_deactivated():
    world = admitted()
    world.edit(suspend=True)
    world.queue = place(QueueStanding.STOPPED)
    world.step()
    assert order(drained(world)) is None


def test_a_job_whose_label_was_taken_off_goes_on_and_leaves_when_its_pods_are_gone():
    """Its quota given back before, the next job would be let in beside them."""
    world = admitted()
    assert world.queue is not None
    world.queue = replace(world.queue, queue="")
    decision = world.step()
    assert (decision.queue, decision.drain) == (None, None)
    assert world.condition("Admitted") == ("True", "Admitted")
    assert world.message("Admitted").endswith("label kueue.x-k8s.io/queue-name is gone: suspend the job to leave")
    world.edit(suspend=True)
    assert order(world) is None
    assert order(drained(world)) is OrderKind.LEAVE
    world.queue = None
    world.edit(suspend=False)
    assert order(world) is None
    assert (world.condition("Admitted"), world.names() != []) == (("True", "NoQueue"), True)


def test_one_that_is_evicted_behind_its_label_is_drained_and_begins_without_a_queue():
    world = admitted()
    withdrawn = place(QueueStanding.WITHDRAWN)
    world.queue = replace(withdrawn, queue="")
    assert world.step().drain is not None
    assert drained(world).names() == []
    world.step()
    assert (world.condition("Admitted"), world.names() != []) == (("True", "NoQueue"), True)


def test_an_evicted_job_with_a_spec_that_is_not_valid_is_drained_as_well():
    world = admitted()
    world.edit(flow={"name": "ppo", "steps": 0})
    world.step()
    world.queue = place(QueueStanding.WITHDRAWN)
    assert world.step().drain is not None
    assert drained(world).names() == []
    assert order(world) is OrderKind.GIVE_BACK


def test_a_finished_job_keeps_its_quota_until_its_workers_are_gone():
    world = admitted()
    world.report(state=DriverState.COMPLETE, plan_revision=1, step=100)
    assert order(world) is None
    assert order(world) is None, "its driver still runs"
    world.exited("math-driver-a1", 0)
    told = world.step().queue
    assert told is not None
    assert (told.kind, told.succeeded) == (OrderKind.FINISH, True)
    world.queue = place(QueueStanding.GRANTED, finished=True)
    assert order(world) is None


def test_a_failed_job_says_that_it_failed():
    world = admitted(activeDeadlineSeconds=60)
    world.later(61).step()
    world.pods.clear()
    told = world.step().queue
    assert told is not None
    assert (told.kind, told.succeeded) == (OrderKind.FINISH, False)
    assert "activeDeadlineSeconds" in told.message


def test_time_in_the_queue_does_not_count_against_the_deadline():
    world = queued(activeDeadlineSeconds=60)
    world.step()
    world.queue = place(QueueStanding.WAITS)
    world.later(600).step()
    assert world.status.start_time is None
    assert world.condition("Admitted") == ("False", "Queued")


def test_nor_does_that_of_a_job_that_lost_its_pods_and_its_place():
    world = admitted(activeDeadlineSeconds=60)
    assert world.status.start_time is not None
    world.pods.clear()
    world.queue, world.link = ASKED, None
    world.step()
    assert world.status.start_time is None
    assert world.condition("Suspended") == ("True", "SuspendedByQueue")


def test_an_admission_is_an_event_and_having_no_queue_is_none():
    def events(reason: str) -> list[tuple[str, str]]:
        now = Condition(type="Admitted", status=Status.TRUE, reason=reason, message="m")
        return [(e.type, e.reason) for e in of_transition(RLJobStatus(), RLJobStatus(conditions=[now]))]

    assert events("NoQueue") == []
    assert events("Admitted") == [("Normal", "Admitted")]
