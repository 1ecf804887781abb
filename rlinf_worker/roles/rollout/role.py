"""The rollout role of simulators: answers observations with actions, with weights that are new enough.

Noise is drawn by (seed, slice, step, t), so whichever rollout answers draws the same action. A question about version v
is answered with v or newer; a rollout that did not get v waits for it, and never answers with what it has.

On a CPU the policy runs in numpy (a batch of 32 takes 14 us, in torch 39 us), on a GPU in torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from rlinf_worker.algorithms import sampling
from rlinf_worker.algorithms.policy_spec import NumpyPolicy, PolicySpec
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.roles import spaces
from rlinf_worker.roles.protocol import FlowSettings, Movable, Offloads, RoleContext

Array = np.ndarray[Any, np.dtype[Any]]
MAX_NOISE_BLOCKS: Final = 4096  # (slice, step) pairs kept: two per slice of two thousand slices


class TorchPolicyRole(Offloads):
    def warm(self, flow: FlowSettings, config: Mapping[str, Any]) -> None:
        """On a GPU torch, which `run` imports late; the GPU itself is not touched, as its slot is somebody else's."""
        if str(config.get("device", "cpu")).startswith("cuda"):
            importlib.import_module("rlinf_worker.algorithms.policies")
            importlib.import_module("rlinf_worker.algorithms.offloading")

    async def run(self, ctx: RoleContext) -> None:
        async with ctx.turn():
            await self._work(ctx)

    async def _work(self, ctx: RoleContext) -> None:
        spec = spaces.policy_spec(await ctx.shared(spaces.FACT), ctx.flow.config)
        load, self.host = _loader(spec, device=str(ctx.config.get("device", "cpu")))
        noise = _Noise(spec, seed=ctx.flow.seed, horizon=int(ctx.flow.config["horizon"]))
        await ctx.ready()
        actions, weights = ctx.answering("actions"), ctx.weights
        policy: Callable[[Array], Array] | None = None
        log_std: Array = np.zeros(0, np.float32)
        held = PolicyVersion(-1, 0)
        async for item in actions:
            if (weights.version is not None and weights.version > held) or item.version > held:
                held, tensors = await weights.pull(item.version)
                with ctx.span("load", step=item.step):
                    policy = load(tensors)
                    log_std = np.array(tensors.get("policy_log_std", ()), np.float32)
            assert policy is not None, "a version is above none"
            obs = np.asarray(item.payload["obs"])
            with ctx.span("compute", step=item.step, units=1, tokens=len(obs)):
                out = policy(obs)
                block = noise.row(item, len(out))
                action: Array
                if spec.actions.are_discrete:
                    action, logprob = sampling.discrete_actions(out, block)
                else:
                    action, logprob = sampling.gaussian_actions(out, log_std, block)
            actions.answer(item, {"action": action, "logprob": logprob}, version=held)
            await ctx.safe_point()


def _loader(
    spec: PolicySpec, *, device: str
) -> tuple[Callable[[Mapping[str, Any]], Callable[[Array], Array]], Movable | None]:
    """(weights -> policy, what can be offloaded); torch is imported only for a GPU. On a CPU the weights are views of
    the memory that they arrived in, and nothing of the role's own lies on its slots."""
    if not device.startswith("cuda"):
        return lambda tensors: NumpyPolicy(spec, tensors), None

    import torch  # noqa: PLC0415 - seconds to import, and only a GPU needs it

    from rlinf_worker.algorithms import offloading  # noqa: PLC0415 - as above
    from rlinf_worker.algorithms.policies import ActorCritic  # noqa: PLC0415 - as above

    model = ActorCritic(spec, seed=0).to(device)

    def load(tensors: Mapping[str, Any]) -> Callable[[Array], Array]:
        model.load_state_dict({name: torch.from_numpy(np.array(t)) for name, t in tensors.items()}, strict=False)

        @torch.inference_mode()
        def policy(obs: Array) -> Array:
            flat = torch.from_numpy(obs.reshape(len(obs), -1)).to(device, non_blocking=True)
            return np.asarray(model.policy(flat).cpu().numpy())

        return policy

    return load, offloading.HostCopy(lambda: offloading.of_module(model))


class _Noise:
    """Rows of the keyed noise blocks; a block is made once per (slice, step)."""

    def __init__(self, spec: PolicySpec, *, seed: int, horizon: int) -> None:
        self._spec, self._seed, self._horizon = spec, seed, horizon
        self._blocks: dict[tuple[int, int], Array] = {}

    def row(self, item: Item, num_envs: int) -> Array:
        index, t = int(item.payload["slice"]), int(item.payload["t"])
        block = self._blocks.get((index, item.step))
        if block is None:
            while len(self._blocks) >= MAX_NOISE_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            block = self._blocks[(index, item.step)] = self._draw(index, item.step, num_envs)
            self._blocks.pop((index, item.step - 2), None)
        return np.asarray(block[t])

    def _draw(self, index: int, step: int, num_envs: int) -> Array:
        key = {"slice_index": index, "step": step, "horizon": self._horizon, "num_envs": num_envs}
        if self._spec.actions.are_discrete:
            return sampling.uniform_block(self._seed, **key)
        return sampling.normal_block(self._seed, action_size=self._spec.actions.size, **key)
