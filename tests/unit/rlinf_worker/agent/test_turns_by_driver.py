"""Lease sets over several pods: the driver decides, and the agent passes on, kills and tells, each of a life."""

import asyncio
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import Stale, UserError
from rlinf_worker.agent.turns import AgentTurns
from rlinf_worker.settings import Settings
from rlinf_worker.turns import rule


def lease_set(name: str, worker: str, *, by_driver: bool) -> agents_pb2.LeaseSet:
    turns = [agents_pb2.Turn(role=worker.split("/")[0], workers=[worker], until_units=6)]
    return agents_pb2.LeaseSet(name=name, by_driver=by_driver, turns=turns)


class Pod:
    """Plays supervisor, socket, outbox and NVML."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, slots_pb2.TurnOrder]] = []
        self.condemned: list[tuple[str, str]] = []
        self.told: list[agents_pb2.AgentMessage] = []
        self.turns = AgentTurns(
            Settings(turn_release_s=20.0), workers=cast(Any, self), order=self.order, tell=self.told.append,
            probe=cast(Any, self), turn_over=lambda *_: None, timers=asyncio.get_running_loop(),
        )  # fmt: skip
        sets = [lease_set("far", "actor/0", by_driver=True), lease_set("near", "env/0", by_driver=False)]
        self.turns.adopt(agents_pb2.LeaseSets(sets=sets))
        for worker in ("actor/0", "env/0"):
            self.turns.joined(worker, 3)
        self.orders.clear()

    def used_bytes(self) -> int | None:
        return 0

    def remains(self, worker: str) -> list[str]:
        return []

    def condemn(self, worker: str, *, why: str) -> None:
        self.condemned.append((worker, why))

    def order(self, worker: str, order: slots_pb2.AgentOrder) -> bool:
        if order.WhichOneof("kind") == "turn":
            self.orders.append((worker, order.turn))
        return True

    def obey(self, **fields: Any) -> None:
        known: dict[str, Any] = {"lease_set": "far", "worker": "actor/0", "attempt": 3, "number": 8, "kind": "grant"}
        self.turns.obey(agents_pb2.TurnOrder(**{**known, **fields}))


@pytest.fixture
async def pod():
    made = Pod()
    yield made
    await made.turns.close()


async def test_an_order_of_the_driver_reaches_its_worker_as_it_is(pod):
    pod.obey(yielding=True, until_units=6)
    wanted = slots_pb2.TurnOrder(lease_set="far", number=8, kind="grant", yielding=True, until_units=6)
    assert pod.orders == [("actor/0", wanted)]
    assert pod.condemned == []


async def test_who_is_to_be_killed_is_condemned_with_the_reason_and_counted(pod):
    pod.obey(kind=rule.KILL)
    assert pod.condemned == [("actor/0", "lease set 'far' not released within 20 s")]
    assert pod.turns.kills == 1
    assert pod.orders == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"attempt": 2}, "worker actor/0 cannot have a turn of 'far': got attempt 2, wanted attempt 3"),
        ({"attempt": 4}, "got attempt 4, wanted attempt 3"),
        ({"worker": "actor/9"}, "got attempt 3, wanted no such worker"),
        ({"lease_set": "other"}, "lease set 'other' is not the driver's here"),
        ({"lease_set": "near", "worker": "env/0"}, "lease set 'near' is not the driver's here"),
        ({"attempt": 2, "kind": rule.KILL}, "got attempt 2, wanted attempt 3"),
    ],
)
async def test_an_order_to_another_life_or_of_another_set_is_stale_and_nothing_happens(pod, fields, why):
    with pytest.raises(Stale, match=why):
        pod.obey(**fields)
    assert (pod.orders, pod.condemned, pod.turns.kills) == ([], [], 0)


async def test_an_order_to_one_that_is_gone_is_stale_and_another_plan_is_not_said_to_it(pod):
    pod.turns.gone("actor/0", 3)
    with pytest.raises(Stale, match="worker actor/0 cannot have a turn of 'far'"):
        pod.obey()
    assert pod.orders == []


async def test_of_one_whose_first_word_is_that_it_has_left_nobody_knows_whether_it_keeps_what_it_had(pod):
    pod.obey()
    left = slots_pb2.TurnReport(lease_set="far", standing="content", seen=8, memory_bytes=5000)
    pod.turns.said("actor/0", 3, left)
    assert [message.WhichOneof("kind") for message in pod.told] == ["turn"]


async def test_an_order_of_another_version_is_named(pod):
    with pytest.raises(UserError, match="an order of lease set 'far' that this agent does not know: got 'juggle'"):
        pod.obey(kind="juggle")


async def test_a_new_driver_is_told_of_its_own_sets_alone(pod):
    pod.turns.said("actor/0", 3, slots_pb2.TurnReport(lease_set="far", standing="holds", ripe=True, seen=8, items=2))
    pod.turns.said("env/0", 3, slots_pb2.TurnReport(lease_set="near", standing="content", ripe=True))
    [told] = list(pod.turns.hello())
    assert (told.lease_set, told.worker, told.attempt) == ("far", "actor/0", 3)
    assert (told.standing, told.seen, told.items) == ("holds", 8, 2)
