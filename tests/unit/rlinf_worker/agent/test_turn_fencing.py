"""The slots of a dead worker are somebody else's only when nothing of it is left: no process, no accelerator memory."""

import asyncio
import ctypes
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import Stale
from rlinf_worker import memory
from rlinf_worker.agent.turns import AgentTurns
from rlinf_worker.settings import Settings

SETS = agents_pb2.LeaseSets(
    sets=[
        agents_pb2.LeaseSet(
            name="all",
            turns=[
                agents_pb2.Turn(role="env", workers=["env/0"]),
                agents_pb2.Turn(role="actor", workers=["actor/0"]),
            ],
        )
    ]
)


class Pod:
    """Plays supervisor, socket, outbox and NVML."""

    def __init__(self) -> None:
        self.used: int | None = 0
        self.left: list[str] = []
        self.orders: list[tuple[str, str]] = []
        self.last: dict[str, int] = {}
        self.told: list[agents_pb2.AgentMessage] = []
        self.condemned: list[str] = []
        self.past: list[tuple[str, float, float]] = []
        self.turns = AgentTurns(
            Settings(), workers=cast(Any, self), order=self.order, tell=self.told.append, probe=cast(Any, self),
            turn_over=self.turn_over, timers=asyncio.get_running_loop(),
        )  # fmt: skip
        self.turns.adopt(SETS)

    def turn_over(self, worker: str, began: float, ended: float) -> None:
        self.past.append((worker, began, ended))

    def used_bytes(self) -> int | None:
        return self.used

    def remains(self, worker: str) -> list[str]:
        return self.left

    def condemn(self, worker: str, *, why: str) -> None:
        self.condemned.append(worker)

    def order(self, worker: str, order: slots_pb2.AgentOrder) -> bool:
        if order.WhichOneof("kind") == "turn":
            self.orders.append((worker, order.turn.kind))
            self.last[worker] = order.turn.number
        return True

    def say(self, worker: str, standing: str, **fields: Any) -> None:
        report = slots_pb2.TurnReport(
            lease_set="all", standing=standing, ripe=True, seen=self.last.get(worker, 0), **fields
        )
        self.turns.said(worker, 1, report)

    async def until_granted(self, worker: str) -> None:
        async with asyncio.timeout(5):
            while (worker, "grant") not in self.orders:
                await asyncio.sleep(0.005)


@pytest.fixture
async def pod():
    made = Pod()
    for worker in ("env/0", "actor/0"):
        made.turns.joined(worker, 1)
    made.say("env/0", "wants")
    made.say("env/0", "holds", memory_bytes=8000)
    made.say("actor/0", "wants")
    yield made
    await made.turns.close()


async def test_the_next_role_waits_until_the_memory_of_a_dead_one_is_free(pod):
    pod.used = 8100
    pod.turns.gone("env/0", 1)
    await asyncio.sleep(0.1)
    assert ("actor/0", "grant") not in pod.orders
    pod.used = 100
    await pod.until_granted("actor/0")


@pytest.mark.parametrize("said", [0, 10])
async def test_of_a_worker_that_dies_in_its_load_everything_above_the_level_before_is_its_own(said):
    """It says what it has once it has loaded; what it said before was of its time off the slots."""
    pod = Pod()
    for worker in ("env/0", "actor/0"):
        pod.turns.joined(worker, 1)
    pod.used = 50
    pod.say("env/0", "wants")
    pod.say("env/0", "holds", memory_bytes=said)
    pod.say("actor/0", "wants")
    pod.used = 4000
    pod.turns.gone("env/0", 1)
    await asyncio.sleep(0.1)
    assert ("actor/0", "grant") not in pod.orders
    pod.used = 50
    await pod.until_granted("actor/0")
    await pod.turns.close()


async def test_a_worker_that_has_left_its_slots_has_no_memory_to_wait_for_whatever_others_use(pod):
    pod.say("env/0", "idle")
    pod.say("env/0", "content", memory_bytes=10)
    assert ("actor/0", "grant") in pod.orders
    pod.used = 9999  # the actor's
    pod.turns.gone("env/0", 1)
    assert pod.turns._members["env/0"].leaving is None, "its next life may have a turn at once"


async def test_a_worker_that_left_and_keeps_most_of_its_memory_is_named_once(pod):
    pod.say("env/0", "idle", memory_bytes=8000)
    for _ in range(2):
        pod.say("env/0", "content", memory_bytes=7000)
    said = [message.notice.message for message in pod.told if message.WhichOneof("kind") == "notice"]
    assert said == ["worker env/0 has left its slots and keeps 7000 of 8000 bytes on them"]


async def test_the_next_role_waits_until_every_process_of_a_dead_one_is_reaped(pod):
    pod.left = ["engine (pid 7) is in an uninterruptible wait"]
    pod.turns.gone("env/0", 1)
    await asyncio.sleep(0.1)
    assert ("actor/0", "grant") not in pod.orders
    pod.left = []
    await pod.until_granted("actor/0")


async def test_a_next_life_that_speaks_early_is_heard_when_the_earlier_one_is_gone(pod):
    pod.used = 8100
    pod.turns.gone("env/0", 1)
    pod.turns.joined("env/0", 2)
    pod.turns.said("env/0", 2, slots_pb2.TurnReport(lease_set="all", standing="wants", ripe=True))
    pod.say("actor/0", "content")
    pod.orders.clear()
    pod.used = 0
    await pod.until_granted("env/0")


async def test_a_next_life_that_has_not_spoken_yet_is_waited_for_and_nothing_breaks(pod):
    pod.used = 8100
    pod.turns.gone("env/0", 1)
    pod.turns.joined("env/0", 2)
    pod.used = 0
    [letting_go] = asyncio.all_tasks() - {asyncio.current_task()}
    await letting_go
    assert pod.orders[-1] == ("actor/0", "grant")
    pod.turns.said("env/0", 2, slots_pb2.TurnReport(lease_set="all", standing="wants", ripe=True))
    pod.say("actor/0", "content")
    assert pod.orders[-1] == ("env/0", "grant")


async def test_words_of_a_life_that_is_no_more_change_nothing(pod):
    pod.turns.joined("env/0", 2)
    before = list(pod.orders)
    pod.say("env/0", "content")
    assert pod.orders == before


async def test_a_set_of_the_agents_own_takes_no_order_of_the_driver(pod):
    with pytest.raises(Stale, match="is not the driver's here"):
        pod.turns.obey(agents_pb2.TurnOrder(lease_set="all", worker="env/0", attempt=1, kind="grant"))


async def test_the_same_sets_again_disturb_nobody(pod):
    """A set that is made anew knows of orders on their way alone: it would tell env once more that somebody waits."""
    pod.say("env/0", "holds")  # it has heard so
    before = list(pod.orders)
    assert before == [("env/0", "grant"), ("env/0", "leave")]
    pod.turns.adopt(SETS)
    assert pod.orders == before
    assert pod.turns.changes == 1, "env has its turn, and the others wait"
    pod.say("env/0", "idle")
    pod.say("env/0", "content")
    assert pod.orders == [*before, ("env/0", "offload"), ("actor/0", "grant")]


@pytest.mark.parametrize("known_at_first", [True, False])
async def test_slots_whose_memory_is_not_known_go_on_with_the_last_process(known_at_first):
    pod = Pod()
    pod.used = 100 if known_at_first else None
    for worker in ("env/0", "actor/0"):
        pod.turns.joined(worker, 1)
    pod.say("env/0", "wants")
    pod.say("actor/0", "wants")
    pod.used, pod.left = None, ["a process"]
    pod.turns.gone("env/0", 1)
    await asyncio.sleep(0.05)
    assert ("actor/0", "grant") not in pod.orders
    pod.left = []
    await pod.until_granted("actor/0")
    assert [m.notice.message for m in pod.told] == []
    await pod.turns.close()


class Library:
    """Plays NVML: one device, which answers or does not."""

    code, asked = 4, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, found: Any) -> int:  # noqa: N802
        found._obj.used = 700
        return self.code


def test_a_refusal_of_the_driver_is_said_once_and_no_error(monkeypatch, caplog):
    """As under MIG, where only the privileged are told, or of a GPU that fell off its bus."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    found = memory.Probe()
    assert [found.used_bytes(), found.used_bytes()] == [None, None]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "the memory of this pod's accelerators is not known: slots go on without a look at it"
    ]
    library.code = 0
    assert found.used_bytes() == 700


def test_without_an_accelerator_no_memory_is_in_use(monkeypatch):
    def missing(name):
        raise OSError(2, f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert memory.Probe().used_bytes() == 0


async def test_a_turn_lasts_from_its_grant_until_the_slots_are_free_whether_it_had_work_or_not():
    pod = Pod()
    for worker in ("env/0", "actor/0"):
        pod.turns.joined(worker, 1)
    pod.say("env/0", "wants")
    pod.say("env/0", "holds")
    pod.say("actor/0", "wants")
    assert pod.past == [], "it goes on"
    pod.say("env/0", "idle")
    pod.say("env/0", "content")
    await pod.until_granted("actor/0")
    pod.say("actor/0", "holds")
    pod.turns.gone("actor/0", 1)  # it dies in its turn, without having done anything
    await pod.turns.close()
    assert [worker for worker, _, _ in pod.past] == ["env/0", "actor/0"]
    (_, began, ended), (_, began_next, ended_next) = pod.past
    assert began < ended <= began_next <= ended_next, "slots are one role's at a time"


async def test_the_turn_that_is_under_way_when_the_agent_ends_or_the_plan_changes_is_told(pod):
    pod.turns.adopt(agents_pb2.LeaseSets())
    assert [worker for worker, _, _ in pod.past] == ["env/0"]
    pod.turns.adopt(SETS)
    pod.say("env/0", "holds")  # the slots were its own
    await pod.turns.close()
    assert [worker for worker, _, _ in pod.past] == ["env/0", "env/0"]


async def test_of_one_that_is_dead_the_turn_ends_when_nothing_is_left_of_it(pod):
    pod.left = ["a process that does not end"]
    pod.turns.gone("env/0", 1)
    await asyncio.sleep(0.05)
    assert pod.past == []
    pod.left = []
    await pod.until_granted("actor/0")
    assert [worker for worker, _, _ in pod.past] == ["env/0"]
