"""Jobs in memory in which an actor and a critic end the steps together.

world = GangsWorld(SHAPES["the same for both"], seed=3)
await world.run(at={40: lambda w: w.kill("critic/0")})
world.committed_by["critic"]                            # [(branch, step, keys)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_worker.channels.protocol import Item, LineageKey
from rlinf_worker.flows.protocol import Flow, Step, Ticket
from tests.builders_driver import make_job
from tests.fakes.driver_roles import ROLES, SimActor, SimEnv
from tests.fakes.driver_workers import SimWorker
from tests.fakes.driver_world import World
from tests.fakes.lineage_world import draws, is_worth, slices_of


def _keys(flow: Flow, step: Step, name: str = "env") -> list[LineageKey]:
    return [LineageKey(f"{name}:{n}@{step.number}") for n in range(slices_of(flow))]


async def _both(flow: Flow, *, units: int | None = 1) -> None:
    """env puts all that it makes into both."""
    tickets = flow.source("segments", to="env")
    flow.queue("trajectories", "env", "actor", rounds=True)
    flow.queue("values", "env", "critic", rounds=True)
    flow.weights("actor", "rollout")
    async for step in flow.steps():
        await tickets.put([Ticket(key=key, units=units) for key in _keys(flow, step)], step=step)


async def the_same_for_both(flow: Flow) -> None:
    await _both(flow)


async def as_many_as_come(flow: Flow) -> None:
    await _both(flow, units=None)


async def behind_a_judge(flow: Flow) -> None:
    """What the critic gets goes by the rollout, which drops some of it: the actor has all."""
    tickets = flow.source("segments", to="env")
    flow.queue("trajectories", "env", "actor", rounds=True)
    flow.queue("drafts", "env", "rollout")
    flow.queue("values", "rollout", "critic", rounds=True)
    async for step in flow.steps():
        await tickets.put([Ticket(key=key) for key in _keys(flow, step)], step=step)


async def each_its_own(flow: Flow) -> None:
    """Some tickets reach the actor alone, others the critic."""
    tickets, hints = flow.source("segments", to="env"), flow.source("hints", to="rollout")
    flow.queue("trajectories", "env", "actor", rounds=True)
    flow.queue("values", "rollout", "critic", rounds=True)
    async for step in flow.steps():
        await tickets.put([Ticket(key=key) for key in _keys(flow, step)], step=step)
        if step.number != 2:  # in which the critic has nothing
            await hints.put([Ticket(key=key) for key in _keys(flow, step, "hint")], step=step)


class SimBoth(SimEnv):
    @property
    def channels(self) -> tuple[str, ...]:
        return ("trajectories", "values")


class SimDrafting(SimEnv):
    @property
    def channels(self) -> tuple[str, ...]:
        return ("drafts", "trajectories")


class SimJudge(SimEnv):
    consumes, produces = "drafts", "values"


class SimHinted(SimEnv):
    consumes, produces = "hints", "values"


class SimCritic(SimActor):
    consumes = "values"


def one(key: str) -> list[str]:
    return [key]


def drawn(key: str) -> list[str]:
    return [f"{key}/{n}" for n in range(draws(key))]


@dataclass(frozen=True, kw_only=True)
class Shape:
    flow: str
    roles: Mapping[str, type[SimWorker]]
    makes: Callable[[str], list[str]] = one
    judged: bool = False
    """The critic gets what the judge lets through."""
    job: Mapping[str, Any] = field(default_factory=dict)


SHAPES: dict[str, Shape] = {
    "the same for both": Shape(flow="the_same_for_both", roles={"env": SimBoth}),
    "gangs of two, in order": Shape(
        flow="the_same_for_both", roles={"env": SimBoth},
        job={"actors": 2, "critics": 2, "order": "lineage", "micro_batch": 1},
    ),
    "two ranks and one, stale": Shape(
        flow="the_same_for_both", roles={"env": SimBoth}, job={"actors": 2, "staleness": 1}
    ),
    "as many as come": Shape(flow="as_many_as_come", roles={"env": SimBoth}, makes=drawn),
    "behind a judge": Shape(
        flow="behind_a_judge", roles={"env": SimDrafting, "rollout": SimJudge}, judged=True,
        job={"capacity": 1, "micro_batch": 1},
    ),
    "each its own": Shape(flow="each_its_own", roles={"env": SimEnv, "rollout": SimHinted}),
}  # fmt: skip


class GangsWorld(World):
    def __init__(self, shape: Shape, *, seed: int = 0, steps: int = 3, **more: Any) -> None:
        self.shape, self.roles = shape, {**ROLES, "critic": SimCritic, **shape.roles}
        flow = f"tests.fakes.gangs_world:{shape.flow}"
        job = {"flow": flow, "steps": steps, "every_steps": 1, "critics": 1, **shape.job, **more}
        super().__init__(make_job(**job), seed=seed)

    def made_of(self, worker: SimWorker, items: Sequence[Item]) -> Sequence[str]:
        return self.shape.makes(items[0].key)

    def filters(self, key: str, *, channel: str) -> bool:
        return self.shape.judged and channel == "drafts" and not is_worth(key)

    def expected_of(self, gang: str, step: int) -> tuple[str, ...]:
        slices, is_critic = range(int(self.driver.job.flow_settings.config["slices"])), gang == "critic"
        name = "hint" if is_critic and self.shape.flow == "each_its_own" else "env"
        if name == "hint" and step == 2:
            return ()
        keys = [key for n in slices for key in self.shape.makes(f"{name}:{n}@{step}")]
        return tuple(sorted(key for key in keys if is_worth(key) or not (is_critic and self.shape.judged)))
