"""Proximal policy optimisation over simulators: env <-> rollout collect segments, actor learns from them.

                 segments (tickets)                 trajectories
    driver ───────────────────────> env ──────────────────────────────> actor
                                    │ ▲                                   │
                       observations │ │ actions (a cycle)                 │ weights
                                    ▼ │                                   │
                                  rollout <───────────────────────────────┘

The unit is a *slice*: numEnvs / slices environments that step together. Its segment of one step is (slice, step), made
again under the same key if its worker dies. env asks and rollout answers: no message of the driver in it; the
slices of one env worker are in flight at once, so that simulator and policy work at the same time.

Runs in the driver. Not for: the update itself (roles/actor), the stepping (roles/env).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from rlinf_api.errors import UserError
from rlinf_api.job import Model
from rlinf_api.plan import Capacity, Depth, MicroBatch
from rlinf_api.sentences import checked
from rlinf_worker.channels import lineage
from rlinf_worker.flows.protocol import Flow, Ticket

# What the channels carry: T steps of a segment, N environments of a slice, F truncated episodes, E ended ones.
TICKET: Final = {"slice": "int"}
OBSERVATION: Final = {"obs": "float32[n, ...]", "slice": "int", "t": "int"}
ACTION: Final = {"action": "number[n, ...]", "logprob": "float32[n]"}
TRAJECTORY: Final = {
    "obs": "float32[t, n, ...]",
    "action": "number[t, n, ...]",
    "logprob": "float32[t, n]",
    "reward": "float32[t, n]",
    "terminated": "bool[t, n]",
    "truncated": "bool[t, n]",
    "last_obs": "float32[n, ...]",
    "final_index": "int32[f, 2]",  # (t, n) of each truncation
    "final_obs": "float32[f, ...]",
    "episode_returns": "float64[e]",
}


class ChannelConfig(Model):
    """Sizes of one channel that the first plan takes over; later plans choose them."""

    micro_batch: MicroBatch = 1
    depth: Depth = 2
    capacity: Capacity = Capacity()


class PpoConfig(Model):
    """spec.flow.config of flow ppo."""

    env: Annotated[str, Field(min_length=1)]
    """Gymnasium id, or module:Id-v0 with the module that registers it."""
    env_kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    num_envs: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Environments of the job. 32: enough that the policy's batch hides the hand-over."""
    slices: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Groups that the environments step in. 2: one is stepped while the other's actions are computed."""
    horizon: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Steps of each environment per policy update."""
    hidden_sizes: list[Annotated[int, Field(ge=1, le=65_536)]] = [64, 64]
    """Hidden layers of policy and value network each."""
    activation: Literal["tanh", "relu"] = "tanh"
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per step. 0.99: looks about a hundred steps ahead."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Bias against variance of the advantage. 0.95: the value of most published work."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 10
    """Passes over the data of one step."""
    final_epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Passes in the last step, reached in even steps from `epochs`. Late policies gain little from many passes."""
    minibatches: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Optimizer steps per epoch."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    schedule: Literal["constant", "linear"] = "constant"
    """How learning rate and clip range change over the job's steps; linear: down to 0."""
    clip_range: Annotated[float, Field(gt=0)] = 0.2
    value_clip_range: Annotated[float, Field(gt=0)] | None = None
    value_coefficient: Annotated[float, Field(ge=0)] = 0.5
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.5
    normalise_advantage: bool = True
    channels: dict[Literal["segments", "actions", "trajectories", "weights"], ChannelConfig] = {}
    order: Literal["arrival", "lineage"] = "arrival"
    """lineage: the same seed gives the same learning curve, whatever arrives first."""

    @model_validator(mode="after")
    def _divides(self) -> PpoConfig:
        if self.num_envs % self.slices:
            raise ValueError(f"slices {self.slices} does not divide numEnvs {self.num_envs}; write a divisor")
        return self


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """With all defaults, snake_case. InvalidManifest with a sentence per problem."""
    return checked(PpoConfig, config, prefix="spec.flow.config").model_dump(mode="json")


async def ppo(flow: Flow) -> None:
    slices, workers = int(flow.config["slices"]), flow.workers("env")
    if workers > slices:
        raise UserError(
            f"{workers} env workers share {slices} slices", wanted=f"at least {workers} slices",
            next="raise spec.flow.config.slices or lower spec.roles[env].workers",
        )  # fmt: skip
    segments = flow.source("segments", to="env", payload=TICKET)
    flow.cycle("actions", ask="env", answer="rollout", question=OBSERVATION, reply=ACTION)
    flow.queue("trajectories", "env", "actor", rounds=True, payload=TRAJECTORY)
    flow.weights("actor", "rollout")

    async for step in flow.steps():
        tickets = [
            Ticket(key=lineage.segment(index, step=step.number), payload={"slice": index}, affinity=index)
            for index in range(slices)
        ]
        await segments.put(tickets, step=step)
