"""Nothing lost, nothing twice per lineage key, bounds held, groups whole, order per route: a job of ppo under faults
that hypothesis chooses and shrinks. The driver and both ends of every channel are the real ones; the rest is
tests.fakes.driver_world. One message moves at a time, so that whoever dies does so between any two of announce, assign,
pull, payload, held and acknowledged.

Twenty-five jobs in the bare pytest; `make deep-channels` runs a thousand, and longer ones.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.links import frames
from rlinf_worker.queues.channel import QueueChannel
from tests.builders_driver import make_job
from tests.fakes.driver_world import TICK_S, World

DEEP = int(os.environ.get("DEEP_CHANNELS", "0"))  # stories
SHAPES: tuple[dict[str, Any], ...] = (
    {"envs": 2, "slices": 4, "micro_batch": 1},
    {"envs": 2, "slices": 5, "order": "lineage"},
    {"envs": 2, "actors": 2, "slices": 5, "micro_batch": 1},
    {"envs": 3, "actors": 2, "slices": 4, "staleness": 1},
    {"envs": 2, "rollouts": 2, "slices": 6, "micro_batch": 1},
    {"envs": 2, "slices": 7, "micro_batch": 1, "depth": 2, "capacity": 4, "staleness": 1},
)


def workers(world: World) -> list[Any]:
    return list(world.workers.values())


MOMENTS: dict[str, Callable[[World], bool]] = {
    "now": lambda world: True,
    "a unit is pulled": lambda world: any(
        q.into.given.units.pulling() for w in workers(world) for q in w.queues.values()
    ),
    "a payload is under way": lambda world: any(
        isinstance(frames.decode(message.head), frames.Payload)
        for w in workers(world)
        for peer in w.links.with_frames
        for message in peer.inbox
    ),
    "a frame is under way": lambda world: any(w.links.with_frames for w in workers(world)),
    "a worker has something to tell": lambda world: any(w.to_driver for w in workers(world)),
    "the driver has something to tell": lambda world: any(w.outbox and w.outbox._messages for w in workers(world)),
    "a unit is taken": lambda world: any(getattr(w, "items", None) for w in workers(world)),
}
moments = st.sampled_from(sorted(MOMENTS))
PATIENCE = 200  # messages until the moment has to come
FAULTS = 6  # in one story: every one costs a restart, of which a job has twenty


class Story(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world: World
        self.faults = 0

    @initialize(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1 << 16))
    def begin(self, shape: dict[str, Any], seed: int) -> None:
        async def make() -> World:
            world = World(make_job(steps=3, every_steps=1, **shape), seed=seed)
            world.is_busy = True
            return world

        self.world = self.loop.run_until_complete(make())

    # --- what happens -------------------------------------------------------------------------------------------------
    @rule(messages=st.integers(1, 40))
    def go_on(self, messages: int) -> None:
        async def some() -> None:
            for _ in range(messages):
                if not await self.world.step():
                    await self.world.pass_time(TICK_S)

        self.loop.run_until_complete(some())

    def faulty(self, moment: str, act: Any) -> None:
        """At the next moment of that kind: chance alone would seldom meet one."""
        if self.faults >= FAULTS or self.world.driver.job.ended.is_set():
            return
        self.faults += 1

        async def do() -> None:
            for _ in range(PATIENCE):
                if MOMENTS[moment](self.world) or self.world.driver.job.ended.is_set():
                    break
                if not await self.world.step():
                    await self.world.pass_time(TICK_S)
            act()

        self.loop.run_until_complete(do())

    @rule(moment=moments, number=st.integers(0, 2))
    def a_producer_dies(self, moment: str, number: int) -> None:
        self.faulty(moment, lambda: self.world.kill(f"env/{number}"))

    @rule(moment=moments, rank=st.integers(0, 1))
    def a_consumer_dies(self, moment: str, rank: int) -> None:
        self.faulty(moment, lambda: self.world.kill(f"actor/{rank}"))

    @rule(moment=moments, pool=st.sampled_from(("sim", "gpu")))
    def a_pod_is_lost(self, moment: str, pool: str) -> None:
        self.faulty(moment, lambda: self.world.kill_pod(pool))

    @rule(moment=moments, at_once=st.booleans())
    def the_driver_is_replaced(self, moment: str, at_once: bool) -> None:
        self.faulty(moment, lambda: self.world.replace_driver(at_once=at_once))

    @rule(moment=moments, worker=st.sampled_from(("env/0", "env/1", "actor/0", "actor/1", "rollout/0")))
    def a_stream_to_the_driver_breaks(self, moment: str, worker: str) -> None:
        self.faulty(moment, lambda: self.world.break_stream(worker))

    @rule(moment=moments, given_up=st.booleans())
    def the_links_of_a_producer_break(self, moment: str, given_up: bool) -> None:
        def cut() -> None:
            for worker in list(self.world.workers):
                if not worker.startswith("env/"):
                    self.world.break_link("env/0", worker, given_up=given_up)

        self.faulty(moment, cut)

    @rule(moment=moments, back=moments, gap=st.integers(0, 12))
    def a_rollout_is_away_and_comes_back(self, moment: str, back: str, gap: int) -> None:
        """Routes move while both of their ends go on: what is on its way on them is neither lost nor stands still."""
        self.faulty(moment, lambda: self.world.stand_in("rollout/1"))
        self.go_on(gap + 1)
        self.faulty(back, lambda: self.world.stand_in())

    # --- what holds ---------------------------------------------------------------------------------------------------
    @invariant()
    def the_job_goes_on(self) -> None:
        if hasattr(self, "world"):
            assert self.world.driver.job.standing.state is not DriverState.FAILED, (
                self.world.driver.job.standing.message
            )

    @invariant()
    def bounds_hold(self) -> None:
        for worker in self.world.workers.values() if hasattr(self, "world") else ():
            for queue in worker.queues.values():
                self.queue_is_bounded(worker.id, queue)
            for asker in worker.askers.values():
                for conversation in asker._with.values():
                    assert len(conversation.asked.unanswered) <= conversation.asked.credit

    def queue_is_bounded(self, worker: WorkerId, queue: QueueChannel) -> None:
        assert queue.into.given.waiting <= queue.into.given.window, (worker, queue.name)
        shelf = queue.out.shelf
        assert shelf.kept_bytes == sum(unit.size_bytes for unit in shelf.units())

    @invariant()
    def order_is_kept_on_each_route(self) -> None:
        """What one conversation leaves unanswered comes to the next behind what was asked there meanwhile: a life that
        is over is known to be so only after the driver has named another."""
        for (_, asker, _), heard in self.world.heard.items() if hasattr(self, "world") else ():
            assert len(heard) == len(set(heard)), "no item twice"
            together = defaultdict[int, list[int]](list)
            for asked in heard:
                together[self.world.asked_first_in[asker, asked]].append(asked)
            for first_in, of_one in together.items():
                assert of_one == sorted(of_one), (first_in, heard, "none of one conversation is overtaken by another")

    @invariant()
    def each_step_has_its_units_once(self) -> None:
        for _, step, keys in self.world.committed if hasattr(self, "world") else ():
            assert keys == self.world.expected(step)

    def nothing_stands_still_on_a_route(self) -> None:
        """When all is quiet, what was asked is answered, on each route to an answerer that is there."""
        world = self.world
        self.loop.run_until_complete(world.run_dry())
        for worker in world.workers.values():
            for asker in worker.askers.values():
                for life, conversation in asker._with.items():
                    other = world.life(life)
                    if worker.outbox is not None and other is not None and other.outbox is not None and other.begun:
                        assert not conversation.asked.unanswered, (worker.id, life, world.story())

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.loop.run_until_complete(self.world.run())
                assert self.world.driver.job.standing.state is DriverState.COMPLETE, self.world.story()
                self.each_step_has_its_units_once()
                self.order_is_kept_on_each_route()
                self.nothing_stands_still_on_a_route()
                steps = {step for _, step, _ in self.world.committed}
                assert steps == set(range(1, self.world.driver.job.ledger.steps + 1))
        finally:
            self.loop.close()


Story.TestCase.settings = settings(
    max_examples=DEEP or 25,
    stateful_step_count=40 if DEEP else 20,
    derandomize=not DEEP,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


class TestStories(Story.TestCase):  # type: ignore[misc, valid-type]
    pytestmark = pytest.mark.timeout(3600 if DEEP else 60)
