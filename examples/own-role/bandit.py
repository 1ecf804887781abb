"""Four slot machines pay 1 or nothing, each by a chance of its own. Which of them pays best is learnt by policy
gradient, in a flow and two roles that are of this file alone. docs/own-role.md makes it in steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext, Trainer, TrainerStep

CHANCES = (0.2, 0.4, 0.6, 0.8)  # of each machine to pay; the learner does not look here
PLAYS = 16  # of a step


async def flow(flow: Flow) -> None:
    tickets = flow.source("tickets", to="sampler", payload={"n": "int"})
    flow.queue("plays", "sampler", "learner", rounds=True, payload={"machine": "int", "reward": "float"})
    flow.weights("learner", "sampler")
    async for step in flow.steps():
        keys = [lineage.sample("play", step.number, index=n, sample=0) for n in range(PLAYS)]
        await tickets.put([Ticket(key=key, payload={"n": n}) for n, key in enumerate(keys)], step=step)


def policy(preferences: np.ndarray) -> np.ndarray:
    powers = np.exp(preferences - preferences.max())
    return np.asarray(powers / powers.sum())


class Sampler:
    async def run(self, ctx: RoleContext) -> None:
        tickets, plays = ctx.channel("tickets"), ctx.channel("plays")
        await ctx.ready()
        async for ticket in tickets:
            version, weights = await ctx.weights.pull(ticket.version)
            with ctx.span("compute", step=ticket.step):
                luck = np.random.default_rng([ctx.flow.seed, ticket.step, ticket.payload["n"]])
                machine = int(luck.choice(len(CHANCES), p=policy(weights["preferences"])))
                reward = float(luck.random() < CHANCES[machine])
            ctx.report(step=ticket.step, metrics={"won_sum": reward}, key=ticket.key)
            await plays.put({"machine": machine, "reward": reward}, key=ticket.key, version=version, parents=[ticket])
            tickets.ack(ticket)


class Learner(Trainer):
    inputs = ("plays",)
    holds_collectives = False  # nothing of it waits in torch for another rank

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        self.rate, self.span = float(ctx.config["rate"]), ctx.span
        self.preferences = np.zeros(len(CHANCES))

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        with self.span("compute", step=step.number):
            rewards = np.array([play["reward"] for play in step.payloads])
            played = np.eye(len(CHANCES))[[play["machine"] for play in step.payloads]]
            gradient = (rewards - rewards.mean()) @ (played - policy(self.preferences)) / len(rewards)
            self.preferences = self.preferences + self.rate * gradient
        return {"reward_mean": float(rewards.mean()), "best": float(policy(self.preferences)[-1])}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        return {"preferences": self.preferences}

    def state(self) -> np.ndarray:
        return self.preferences

    def write(self, folder: Path, state: np.ndarray) -> None:
        np.save(folder / "preferences.npy", state)

    def read(self, folder: Path) -> np.ndarray:
        return np.asarray(np.load(folder / "preferences.npy"))

    def restore(self, state: np.ndarray) -> None:
        self.preferences = state
