"""The env role: steps its slices of environments, asks the rollout for actions, hands whole segments to the actor.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | segments (tickets), and asks the first question of each | a ticket | the driver |
| _answers | answers: steps the slice that asked, and asks its next | an answer | the rollout |
| one per finished segment | | room in trajectories | the actor |

The tickets of different slices are worked on at once, so the rollout infers for one slice while another is stepped.
They share one task: a task per ticket would be one more to wake for every answer, which costs as much as three
CartPoles. An environment lives in the worker to which its slice is pinned; where it moves to another, it starts anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.roles import spaces
from rlinf_worker.roles.env.environment import Array, Environment, EnvironmentConfig, StepOut, import_environment
from rlinf_worker.roles.protocol import FlowSettings, RoleContext


@dataclass(slots=True)
class _Collecting:
    """What one ticket collects: rows of T steps, then one payload."""

    ticket: Item
    question: str = ""  # key of the one that is not answered yet
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
        }


@dataclass(slots=True)
class _Slice:
    index: int
    environment: Environment
    obs: Array
    segment: _Collecting | None = None  # in work; one at a time, as all step the same environments
    waiting: deque[Item] = field(default_factory=deque)


class GymnasiumRole:
    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        """The simulator's modules; not an environment: that may take a display, a GPU or a licence of its own."""
        import_environment(str(flow.config["env"]))

    async def run(self, ctx: RoleContext) -> None:
        self._ctx = ctx
        async with ctx.turn():
            await self._work(ctx)

    async def _work(self, ctx: RoleContext) -> None:
        config = ctx.flow.config
        self._horizon = int(config["horizon"])
        self._environment = EnvironmentConfig(
            id=config["env"], num_envs=config["num_envs"] // config["slices"], kwargs=config["env_kwargs"]
        )
        self._slices: dict[int, _Slice] = {}
        self._asked: dict[str, _Slice] = {}
        self._wanting: deque[_Slice] = deque()  # have an observation and wait for a stage of the cycle
        probe = Environment(self._environment)
        ctx.share(spaces.FACT, spaces.describe(probe.obs_shape, probe.actions))
        self._spare: Environment | None = probe
        await ctx.ready()
        self._segments, self._trajectories = ctx.channel("segments"), ctx.channel("trajectories")
        self._actions = ctx.asking("actions")
        try:
            async with asyncio.TaskGroup() as tasks:
                answers = tasks.create_task(self._answers(tasks))
                async for ticket in self._segments:
                    current = self._slice(int(ticket.payload["slice"]), ticket.step)
                    current.waiting.append(ticket)
                    await self._begin(current)
                answers.cancel()
                for current in self._slices.values():
                    self._give_up(current, "stopping")
        except ExceptionGroup as group:  # not except*: before Python 3.11.4 it puts what it raises into a group again
            # One failure is enough: the first is the cause, the others follow from it.
            first = group.exceptions[0]
            raise first from first.__cause__
        finally:
            for kept in self._slices.values():
                kept.environment.close()

    async def _begin(self, current: _Slice) -> None:
        """The next ticket of a slice, where none is in work, or none that anybody needs: the weights that a cancelled
        one waits for may never come."""
        if current.segment is not None and current.segment.ticket.cancelled:
            self._give_up(current, "cancelled")
        while current.segment is None and current.waiting:
            current.segment = _Collecting(current.waiting.popleft())
            if current.segment.ticket.cancelled:
                self._give_up(current, "cancelled")
            else:
                await self._ask(current)

    def _give_up(self, current: _Slice, why: str) -> None:
        if (segment := current.segment) is not None:
            current.segment = None
            self._asked.pop(segment.question, None)
            self._segments.drop(segment.ticket, why)

    async def _ask(self, current: _Slice) -> None:
        """The plan says how many slices are in flight at once; they take turns question by question."""
        self._wanting.append(current)
        await self._go_on()

    async def _go_on(self) -> None:
        while self._wanting and len(self._asked) < (self._ctx.stages("actions") or len(self._asked) + 1):
            current = self._wanting.popleft()
            segment = current.segment
            if segment is not None and segment.question not in self._asked:  # not given up, nor asked meanwhile
                await self._put(current, segment)

    async def _put(self, current: _Slice, segment: _Collecting) -> None:
        ticket, t = segment.ticket, len(segment.steps)
        segment.question = f"{ticket.key}#{ticket.branch}/{t}"
        self._asked[segment.question] = current
        await self._actions.ask(
            {"obs": current.obs, "slice": current.index, "t": t},
            key=segment.question,
            step=ticket.step,
            branch=ticket.branch,
            version=ticket.version,
        )

    async def _answers(self, tasks: asyncio.TaskGroup) -> None:
        async for answer in self._actions:
            current = self._asked.pop(answer.key, None)
            if current is None or current.segment is None:  # its segment was given up
                await self._go_on()
                continue
            segment = current.segment
            if segment.ticket.cancelled or answer.cancelled:
                self._give_up(current, "cancelled" if segment.ticket.cancelled else "unanswered")
                await self._begin(current)
                await self._go_on()
                continue
            action = np.asarray(answer.payload["action"])
            with self._ctx.span("compute", step=segment.ticket.step, units=1, tokens=len(action)):
                out = current.environment.step(action)
                segment.add(current.obs, answer, out)
            answer.release()
            current.obs = out.obs
            if len(segment.steps) < self._horizon:
                await self._ask(current)
                await self._ctx.safe_point()
                continue
            current.segment = None
            # A task of its own: room in trajectories may have to wait for segments of other slices.
            tasks.create_task(self._hand_over(segment, current.obs))
            await self._begin(current)
            await self._go_on()
            await self._ctx.safe_point()

    async def _hand_over(self, segment: _Collecting, last_obs: Array) -> None:
        ticket = segment.ticket
        await self._trajectories.put(
            segment.payload(last_obs),
            key=ticket.key,
            step=ticket.step,
            branch=ticket.branch,
            version=segment.version,
            weight=float(len(segment.steps) * len(last_obs)),
            parents=[ticket],
        )
        self._segments.ack(ticket)

    def _slice(self, index: int, step: int) -> _Slice:
        known = self._slices.get(index)
        if known is None:
            with self._ctx.span("other", step=step, phase="load"):
                environment, self._spare = self._spare or Environment(self._environment), None
                obs = environment.reset(seed=self._ctx.flow.seed, slice_index=index, step=step)
                known = self._slices[index] = _Slice(index, environment, obs)
        return known
