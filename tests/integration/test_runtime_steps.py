"""Weights, steps, gangs and the ends of a worker, under a driver that is a script."""

import asyncio
from typing import Any

import numpy
import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, UserError, WorkerUnreachable
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.dialling import RefusedByDriver
from rlinf_worker.weights.edition import SchemaChanged
from tests.fakes.channels_driver import FakeDriver, queue, weights
from tests.fakes.workers import pod

WEIGHTS = [weights("actor", "rollout")]


def tensors(value: float, *, size: int = 1000):
    return {"w": numpy.full((size, 3), value, "f4"), "b": numpy.full(3, value, "f8"), "steps": int(value)}


async def until(condition, *, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def puller(got: list[Any], wanted: list[int]):
    async def run(ctx):
        for number in wanted:
            version, here = await ctx.weights.pull(PolicyVersion(0, number))
            assert ctx.weights.version == version
            assert (here["w"] == here["steps"]).all()
            got.append((version.number, here["steps"]))
        await ctx.stopping.wait()

    return run


async def test_weights_reach_present_and_late_receivers(tmp_path):
    async with pod(tmp_path, WEIGHTS) as p:
        early: list[Any] = []
        late: list[Any] = []
        go = asyncio.Event()

        async def train(ctx):
            for number in range(3):
                await ctx.weights.publish(PolicyVersion(0, number), tensors(number, size=500_000))
            await go.wait()
            await ctx.weights.publish(PolicyVersion(0, 3), tensors(3))

        p.start("actor/0", train)
        p.start("rollout/0", puller(early, [0, 2]))
        await p.driver.connected("actor/0", "rollout/0")
        p.driver.route("weights", "actor/0", "rollout/0")
        await until(lambda: bool(early) and early[-1] == (2, 2))
        p.start("rollout/1", puller(late, [0]))
        await p.driver.connected("rollout/1")
        p.driver.route("weights", "actor/0", "rollout/1")
        await until(lambda: late == [(2, 2)])
        go.set()
        p.workers.pop("actor/0")
        with pytest.raises(SchemaChanged, match=r"w is float32\[1000, 3\], was float32\[500000, 3\]"):
            await p.tasks.pop("actor/0")


async def test_a_rank_that_waits_for_its_begin_is_not_taken_for_idle(tmp_path):
    """It would leave its slots, and want them again at another moment than the other ranks of its gang."""
    async with pod(tmp_path, []) as p:
        p.driver.begin_with = None

        async def begin(ctx):
            await ctx.ready()

        worker = p.start("actor/0", begin)
        await until(lambda: "ready" in p.driver.kinds("actor/0"))
        waits = worker.session._host.waits
        assert [what for what, _ in waits.current()] == ["the driver's Begin for actor/0"]
        assert waits.gated == []


async def test_a_version_is_never_published_with_two_contents(tmp_path):
    async with pod(tmp_path, WEIGHTS) as p:

        async def train(ctx):
            await ctx.weights.publish(PolicyVersion(0, 1), tensors(1))
            await ctx.weights.publish(PolicyVersion(0, 1), tensors(1))
            await ctx.weights.publish(PolicyVersion(0, 1), tensors(2))

        p.start("actor/0", train)
        p.workers.pop("actor/0")
        with pytest.raises(InvariantBroken, match="b0-1 exist twice"):
            await p.tasks.pop("actor/0")


async def test_a_new_driver_is_told_of_the_branch_whose_weights_a_worker_holds(tmp_path):
    """Of a flow without queues, a rollout that has heard of no other step since."""
    async with pod(tmp_path, WEIGHTS) as p:
        pulled: list[PolicyVersion] = []

        async def train(ctx):
            await ctx.weights.publish(PolicyVersion(2, 7), tensors(7))
            await ctx.stopping.wait()

        async def play(ctx):
            pulled.append((await ctx.weights.pull(await ctx.ready()))[0])
            await ctx.stopping.wait()

        p.start("actor/0", train)
        p.start("rollout/0", play)
        await p.driver.connected("actor/0", "rollout/0")
        p.driver.route("weights", "actor/0", "rollout/0")
        await until(lambda: pulled == [PolicyVersion(2, 7)])
        channels = list(p.driver.channels.values())
        for attempt, highest in ((2, 2), (3, 5)):
            await p.driver.stop()
            p.driver = await FakeDriver.start(channels, attempt=attempt)
            await p.driver.connected("actor/0", "rollout/0")
            assert {hello.worker: hello.highest_branch for hello in p.driver.hellos} == dict.fromkeys(
                ("actor/0", "rollout/0"), highest
            )
            for worker in ("actor/0", "rollout/0"):
                p.driver.send(worker, step_commit=pb.StepCommit(step=8, version=pb.PolicyVersion(branch=5, number=8)))
            for worker in ("actor/0", "rollout/0"):
                await until(lambda w=worker: p.workers[w].session.highest_branch == 5)


async def test_a_step_counts_when_the_driver_says_so_also_over_a_broken_stream(tmp_path):
    async with pod(tmp_path, [queue("units", "", "actor", rounds=True)]) as p:
        commits: list[Any] = []

        async def train(ctx):
            assert await ctx.ready() == PolicyVersion(0, 0)
            for step in (1, 2):
                commits.append(await ctx.step_done(step, branch=0, keys=("a",), metrics={"loss": 0.5}))
            await ctx.stopping.wait()

        p.start("actor/0", train)
        await until(lambda: "step_done" in p.driver.kinds("actor/0"))
        first = pb.StepCommit(step=1, version=pb.PolicyVersion(number=1), checkpoint=True, state_json="{}")
        p.driver.send("actor/0", step_commit=first)
        await until(lambda: p.driver.kinds("actor/0").count("step_done") == 2)
        await p.driver.stop()
        p.driver = await FakeDriver.start(list(p.driver.channels.values()), attempt=2)
        await p.driver.connected("actor/0")
        hello = p.driver.hellos[0]
        assert [done.step for done in hello.steps_done] == [2]
        assert hello.committed.number == 1
        assert hello.last_commit == first, "word for word: its other ranks may not have heard it"
        commit = pb.StepCommit(step=2, version=pb.PolicyVersion(number=2), checkpoint=True, state_json="{}", last=True)
        p.driver.send("actor/0", step_commit=commit)
        p.driver.send("actor/0", step_commit=commit)
        await until(lambda: len(commits) == 2)
        assert commits[1].last
        assert commits[1].version == PolicyVersion(0, 2)


async def test_the_number_of_a_branch_is_kept_before_anything_is_called_by_it(tmp_path):
    place = tmp_path / "checkpoints"
    async with pod(tmp_path, [queue("units", "", "actor", rounds=True)]) as p:
        p.driver.checkpoint_uri = str(place)
        p.driver.begin_with = PolicyVersion(6, 20)
        kept: list[str] = []

        async def train(ctx):
            assert ctx.checkpoints.latest() is None
            (place / "b5-40").mkdir()
            await ctx.ready()
            kept.extend(path.name for path in place.iterdir())
            ctx.report(step=21, metrics={"seen_count": 1}, key="units:0/21")
            await ctx.stopping.wait()

        p.start("actor/0", train)
        await until(lambda: bool(kept))
        assert sorted(kept) == [".b6.opened", "b5-40"]
        said = [m.ready for m in p.driver.messages["actor/0"] if m.WhichOneof("kind") == "ready"]
        assert [(ready.restored, ready.highest_branch) for ready in said] == [(False, 5)]
        await until(lambda: "report" in p.driver.kinds("actor/0"))
        report = next(m.report for m in p.driver.messages["actor/0"] if m.WhichOneof("kind") == "report")
        assert (report.step, report.branch, report.key) == (21, 6, "units:0/21")


async def test_a_value_that_one_role_shares_reaches_the_others(tmp_path):
    async with pod(tmp_path, [queue("units", "", "actor")]) as p:
        heard: list[Any] = []

        async def tell(ctx):
            ctx.share("observation", {"shape": [4]})
            ctx.share("observation", {"shape": [4]})
            with pytest.raises(UserError, match="another value"):
                ctx.share("observation", {"shape": [5]})
            await ctx.stopping.wait()

        async def listen(ctx):
            heard.append(await ctx.shared("observation"))
            await ctx.stopping.wait()

        p.start("actor/0", listen)
        p.start("env/0", tell)
        await until(lambda: heard == [{"shape": [4]}])


async def test_a_roles_error_ends_the_worker_with_its_sentence(tmp_path):
    async with pod(tmp_path, [queue("units", "", "actor")]) as p:

        async def wrong(ctx):
            ctx.channel("unit")

        p.start("actor/0", wrong)
        p.workers.pop("actor/0")
        with pytest.raises(UserError, match="is at no end of queue 'unit': got 'unit', wanted one of units"):
            await p.tasks.pop("actor/0")


async def test_a_refused_worker_ends_with_the_drivers_exit_code(tmp_path):
    async with pod(tmp_path, [queue("units", "", "actor")]) as p:
        p.driver.refusal = pb.Refusal(message="attempt 2 has taken your place", exit_code=names.EXIT_STALE)

        async def never(ctx):
            raise AssertionError

        p.start("actor/0", never)
        p.workers.pop("actor/0")
        with pytest.raises(RefusedByDriver, match="attempt 2") as caught:
            await p.tasks.pop("actor/0")
        assert caught.value.exit_code == names.EXIT_STALE


async def test_a_worker_without_a_driver_ends_after_a_while(tmp_path):
    async with pod(tmp_path, [queue("units", "", "actor")]) as p:
        p.settings = Settings(driver_absence_timeout_s=0.3, reconnect_backoff_s=0.05)

        async def wait(ctx):
            await ctx.stopping.wait()

        w = p.start("actor/0", wait)
        await p.driver.connected("actor/0")
        await until(lambda: w.driver.is_connected)  # else its role may be the first to give up, waiting for the Welcome
        await p.driver.stop()
        p.workers.pop("actor/0")
        with pytest.raises(WorkerUnreachable, match="no driver for"):
            await asyncio.wait_for(p.tasks.pop("actor/0"), 20)
