"""spec.allOrNothing without a scheduler of gangs: a job that is half placed gives back all, and tries again."""

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_api import names, times
from rlinf_api.job import PlacementStatus
from rlinf_api.report import DriverState
from rlinf_operator.manifests.asking import PlaceInQueue, QueueStanding, QueueView
from rlinf_operator.policies import placing
from rlinf_operator.policies.placing import PAUSE_MAX_S, PAUSE_MIN_S, Placed
from rlinf_operator.reconcile.events import of_transition
from tests.builders import NOW, World, ppo_job

TIMEOUT_S = 60
NO_ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def job(*, pods: int = 2, name: str = "math", uid: str = "", **spec: Any) -> World:
    made = ppo_job(name=name).with_spec(allOrNothing={"timeoutSeconds": TIMEOUT_S}, **spec)
    made.spec["pools"][0]["pods"] = pods
    if uid:
        made.manifest["metadata"]["uid"] = uid
    return made.world()


def bind(world: World, *pods: str) -> None:
    """A node, and nothing of it runs yet."""
    for pod in pods:
        world.pods[pod]["spec"]["nodeName"] = "n1"


def half_placed(**spec: Any) -> World:
    """Of four pods, one of the simulators has no node."""
    world = job(**spec).created()
    bind(world, "math-driver-a1", "math-sim-0-a1", "math-train-0-a1")
    world.waiting("math-sim-1-a1", unschedulable=NO_ROOM)
    world.step()
    return world


def given_back() -> World:
    world = half_placed()
    world.later(TIMEOUT_S).step()
    world.step()
    return world


def test_a_half_placed_job_gives_back_all_pods_when_its_time_is_over():
    world = half_placed()
    assert world.later(TIMEOUT_S - 1).decide().delete_pods == ()
    decision = world.later(1).step()
    assert sorted(pod.name for pod in decision.delete_pods) == [
        "math-driver-a1", "math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1",
    ]  # fmt: skip
    assert world.names() == []
    assert world.condition("Admitted") == ("False", "NotPlaced")
    said = world.message("Admitted")
    assert said.startswith(
        "3 of 4 pods have a node, and math-sim-1-a1 found none within 60 s (0/2 nodes are available: 2 Insufficient "
        "nvidia.com/gpu.); spec.allOrNothing wants all or none, so the job gives back what it holds, for the 1. time"
    )
    assert "lower spec.pools" in said
    world.step()
    assert world.message("Admitted") == said, "each change is a write"
    assert world.condition("Suspended") == ("True", "SuspendedByQueue")
    assert world.status.state == "Queued"


def test_its_deadline_is_looked_at_in_time():
    assert half_placed().decide().requeue_after_s == TIMEOUT_S
    assert given_back().decide().requeue_after_s == pytest.approx(placing.pause_s(1, uid=job().job.uid), abs=1)


def test_a_job_that_gave_back_has_no_pod_before_its_pause_is_over_and_then_begins_a_new_life():
    world = given_back()
    pause_s = placing.pause_s(1, uid=world.job.uid)
    world.later(pause_s - 2)
    assert world.step().create_pods == ()
    made = world.later(2).step().create_pods
    assert len(made) == 4
    assert {pod["metadata"]["labels"][names.LABEL_ATTEMPT] for pod in made} == {"2"}
    assert world.status.life == 2
    assert world.condition("Admitted") == ("True", "NoQueue")


def test_a_pass_that_was_cut_off_after_its_pods_does_not_give_these_back():
    world = given_back()
    before = world.later(PAUSE_MIN_S * 2).status
    world.step()
    world.status = before
    assert world.step().delete_pods == ()
    assert len(world.names()) == 4


def test_a_second_is_a_second_though_times_are_written_without_fractions():
    seen = Placed(needed=2, made=2, nodes=1, lacking=["a"])
    begun = NOW + timedelta(seconds=0.9)
    memory = placing.judge(None, seen, timeout_s=1, uid="a", now=begun).memory
    soon = placing.judge(memory, seen, timeout_s=1, uid="a", now=begun + timedelta(seconds=0.9))
    assert soon.gives_back == ""
    assert placing.judge(soon.memory, seen, timeout_s=1, uid="a", now=begun + timedelta(seconds=1.2)).gives_back


def test_tries_are_counted_until_all_pods_have_a_node():
    world = given_back()
    world.later(PAUSE_MIN_S * 2).created()
    assert world.status.placement == PlacementStatus(tries=1)
    bind(world, "math-driver-a2")
    world.step()
    assert world.later(TIMEOUT_S).step().delete_pods != ()
    assert world.status.placement is not None
    assert world.status.placement.tries == 2
    world.step()
    world.later(PAUSE_MIN_S * 4).created().all_ready().step()
    assert world.status.placement is None


def test_a_job_without_a_node_holds_nothing_and_waits_on():
    world = job().created()
    for name in world.names():
        world.waiting(name, unschedulable=NO_ROOM)
    for _ in range(20):
        world.later(TIMEOUT_S)
        assert world.step().delete_pods == ()
    assert world.condition("PodsReady") == ("False", "Unschedulable")
    decision = world.decide()
    assert decision.requeue_after_s is not None
    assert decision.requeue_after_s <= placing.LOOKS_S
    bind(world, "math-sim-0-a1")
    world.step()
    assert world.later(TIMEOUT_S - 1).decide().delete_pods == (), "its time begins with the first node"


def test_pods_that_a_quota_refuses_are_lacking_and_those_that_are_made_are_held():
    world = job().created()
    del world.pods["math-sim-1-a1"]
    before = world.status.model_copy(update={"pools": [], "attempt": 0})
    world.status = before
    decision = world.decide()
    assert [pod["metadata"]["name"] for pod in decision.create_pods] == ["math-sim-1-a1"]
    assert decision.status.placement is not None
    world.status = before.model_copy(update={"placement": decision.status.placement})
    assert len(world.later(TIMEOUT_S).decide().delete_pods) == 3


def test_without_the_field_nobody_gives_anything_back():
    world = half_placed()
    world.edit(allOrNothing=None)
    assert world.later(TIMEOUT_S * 10).step().delete_pods == ()
    assert world.status.placement is None
    assert world.condition("Admitted") == ("True", "NoQueue")


def test_a_job_at_work_that_lost_a_node_is_drained_with_its_checkpoint():
    world = job(checkpoint={"uri": "/c"}).started()
    world.step()
    assert world.status.placement is None
    world.vanished("math-sim-0-a1")
    world.step()
    world.later(TIMEOUT_S).step()
    decision = world.later(TIMEOUT_S).step()
    assert (decision.drain is not None, decision.delete_pods) == (True, ())
    assert world.condition("Admitted") == ("False", "NotPlaced")
    world.later(PAUSE_MIN_S * 3)
    assert world.step().delete_pods == (), "it is drained, though its pause is over"
    world.report(state=DriverState.DRAINED, plan_revision=1, step=7, checkpoint_uri="/c", checkpoint_step=7)
    assert len(world.step().delete_pods) == 4
    world.link = None
    assert len(world.later(PAUSE_MIN_S * 2).step().create_pods) == 4


def test_a_pause_before_a_pod_that_crashed_is_no_lack_of_a_node():
    world = job().started()
    for _ in range(9):  # the last ones are a minute apart
        world.exited(next(n for n in world.names() if "-sim-0-" in n), 1)
        for _ in range(100):
            if world.later(1).step().create_pods:
                break
            assert world.status.placement is None
        world.all_ready().report(plan_revision=1).step()
    assert world.condition("Admitted") == ("True", "NoQueue")


def test_time_that_a_job_was_suspended_is_no_part_of_its_deadline():
    world = half_placed()
    world.edit(suspend=True)
    world.step()
    world.step()
    assert world.status.placement is None
    world.later(TIMEOUT_S * 2).edit(suspend=False)
    world.created()
    bind(world, world.names()[0])
    world.step()
    assert world.later(TIMEOUT_S - 1).decide().delete_pods == ()


def test_a_job_that_ends_before_all_pods_have_a_node_tries_no_more():
    world = half_placed()
    world.ready("math-driver-a1").report(state=DriverState.COMPLETE, plan_revision=1, step=100)
    world.step()
    assert world.condition("Complete") == ("True", "FlowFinished")
    assert world.status.placement is None


def test_a_job_in_a_queue_leaves_it_to_the_queue():
    world = job()
    place = PlaceInQueue(name="rljob-math", uid="w", queue="team", standing=QueueStanding.GRANTED, holds=True)
    world.queue = QueueView(queue="team", provider="kueue", place=place)
    world.created()
    bind(world, "math-driver-a1")
    world.step()
    assert world.later(TIMEOUT_S * 3).step().delete_pods == ()
    assert world.condition("Admitted") == ("True", "Admitted")
    assert "spec.allOrNothing is left to the queue" in world.message("Admitted")


def test_giving_back_is_an_event_once():
    world = half_placed()
    before = world.status
    world.later(TIMEOUT_S).step()
    told = [e for e in of_transition(before, world.status) if e.reason == "NotPlaced"]
    assert [e.type for e in told] == ["Warning"]
    before = world.status
    world.step()
    assert [e for e in of_transition(before, world.status) if e.reason == "NotPlaced"] == []


def test_pauses_grow_within_their_bounds_and_two_jobs_draw_different_ones():
    for uid in ("a", "b", "c"):
        pauses = [placing.pause_s(n, uid=uid) for n in range(1, 40)]
        assert all(PAUSE_MIN_S * 2**n <= p < PAUSE_MIN_S * 2 ** (n + 1) for n, p in enumerate(pauses[:4]))
        assert all(PAUSE_MAX_S / 2 <= p <= PAUSE_MAX_S for p in pauses[4:])
    apart = [abs(placing.pause_s(n, uid="a") - placing.pause_s(n, uid="b")) for n in range(1, 9)]
    assert max(apart) > 10


def test_a_clock_that_was_put_back_makes_no_pause_and_no_deadline_longer():
    ahead = times.text(NOW + timedelta(days=1))
    gate = placing.gate(PlacementStatus(tries=1, next_try=ahead), said="", pods_left=False, now=NOW)
    assert gate is not None
    assert gate.look_again_s == PAUSE_MAX_S
    seen = Placed(needed=2, made=2, nodes=1, lacking=["a"])
    judged = placing.judge(
        PlacementStatus(half_placed_since=ahead), seen, timeout_s=TIMEOUT_S, uid="a", now=NOW
    )  # fmt: skip
    assert judged.look_again_s == TIMEOUT_S


# --- several jobs and too few slots -----------------------------------------------------------------------------------


class Slots:
    """Jobs of which each needs a slot for each of its workers, and a scheduler that gives slots out one by one in any
    order. A job that has had all of its pods for `WORK_S` is done and leaves."""

    WORK_S = 30.0
    TICK_S = 2.0

    def __init__(self, sizes: list[int], *, slots: int) -> None:
        self.slots, self.jobs, self.half_s, self.whole_s = slots, {}, {}, {}
        for number, pods in enumerate(sizes):
            self.jobs[f"j{number}"] = job(pods=pods, name=f"j{number}", uid=f"uid-{number}")
        self.half_s = dict.fromkeys(self.jobs, 0.0)
        self.whole_s = dict.fromkeys(self.jobs, 0.0)

    def tick(self, order) -> None:
        for name in order(sorted(self.jobs)):
            self.jobs[name].step()
        waiting = [(j, p) for j, w in self.jobs.items() for p in w.names() if not w.pods[p]["spec"].get("nodeName")]
        for name, pod in order(sorted(waiting)):
            if "driver" in pod or self.taken() < self.slots:
                bind(self.jobs[name], pod)
        for name in sorted(self.jobs):
            world = self.jobs[name]
            pods = list(world.pods.values())
            bound = sum(1 for pod in pods if pod["spec"].get("nodeName"))
            whole = bool(pods) and bound == len(pods)
            self.half_s[name] = self.half_s[name] + self.TICK_S if bound and not whole else 0.0
            self.whole_s[name] = self.whole_s[name] + self.TICK_S if whole else 0.0
            if self.whole_s[name] >= self.WORK_S:
                del self.jobs[name]
            else:
                world.later(self.TICK_S)

    def taken(self) -> int:
        pods = (p for w in self.jobs.values() for p in w.pods.values())
        return sum(1 for p in pods if p["spec"].get("nodeName") and "driver" not in p["metadata"]["name"])


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(2, 4), min_size=2, max_size=3), spare=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_no_interleaving_leaves_a_job_half_placed_beyond_its_deadline_and_all_get_their_turn(sizes, spare, seed):
    random = Random(seed)
    world = Slots(sizes, slots=max(sizes) + 1 + spare)  # the trainer's slot

    def shuffled(things):
        return random.sample(things, len(things))

    for _ in range(1800):
        if not world.jobs:
            return
        world.tick(shuffled)
        assert max(world.half_s.values()) <= TIMEOUT_S + 2 * world.TICK_S
        assert world.taken() <= world.slots
    raise AssertionError(f"after an hour {sorted(world.jobs)} never had all of their pods")
