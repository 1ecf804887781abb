"""A lease set over two pods, as the driver runs it: all or nothing; the next driver rebuilds it from agents' hellos."""

import asyncio
import contextlib
from typing import Any

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.lease_sets import Measured
from rlinf_api.placement import NO_PLAN, Placement, resolve
from rlinf_api.plan import ChannelPlan, CyclePlan, RLPlanSpec
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.driver.topology import QueueSpec, Topology
from rlinf_worker.driver.turns import NUMBERS_PER_DRIVER, DriverTurns, check
from rlinf_worker.settings import Settings
from tests.builders_driver import Clock
from tests.builders_driver import Job as DriverJob

JOB = RLJobSpec.model_validate(
    {
        "flow": {"name": "ppo", "steps": 3, "config": {"env": "x"}},
        "roles": [{"name": "rollout", "kind": "torch"}, {"name": "actor", "kind": "fsdp"}],
        "pools": [{"name": "gpu", "roles": ["rollout", "actor"], "pods": 2, "slots": {"perPod": 1, "cpu": "1"}}],
    }
)
TOPOLOGY = Topology(queues=(QueueSpec(channel="samples", producer="rollout", consumer="actor", rounds=True),))


def plan(**changes: Any) -> RLPlanSpec:
    value: dict[str, Any] = {
        "job": {"name": "j", "uid": "u"},
        "revision": 1,
        "pools": [{"name": "gpu", "pods": 2}],
        "workers": [
            {"role": "rollout", "count": 2, "slots": "gpu/[0-1]/0"},
            {"role": "actor", "count": 2, "slots": "gpu/[0-1]/0"},
        ],
        "leaseSets": [
            {
                "name": "all",
                "slots": "gpu/[0-1]/0",
                "turns": [{"role": "rollout", "until": {"units": 7}}, {"role": "actor"}],
            }
        ],
        "channels": [{"name": "samples", "capacity": {"units": 8}}],
        "reason": {"code": "Initial"},
    }
    return RLPlanSpec.model_validate(value | changes)


class Job:
    """`orders`: (worker, kind) in the order of sending; `say` is a worker that has obeyed all of its orders."""

    def __init__(self, *, attempt: int = 1, settings: Settings | None = None) -> None:
        self.placement: Placement = resolve(plan(), JOB)
        known = DriverJob(JOB, plan()).known(
            Clock(), attempt=attempt, settings=DriverSettings(limits=settings or Settings())
        )
        known.instruct = self.instruct  # type: ignore[method-assign, assignment]
        known.event = lambda kind, message, **_: self.events.append(message)  # type: ignore[method-assign]
        self.members = known.members
        self.members.adopt(self.placement)
        self.orders: list[tuple[str, str]] = []
        self.sets: list[tuple[tuple[str, int], agents_pb2.LeaseSets]] = []
        self.events: list[str] = []
        self.last: dict[str, int] = {}
        self.instructions, self.set_by = 0, dict[tuple[str, int], int]()
        self.turns = DriverTurns(known)
        self.turns.adopt(self.placement, TOPOLOGY)

    def instruct(self, key: tuple[str, int], **kind: Any) -> int:
        self.instructions += 1
        if "turn" in kind:
            order = kind["turn"]
            self.orders.append((order.worker, order.kind))
            self.last[order.worker] = order.number
            assert self.members.workers[order.worker].placed.pod == key
        else:
            self.sets.append((key, kind["lease_sets"]))
            self.set_by[key] = self.instructions
        return self.instructions

    def attach(self, ordinal: int, *, life: int = 1, **standings: str) -> None:
        turns = [self.turn(worker.replace("_", "/"), standing, life=life) for worker, standing in standings.items()]
        self.turns.attached(("gpu", ordinal), agents_pb2.Hello(turns=turns))

    def turn(self, worker: str, standing: str, *, life: int = 1) -> agents_pb2.WorkerTurn:
        return agents_pb2.WorkerTurn(
            lease_set="all", worker=worker, attempt=life, standing=standing, ripe=True, seen=self.last.get(worker, 0)
        )

    def say(self, worker: str, standing: str) -> list[tuple[str, str]]:
        before = len(self.orders)
        self.turns.heard(("gpu", int(worker[-1])), self.turn(worker, standing))
        return self.orders[before:]


@pytest.fixture
async def job():
    made = Job()
    made.attach(0)
    made.attach(1)
    yield made
    made.turns.adopt(NO_PLAN, TOPOLOGY)


async def test_each_agent_learns_the_sets_with_its_own_workers(job):
    """And for each worker its share of the units that its role takes in a turn: 7 of two are 4 of each."""
    key, sets = job.sets[0]
    assert key == ("gpu", 0)
    assert [(t.role, list(t.workers), t.until_units, t.gang) for t in sets.sets[0].turns] == [
        ("rollout", ["rollout/0"], 4, False),
        ("actor", ["actor/0"], 0, True),
    ]
    assert sets.sets[0].by_driver


async def test_a_gang_over_pods_is_granted_when_all_have_left_and_all_its_ranks_want(job):
    assert job.say("rollout/0", "wants") == [("rollout/0", "grant")]
    assert job.say("rollout/1", "wants") == [] or job.orders[-1] == ("rollout/1", "grant")
    job.say("rollout/0", "holds")
    job.say("rollout/1", "holds")
    job.say("actor/0", "wants")
    job.orders.clear()
    job.say("actor/1", "wants")
    assert sorted(job.orders) == [("rollout/0", "finish"), ("rollout/1", "finish")]
    job.say("rollout/1", "holds")
    job.say("rollout/0", "holds")
    assert job.say("rollout/0", "idle") == [], "one alone never ends the turn"
    assert sorted(job.say("rollout/1", "due")) == [("rollout/0", "offload"), ("rollout/1", "offload")]
    assert job.say("rollout/0", "content") == [], "half of the slots are no turn"
    before = job.turns.changes
    assert sorted(job.say("rollout/1", "content")) == [("actor/0", "grant"), ("actor/1", "grant")]
    assert job.turns.changes == before + 1


async def test_a_worker_whose_memory_is_seen_to_be_free_holds_nothing(job):
    job.say("rollout/0", "wants")
    job.say("rollout/0", "holds")
    job.say("actor/0", "wants")
    assert job.say("actor/1", "wants") == [("rollout/0", "finish")]
    assert sorted(job.say("rollout/0", "away")) == [("actor/0", "grant"), ("actor/1", "grant")]


async def test_an_order_that_was_lost_with_a_stream_is_sent_again_when_the_agent_is_back(job):
    job.say("rollout/0", "wants")
    job.say("rollout/0", "holds")
    job.say("actor/0", "wants")
    job.say("actor/1", "wants")
    assert job.orders[-1] == ("rollout/0", "finish")
    lost, job.last["rollout/0"] = job.last["rollout/0"], job.last["rollout/0"] - 1
    job.orders.clear()
    job.attach(0, rollout_0="holds", actor_0="wants")
    assert job.orders == [("rollout/0", "finish")]
    assert job.last["rollout/0"] == lost, "the same order"
    job.orders.clear()
    job.attach(0, rollout_0="holds", actor_0="wants")
    assert job.orders == [], "it was answered"


def reversed_turns() -> Placement:
    sets = plan().model_dump(mode="json", by_alias=True)["leaseSets"]
    sets[0]["turns"].reverse()
    return resolve(plan(leaseSets=sets, revision=2), JOB)


@pytest.fixture
async def one_to_be_killed():
    """Whose rollout/0 does not leave its slots; the word to kill it has been sent."""
    made = Job(settings=Settings(turn_release_s=0.05))
    made.attach(0)
    made.attach(1)
    for standing in ("wants", "holds"):
        made.say("rollout/0", standing)
        made.say("rollout/1", standing)
    made.say("actor/0", "wants")
    made.say("actor/1", "wants")
    made.say("rollout/1", "holds")
    made.say("rollout/0", "idle")
    assert ("rollout/0", "offload") in made.say("rollout/1", "due")
    made.say("rollout/1", "content")
    async with asyncio.timeout(20):
        while ("rollout/0", "kill") not in made.orders:
            await asyncio.sleep(0.01)
    made.orders.clear()
    yield made
    made.turns.adopt(NO_PLAN, TOPOLOGY)


async def test_a_worker_that_is_to_be_killed_is_so_again_when_its_agent_did_not_hear_of_it(one_to_be_killed):
    job = one_to_be_killed
    job.attach(0, rollout_0="leaves", actor_0="wants")
    assert job.orders == [("rollout/0", "kill")]


async def test_a_later_life_of_a_worker_that_was_to_be_killed_takes_turns(one_to_be_killed):
    """That its agent has lost the word of the earlier one's end, with its stream, holds nobody up."""
    job = one_to_be_killed
    job.attach(0, life=2, rollout_0="wants", actor_0="wants")
    assert sorted(job.orders) == [("actor/0", "grant"), ("actor/1", "grant")]


async def test_another_order_of_turns_goes_on_where_the_set_was_once_every_agent_has_it(job):
    job.say("rollout/0", "wants")
    job.say("rollout/1", "wants")
    job.say("rollout/0", "holds")
    grant = job.last["rollout/1"]
    for pod in job.members.pods.values():
        pod.attached = True
    job.turns.adopt(reversed_turns(), TOPOLOGY)
    assert [t.role for t in job.sets[-1][1].sets[0].turns] == ["actor", "rollout"]
    job.orders.clear()
    job.say("actor/0", "wants")
    job.say("actor/1", "wants")
    job.turns.answered(("gpu", 0), job.set_by["gpu", 0])
    assert job.orders == [], "the other agent may not have it yet"
    job.turns.answered(("gpu", 1), job.set_by["gpu", 1])
    assert job.orders == [("rollout/0", "finish")], "rollout/1 has not read its grant, and holds slots once it does"
    assert job.last["rollout/0"] > grant
    job.last["rollout/1"] = grant
    assert job.say("rollout/1", "holds") == [("rollout/1", "finish")]
    job.say("rollout/0", "leaves")
    job.say("rollout/1", "leaves")
    assert job.say("rollout/0", "wants") == []
    assert sorted(job.say("rollout/1", "wants")) == [("actor/0", "grant"), ("actor/1", "grant")]


async def test_a_lost_pod_does_not_hold_what_others_wait_for(job):
    job.say("rollout/1", "wants")
    job.say("rollout/1", "holds")
    job.orders.clear()
    job.turns.pod_lost(("gpu", 1))
    assert job.say("rollout/0", "wants") == [("rollout/0", "grant")]


async def test_a_new_driver_waits_for_all_agents_and_takes_the_turn_over():
    job = Job(attempt=2)
    job.attach(0, rollout_0="holds", actor_0="wants")
    assert job.orders == []
    job.attach(1, rollout_1="idle", actor_1="wants")
    assert sorted(job.orders) == [("rollout/0", "finish")]
    assert job.last["rollout/0"] > 2 * NUMBERS_PER_DRIVER, "above all numbers of the driver before"
    job.turns.adopt(NO_PLAN, TOPOLOGY)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"channels": [{"name": "samples", "capacity": {"units": 7}}]}, "wanted at least 8: a turn of 'rollout'"),
        (
            {"channels": [{"name": "samples", "microBatch": 9, "depth": 1, "capacity": {"units": 9}}]},
            "wanted at least 18: a round of 9 units for 2 ranks",
        ),
    ],
)
def test_a_channel_within_a_set_that_cannot_hold_a_turn_is_refused_by_name(changes, sentence):
    with pytest.raises(InvalidManifest, match=r"channel 'samples' within lease set 'all' is too small") as refused:
        check(resolve(plan(**changes), JOB), TOPOLOGY, {})
    assert sentence in str(refused.value)


BYTES = {"channels": [{"name": "samples", "capacity": {"units": 8, "bytes": "800"}}]}
STEP = {"leaseSets": [{"name": "all", "slots": "gpu/[0-1]/0", "turns": [{"role": "rollout"}, {"role": "actor"}]}]}


@pytest.mark.parametrize(
    ("changes", "fits", "too_large", "sentence"),
    [
        (
            BYTES,
            Measured(largest_bytes=100, step_bytes=10_000),
            Measured(largest_bytes=101),
            "got capacity.bytes 800, wanted at least 808: a turn of 'rollout', until 7 units, makes 808 bytes",
        ),
        (
            BYTES | STEP,
            Measured(largest_bytes=800, step_bytes=800),
            Measured(largest_bytes=10, step_bytes=801),
            "got capacity.bytes 800, wanted at least 801: a turn of 'rollout', of a step, makes 801 bytes",
        ),
        (
            BYTES | STEP,
            Measured(largest_bytes=1, step_units=8, step_bytes=8),
            Measured(largest_bytes=1, step_units=9, step_bytes=9),
            "got capacity.units 8, wanted at least 9: a turn of 'rollout', of a step",
        ),
    ],
)
def test_a_channel_within_a_set_holds_a_turn_as_its_units_have_been(changes, fits, too_large, sentence):
    placement = resolve(plan(**changes), JOB)
    check(placement, TOPOLOGY, {})
    check(placement, TOPOLOGY, {"samples": fits})
    with pytest.raises(InvalidManifest) as refused:
        check(placement, TOPOLOGY, {"samples": too_large})
    assert sentence in str(refused.value)


async def test_of_a_channel_that_has_become_too_small_a_running_job_tells():
    driver = DriverJob(JOB, plan(**BYTES)).driver(Clock())
    driver.switch.first(plan(**BYTES), switches=1)
    driver.declare(TOPOLOGY)
    driver.job.begin()
    queue = driver.exchange.queues["samples"]
    for nbytes, said in ((100, ""), (101, "got capacity.bytes 800, wanted at least 808: a turn of 'rollout'")):
        queue.measured = Measured(largest_bytes=nbytes)
        driver.notices.look(driver.job.clock())
        assert said in driver.job.standing.message
        assert bool(said) == bool(driver.job.standing.message)
    assert driver.job.standing.reason == "Stepping"


@pytest.mark.parametrize(
    ("source", "attempt", "fields", "sentence"),
    [
        ("User", 1, {"channels": [ChannelPlan(name="smaples")]}, "the flow has no channel smaples"),
        ("User", 1, {"cycles": [CyclePlan(roles=["rollout", "actor"])]}, "the flow has no cycle of rollout and actor"),
        ("User", 2, {"channels": [ChannelPlan(name="smaples")]}, ""),
        ("Scheduler", 1, {"channels": [ChannelPlan(name="smaples")]}, ""),
        ("User", 1, {}, ""),
    ],
)
async def test_a_first_plan_by_hand_names_no_channel_that_the_flow_has_not(source, attempt, fields, sentence):
    """Told before any worker starts. A scheduler's plan takes such names from the flow's config, and a driver that
    follows another finds a plan that has been in force."""
    by_hand = plan(**BYTES).model_copy(update={"source": source, **fields})
    driver = DriverJob(JOB, by_hand).driver(Clock(), attempt=attempt)
    driver.switch.first(by_hand, switches=1)
    refused = pytest.raises(InvalidManifest, match=f"plan revision 1 does not fit the flow: {sentence}")
    with refused if sentence else contextlib.nullcontext():
        driver.declare(TOPOLOGY)


async def test_turns_without_an_item_are_a_condition_until_something_moves(job):
    pods = ((0, "rollout/0", "actor/0"), (1, "rollout/1", "actor/1"))
    items = 0

    def all_say(index: int, standing: str) -> None:
        for pod in pods:
            turn = job.turn(pod[index], standing)
            turn.items = items
            job.turns.heard(("gpu", pod[0]), turn)

    def one_turn(index: int) -> None:
        all_say(index, "wants")
        all_say(index, "holds")
        all_say(3 - index, "wants")
        all_say(index, "holds")
        all_say(index, "leaves")
        all_say(index, "content")

    items = 1
    one_turn(1)
    assert job.turns.stalls == []
    for index in (2, 1, 2):
        one_turn(index)
    [why] = job.turns.stalls
    assert why.startswith("two turns in a row of lease set 'all' passed without an item: rollout/0 ")
    assert len(job.events) == 1, "said once"
    items = 2
    all_say(1, "holds")
    assert job.turns.stalls == []
    assert job.events[1].startswith("turns bring items again, after: two turns")


async def test_an_agents_word_on_its_own_sets_is_a_condition_too(job):
    job.turns.noticed(("gpu", 0), agents_pb2.Notice(kind="turns-stalled", message="two turns of set 'y'"))
    assert job.turns.stalls == ["two turns of set 'y'"]
    job.turns.noticed(("gpu", 0), agents_pb2.Notice(kind="turns", message="something else"))
    assert job.events == ["two turns of set 'y'", "something else"]
    job.turns.pod_lost(("gpu", 0))
    assert job.turns.stalls == [], "whoever takes its place says so anew"
