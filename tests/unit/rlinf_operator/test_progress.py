"""How often progress is written: conditions at once, steps when their interval is over, all jobs sharing one rate."""

import asyncio
import contextlib

import pytest

from rlinf_api.report import DriverState
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.reconcile import loop
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_operator.settings import OperatorSettings
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, KEY, Cluster
from tests.fakes.drivers import FakeDrivers

INTERVAL_S = 1.0


class Progressing(FakeDrivers):
    """Says of each report whether it is progress alone, as the drivers of a cluster do."""

    def __init__(self, on_change):
        super().__init__(on_change)
        self.loop_hears = on_change

    def step(self, key, number):
        self.on_change = lambda key: None
        self.say(key, state=DriverState.RUNNING, plan_revision=1, step=number)
        self.on_change = self.loop_hears
        self.loop_hears(key, progress=True)


@contextlib.asynccontextmanager
async def running(**settings):
    """(cluster, drivers, the passes so far) of a job that runs."""
    cluster, passes, took, made = Cluster(), [], [], []
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()

    def passed(seconds, result):
        passes.append(loop.time())
        took.append(seconds)

    def drivers(on_change):
        made.append(Progressing(on_change))
        return made[0]

    reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=drivers, authority=AUTHORITY,
        settings=OperatorSettings(coalesce_s=0.0, **settings), clock=lambda: NOW,
        on_pass=passed,
    )  # fmt: skip
    task = asyncio.create_task(reconciler.run())
    await cluster.apply(ppo_job())
    async with asyncio.timeout(10):
        while ("Commit", 1) not in made[0].told:
            await cluster.kubelet()
            await asyncio.sleep(0.01)
    await quiet(passes)
    try:
        yield cluster, made[0], passes
        assert sum(took) <= loop.time() - began, "one pass after the other"
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def quiet(passes):
    """No pass for a while."""
    known = -1
    while known != (known := len(passes)):
        await asyncio.sleep(0.1)


async def until_step(cluster, number):
    async with asyncio.timeout(5):
        while (await cluster.status()).get("step") != number:
            await asyncio.sleep(0.01)


async def test_steps_cause_no_pass_before_their_interval_is_over():
    async with running(progress_interval_s=INTERVAL_S) as (cluster, drivers, passes):
        await asyncio.sleep(INTERVAL_S)
        drivers.step(KEY, 1)
        await until_step(cluster, 1)  # at once: the last write is long ago
        written_at = asyncio.get_running_loop().time()
        await quiet(passes)
        before = len(passes)
        for number in range(2, 22):
            drivers.step(KEY, number)
            await asyncio.sleep(0.01)
        await until_step(cluster, 21)
        assert passes[before] - written_at > INTERVAL_S / 2
        intervals = (asyncio.get_running_loop().time() - written_at) / INTERVAL_S
        assert len(passes) - before <= 2 * intervals + 2  # each that writes is followed by one that looks at it


async def test_what_a_condition_says_does_not_wait_for_the_interval_and_takes_progress_along():
    async with running(progress_interval_s=3600.0) as (cluster, drivers, _):
        drivers.step(KEY, 7)
        drivers.say(KEY, state=DriverState.RECOVERING, plan_revision=1, step=7, message="env/0 is started again")
        async with asyncio.timeout(5):
            while (await cluster.condition("Degraded"))[0] != "True":
                await asyncio.sleep(0.01)
        assert (await cluster.status())["step"] == 7


async def test_all_jobs_together_write_progress_at_one_rate(monkeypatch):
    """Two followed jobs at a rate of one write in 20 s: each waits 40 s, whatever the interval of one job is."""
    monkeypatch.setattr(loop, "PROGRESS_PER_S", 0.05)
    async with running(progress_interval_s=0.0) as (cluster, drivers, passes):
        drivers.step(KEY, 1)
        before = len(passes)
        await asyncio.sleep(0.3)
        assert len(passes) == before
        assert (await cluster.status()).get("step") in (None, 0)


async def test_jobs_whose_progress_is_due_at_once_have_their_passes_one_after_the_other():
    """A thousand of them would be half a minute in which a failure waits for its pass."""
    cluster = Cluster()
    keys = [JobKey(namespace="team", name=f"job-{number}") for number in range(100)]
    for key in keys:
        await cluster.apply(ppo_job(name=key.name))
        await cluster.reconciler.pass_over(key)
    reconciler, queue = cluster.reconciler, cluster.reconciler._queue
    for memory in reconciler._memory.values():
        memory.progress_written_at = None
    queue._due.clear()
    now = queue._now()
    for _ in range(3):  # each reports again before its pass: it keeps its turn
        for key in keys:
            reconciler._driver_changed(key, progress=True)
    turns = sorted(due - now for due in queue._due.values())
    assert len(turns) == 100
    assert turns == pytest.approx([number / loop.PROGRESS_PER_S for number in range(100)], abs=0.04)
    reconciler._driver_changed(keys[-1])
    assert queue._due[keys[-1]] - now < 0.5, "what is more than progress is looked at at once"
    await reconciler.pass_over(keys[0])
    reconciler._memory[keys[0]].progress_written_at = None
    queue._due.clear()
    reconciler._driver_changed(keys[0], progress=True)
    assert 4.5 < queue._due[keys[0]] - now < 6.0, "behind the others that wait"


def test_the_rate_is_that_of_the_documents():
    """max(30 s, jobs / 20 s)."""
    assert loop.PROGRESS_PER_S == 20
    assert OperatorSettings().progress_interval_s == 30.0
    assert JobKey(namespace="team", name="math") == KEY


async def test_children_of_a_finished_job_wait_and_those_of_no_job_are_nobodys_business(monkeypatch):
    monkeypatch.setattr(loop, "FINISHED_S", 3600.0)
    cluster = Cluster()
    await cluster.apply(ppo_job())
    await cluster.settle()

    async def due_after(key):
        """Of an operator that has looked at the job once."""
        cluster.restart()
        await cluster.reconciler.pass_over(KEY)
        assert cluster.reconciler.overdue()[0] == 0
        cluster.reconciler.child_changed(key)
        return cluster.reconciler.overdue()[0]

    assert await due_after(JobKey(namespace="team", name="gone")) == 0
    assert await due_after(KEY) == 1
    cluster.drivers.say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)
    await cluster.settle()
    assert (await cluster.condition("Complete"))[0] == "True"
    assert await due_after(KEY) == 0


async def test_the_driver_of_a_job_that_is_seen_to_be_complete_is_followed_no_longer():
    cluster = Cluster()
    await cluster.apply(ppo_job())
    await cluster.settle()
    cluster.drivers.say(KEY, state=DriverState.COMPLETE, plan_revision=1, step=100)
    await cluster.reconciler.pass_over(KEY)
    assert (await cluster.condition("Complete"))[0] == "True"
    assert KEY not in cluster.drivers.followed


@pytest.mark.parametrize(("lag_s", "waits"), [(0.0, False), (0.4, True), (60.0, True)])
async def test_good_news_of_pods_waits_as_long_as_passes_wait_anyway_and_a_second_at_most(monkeypatch, lag_s, waits):
    cluster = Cluster()
    await cluster.apply(ppo_job())
    await cluster.reconciler.pass_over(KEY)
    cluster.restart()
    await cluster.reconciler.pass_over(KEY)
    queue = cluster.reconciler._queue
    monkeypatch.setattr(queue, "_lag_s", lag_s)
    cluster.reconciler.child_changed(KEY, can_wait=True)
    assert (cluster.reconciler.overdue()[0] == 0) is waits
    assert queue._due[KEY] <= queue._now() + loop.GOOD_NEWS_S
    cluster.reconciler.child_changed(KEY)
    assert cluster.reconciler.overdue()[0] == 1  # what cannot wait does not


async def test_good_news_of_a_large_jobs_pods_waits_the_longer_as_each_pass_over_it_keeps_all_others_waiting():
    cluster = Cluster()
    await cluster.apply(ppo_job())
    await cluster.settle()
    queue, memory = cluster.reconciler._queue, cluster.reconciler._memory[KEY]
    assert memory.pods == 4, "as the last pass saw"
    memory.pods = 2000
    queue._due.clear()
    now = queue._now()
    cluster.reconciler.child_changed(KEY, can_wait=True)
    assert 2.0 <= queue._due[KEY] - now < 2.0 + loop.GOOD_NEWS_S
    cluster.reconciler.child_changed(KEY)
    assert cluster.reconciler.overdue()[0] == 1  # what cannot wait does not
