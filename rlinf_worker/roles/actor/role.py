"""The actor role: takes the rounds of a step, learns, commits with the other ranks, publishes, writes checkpoints.

take_round ... last ──> update ──> step_done ──(all ranks)──> publish version, checkpoint, ack
                                                                               ▲ only now may anybody see the weights
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from rlinf_api.errors import UserError
from rlinf_worker.algorithms.offloading import HostCopy
from rlinf_worker.algorithms.policy_spec import PolicySpec
from rlinf_worker.channels import lineage
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion
from rlinf_worker.roles import saving, spaces
from rlinf_worker.roles.actor import portable, warming
from rlinf_worker.roles.actor.batch import collect
from rlinf_worker.roles.actor.gang import Gang, Place
from rlinf_worker.roles.actor.learner import Learner, LearnerConfig
from rlinf_worker.roles.offloads import Offloads
from rlinf_worker.roles.protocol import FlowSettings, RoleContext, StepCommit

BEFORE_LOAD: Final = (-1, 0, 0)  # the places of a gang's start come before those of all steps
BEFORE_RESTORE: Final = (-1, 0, 1)


class FsdpRole(Offloads):
    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        warming.warm(LearnerConfig.of(flow.config, steps=flow.steps, seed=flow.seed))

    async def run(self, ctx: RoleContext) -> None:
        ctx.phase("load")
        torch.set_num_threads(1)
        self._delta = _weights_delta(ctx.config)
        self._free_at = self._publish_s = 0.0  # of the last publish: when it ended, how long it took
        async with ctx.turn():
            await self._work(ctx)
        await ctx.stopping.wait()

    async def _work(self, ctx: RoleContext) -> None:
        self._gang = Gang(await ctx.join_gang()) if ctx.world > 1 else None
        mesh = self._gang.mesh() if self._gang else None
        self._spec = spaces.policy_spec(await ctx.shared(spaces.FACT), ctx.flow.config)
        config = LearnerConfig.of(ctx.flow.config, steps=ctx.flow.steps, seed=ctx.flow.seed)
        self._learner = Learner(self._spec, config, mesh=mesh)
        self.host = HostCopy(self._learner.tensors)
        restored, state_json = await self._restore(ctx, self._learner, self._spec)
        self._version = await ctx.ready(version=restored, state_json=state_json)
        await self._publish(ctx)
        trajectories, items = ctx.channel("trajectories"), list[Item]()
        while not ctx.stopping.is_set():
            try:
                taken = await trajectories.take_round()
            except ChannelClosed:
                break
            if (taken.branch, taken.step) <= (self._version.branch, self._version.number):
                continue  # a new driver cannot know that this step's last round had come
            items = [i for i in items if i.branch == taken.branch and i.step == taken.step] + list(taken.items)
            if taken.last:
                commit = await self._step(ctx, items, taken.step, branch=taken.branch)
                for item in items:
                    trajectories.ack(item)
                items = []
                if commit.last:
                    break
            await ctx.safe_point()

    async def _meet(self, ctx: RoleContext, place: Place) -> None:
        """Before anything that holds collectives."""
        if self._gang is not None:
            with ctx.span("comm", step=place[1]):
                await self._gang.meet(place)

    async def _step(self, ctx: RoleContext, items: list[Item], step: int, *, branch: int) -> StepCommit:
        items.sort(key=lambda item: lineage.sort_key(item.key))
        await self._meet(ctx, (branch, step, 0))
        started = time.perf_counter()
        with ctx.span("compute", step=step):
            numbers = self._update([item.payload for item in items], step)
        # Where the step's time went, as the actor sees it; what is left of step_s is the commit and its checkpoint.
        numbers["collect_s"], numbers["publish_s"] = started - self._free_at, self._publish_s
        numbers["update_s"] = time.perf_counter() - started
        config = ctx.flow.config
        numbers["env_steps"] = float(step * int(config["num_envs"]) * int(config["horizon"]))
        commit = await ctx.step_done(step, branch=branch, keys=tuple(i.key for i in items), metrics=numbers)
        self._version = commit.version
        await self._publish(ctx)
        if commit.checkpoint:
            await self._save(ctx, commit)
            self._free_at = time.perf_counter()
        return commit

    def _update(self, payloads: list[Mapping[str, Any]], step: int) -> dict[str, float]:
        config = self._learner.config
        samples = collect(payloads, self._learner.values, gamma=config.gamma, gae_lambda=config.gae_lambda)
        return self._learner.update(samples, step=step)

    async def _publish(self, ctx: RoleContext) -> None:
        started = time.perf_counter()
        with ctx.span("weights", step=self._version.number):
            await ctx.weights.publish(self._version, self._learner.shards(), delta=self._delta)
        self._free_at = time.perf_counter()
        self._publish_s = self._free_at - started

    async def _save(self, ctx: RoleContext, commit: StepCommit) -> None:
        await self._meet(ctx, (commit.version.branch, commit.step, 1))
        ctx.phase("load")
        with ctx.span("other", step=commit.step):
            model, optimizer = self._learner.state()  # of all ranks together
            if ctx.rank == 0:
                extra = {"episodes": list(self._learner.episodes)}

                def write(folder: Path) -> None:
                    portable.write(folder, model=model, optimizer=optimizer, spec=self._spec, extra=extra)

                await saving.save(ctx, commit, write, failures=(SafetensorError,))
        ctx.phase("step")

    async def _restore(self, ctx: RoleContext, learner: Learner, spec: PolicySpec) -> tuple[PolicyVersion | None, str]:
        found = ctx.checkpoints.latest()
        if found is None:
            return None, ""
        version, folder, state_json = found
        await self._meet(ctx, BEFORE_LOAD)
        with ctx.span("load"):
            _, live = learner.state()
            model: dict[str, Any] = {}
            optimizer: dict[str, Any] = {}
            if ctx.rank == 0:
                model, optimizer, extra = portable.read(Path(folder), spec=spec, optimizer=live)
                learner.episodes.extend(extra.get("episodes", ()))
        await self._meet(ctx, BEFORE_RESTORE)  # rank 0 may read for minutes
        with ctx.span("load"):
            learner.restore(model, optimizer)
        return version, state_json


def _weights_delta(config: Mapping[str, Any]) -> bool:
    """Role config `weightsDelta`. Off by default: PPO changes every block, and finding that out costs a hash each."""
    found = config.get("weightsDelta", False)
    if not isinstance(found, bool):
        raise UserError("the actor's config weightsDelta is not a switch", got=repr(found), wanted="true or false")
    return found
