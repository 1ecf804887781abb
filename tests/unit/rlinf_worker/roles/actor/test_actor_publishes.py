"""What the actor publishes and when, through a whole step. The update itself: test_learner.py."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_worker.algorithms.policy_spec import Actions
from rlinf_worker.channels.protocol import ChannelClosed, PolicyVersion, Round
from rlinf_worker.roles import spaces
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import StepCommit
from tests.fakes.context import FakeChannel, FakeContext, Stage

T, ENVS = 4, 2


def trajectory(seed: int, *, returns: Sequence[float] = ()) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "obs": draw.normal(size=(T, ENVS, 3)).astype(np.float32),
        "action": draw.integers(0, 4, (T, ENVS)),
        "logprob": np.full((T, ENVS), -1.4, np.float32),
        "reward": draw.normal(size=(T, ENVS)).astype(np.float32),
        "terminated": np.zeros((T, ENVS), bool),
        "truncated": np.zeros((T, ENVS), bool),
        "last_obs": draw.normal(size=(ENVS, 3)).astype(np.float32),
        "final_index": np.zeros((0, 2), np.int32),
        "final_obs": np.zeros((0, 3), np.float32),
        "episode_returns": np.array(returns, float),
    }


class Rounds(FakeChannel):
    """A step is one round of one unit."""

    async def take_round(self) -> Round:
        item = self.take_now()
        if item is None:
            raise ChannelClosed(self.name)
        return Round(step=item.step, branch=item.branch, number=0, last=True, items=(item,), total_weight=1.0)


class Checkpoints:
    """At most the one in this folder, of step 1."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def latest(self) -> Any:
        if self._folder is None:
            return None
        opened = contextlib.nullcontext(self._folder)
        return SimpleNamespace(version=PolicyVersion(0, 1), reading_s=1.0, folder=lambda: opened)


class Committing(FakeContext):
    """Every step commits at once, and none asks for a checkpoint."""

    def __init__(self, stage: Stage, config: Mapping[str, Any], *, checkpoint: Path | None = None) -> None:
        super().__init__(stage, "actor", config)
        self._checkpoints, self.numbers = Checkpoints(checkpoint), list[Mapping[str, float]]()

    @property
    def checkpoints(self) -> Any:
        return self._checkpoints

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        self.numbers.append(metrics)
        last = step == self.flow.steps
        if last:
            self.stopping.set()
        return StepCommit(step=step, version=PolicyVersion(branch, step), checkpoint=False, state_json="", last=last)


async def run_two_steps(**config: Any) -> Stage:
    stage = Stage(steps=2, epochs=1, minibatches=1)
    trajectories = stage.channels["trajectories"] = Rounds("trajectories")
    stage.facts[spaces.FACT] = spaces.describe((3,), Actions("discrete", 4))
    for step in (1, 2):
        trajectories.give(f"env:0@{step}", trajectory(step), step=step)
    ctx = Committing(stage, config)
    async with asyncio.timeout(60):
        await FsdpRole().run(ctx)
    assert [item.key for item in trajectories.acked] == ["env:0@1", "env:0@2"]
    return stage


@pytest.mark.parametrize(
    ("config", "delta"), [({"weightsDelta": True}, True), ({"weightsDelta": False}, False), ({}, False)]
)
async def test_every_version_is_published_as_a_delta_where_the_config_says_so(config, delta):
    stage = await run_two_steps(**config)
    assert stage.weights.published == [(PolicyVersion(0, step), delta) for step in (0, 1, 2)]


async def test_the_return_of_the_last_episodes_goes_on_from_a_checkpoint(tmp_path):
    """A step in which no episode ends has the mean of those before it, in a life that did not see them too."""

    async def step(number: int, *, returns: Sequence[float], checkpoint: Path | None) -> tuple[FsdpRole, float]:
        stage, role = Stage(steps=number, epochs=1, minibatches=1), FsdpRole()
        trajectories = stage.channels["trajectories"] = Rounds("trajectories")
        stage.facts[spaces.FACT] = spaces.describe((3,), Actions("discrete", 4))
        trajectories.give(f"env:0@{number}", trajectory(number, returns=returns), step=number)
        ctx = Committing(stage, {}, checkpoint=checkpoint)
        async with asyncio.timeout(60):
            await role.run(ctx)
        [numbers] = ctx.numbers
        return role, numbers["return_mean"]

    before, mean = await step(1, returns=[4.0, 8.0], checkpoint=None)
    assert mean == 6.0
    before.write(tmp_path, before.state())
    _, mean = await step(2, returns=[], checkpoint=tmp_path)
    assert mean == 6.0
    _, mean = await step(2, returns=[12.0], checkpoint=tmp_path)
    assert mean == 8.0
