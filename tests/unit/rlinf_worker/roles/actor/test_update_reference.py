"""Whole updates against a float64 reference by another hand (tests/fakes/ppo_reference.py): as they are configured, and
with each field of the config moved once. A field that is ignored gives what it gave before, or not what the reference
gives with the same move."""

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_worker.algorithms.losses.ppo import LossConfig
from rlinf_worker.algorithms.policies import ActorCritic
from rlinf_worker.algorithms.policy_spec import Actions, PolicySpec
from rlinf_worker.channels.protocol import ChannelClosed, PolicyVersion, Round
from rlinf_worker.flows.ppo import check_config
from rlinf_worker.roles import spaces
from rlinf_worker.roles.actor.batch import collect
from rlinf_worker.roles.actor.learner import Learner, LearnerConfig
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import FlowSettings, StepCommit
from rlinf_worker.sums import Amount
from tests.fakes.context import FakeChannel, FakeContext, Stage
from tests.fakes.ppo_reference import Moves, Reference

STEPS, T, ENVS, ACTIONS = 3, 7, 3, 4
SPEC = PolicySpec(obs_shape=(3,), actions=Actions("discrete", ACTIONS), hidden_sizes=(8,))
ARM = PolicySpec(obs_shape=(3,), actions=Actions("continuous", 2), hidden_sizes=(8, 5), activation="relu")
BASE = Moves(
    steps=4, seed=5, gamma=0.9, gae_lambda=0.8, epochs=2, final_epochs=4, minibatches=5, learning_rate=0.004,
    schedule="linear", max_grad_norm=0.5, normalise_advantage=True, clip_range=0.15, value_clip_range=0.05,
    value_coefficient=0.6, entropy_coefficient=0.05,
)  # fmt: skip
"""Of 42 samples five minibatches are 9, 9, 9, 9 and 6."""
MOVED: Mapping[str, Any] = {
    "steps": 8, "seed": 6, "gamma": 0.95, "gae_lambda": 0.6, "epochs": 1, "final_epochs": None, "minibatches": 4,
    "learning_rate": 0.006, "schedule": "constant", "max_grad_norm": 0.2, "normalise_advantage": False,
    "clip_range": 0.25, "value_clip_range": None, "value_coefficient": 1.2, "entropy_coefficient": 0.0,
}  # fmt: skip
CLOSE = 5e-6
"""What float32 may be off after 3 steps of up to 20 minibatches: 5e-7 was measured at most, and the least move of a
field (the entropy's) makes 5e-4."""


def payload(seed: int, spec: PolicySpec = SPEC) -> dict[str, Any]:
    """A segment as env sends it: episodes that end in both ways, and log-probabilities of another policy than the
    learner's, so that ratios leave the clip range on either side."""
    draw = np.random.default_rng(seed)
    terminated = draw.random((T, ENVS)) < 0.15
    truncated = (draw.random((T, ENVS)) < 0.15) & ~terminated
    index = np.argwhere(truncated).astype(np.int32)
    action: Any
    logprob: Any
    if not spec.actions.are_discrete:
        action = draw.normal(size=(T, ENVS, spec.actions.size)).astype(np.float32)
        logprob = (-0.5 * action**2 - 0.5 * np.log(2 * np.pi)).sum(-1)
    else:
        action, logprob = draw.integers(0, ACTIONS, (T, ENVS)), np.full((T, ENVS), -np.log(ACTIONS))
    return {
        "obs": draw.normal(size=(T, ENVS, 3)).astype(np.float32),
        "action": action,
        "logprob": (logprob + draw.normal(size=(T, ENVS)) * 0.2).astype(np.float32),
        "reward": draw.normal(size=(T, ENVS)).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "last_obs": draw.normal(size=(ENVS, 3)).astype(np.float32),
        "final_index": index,
        "final_obs": draw.normal(size=(len(index), 3)).astype(np.float32),
        "episode_returns": draw.normal(size=int((terminated | truncated).sum())),
    }


def payloads(step: int, spec: PolicySpec = SPEC) -> list[dict[str, Any]]:
    return [payload(10 * step + part, spec) for part in range(2)]


def flow_config(moves: Moves) -> dict[str, Any]:
    """As a user writes it, with everything that the flow does not mean left to its defaults."""
    words = {f.name: getattr(moves, f.name) for f in fields(moves) if f.name not in ("steps", "seed")}
    camel = {"".join([n.split("_")[0], *(w.title() for w in n.split("_")[1:])]): value for n, value in words.items()}
    return check_config({"env": "x", "hiddenSizes": list(SPEC.hidden_sizes), **camel})


def moved(name: str) -> Moves:
    assert getattr(BASE, name) != MOVED[name]
    return Moves(**{**{f.name: getattr(BASE, f.name) for f in fields(BASE)}, name: MOVED[name]})


def parameters(of: Learner | Reference) -> np.ndarray:
    tensors = of.parameters if isinstance(of, Reference) else of.model.state_dict()
    return np.concatenate([tensors[name].detach().double().ravel().numpy() for name in sorted(tensors)])


@functools.cache
def learnt(moves: Moves, spec: PolicySpec = SPEC) -> tuple[Learner, list[dict[str, float]]]:
    """The learner after STEPS steps, and what it said in each."""
    config = LearnerConfig.of(flow_config(moves), steps=moves.steps, seed=moves.seed)
    learner, numbers = Learner(spec, config), []
    for step in range(1, STEPS + 1):
        samples = collect(payloads(step, spec), learner.values, gamma=config.gamma, gae_lambda=config.gae_lambda)
        numbers.append(learner.update(samples, step=step))
    return learner, numbers


@functools.cache
def referred(moves: Moves, spec: PolicySpec = SPEC) -> tuple[Reference, list[dict[str, float]]]:
    start = ActorCritic(spec, seed=moves.seed).state_dict()
    reference = Reference(start, moves, activation=spec.activation)
    return reference, [reference.update(payloads(step, spec), step=step) for step in range(1, STEPS + 1)]


def test_every_field_of_the_update_is_moved_once():
    """A field that comes later needs its line in MOVED, and with it its part of the reference."""
    own = {f.name for f in fields(LearnerConfig)} - {"loss"} | {f.name for f in fields(LossConfig)}
    assert own == set(MOVED) == {f.name for f in fields(Moves)}


@pytest.mark.parametrize("spec", [SPEC, ARM], ids=["discrete", "continuous"])
def test_three_whole_updates_are_those_of_the_reference(spec):
    learner, numbers = learnt(BASE, spec)
    reference, wanted = referred(BASE, spec)
    np.testing.assert_allclose(parameters(learner), parameters(reference), rtol=0, atol=CLOSE)
    for said, right in zip(numbers, wanted, strict=True):
        assert said == pytest.approx(right, rel=1e-4, abs=1e-5)


def test_the_batch_tries_every_branch_of_the_losses():
    """Without that, an agreement says little."""
    _, wanted = referred(BASE)
    assert all(0.2 < numbers["clip_fraction"] < 0.8 for numbers in wanted)
    assert all(numbers["grad_norm"] > 1.2 * BASE.max_grad_norm for numbers in wanted)
    parts = [part for step in range(1, STEPS + 1) for part in payloads(step)]
    assert any(part["terminated"].any() for part in parts)
    assert any(part["truncated"].any() for part in parts)


@pytest.mark.parametrize("name", MOVED)
def test_a_field_that_is_moved_moves_the_update_as_it_moves_the_reference(name):
    before, after = learnt(BASE)[0], learnt(moved(name))[0]
    assert np.abs(parameters(after) - parameters(before)).max() > 10 * CLOSE, "the field is ignored"
    np.testing.assert_allclose(parameters(after), parameters(referred(moved(name))[0]), rtol=0, atol=CLOSE)


# --- through the role: what a rollout gets -------------------------------------------------------------------------
class Rounds(FakeChannel):
    """A step is one round of two units, which come in the wrong order."""

    async def take_round(self) -> Round:
        items = [item for item in (self.take_now(), self.take_now()) if item is not None]
        if not items:
            raise ChannelClosed(self.name)
        first = items[0]
        return Round(step=first.step, branch=0, number=0, last=True, items=tuple(items[::-1]), total_weight=2.0)


class NoCheckpoints:
    def latest(self) -> None:
        return None


class Committing(FakeContext):
    """Every step commits at once; keeps what was said of each."""

    said: list[dict[str, float]]

    @property
    def checkpoints(self) -> Any:
        return NoCheckpoints()

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        self.said.append(dict(metrics))
        if last := step == STEPS:
            self.stopping.set()
        return StepCommit(step=step, version=PolicyVersion(branch, step), checkpoint=False, state_json="", last=last)


async def played(moves: Moves) -> tuple[Mapping[str, Any], list[dict[str, float]]]:
    """What the role published last, and the metrics of its steps. Of each update it says how much it works on."""
    stage = Stage()
    stage.flow = FlowSettings(
        name="ppo", steps=moves.steps, seed=moves.seed, max_staleness=0, order="arrival", config=flow_config(moves)
    )
    trajectories = stage.channels["trajectories"] = Rounds("trajectories")
    stage.facts[spaces.FACT] = spaces.describe(SPEC.obs_shape, Actions("discrete", ACTIONS))
    for step in range(1, STEPS + 1):
        for part, one in enumerate(payloads(step)):
            trajectories.give(f"env:{part}@{step}", one, step=step)
    context = Committing(stage, "actor", {})
    context.said = []
    async with asyncio.timeout(60):
        await FsdpRole().run(context)
    samples = [float(sum(part["obs"][..., 0].size for part in payloads(step))) for step in range(1, STEPS + 1)]
    updates = [amount for kind, amount in context.worked if kind == "compute"]
    assert updates == [Amount(units=len(payloads(1)), tokens=tokens) for tokens in samples]
    _, tensors = await stage.weights.pull(PolicyVersion(0, STEPS))
    return tensors, context.said


@pytest.mark.parametrize("name", ["as it is", *MOVED])
async def test_the_role_publishes_and_says_what_the_reference_learns(name):
    moves = BASE if name == "as it is" else moved(name)
    tensors, said = await played(moves)
    reference, wanted = referred(moves)
    assert set(tensors) == set(SPEC.policy_parameters())
    for key, tensor in tensors.items():
        right = reference.parameters[key].numpy()
        np.testing.assert_allclose(np.asarray(torch.as_tensor(tensor)), right, rtol=0, atol=CLOSE, err_msg=key)
    for metrics, right_numbers in zip(said, wanted, strict=True):
        assert {k: metrics[k] for k in right_numbers} == pytest.approx(right_numbers, rel=1e-4, abs=1e-5)
