"""The env role: steps its slices of environments, asks the rollout for actions, hands whole segments to the actor.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | segments (tickets) | a ticket | the driver |
| one per ticket in work | answers to its own observations | the answer | _answers |
| _answers | actions | the rollout | the rollout |

The tickets of different slices are worked on at once, so the rollout infers for one slice while another is stepped. An
environment lives in the worker to which its slice is pinned; where it moves to another, it starts anew there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf_worker.channels.protocol import Channel, Item, PolicyVersion
from rlinf_worker.roles import spaces
from rlinf_worker.roles.env.environment import Array, Environment, EnvironmentConfig, StepOut, make_environment
from rlinf_worker.roles.protocol import RoleContext


@dataclass(slots=True)
class _Slice:
    environment: Environment
    obs: Array


@dataclass(slots=True)
class _Segment:
    """What one ticket collects: rows of T steps, then one payload."""

    obs: list[Array] = field(default_factory=list)
    action: list[Array] = field(default_factory=list)
    logprob: list[Array] = field(default_factory=list)
    steps: list[StepOut] = field(default_factory=list)
    version: PolicyVersion | None = None  # the oldest that chose an action

    def add(self, obs: Array, answer: Item, out: StepOut) -> None:
        self.obs.append(obs)
        self.action.append(np.array(answer.payload["action"]))
        self.logprob.append(np.array(answer.payload["logprob"]))
        self.steps.append(out)
        self.version = answer.version if self.version is None else min(self.version, answer.version)

    def payload(self, last_obs: Array) -> dict[str, Any]:
        """final_obs only where an episode was truncated: (t, n) in final_index, the observation in final_obs."""
        truncated = np.stack([s.truncated & ~s.terminated for s in self.steps])
        ended = np.stack([s.ended for s in self.steps])
        index = np.argwhere(truncated)
        final = [self.steps[t].final_obs[n] for t, n in index]
        return {
            "obs": np.stack(self.obs),
            "action": np.stack(self.action),
            "logprob": np.stack(self.logprob),
            "reward": np.stack([s.reward for s in self.steps]),
            "terminated": np.stack([s.terminated for s in self.steps]),
            "truncated": truncated,
            "last_obs": last_obs,
            "final_index": index.astype(np.int32),
            "final_obs": np.stack(final) if final else np.zeros((0, *last_obs.shape[1:]), np.float32),
            "episode_returns": np.stack([s.episode_returns for s in self.steps])[ended],
            "episode_lengths": np.stack([s.episode_lengths for s in self.steps])[ended],
        }


class GymnasiumRole:
    async def run(self, ctx: RoleContext) -> None:
        self._ctx = ctx
        config = ctx.flow.config
        self._horizon = int(config["horizon"])
        self._environment = EnvironmentConfig(
            id=config["env"], num_envs=config["num_envs"] // config["slices"], kwargs=config["env_kwargs"]
        )
        self._slices: dict[int, _Slice] = {}
        self._waiting: dict[str, asyncio.Future[Item]] = {}
        probe = make_environment(self._environment)
        ctx.share(spaces.FACT, spaces.describe(probe.obs_shape, probe.actions))
        self._spare: Environment | None = probe
        await ctx.ready()
        self._observations, self._actions = ctx.channel("observations"), ctx.channel("actions")
        self._trajectories = ctx.channel("trajectories")
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = tasks.create_task(self._answers())
                await self._work(ctx.channel("segments"), tasks)
                answers.cancel()
        except* Exception as group:  # noqa: BLE001 - raised again
            # One failure is enough: the first is the cause, the others follow from it.
            first = group.exceptions[0]
            raise first from first.__cause__
        finally:
            for kept in self._slices.values():
                kept.environment.close()

    async def _work(self, segments: Channel, tasks: asyncio.TaskGroup) -> None:
        """A task per ticket; two tickets of one slice never at once, as they share its environments."""
        last: dict[int, asyncio.Task[None]] = {}
        async for ticket in segments:
            index = int(ticket.payload["slice"])
            last[index] = tasks.create_task(self._collect(index, ticket, after=last.get(index), segments=segments))

    async def _collect(self, index: int, ticket: Item, *, after: asyncio.Task[None] | None, segments: Channel) -> None:
        if after is not None:
            await after
        ctx, segment = self._ctx, _Segment()
        current = self._slice(index, ticket.step)
        for t in range(self._horizon):
            if ticket.cancelled or ctx.stopping.is_set():
                segments.drop(ticket, "cancelled" if ticket.cancelled else "stopping")
                return
            answer = await self._ask(index, t, ticket=ticket, obs=current.obs)
            if answer is None:
                segments.drop(ticket, "cancelled")
                return
            with ctx.span("compute", step=ticket.step):
                out = current.environment.step(np.asarray(answer.payload["action"]))
                segment.add(current.obs, answer, out)
            self._actions.ack(answer)
            current.obs = out.obs
        await self._trajectories.put(
            segment.payload(current.obs),
            key=ticket.key,
            step=ticket.step,
            branch=ticket.branch,
            version=segment.version,
            weight=float(self._horizon * self._environment.num_envs),
            parents=[ticket],
        )

    async def _ask(self, index: int, t: int, *, ticket: Item, obs: Array) -> Item | None:
        """The rollout's answer; None where the ticket was cancelled meanwhile (its branch's weights may never come)."""
        key = f"{ticket.key}#{ticket.branch}/{t}"
        answer: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        try:
            await self._observations.put(
                {"obs": obs, "slice": index, "t": t},
                key=key,
                step=ticket.step,
                branch=ticket.branch,
                version=ticket.version,
            )
            return await answer
        finally:
            self._waiting.pop(key, None)

    async def _answers(self) -> None:
        """Hands answers to the tasks that asked. One that nobody waits for is a repetition after a link broke."""
        async for item in self._actions:
            waiting = self._waiting.get(item.key)
            if waiting is not None and not waiting.done():
                waiting.set_result(item)
            else:
                self._actions.drop(item, "repeated")

    def _slice(self, index: int, step: int) -> _Slice:
        known = self._slices.get(index)
        if known is None:
            self._ctx.phase("load")
            environment, self._spare = self._spare or make_environment(self._environment), None
            obs = environment.reset(seed=self._ctx.flow.seed, slice_index=index, step=step)
            known = self._slices[index] = _Slice(environment, obs)
            self._ctx.phase("step")
        return known
