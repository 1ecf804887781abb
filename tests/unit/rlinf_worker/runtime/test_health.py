"""An engine that is asked whether it is well: a dead one is named at once, one that does not answer after a while."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from rlinf_worker import proctree
from rlinf_worker.phases import Phases
from rlinf_worker.runtime.health import EngineLost, Health
from rlinf_worker.settings import Settings

QUICK = Settings(probe_interval_s=0.01, probe_deadline_s=0.1)


class Engine:
    """Answers once `answers` is set."""

    def __init__(self) -> None:
        self.answers, self.error = asyncio.Event(), ""
        self.asked = self.at_once = self.most_at_once = 0
        self.answers.set()

    async def check_health(self) -> None:
        self.asked, self.at_once = self.asked + 1, self.at_once + 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.answers.wait()
        finally:
            self.at_once -= 1
        if self.error:
            raise RuntimeError(self.error)

    async def until_asked(self, times: int) -> None:
        wanted = self.asked + times
        async with asyncio.timeout(10):
            while self.asked < wanted:
                await asyncio.sleep(0.005)


class Site:
    def __init__(self, settings: Settings = QUICK) -> None:
        self.engine, self.phases = Engine(), Phases(settings)
        self.phases.enter("step")
        health = Health("engine/0", phases=self.phases, settings=settings)
        self.watching = asyncio.ensure_future(health.watch(self.engine))

    async def said(self) -> str:
        async with asyncio.timeout(10):
            with pytest.raises(EngineLost) as error:
                await self.watching
        return str(error.value)

    async def close(self) -> None:
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)
        await asyncio.sleep(0)
        assert self.engine.at_once == 0, "what was asked is not left behind"


@pytest.fixture
async def site():
    made = Site()
    yield made
    await made.close()


async def test_an_engine_that_is_well_is_asked_again_and_again(site):
    await site.engine.until_asked(3)
    assert not site.watching.done()


async def test_what_an_engine_raises_is_the_sentence(site, monkeypatch):
    monkeypatch.setattr(proctree, "descendants", lambda pids, processes: set(pids))  # tests before left some, perhaps
    site.engine.error = "EngineCore died with exit code -9"
    assert await site.said() == (
        "the engine of worker engine/0 is lost: got EngineCore died with exit code -9; the worker starts again with "
        "another"
    )


async def test_an_engine_that_does_not_answer_is_lost_after_the_deadline_and_its_stopped_process_named(site):
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        site.engine.answers.clear()
        said = await site.said()
    finally:
        child.kill()
        await child.wait()
    assert "no answer to check_health() for 0.2 s" in said
    assert f"(pid {child.pid}) is stopped by a signal (SIGSTOP)" in said
    assert site.engine.most_at_once == 1


async def test_one_that_answers_late_and_within_the_deadline_is_well():
    site = Site(Settings(probe_interval_s=0.01, probe_deadline_s=5.0))
    site.engine.answers.clear()
    await site.engine.until_asked(1)
    await asyncio.sleep(0.3)
    assert site.engine.asked == 1, "it is asked one thing at a time"
    site.engine.answers.set()
    await site.engine.until_asked(2)
    assert not site.watching.done()
    await site.close()


async def test_a_process_that_stood_still_gave_its_engine_no_chance(site):
    site.engine.answers.clear()
    await site.engine.until_asked(1)
    time.sleep(0.4)  # noqa: ASYNC251  as one that is stopped and continued: four times the deadline
    site.engine.answers.set()
    await site.engine.until_asked(2)
    assert not site.watching.done()


@pytest.mark.parametrize("phase", ["load", "compile", "stop"])
async def test_an_engine_that_is_busy_with_itself_is_not_asked_and_has_the_phases_time(site, phase):
    site.engine.answers.clear()
    await site.engine.until_asked(1)
    with site.phases.during(phase, deadline_s=900.0):
        await asyncio.sleep(0.4)
        assert not site.watching.done(), "what was asked before is not counted"
        site.engine.answers.set()
        await asyncio.sleep(0.2)
        asked = site.engine.asked
        await asyncio.sleep(0.1)
        assert site.engine.asked == asked
    await site.engine.until_asked(1)


async def test_a_role_without_an_engine_is_not_asked():
    health = Health("env/0", phases=Phases(QUICK), settings=QUICK)
    async with asyncio.timeout(5):
        await health.watch(object())
