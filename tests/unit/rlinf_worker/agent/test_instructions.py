"""An instruction in, a result out: what each kind does, and what the driver hears where it cannot be done."""

import asyncio
import logging
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2 as pb
from rlinf_api.errors import RetryableError, Stale, UserError
from rlinf_worker.agent.instructions import Book, Instructions, NewestPlan, start_of
from rlinf_worker.agent.lifecycle import Stage, Start, WorkerLife

SETS = pb.LeaseSets(sets=[pb.LeaseSet(name="all")])
ORDER = pb.TurnOrder(lease_set="all", worker="env/0", attempt=1, number=4, kind="grant")


def start(attempt: int = 1, worker: str = "env/0") -> pb.Start:
    return pb.Start(worker=worker, role="env", kind="fake", attempt=attempt, config_json="{}")


class Pod:
    """Plays supervisor, turns, vacancy and the uplink; `done` is what came of the instructions, in order."""

    def __init__(self, *, highest: int = 0) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.alone_now: list[str] = []
        self.told: list[pb.Result] = []
        self.lives: dict[str, WorkerLife] = {}
        self.raises: Exception | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.book = Book(keep=10)
        self.book.hear(highest)
        self.instructions = Instructions(
            supervisor=cast(Any, self), turns=cast(Any, self), vacancy=cast(Any, self),
            book=self.book, tell=lambda message: self.told.append(message.result),
        )  # fmt: skip

    async def _did(self, *what: Any) -> None:
        self.done.append(what)
        await self.may_go_on.wait()
        if self.raises is not None:
            raise self.raises

    async def wait(self, begun: Start) -> None:
        await self._did("wait", begun.worker, begun.attempt)

    async def start(self, begun: Start) -> None:
        await self._did("start", begun)
        self.lives[begun.worker] = WorkerLife(id=begun.worker, stage=Stage.RUNNING, start=begun)

    async def stop(self, worker: str, *, reason: str, grace_s: float) -> None:
        await self._did("stop", worker, reason, grace_s)

    def life(self, worker: str) -> WorkerLife:
        return self.lives.get(worker, WorkerLife(id=worker))

    def ended(self, worker: str = "env/0") -> None:
        self.lives[worker] = WorkerLife(id=worker, start=self.lives[worker].start)

    def give_up(self, worker: str) -> None:
        self.done.append(("give up", worker))

    def adopt(self, message: pb.LeaseSets) -> list[str]:
        self.done.append(("adopt", message))
        return self.alone_now

    async def left_to(self, worker: str) -> None:
        await self._did("left to", worker)
        await asyncio.sleep(0)

    def alone(self, worker: str) -> None:
        self.done.append(("alone", worker))

    def obey(self, order: pb.TurnOrder) -> None:
        self.done.append(("obey", order))
        if self.raises is not None:
            raise self.raises

    def take(self, id: int = 1, *, driver: int = 1, revision: int = 0, **kind: Any) -> None:
        self.instructions.take(pb.Instruction(id=id, driver_attempt=driver, plan_revision=revision, **kind))

    async def obeyed(self, id: int = 1, **fields: Any) -> pb.Result:
        """Its result, once it has been told."""
        before = len(self.told)
        self.take(id, **fields)
        async with asyncio.timeout(10):
            while len(self.told) == before:
                await asyncio.sleep(0)
        return self.told[-1]


@pytest.fixture
async def pod():
    made = Pod()
    yield made
    made.may_go_on.set()
    await made.instructions.close()


def ok(id: int = 1) -> pb.Result:
    return pb.Result(instruction_id=id, ok=True)


async def test_a_start_waits_for_its_slots_and_is_answered_when_the_process_runs(pod):
    asked = pb.Start(
        worker="env/0", role="env", kind="fake", rank=2, world=4, attempt=3, slots=[1, 0], config_json='{"a": 1}',
        spare=True, from_spare="spare.env/0", flow_json='{"b": 2}',
    )  # fmt: skip
    assert await pod.obeyed(start=asked) == ok()
    wanted = Start(
        worker="env/0", role="env", kind="fake", rank=2, world=4, attempt=3, slots=(1, 0), config_json='{"a": 1}',
        spare=True, from_spare="spare.env/0", flow_json='{"b": 2}',
    )  # fmt: skip
    assert pod.done == [("wait", "env/0", 3), ("start", wanted)]
    assert pod.instructions.refused == 0


def test_what_a_start_does_not_say_is_that_of_a_lonely_worker():
    wanted = Start(worker="env/0", role="env", kind="", rank=0, world=1, attempt=0, slots=(), config_json="{}")
    assert start_of(pb.Start(worker="env/0")) == wanted
    assert start_of(pb.Start(worker="env/0")).flow_json == "{}"


@pytest.mark.parametrize("name", ["", "env", "/0", "env/", "env/x", "env/-1", "a/b/0"])
def test_a_worker_is_called_by_role_and_number(name):
    with pytest.raises(UserError) as error:
        start_of(pb.Start(worker=name))
    assert str(error.value) == f"a worker cannot have this name: got {name!r}, wanted role/number"


@pytest.mark.parametrize(
    ("config", "why"),
    [("{", "the config of worker env/0 is not JSON: got Expecting"), ("[]", "env/0 is not an object: got list")],
)
def test_a_config_is_an_object(config, why):
    with pytest.raises(UserError, match=why):
        start_of(pb.Start(worker="env/0", config_json=config))


async def test_a_stop_gives_up_what_waits_to_start_before_it_ends_what_runs(pod):
    stop = pb.Stop(worker="env/0", reason="replaced", grace_s=2.5)
    assert await pod.obeyed(stop=stop) == ok()
    assert pod.done == [("give up", "env/0"), ("stop", "env/0", "replaced", 2.5)]


async def test_a_pod_that_may_leave_is_noted_and_nothing_is_ended_by_it(pod):
    assert not pod.instructions.may_leave.is_set()
    assert await pod.obeyed(leave=pb.Leave()) == ok()
    assert pod.instructions.may_leave.is_set()
    assert pod.done == []


async def test_lease_sets_are_taken_over(pod):
    assert await pod.obeyed(lease_sets=SETS) == ok()
    assert pod.done == [("adopt", SETS)]


async def test_who_takes_no_turns_any_more_hears_it_once_its_slots_are_left_to_it(pod):
    pod.alone_now = ["env/0", "actor/0"]
    assert await pod.obeyed(lease_sets=SETS) == ok()
    assert pod.done[1:] == [("left to", "env/0"), ("left to", "actor/0"), ("alone", "env/0"), ("alone", "actor/0")]


async def test_who_ends_is_not_told_that_it_has_its_slots_to_itself(pod):
    """It would load once more, beside who works there."""
    pod.alone_now = ["env/0", "actor/0"]
    pod.lives["env/0"] = WorkerLife(id="env/0", stage=Stage.STOPPING)
    assert pod.lives["env/0"].ending
    assert await pod.obeyed(lease_sets=SETS) == ok()
    assert ("alone", "actor/0") in pod.done
    assert ("alone", "env/0") not in pod.done


async def test_a_plan_is_prepared_committed_and_left_by_the_numbers_of_its_switch(pod):
    assert await pod.obeyed(1, revision=5, prepare=pb.Prepare(plan_json="five", switch_number=2)) == ok(1)
    assert pod.instructions.plan == NewestPlan(revision=5, switch=2, plan_json="five")
    assert await pod.obeyed(2, revision=5, commit=pb.Commit(switch_number=2)) == ok(2)
    five = NewestPlan(5, 2, "five", 5, 2, "five")
    assert pod.instructions.plan == five
    assert await pod.obeyed(3, revision=6, prepare=pb.Prepare(plan_json="six", switch_number=3)) == ok(3)
    assert pod.instructions.plan == NewestPlan(6, 3, "six", 5, 2, "five")
    assert await pod.obeyed(4, revision=6, abort=pb.Abort(switch_number=3)) == ok(4)
    assert pod.instructions.plan == five


@pytest.mark.parametrize(
    ("revision", "kind", "why"),
    [
        (4, {"prepare": pb.Prepare(plan_json="four", switch_number=2)},
         "plan 4 cannot be prepared: got switch 2, wanted more than 2, by which plan 5 came into force here"),
        (4, {"commit": pb.Commit(switch_number=1)},
         "plan 4 cannot be committed: got switch 1, wanted more than 2, by which plan 5 came into force here"),
        (6, {"commit": pb.Commit(switch_number=3)},
         "plan 6 cannot be committed: it was not prepared here by switch 3"),
        (5, {"abort": pb.Abort(switch_number=2)},
         "plan 5 cannot be aborted: its commit was seen here, so it must be finished"),
    ],
)  # fmt: skip
async def test_a_plan_that_cannot_be_changed_so_stays_and_the_driver_hears_why(pod, revision, kind, why):
    await pod.obeyed(1, revision=5, prepare=pb.Prepare(plan_json="five", switch_number=2))
    await pod.obeyed(2, revision=5, commit=pb.Commit(switch_number=2))
    before = pod.instructions.plan
    assert await pod.obeyed(3, revision=revision, **kind) == pb.Result(instruction_id=3, error=why)
    assert (pod.instructions.plan, pod.instructions.refused) == (before, 1)


async def test_an_instruction_of_another_version_is_said_to_be_one(pod):
    assert await pod.obeyed(9) == pb.Result(
        instruction_id=9,
        error="an instruction of a kind that this agent does not know: got id 9; run driver and worker pods from "
        "images of the same version",
    )
    assert pod.instructions.refused == 1


@pytest.mark.parametrize(
    ("error", "said", "level"),
    [
        (RetryableError("no room", got="none"), "no room: got none", logging.WARNING),
        (KeyError("env/0"), "KeyError: 'env/0'", logging.ERROR),
    ],
)
async def test_what_fails_is_told_counted_and_logged(pod, caplog, error, said, level):
    pod.raises = error
    answer = await pod.obeyed(3, stop=pb.Stop(worker="env/0"))
    assert answer == pb.Result(instruction_id=3, error=said)
    assert pod.instructions.refused == 1
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (record.levelno, record.__dict__["id"], record.__dict__["kind"]) == (level, 3, "stop")


async def test_an_order_for_a_turn_is_passed_on_at_once_and_answered_by_the_worker_alone(pod):
    pod.take(turn=ORDER)
    assert (pod.done, pod.told) == ([("obey", ORDER)], [])
    pod.take(turn=ORDER)
    assert pod.told == [ok()], "one who asks again is told that it was passed on"
    assert (len(pod.done), pod.instructions.refused) == (1, 0)


async def test_an_order_for_a_turn_that_cannot_be_passed_on_is_refused(pod):
    pod.raises = Stale("worker env/0 is away")
    pod.take(turn=ORDER)
    assert pod.told == [pb.Result(instruction_id=1, error="worker env/0 is away")]
    assert pod.instructions.refused == 1


async def test_an_instruction_that_comes_again_is_done_once(pod):
    pod.may_go_on.clear()
    stop = pb.Stop(worker="env/0")
    pod.take(stop=stop)
    pod.take(stop=stop)
    await asyncio.sleep(0)
    assert pod.told == []
    pod.may_go_on.set()
    assert await pod.obeyed(2, stop=stop) == ok(2)
    assert pod.told == [ok(1), ok(2)]
    pod.take(stop=stop)
    assert pod.told[2:] == [ok(1)]
    assert [what for what, *_ in pod.done].count("stop") == 2
    assert pod.instructions.refused == 0, "a question that is asked again is none"


async def test_an_older_driver_is_refused_and_counted():
    pod = Pod(highest=3)
    pod.take(7, driver=2, stop=pb.Stop(worker="env/0"))
    [said] = pod.told
    assert (said.instruction_id, said.ok) == (7, False)
    assert said.error.startswith("an older driver speaks: got driver attempt 2, wanted 3 or more")
    assert (pod.instructions.refused, pod.done) == (1, [])


async def test_a_failure_that_is_asked_for_again_is_counted_once(pod):
    pod.raises = RetryableError("no room")
    first = await pod.obeyed(1, stop=pb.Stop(worker="env/0"))
    assert await pod.obeyed(1, stop=pb.Stop(worker="env/0")) == first
    assert pod.instructions.refused == 1


async def test_a_driver_that_was_replaced_meanwhile_is_told_nothing(pod):
    pod.may_go_on.clear()
    pod.take(1, driver=1, stop=pb.Stop(worker="env/0"))
    await asyncio.sleep(0)
    pod.book.hear(2)
    pod.may_go_on.set()
    assert await pod.obeyed(5, driver=2, stop=pb.Stop(worker="env/0")) == ok(5)
    assert pod.told == [ok(5)]


# --- a driver that came back counts attempts from what lives ----------------------------------------------------------
async def begun(pod: Pod, id: int, *, driver: int, attempt: int) -> int:
    assert (await pod.obeyed(id, driver=driver, start=start(attempt))).ok
    return int(pod.done[-1][1].attempt)


async def test_an_attempt_that_has_been_here_gets_the_next_number_from_a_new_driver(pod):
    assert await begun(pod, 1, driver=1, attempt=4) == 4
    pod.ended()
    assert await begun(pod, 1, driver=2, attempt=2) == 5
    pod.ended()
    assert await begun(pod, 2, driver=2, attempt=5) == 5, "by the driver that asked for the last one nothing is changed"


@pytest.mark.parametrize(("attempt", "becomes"), [(3, 5), (4, 5), (5, 5), (6, 6)])
async def test_the_number_grows_and_no_more_than_it_must(pod, attempt, becomes):
    await begun(pod, 1, driver=1, attempt=4)
    pod.ended()
    assert await begun(pod, 1, driver=2, attempt=attempt) == becomes


async def test_of_one_that_lives_the_number_is_the_drivers_to_say(pod):
    await begun(pod, 1, driver=1, attempt=4)
    assert await begun(pod, 1, driver=2, attempt=4) == 4


async def test_what_is_under_way_ends_with_the_agent(pod):
    pod.may_go_on.clear()
    pod.take(stop=pb.Stop(worker="env/0"))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await pod.instructions.close()
    pod.may_go_on.set()
    await asyncio.sleep(0)
    assert pod.told == []
