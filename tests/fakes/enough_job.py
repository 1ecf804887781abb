"""A job that samples until it has enough, for test_many_of_one.py: of each prompt three samples, a reward of all three,
and prompts of which nothing can be learnt are dropped and replaced by others.

    flow ── prompts ──► sampler x 2 ── samples ──► judge ── groups (rounds) ──► learner
      ▲                                              │
      └────────────────── scores ────────────────────┘
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import Item
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import RoleContext, Trainer, TrainerStep

SAMPLES = 3
KEPT = 4  # groups of a step


def luck(key: str) -> int:
    return hashlib.sha256(key.encode()).digest()[0]


def is_worth(prompt: str) -> bool:
    return luck(prompt) % 3 > 0


def kept_of(*, upto: int) -> list[list[str]]:
    """The prompts that each step trains on, and what is used up in between."""
    number, steps = 0, list[list[str]]()
    for _ in range(upto):
        kept = list[str]()
        while len(kept) < KEPT:
            keys = [lineage.sample("p", 0, index=number + n, sample=0) for n in range(KEPT - len(kept))]
            number += len(keys)
            kept += [key for key in keys if is_worth(key)]
        steps.append(kept)
    return steps


async def flow(flow: Flow) -> None:
    prompts = flow.source("prompts", to="sampler", payload={"n": "int"})
    flow.queue("samples", "sampler", "judge", payload={"reward": "int"})
    scores = flow.results("scores", producer="judge", payload={"kept": "int"})
    flow.queue("groups", "judge", "learner", rounds=True)
    async for step in flow.steps():
        kept, number = 0, int(flow.state.get("next", 0))
        while kept < KEPT:
            keys = [lineage.sample("p", 0, index=number + n, sample=0) for n in range(KEPT - kept)]
            tickets = [Ticket(key=key, payload={"n": number + n}) for n, key in enumerate(keys)]
            await prompts.put(tickets, step=step)
            kept += sum(result.value["kept"] for result in await scores.of(step, keys))
            number += len(keys)
        flow.state["next"] = number


class Sampler:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        prompts, samples = ctx.channel("prompts"), ctx.channel("samples")
        async for prompt in prompts:
            for n in range(SAMPLES):
                with ctx.span("compute", step=prompt.step):
                    await asyncio.sleep(0.004)
                key = f"{prompt.key}/{n}"
                await samples.put({"reward": luck(key)}, key=key, parents=[prompt])
            prompts.ack(prompt)


class Judge:
    """One worker, as all samples of a prompt have to come to the same."""

    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        samples, groups, scores = ctx.channel("samples"), ctx.channel("groups"), ctx.channel("scores")
        here: dict[tuple[int, str], dict[str, Item]] = defaultdict(dict)
        async for sample in samples:
            [prompt] = sample.tickets
            group = here[sample.branch, prompt]
            group[sample.key] = sample
            if len(group) < SAMPLES:
                continue
            parents = [group[key] for key in sorted(here.pop((sample.branch, prompt)))]
            await scores.put({"kept": int(is_worth(prompt))}, key=prompt, parents=parents)
            if is_worth(prompt):
                rewards = [item.payload["reward"] for item in parents]
                await groups.put({"rewards": rewards}, key=f"g/{prompt}", parents=parents)
            for item in parents:
                if is_worth(prompt):
                    samples.ack(item)
                else:
                    samples.drop(item, "nothing to learn from")


class Counter(Trainer):
    """Its weights are one number, which a checkpoint keeps."""

    holds_collectives = False

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        self.total = 0

    def state(self) -> int:
        return self.total

    def write(self, folder: Path, state: int) -> None:
        (folder / "total").write_text(str(state), encoding="utf-8")

    def read(self, folder: Path) -> int:
        return int((folder / "total").read_text(encoding="utf-8"))

    def restore(self, state: Any) -> None:
        self.total = state


class Learner(Counter):
    """Remembers what it was given: the sum of all rewards."""

    inputs = ("groups",)

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        self.total += sum(sum(group["rewards"]) for group in step.payloads)
        return {"total": float(self.total)}
