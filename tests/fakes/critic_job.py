"""A job whose actor and critic end the steps together, for test_actor_and_critic.py: what the actor learns depends on
what the critic had learnt in every step before.

    flow ── prompts ──► sampler x 2 ──┬── samples (rounds) ───► actor x 2
                                      │                           ▲
                                      └── returns (rounds) ──► critic ── values (joins samples)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import LineageKey, Round
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext, TrainerStep
from tests.fakes.enough_job import Counter, luck

PROMPTS = 8  # of a step
MODULUS = 101  # of values, which therefore depend on all that the critic has seen


def keys_of(step: int) -> list[LineageKey]:
    return [lineage.sample("p", step, index=n, sample=0) for n in range(PROMPTS)]


def learnt(*, upto: int) -> dict[int, tuple[int, int]]:
    """What actor and critic have come to, by step."""
    actor, critic, found = 0, 0, dict[int, tuple[int, int]]()
    for step in range(1, upto + 1):
        rewards = [luck(key) for key in keys_of(step)]
        actor += sum(reward * (critic % MODULUS) for reward in rewards)
        critic += sum(rewards)
        found[step] = actor, critic
    return found


async def flow(flow: Flow) -> None:
    prompts = flow.source("prompts", to="sampler")
    flow.queue("samples", "sampler", "actor", rounds=True, payload={"reward": "int"})
    flow.queue("returns", "sampler", "critic", rounds=True, payload={"reward": "int"})
    flow.queue("values", "critic", "actor", joins="samples", payload={"value": "int"})
    async for step in flow.steps():
        await prompts.put([Ticket(key=key) for key in keys_of(step.number)], step=step)


class Sampler:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        prompts, samples, returns = ctx.channel("prompts"), ctx.channel("samples"), ctx.channel("returns")
        pace_s = float(ctx.config.get("paceSeconds", 0.004))
        async for prompt in prompts:
            with ctx.span("compute", step=prompt.step):
                await asyncio.sleep(pace_s)
            for channel in (samples, returns):
                await channel.put({"reward": luck(prompt.key)}, key=prompt.key, parents=[prompt])
            prompts.ack(prompt)


class Critic(Counter):
    inputs = ("returns",)

    async def build(self, ctx: RoleContext) -> None:
        await super().build(ctx)
        self.out, self.gang = ctx.channel("values"), ctx.gang

    async def take(self, part: Round) -> None:
        """The actor has its values while this gang still waits for the rest of the step."""
        for item in part.items:
            await self.out.put({"value": self.total % MODULUS}, key=item.key, parents=[item])

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        mine = sum(item["reward"] for item in step.payloads)
        self.total += sum(await self.gang.meet((step.branch, step.number, 0), mine))
        return {"total": float(self.total)}


class Actor(Counter):
    inputs = ("samples", "values")

    async def build(self, ctx: RoleContext) -> None:
        await super().build(ctx)
        self.gang = ctx.gang

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        mine = sum(sample.payload["reward"] * value.payload["value"] for sample, value in step.units)
        self.total += sum(await self.gang.meet((step.branch, step.number, 0), mine))
        return {"total": float(self.total)}
