"""Whether a role's work moves: who is stuck, who waits for others, and what people are told of either."""

import asyncio
from typing import Any

import pytest

from rlinf_worker.channels.waiting import Waits
from rlinf_worker.phases import Phases
from rlinf_worker.runtime.work import Stopping, Work
from rlinf_worker.settings import Settings


class Site:
    def __init__(self) -> None:
        self.waits, self.phases, self.stopping = Waits(), Phases(Settings()), Stopping()
        self.phases.enter("step")
        self.units, self.news = 0, self.waits.signal()
        self.work = Work(waits=self.waits, phases=self.phases, moves=lambda: self.units, stopping=self.stopping)
        self.work.tick(1.0)  # the first look at what has moved
        self.tasks: list[asyncio.Task[Any]] = []

    async def begin(self, work: Any) -> None:
        self.tasks.append(asyncio.create_task(work))
        await asyncio.sleep(0)

    def wait(self, what: str = "units of queue 'tasks'") -> Any:
        return self.waits.until(lambda: False, self.news, what=what, timeout_s=None)

    def seconds(self, count: int = 8) -> tuple[float, float]:
        """Later: for how long it has not moved, and has been stuck."""
        for _ in range(count):
            self.work.tick(1.0)
        return self.work.still_s, self.work.stuck_s


@pytest.fixture
async def site():
    made = Site()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_a_role_that_awaits_something_of_its_own_is_stuck(site):
    await site.begin(asyncio.Event().wait())
    assert site.seconds() == (8.0, 8.0)
    assert site.work.doing == "nothing that its runtime knows of for 8 s"


async def test_who_waits_for_others_by_the_runtime_is_still_and_not_stuck(site):
    assert site.seconds(2) == (2.0, 2.0)
    await site.begin(site.wait())
    assert site.seconds() == (10.0, 0.0)
    assert site.work.doing == "waits for units of queue 'tasks' for 0 s"


async def test_a_span_that_does_not_end_is_stuck_though_another_task_waits(site):
    async def compute() -> None:
        with site.work.piece("compute"):
            await asyncio.Event().wait()

    await site.begin(compute())
    await site.begin(site.wait())
    assert site.seconds() == (8.0, 8.0)
    assert site.work.doing == "span compute for 0 s"


async def test_a_span_around_a_wait_of_the_runtime_waits(site):
    async def sloppy() -> None:
        with site.work.piece("compute"):
            await site.wait("an answer")

    await site.begin(sloppy())
    assert site.seconds() == (8.0, 0.0)
    assert site.work.doing == "waits for an answer for 0 s"


async def test_a_span_in_a_thread_has_no_task_that_could_wait(site):
    began, end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def compute() -> None:
        with site.work.piece("compute"):
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(end.wait(), loop).result(10)

    thread = asyncio.create_task(asyncio.to_thread(compute))
    await began.wait()
    await site.begin(site.wait())
    assert site.seconds() == (8.0, 8.0)
    end.set()
    await thread
    assert site.seconds(1) == (1.0, 0.0)


@pytest.mark.parametrize("what", ["a unit", "a span begins", "a span ends", "the role says so"])
async def test_what_moves_begins_the_time_anew(site, what):
    open_span = site.work.piece("compute")
    if what == "a span ends":
        open_span.__enter__()
    assert site.seconds() == (8.0, 8.0)
    if what == "a unit":
        site.units += 1
        site.work.tick(1.0)
    elif what == "a span begins":
        open_span.__enter__()
    elif what == "a span ends":
        open_span.__exit__(None, None, None)
    else:
        site.work.moved()
    assert (site.work.still_s, site.work.stuck_s, site.work.doing) == (0.0, 0.0, "")
    assert site.seconds(4) == (4.0, 4.0)
    assert site.work.doing == "", "nothing to speak of yet"


@pytest.mark.parametrize("phase", ["start", "ready", "idle", "stop"])
async def test_in_some_phases_nothing_has_to_move(site, phase):
    site.phases.enter(phase)
    assert site.seconds() == (8.0, 0.0)


@pytest.mark.parametrize("phase", ["load", "compile", "step"])
async def test_in_others_it_has(site, phase):
    site.phases.enter(phase)
    assert site.seconds() == (8.0, 8.0)


async def test_work_that_is_raced_against_the_end_is_work(site):
    async def engine() -> None:
        with site.work.piece("compute"):
            ways = [asyncio.ensure_future(way) for way in (asyncio.Event().wait(), site.stopping.wait())]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()

    await site.begin(engine())
    await site.begin(site.waits.beside(lambda: False, site.news))
    assert site.seconds() == (8.0, 8.0)
    assert site.work.doing == "span compute for 0 s"


async def test_who_waits_to_be_stopped_has_done_its_work(site):
    await site.begin(site.stopping.told())  # the runtime's own wait says nothing of the role
    assert site.seconds() == (8.0, 8.0)
    await site.begin(site.stopping.wait())
    assert site.seconds(1) == (9.0, 0.0)
    site.stopping.set()
    await asyncio.sleep(0)
    assert site.stopping.awaited == 0
