"""A slot is given to the next worker when nothing of the former one is left: no process, no accelerator memory."""

import asyncio
from typing import Any, cast

import pytest

from rlinf_api.errors import RetryableError, Stale
from rlinf_worker import memory
from rlinf_worker.agent import vacancy
from rlinf_worker.agent.lifecycle import Stage, Start, WorkerLife
from rlinf_worker.agent.vacancy import FLAT_S, LIMIT_S, Vacancy


def begin(worker: str = "env/1", *slots: int, attempt: int = 1) -> Start:
    return Start(worker=worker, role=worker.split("/")[0], kind="fake", attempt=attempt, slots=slots or (0,))


class Pod:
    """Plays supervisor, turns, NVML and the clock."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerLife] = {}
        self.left: list[str] = []
        self.used: int | None = 0
        self.now, self.turns = 100.0, False
        self.vacancy = Vacancy(
            workers=cast(Any, self), take_turns=lambda *_: self.turns, probe=cast(Any, self), clock=lambda: self.now
        )

    def life(self, worker: str) -> WorkerLife:
        return self.workers.get(worker, WorkerLife(id=worker))

    def held(self) -> list[WorkerLife]:
        return list(self.workers.values())

    def remains(self, worker: str) -> list[str]:
        return self.left

    def used_bytes(self) -> int | None:
        return self.used

    async def run(self, worker: str = "env/0", *slots: int, uses: int = 0) -> None:
        start = begin(worker, *slots)
        await self.vacancy.wait(start)
        self.used = None if self.used is None else self.used + uses
        self.workers[worker] = WorkerLife(id=worker, stage=Stage.RUNNING, start=start)

    def stop(self, worker: str = "env/0", stage: Stage = Stage.STOPPING) -> None:
        self.workers[worker] = WorkerLife(id=worker, stage=stage, start=self.workers[worker].start, asked=True)

    def exit(self, worker: str = "env/0", *, asked: bool = True) -> None:
        del self.workers[worker]
        self.vacancy.exited(worker, asked=asked)

    async def is_waiting(self, task: "asyncio.Task[None]") -> bool:
        await asyncio.wait([task], timeout=3 * vacancy._POLL_S)
        return not task.done()


@pytest.fixture
def pod() -> Pod:
    return Pod()


@pytest.mark.parametrize("stage", [Stage.STOPPING, Stage.KILLING, Stage.CLEARING])
async def test_the_next_worker_waits_for_the_end_of_the_former(pod, stage):
    await pod.run()
    pod.stop(stage=stage)
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(task)
    assert set(pod.vacancy.waiting) == {"env/1"}
    pod.exit()
    await asyncio.wait_for(task, 5)
    assert not pod.vacancy.waiting


async def test_so_does_the_next_life_of_the_same_worker_on_other_slots(pod):
    await pod.run()
    pod.stop()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/0", 3, attempt=2)))
    assert await pod.is_waiting(task)
    pod.exit()
    await asyncio.wait_for(task, 5)


async def test_a_worker_that_lives_on_has_its_slots_to_itself_when_the_others_on_them_have_ended(pod):
    await pod.run("env/0", 0)
    pod.turns = True  # they took turns
    await pod.run("actor/0", 0, uses=100)
    pod.turns = False
    pod.stop("actor/0")
    task = asyncio.ensure_future(pod.vacancy.left_to("env/0"))
    assert await pod.is_waiting(task)
    pod.exit("actor/0")
    assert await pod.is_waiting(task), "its memory is not free yet"
    pod.used = 0
    await asyncio.wait_for(task, 5)


async def test_it_goes_on_where_they_never_end_and_that_is_said(pod, caplog):
    await pod.run("env/0", 0)
    pod.turns = True
    await pod.run("actor/0", 0)
    pod.turns = False
    pod.stop("actor/0")
    task = asyncio.ensure_future(pod.vacancy.left_to("env/0"))
    assert await pod.is_waiting(task)
    pod.now += LIMIT_S
    await asyncio.wait_for(task, 5)
    assert "slots of a worker that goes on alone are not free" in caplog.text


async def test_who_ends_itself_or_is_not_there_waits_for_nobody(pod):
    await pod.run("env/0", 0)
    pod.stop("env/0")
    await asyncio.wait_for(pod.vacancy.left_to("env/0"), 5)
    await asyncio.wait_for(pod.vacancy.left_to("env/9"), 5)


async def test_who_has_other_slots_or_takes_turns_waits_for_nobody(pod):
    await pod.run()
    pod.stop()
    await asyncio.wait_for(pod.vacancy.wait(begin("env/1", 1)), 5)
    pod.turns = True
    await asyncio.wait_for(pod.vacancy.wait(begin("env/2", 0)), 5)


async def test_a_worker_that_is_not_told_to_end_keeps_nobody_waiting(pod):
    """Whether two may be on one slot is the plan's to say."""
    await pod.run()
    await asyncio.wait_for(pod.vacancy.wait(begin("env/1")), 5)


async def test_memory_of_the_former_is_waited_for(pod):
    pod.used = 100
    await pod.run(uses=8000)
    pod.stop()
    pod.exit()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(task)
    pod.used = 5000
    pod.now += FLAT_S / 2
    assert await pod.is_waiting(task), "it still falls"
    pod.used = 4000
    await asyncio.wait_for(task, 5)


async def test_a_level_that_does_not_fall_is_of_somebody_else(pod):
    await pod.run(uses=10)
    await pod.run("env/7", 7, uses=8000)
    pod.stop()
    pod.exit()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(task)
    pod.now += FLAT_S
    await asyncio.wait_for(task, 5)


async def test_nor_is_one_that_falls_for_ever(pod):
    await pod.run(uses=10**9)
    pod.stop()
    pod.exit()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    for _ in range(40):
        pod.used -= 1
        pod.now += memory.LIMIT_S / 40
        await asyncio.sleep(2 * vacancy._POLL_S)
    await asyncio.wait_for(task, 5)


async def test_one_that_failed_starts_again_without_a_look_at_memory(pod):
    await pod.run(uses=8000)
    pod.exit(asked=False)
    await asyncio.wait_for(pod.vacancy.wait(begin("env/0", attempt=2)), 5)


@pytest.mark.parametrize("known", ["never", "only before", "only after"])
async def test_memory_that_is_not_known_keeps_nobody_waiting(pod, known):
    pod.used = 100 if known == "only before" else None
    await pod.run(uses=8000)
    pod.used = 9000 if known == "only after" else None
    pod.stop()
    pod.left = ["a process"]
    pod.exit()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(task), "for processes all the same"
    pod.left = []
    await asyncio.wait_for(task, 5)


async def test_a_process_that_does_not_end_is_named(pod):
    await pod.run()
    pod.stop()
    pod.left = ["a process"]
    pod.exit()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(task)
    pod.now += LIMIT_S
    with pytest.raises(RetryableError, match="still there: memory or processes of env/0"):
        await asyncio.wait_for(task, 5)
    assert not pod.vacancy.waiting


async def test_a_start_that_is_given_up_while_it_waits_does_not_happen(pod):
    await pod.run()
    pod.stop()
    first = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(first)
    second = asyncio.create_task(pod.vacancy.wait(begin("env/1", attempt=2)))
    with pytest.raises(Stale, match=r"attempt 1 of worker env/1 was given up before it began"):
        await asyncio.wait_for(first, 5)
    pod.vacancy.give_up("env/1")
    with pytest.raises(Stale, match="attempt 2"):
        await asyncio.wait_for(second, 5)


async def test_slots_that_stay_taken_are_named_with_who_has_them_and_for_how_long(pod):
    await pod.run("env/0", 0)
    await pod.run("env/2", 0, 1)
    pod.stop("env/0")
    pod.stop("env/2")
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1", 0, 1)))
    assert await pod.is_waiting(task)
    pod.now += LIMIT_S - 0.5
    assert await pod.is_waiting(task)
    pod.now += 0.5
    with pytest.raises(RetryableError) as error:
        await asyncio.wait_for(task, 5)
    assert str(error.value) == (
        "worker env/1 cannot start: its slots are not free within 45 s: got still there: env/0, env/2; replace the pod "
        "where a process does not end"
    )


async def test_half_of_what_a_worker_had_is_free_enough(pod):
    pod.used = 100
    await pod.run(uses=8000)
    pod.stop()
    pod.exit()
    pod.used = 4101
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    assert await pod.is_waiting(task)
    pod.used = 4100
    await asyncio.wait_for(task, 5)


async def test_a_level_that_falls_late_is_waited_for_from_its_last_fall(pod):
    pod.used = 100
    await pod.run(uses=8000)
    pod.stop()
    pod.exit()
    task = asyncio.create_task(pod.vacancy.wait(begin("env/1")))
    for used in (8000, 7000, 7000):
        pod.used, pod.now = used, pod.now + FLAT_S / 2
        assert await pod.is_waiting(task), "it fell less than a second ago"
    pod.now += FLAT_S / 2
    await asyncio.wait_for(task, 5)


async def test_a_worker_without_slots_leaves_nothing_and_waits_for_nothing(pod):
    start = Start(worker="env/0", role="env", kind="fake")
    await asyncio.wait_for(pod.vacancy.wait(start), 5)
    pod.left = ["a process"]
    pod.vacancy.exited("env/0", asked=True)
    await asyncio.wait_for(pod.vacancy.wait(begin("env/1", 0)), 5)
