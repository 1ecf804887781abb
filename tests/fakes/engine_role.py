"""A job around the reference engine, for test_engine_job.py: prompts are answered by an engine, judged, trained on.

    flow ── prompts ──► engine x 2 ── samples ──► judge ── judged (rounds) ──► trainer
                          ▲                                                      │
                          └──────────────────── weights ─────────────────────────┘

The judge ends the job at a token that no version of the weights makes there. What a role on vLLM would do stands here
in little: which events it races, what it does between two of its steps, what it says of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_api.errors import UserError
from rlinf_api.slots import Allotment
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.protocol import Memory, RoleContext, Trainer, TrainerStep
from tests.fakes.reference_engine import Engine, Tokens, weights_of

PROMPTS = 6  # of a step
SPARE = 2  # more, each of which takes minutes
LENGTH = 20  # tokens of an answer, and as many again of every third one
MOST = 8  # requests at once
KEEP_S = 0.1  # between two times that what there is of answers is left with the driver
KV_BYTES = 8 << 20  # where the plan does not say
PARTS = 2


async def flow(flow: Flow) -> None:
    prompts = flow.source("prompts", to="engine", payload={"n": "int"})
    flow.queue("samples", "engine", "judge")
    flow.queue("judged", "judge", "trainer", rounds=True)
    flow.weights("trainer", "engine")
    async for step in flow.steps():
        keys = [lineage.sample("p", step.number, index=n, sample=0) for n in range(PROMPTS)]
        await prompts.put([Ticket(key=key, payload={"n": n}) for n, key in enumerate(keys)], step=step)


async def flow_of_the_quickest(flow: Flow) -> None:
    """Puts more prompts than it needs, and gives up those that are not answered when it has enough."""
    prompts = flow.source("prompts", to="engine", payload={"n": "int"})
    flow.queue("samples", "engine", "judge")
    scores = flow.results("scores", producer="judge")
    flow.queue("judged", "judge", "trainer", rounds=True)
    flow.weights("trainer", "engine")
    async for step in flow.steps():
        keys = [lineage.sample("p", step.number, index=n, sample=0) for n in range(PROMPTS + SPARE)]
        await prompts.put([Ticket(key=key, payload={"n": n}) for n, key in enumerate(keys)], step=step)
        answers = {asyncio.ensure_future(scores.of(step, [key])): key for key in keys}
        waiting = set(answers)
        while len(waiting) > SPARE:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        prompts.withdraw([answers[answer] for answer in waiting], step=step)
        await asyncio.gather(*waiting)  # nobody works on them any more


def length_of(prompt: int) -> int:
    if prompt >= PROMPTS:
        return LENGTH * 1000
    return LENGTH * (2 if prompt % 3 == 0 else 1)


class EngineRole:
    """Config: `length`, a factor of the answers'."""

    engine: Engine | None = None

    async def run(self, ctx: RoleContext) -> None:
        self.ctx, self.factor = ctx, int(ctx.config.get("length", 1))
        self.prompts, self.samples = ctx.channel("prompts"), ctx.channel("samples")
        self.working: dict[asyncio.Future[Tokens], Item] = {}
        self.span = contextlib.ExitStack()
        self.held, self.given = PolicyVersion(-1, 0), ctx.allotment
        self.left = 0.0  # turns, while answers were made
        try:
            async with ctx.turn():
                kv_bytes = self.given.kv_bytes or KV_BYTES
                self.engine = await Engine.start(parts=PARTS, kv_bytes=kv_bytes, stepped=ctx.moved)
                await ctx.ready()
                with contextlib.suppress(ChannelClosed):
                    await self.serve()
        finally:
            self.span.close()
            if self.engine is not None:
                await self.engine.close()

    async def serve(self) -> None:
        ctx, events = self.ctx, Events()
        try:
            while True:
                if len(self.working) < MOST:
                    events.begin("prompt", self.prompts.take)
                events.begin("weights", ctx.weights.newer, self.held)
                events.begin("yield", ctx.yield_wanted.wait)
                events.begin("plan", ctx.other_allotment, self.given)
                events.begin("end", ctx.stopping.wait)
                events.begin("keep", asyncio.sleep, KEEP_S, True)
                await asyncio.wait([*events.tasks.values(), *self.working], return_when=asyncio.FIRST_COMPLETED)
                if (prompt := events.took("prompt")) is not None:
                    await self.begin(prompt)
                if events.took("weights") is not None:
                    await self.load_weights(self.held)
                if (given := events.took("plan")) is not None:
                    await self.resize(given)
                if events.took("yield"):
                    await self.leave()
                if events.took("keep"):
                    self.keep()
                for answer in [answer for answer in self.working if answer.done()]:
                    await self.end(answer)
                if events.took("end"):
                    return
        finally:
            self.keep()
            await events.close()

    def keep(self) -> None:
        """For whoever makes these answers if it is not us."""
        assert self.engine is not None
        for answer, prompt in self.working.items():
            if not answer.done() and (made := self.engine.so_far(name_of(prompt))).ids:
                self.prompts.keep(prompt, {"ids": made.ids, "versions": made.versions})

    # --- work ---------------------------------------------------------------------------------------------------------
    async def begin(self, prompt: Item) -> None:
        if self.held < prompt.version:
            await self.load_weights(prompt.version)
        assert self.engine is not None
        engine, name, made = self.engine, name_of(prompt), None
        if prompt.partial is not None:
            made = Tokens(ids=prompt.partial["ids"], versions=[(b, v) for b, v in prompt.partial["versions"]])
            self.ctx.report(step=prompt.step, metrics={"continued_sum": float(len(made.ids))}, key=prompt.key)
        number, length = prompt.payload["n"], self.factor * length_of(prompt.payload["n"])
        if not self.working:
            self.span.enter_context(self.ctx.span("compute", step=prompt.step))
        self.working[engine.begin(name, prompt=number, length=length, made=made)] = prompt
        prompt.on_cancel(lambda: engine.abort(name))

    async def end(self, answer: asyncio.Future[Tokens]) -> None:
        prompt = self.working.pop(answer)
        if not self.working:
            self.span.close()
        if prompt.cancelled:
            self.prompts.drop(prompt, "cancelled")
            return
        made = answer.result()
        oldest, newest = PolicyVersion(*made.versions[0]), PolicyVersion(*made.versions[-1])
        told = {"mixed_sum": float(oldest != newest), "kv_bytes": float(self.given.kv_bytes), "left": self.left}
        self.ctx.report(step=prompt.step, metrics=told, key=prompt.key)
        payload = {"n": prompt.payload["n"], "ids": made.ids, "versions": made.versions}
        await self.samples.put(payload, key=prompt.key, version=oldest, parents=[prompt])
        self.prompts.ack(prompt)

    # --- between two steps of the engine ------------------------------------------------------------------------------
    async def load_weights(self, at_least: PolicyVersion) -> None:
        assert self.engine is not None
        self.held, _ = await self.ctx.weights.pull(at_least, into=self.engine.weights)
        with self.ctx.span("weights"):
            await self.engine.load(self.held)

    async def leave(self) -> None:
        """Requests stay where they are, with what there is of them."""
        assert self.engine is not None
        await self.engine.pause()
        self.span.close()
        self.left += bool(self.working)
        await self.ctx.safe_point()
        self.engine.resume()
        if self.working:
            self.span.enter_context(self.ctx.span("compute"))

    async def resize(self, given: Allotment) -> None:
        assert self.engine is not None
        self.given = given
        await self.engine.resize(given.kv_bytes or KV_BYTES)

    # --- what its runtime asks of it ----------------------------------------------------------------------------------
    async def check_health(self) -> None:
        if self.engine is not None:
            await self.engine.check()

    def memory(self) -> Memory:
        return Memory(now=self.engine.kv_bytes if self.engine is not None and self.engine.is_awake else 0)

    async def load(self) -> None:
        if self.engine is not None:
            await self.engine.wake()

    async def offload(self) -> None:
        if self.engine is not None:
            await self.engine.sleep()


class Events:
    """Tasks of what may come meanwhile, one of each name at a time."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Future[Any]] = {}

    def begin(self, name: str, event: Any, *arguments: Any) -> None:
        if name not in self.tasks:
            self.tasks[name] = asyncio.ensure_future(event(*arguments))

    def took(self, name: str) -> Any:
        """What it brought; None where nothing has come. Raises what it raised."""
        task = self.tasks.get(name)
        return self.tasks.pop(name).result() if task is not None and task.done() else None

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def name_of(prompt: Item) -> str:
    return f"{prompt.branch}/{prompt.key}"


class Judge:
    async def run(self, ctx: RoleContext) -> None:
        await ctx.ready()
        samples, judged = ctx.channel("samples"), ctx.channel("judged")
        scores = ctx.channel("scores") if ctx.flow.name.endswith("quickest") else None
        async for sample in samples:
            number, made = sample.payload["n"], Tokens(ids=sample.payload["ids"])
            made.versions = [(branch, version) for branch, version in sample.payload["versions"]]
            if not made.are_right(number, parts=PARTS) or len(made.ids) % length_of(number):
                raise UserError(f"unit {sample.key} has a token that no weights make", got=str(sample.payload))
            if scores is not None:
                await scores.put({"n": number}, key=sample.key, parents=[sample])
            await judged.put({"n": number}, key=sample.key, parents=[sample])
            samples.ack(sample)


class Pupil(Trainer):
    """Its weights are the name of their version. Config: `step_s`, how long an update takes."""

    inputs = ("judged",)
    holds_collectives = False

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        self.span, self.step_s = ctx.span, float(ctx.config.get("step_s", 0.01))

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        with self.span("compute", step=step.number):
            await asyncio.sleep(self.step_s)
        return {"units": float(len(step.units))}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        return {"w": weights_of(version, parts=PARTS)}

    def write(self, folder: Path, state: None) -> None:
        (folder / "pupil").write_text("nothing is learnt")
