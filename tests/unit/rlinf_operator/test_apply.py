"""What a pass writes of a decision: names, preconditions, order, and what it says of what was refused."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from rlinf_api.errors import ClusterBusy, Conflict, RLinfError, WorkerUnreachable
from rlinf_api.plan import Planned
from rlinf_api.report import DriverState
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_operator.clients.api_errors import NamespaceTerminating
from rlinf_operator.manifests.metadata import Target
from rlinf_operator.reconcile import apply
from rlinf_operator.reconcile.apply import Applied, Clients
from rlinf_operator.reconcile.state import Decision, DeletePod, Drain, Event, Instruct
from rlinf_operator.reconcile.telling import EventRecorder
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY

TARGET = Target(job_uid="u", attempt=3, address="10.0.0.1:7070")


class Store:
    """Notes each write; `errors[verb, name]` is raised instead."""

    def __init__(self):
        self.writes, self.errors = [], {}

    def _done(self, verb, name, *more):
        if (verb, name) in self.errors:
            raise self.errors[verb, name]
        self.writes.append((verb, name, *more))

    async def get(self, kind, name, *, namespace, live=True):
        raise NotFound(f"{kind} {name}")

    async def create(self, obj):
        self._done("create", obj["metadata"].get("name") or obj.get("reason"))
        return obj

    async def replace(self, obj, *, subresource=""):
        self._done("replace", obj["metadata"]["name"], subresource, obj)
        return obj

    async def patch(self, kind, name, *, patch, namespace, subresource=""):
        self._done("patch", name, namespace, patch, subresource)
        return {}

    async def delete(self, kind, name, *, namespace, uid, grace_period_s=None):
        given = () if grace_period_s is None else (grace_period_s,)
        self._done("delete", name, kind, namespace, uid, *given)
        return {}


class Scheduler:
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def request_plan(self, job, *, reason, highest_revision):
        self.asked.append((job["metadata"]["name"], reason, highest_revision))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Drivers:
    def __init__(self, *answers):
        self.answers, self.told = list(answers), []

    async def apply_plan(self, target, plan, *, step, switches=0, uid=""):
        self.told.append((target, plan.revision, step, switches))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def drain(self, key, target, *, deadline_s):
        self.told.append((str(key), target, deadline_s))


class World:
    def __init__(self, *, answer=None, drivers=()):
        self.store = cast(Any, Store())  # as far as a pass asks it
        self.drivers = cast(Any, Drivers(*drivers))
        self.scheduler = Scheduler(answer or Planned())
        self.world = ppo_job().world().created().all_ready()
        self.world.report(plan_revision=1, plan_switches=1).step()
        self.observed = self.world.observed()
        self.clients = Clients(
            store=self.store,
            scheduler=self.scheduler,
            drivers=self.drivers,
            authority=AUTHORITY,
            clock=lambda: NOW,
            recorder=EventRecorder(self.store),
        )

    async def apply(self, *, may_leave_status=False, **decided):
        decided = {"status": self.observed.status} | decided
        return await apply.apply(Decision(**decided), self.observed, self.clients, may_leave_status=may_leave_status)


async def test_a_decision_of_nothing_writes_nothing():
    world = World()
    assert await world.apply() == Applied()
    assert world.store.writes == []


async def test_a_job_whose_time_is_over_is_deleted_as_it_was_seen_and_nothing_else_is_done():
    world = World()
    assert await world.apply(delete_job=True, drain=Drain(target=TARGET, deadline_s=1)) == Applied()
    assert world.store.writes == [("delete", "math", "RLJob", "team", world.observed.job.uid)]
    assert world.drivers.told == []


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("another one")])
async def test_a_pod_that_is_gone_or_another_one_by_now_needs_no_deletion(error):
    world = World()
    world.store.errors["delete", "a"] = error
    pods = [DeletePod(name=name, uid=f"u-{name}", why="") for name in ("a", "b")]
    pods.append(DeletePod(name="c", uid="u-c", why="its agent is silent", grace_period_s=1))
    assert await world.apply(delete_pods=tuple(pods)) == Applied()
    assert world.store.writes == [("delete", "b", "Pod", "team", "u-b"), ("delete", "c", "Pod", "team", "u-c", 1)]


async def test_a_status_is_written_without_managed_fields_and_with_what_a_newer_operator_wrote():
    world = World()
    manifest = world.observed.manifest
    manifest["metadata"]["managedFields"] = [{"manager": "x"}]
    manifest["status"] = {"later": 7, "step": 3}
    changed = world.observed.status.model_copy(update={"step": 9})
    applied = await world.apply(status=changed)
    assert applied == Applied(wrote_status=True)
    [(verb, name, subresource, written)] = world.store.writes
    assert (verb, name, subresource) == ("replace", "math", "status")
    assert "managedFields" not in written["metadata"]
    assert (written["status"]["later"], written["status"]["step"]) == (7, 9)


async def test_deletions_come_after_the_status_then_plans_a_drain_and_events():
    world = World()
    events = (Event(type="Normal", reason="First", message=""), Event(type="Normal", reason="Second", message=""))
    plan = world.world.plans[0]
    await world.apply(
        status=world.observed.status.model_copy(update={"step": 9}),
        delete_pods=(DeletePod(name="a", uid="u", why=""),),
        delete_network_policy="n1",
        plan_statuses=((plan.name, plan.status),),
        drain=Drain(target=TARGET, deadline_s=5.0),
        events=events[:1], events_of_made=events[1:],
    )  # fmt: skip
    assert [write[:2] for write in world.store.writes] == [
        ("replace", "math"), ("delete", "a"), ("delete", "math"), ("patch", "math-p1"), ("create", "First"),
        ("create", "Second"),
    ]  # fmt: skip
    assert world.store.writes[2] == ("delete", "math", "NetworkPolicy", "team", "n1")
    assert world.store.writes[3][2:] == ("team", {"status": {"conditions": []}}, "status")
    assert world.drivers.told == [("team/math", TARGET, 5.0)]


async def test_a_plan_that_somebody_deleted_has_no_status_and_an_event_may_be_lost(caplog):
    world = World()
    world.store.errors |= {("patch", "math-p1"): NotFound("gone"), ("create", "First"): ClusterBusy("busy")}
    plan = world.world.plans[0]
    applied = await world.apply(
        plan_statuses=((plan.name, plan.status),), events=(Event(type="Normal", reason="First", message=""),)
    )
    assert applied == Applied()
    assert caplog.messages == ["event lost"]


def pod(name, pool="sim"):
    labels = {**LABELS, "rlinf.io/pool": pool}
    return {"kind": "Pod", "metadata": {"name": name, "namespace": "team", "labels": labels}}


LABELS = {"rlinf.io/attempt": "2", "rlinf.io/component": "worker", "rlinf.io/pool": "sim", "rlinf.io/ordinal": "0"}


async def test_of_pods_that_are_refused_the_first_three_are_named_and_their_predecessors_stay():
    world = World()
    for name in "abcde":
        world.store.errors["create", name] = RLinfError("no")
    told = Event(type="Warning", reason="Made", message="")
    applied = await world.apply(
        create_pods=(*(pod(name, pool=f"of-{name}") for name in "abcdef"), pod("g", pool="of-a")),
        events_of_made=(told,),
        delete_pods=(
            DeletePod(name="old", uid="1", why="", for_successor=True), DeletePod(name="surplus", uid="2", why=""),
        ),
    )  # fmt: skip
    sentence = "Pod {} was refused by the API server: got no; it is tried again"
    assert applied.try_again == "; ".join([*(sentence.format(name) for name in "abc"), "and 3 more"]), "g is not tried"
    written = [write[:2] for write in world.store.writes]
    assert ("create", "f") in written
    assert ("create", "g") not in written
    assert ("delete", "surplus") in written
    assert ("delete", "old") not in written
    assert ("create", "Made") not in written


async def test_pods_of_a_plan_on_its_way_are_made_beside_the_others_and_a_refusal_is_told():
    world = World()
    world.store.errors["create", "b"] = RLinfError("no")
    applied = await world.apply(create_pods=(pod("a"), pod("b")), late_pods=frozenset({"b"}))
    assert applied.try_again.startswith("Pod b was refused")
    assert [write[1] for write in world.store.writes if write[0] == "create"] == ["a"]
    [status] = [write[3]["status"] for write in world.store.writes if write[0] == "replace"]
    said = {c["type"]: c["reason"] for c in status["conditions"]}
    assert (said["PlanApplied"], said["PodsReady"]) == ("PlanPending", "PodsReady")


async def test_in_a_namespace_that_is_being_deleted_a_pass_ends_after_its_status():
    world = World()
    world.store.errors["create", "a"] = NamespaceTerminating("create of Pod team/a")
    applied = await world.apply(create_pods=(pod("a"),), delete_pods=(DeletePod(name="b", uid="1", why=""),))
    assert (applied.going, applied.wrote_status, applied.try_again) == (True, True, "")
    assert [write[0] for write in world.store.writes] == ["replace"]


@pytest.mark.parametrize("may_leave_status", [False, True])
async def test_a_first_plan_is_answered_for_by_the_next_pass(may_leave_status):
    world = World(answer=Planned(plan="math-p1", revision=1))
    applied = await world.apply(
        request_plan="Initial", highest_revision=6, may_leave_status=may_leave_status,
        status=world.observed.status.model_copy(update={"step": 9}),
    )  # fmt: skip
    assert world.scheduler.asked == [("math", "Initial", 6)]
    assert applied == Applied(
        progressed=True, left_status=may_leave_status, wrote_status=not may_leave_status
    )  # fmt: skip
    assert len(world.store.writes) == (0 if may_leave_status else 1)


async def test_a_scheduler_that_is_away_is_a_reason_to_try_again_and_one_that_has_no_plan_is_none():
    away = World(answer=WorkerUnreachable("it is away"))
    assert (await away.apply(request_plan="Initial")).try_again == "it is away"
    none = World(answer=Planned(infeasible=("too large",)))
    applied = await none.apply(request_plan="Initial")
    assert (applied.try_again, applied.progressed, applied.wrote_status) == ("", False, True)
    assert away.scheduler.asked == [("math", "Initial", 0)]


@pytest.mark.parametrize(
    ("answers", "told", "trouble"),
    [
        (("", ""), ["Prepare", "Commit"], ""),
        (("not now",), ["Prepare"], "driver attempt 3 refused Prepare of plan revision 1: not now"),
        (("", "no"), ["Prepare", "Commit"], "driver attempt 3 refused Commit of plan revision 1: no"),
        ((WorkerUnreachable("it is away"),), ["Prepare"], "it is away"),
    ],
)
async def test_a_driver_is_told_step_by_step_as_long_as_it_agrees(answers, told, trouble):
    world = World(drivers=answers)
    plan = world.world.plans[0].spec
    assert plan is not None
    order = Instruct(target=TARGET, plan=plan, steps=("Prepare", "Commit"), switches=5)
    applied = await world.apply(instruct=order)
    assert world.drivers.told == [(TARGET, 1, step, 5) for step in told]
    assert applied.try_again == trouble


async def test_a_bug_among_many_writes_is_raised_after_all_of_them_have_ended():
    world = World()
    world.store.errors["create", "b"] = KeyError("a bug")
    done = asyncio.Event()
    create = world.store.create

    async def slow(obj):
        if obj["metadata"]["name"] == "c":
            await asyncio.sleep(0.01)
            done.set()
        return await create(obj)

    world.store.create = slow
    with pytest.raises(KeyError):
        await world.apply(create_pods=(pod("a"), pod("b"), pod("c")))
    assert done.is_set(), "no write of this pass may still be on its way in the next"


async def test_a_name_that_was_taken_a_moment_ago_is_tried_again():
    world = World()
    world.store.errors["create", "a"] = AlreadyExists("a")
    applied = await world.apply(create_pods=(pod("a"),))
    assert applied.try_again == "the name of Pod a was taken a moment ago; it is tried again"


async def test_a_finished_status_that_is_written_says_so():
    world = World()
    done = world.world.report(state=DriverState.COMPLETE, plan_revision=1).decide().status
    assert await world.apply(status=done) == Applied(wrote_status=True, finished=True)
    world.observed = replace(world.observed, status=done)
    assert await world.apply(status=done) == Applied()
