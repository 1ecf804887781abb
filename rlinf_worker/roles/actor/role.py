"""The actor role: PPO's update as a trainer. What it reads and writes, and which of its tensors are shown.

For: the step loop (gang/steps.py), which calls it. Not for: the update itself (learner.py), commits, channels, language
models (text.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from rlinf_worker.algorithms.offloading import HostCopy
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles import mesh, spaces
from rlinf_worker.roles.actor import learner, portable
from rlinf_worker.roles.actor.batch import collect
from rlinf_worker.roles.actor.learner import Learner, LearnerConfig
from rlinf_worker.roles.protocol import FlowSettings, Offloads, RoleContext, Trainer, TrainerStep

Tensors = dict[str, Any]
TEXT: Final = "rlinf_worker.roles.actor.text"


class FsdpRole(Offloads, Trainer):
    inputs = ("trajectories",)
    failures = (SafetensorError,)

    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        if flow.model:
            importlib.import_module(TEXT)
            return
        learner.warm(LearnerConfig.of(flow.config, steps=flow.steps, seed=flow.seed))

    async def run(self, ctx: RoleContext) -> None:
        """Over a language model another trainer, whose libraries PPO's actors have no need of."""
        await ctx.train(importlib.import_module(TEXT).TextTrainer(self) if ctx.flow.model else self)

    async def build(self, ctx: RoleContext) -> None:
        torch.set_num_threads(1)
        self.delta = ctx.config.get("weightsDelta", False)  # a switch: schema.py looks at it before anything starts
        flow, self._ctx, self._span = ctx.flow, ctx, ctx.span
        group = await mesh.of_gang(ctx.gang)
        self._spec = spaces.policy_spec(await ctx.shared(spaces.FACT), flow.config)
        config = LearnerConfig.of(flow.config, steps=flow.steps, seed=flow.seed)
        self._learner = Learner(self._spec, config, mesh=group)
        self._env_steps = int(flow.config["num_envs"]) * int(flow.config["horizon"])
        self.host = HostCopy(self._learner.tensors)

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        # An edit of the running job may have moved the last step, to which schedules go.
        config = self._learner.config = replace(self._learner.config, steps=self._ctx.flow.steps)
        tokens = float(sum(len(payload["obs"]) * len(payload["last_obs"]) for payload in step.payloads))
        with self._span("compute", step=step.number, units=len(step.units), tokens=tokens):
            samples = collect(step.payloads, self._learner.values, gamma=config.gamma, gae_lambda=config.gae_lambda)
            numbers = self._learner.update(samples, step=step.number)
        return {**numbers, "env_steps": float(step.number * self._env_steps)}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        return self._learner.shards()

    # --- checkpoints --------------------------------------------------------------------------------------------------
    def state(self) -> tuple[Tensors, Tensors]:
        return self._learner.state()

    def write(self, folder: Path, state: tuple[Tensors, Tensors]) -> None:
        model, optimizer = state
        extra = {"episodes": list(self._learner.episodes)}
        portable.write(folder, model=model, optimizer=optimizer, spec=self._spec, extra=extra)

    def read(self, folder: Path) -> tuple[Tensors, Tensors]:
        live = {"param_groups": self._learner.param_groups()}
        model, optimizer, extra = portable.read(folder, spec=self._spec, optimizer=live)
        self._learner.episodes.extend(extra.get("episodes", ()))
        return model, optimizer

    def restore(self, state: tuple[Tensors, Tensors] | None) -> None:
        self._learner.restore(*(state or ({}, {})))
