"""Vectorised environments: one slice of N environments that are stepped together.

For: one interface over Gymnasium with exact episode ends, keyed seeds, and errors that say which environment and which
step. Not for: trajectories, channels, time limits on a hanging environment (the agent's phase deadline). Called by the
env role, one object per slice. Needs numpy and gymnasium, never torch: an env worker starts in half a second.

Shapes: N environments of the slice, D... observation, A action dimensions.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlinf_api.errors import InvariantBroken, NotSupportedYet, RetryableError, RLinfError, UserError
from rlinf_worker.algorithms.policy_spec import Actions
from rlinf_worker.algorithms.sampling import environment_seeds
from rlinf_worker.roles import loading

Array = NDArray[Any]
Bool = NDArray[np.bool_]


class EnvironmentFailed(RetryableError):
    """The environment's own code raised, or returned what no network can learn from.

    Retryable, because a simulator may crash once in a million steps: the worker's restart bound says when it is enough.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What the manifest says. `id` may name a module to import first: "my_envs:Reach-v0"."""

    id: str
    num_envs: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOut:
    """The arrays are the caller's: no later call writes to them."""

    obs: Array
    """[N, D...] what to act on next: where an episode ended, already the first observation of the next one."""
    reward: NDArray[np.float32]
    terminated: Bool
    truncated: Bool
    final_obs: Array
    """[N, D...] what the action led to: the last observation where an episode ended, elsewhere equal to `obs`."""
    episode_returns: NDArray[np.float64]
    """[N] undiscounted return of the episode so far, this step included: the whole episode's where it ended."""

    @property
    def ended(self) -> Bool:
        return self.terminated | self.truncated


class Environment:
    """One slice: N environments stepped one after the other in this process, each with its own random numbers. Used by
    one thread: `reset`, then `step` as often as wanted, `reset` again at any time, `close` once at the end.

    The loop is ours: Gymnasium's SyncVectorEnv costs a quarter as much again as the CartPoles in it (infos that nobody
    reads, deep copies) and does not say which of its environments raised. Gymnasium's own vector CartPole is ten times
    as fast and is not used either: it only knows NEXT_STEP autoreset, where one step in each episode ignores its
    action, and draws all environments from one generator, so that an episode depends on how many neighbours it has.

    Raises UserError for what the manifest must change: unknown id, arguments, spaces that no policy fits; and
    RetryableError for what the machine refuses.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        if config.num_envs < 1:
            raise UserError("a slice needs environments", got=f"num_envs {config.num_envs}", wanted="1 or more")
        self._config, self.num_envs = config, config.num_envs
        self._envs = _make_all(import_environment(config.id), config)
        try:
            self.obs_shape = _obs_shape(self._envs[0].observation_space, config.id)
            self.actions, self._to_actions = _actions(self._envs[0].action_space, config.id)
        except UserError:
            self.close()
            raise
        self._returns = np.zeros(config.num_envs)
        self._steps_taken = 0

    def reset(self, *, seed: int, slice_index: int, step: int = 0) -> Array:
        """As a slice starts, and when it starts again (at `step`) after a failure. Returns float32 obs [N, D...]. The
        same arguments give the same episodes."""
        seeds = environment_seeds(seed, slice_index=slice_index, step=step, num_envs=self.num_envs)
        self._steps_taken = 0
        self._returns[:] = 0.0
        obs = np.empty((self.num_envs, *self.obs_shape), np.float32)
        for index, env in enumerate(self._envs):
            try:
                obs[index], _ = env.reset(seed=seeds[index])
            except Exception as err:  # the user's code: anything may come; translated with its cause, never swallowed
                raise self._raised("raised in reset()", index, err) from err
        return self._checked(obs, "an observation")

    def step(self, action: Array) -> StepOut:
        """`action`: int64 [N] or float32 [N, A]. Ends and starts episodes in the same step. After EnvironmentFailed
        only `reset` and `close` may follow."""
        num_envs = self.num_envs
        if len(action) != num_envs:
            raise InvariantBroken("actions do not fit the slice", got=str(len(action)), wanted=str(num_envs))
        obs = np.empty((num_envs, *self.obs_shape), np.float32)
        rewards, terminated, truncated = [0.0] * num_envs, [False] * num_envs, [False] * num_envs
        ends: list[tuple[int, Array]] = []
        for index, (env, its_action) in enumerate(zip(self._envs, self._to_actions(action), strict=True)):
            try:
                out, reward, terminated[index], truncated[index], _ = env.step(its_action)
                rewards[index] = float(reward)
                if terminated[index] or truncated[index]:
                    last = np.empty(self.obs_shape, np.float32)
                    last[...] = out  # a copy: an environment may fill one buffer again and again, also in reset()
                    ends.append((index, last))
                    out, _ = env.reset()
                obs[index] = out
            except Exception as err:  # the user's code, as in reset
                raise self._raised("raised in step()", index, err) from err
        self._steps_taken += 1
        exact = np.array(rewards, np.float64)
        self._checked(obs, "an observation")
        self._returns += exact
        returns, final_obs = self._returns.copy(), obs
        if ends:
            final_obs = obs.copy()
            for index, last in ends:
                final_obs[index] = last
                self._returns[index] = 0.0
            self._checked(final_obs, "an observation")
        return StepOut(
            obs=obs,
            reward=self._checked(exact.astype(np.float32), "a reward"),
            terminated=np.array(terminated, np.bool_),
            truncated=np.array(truncated, np.bool_),
            final_obs=final_obs,
            episode_returns=returns,
        )

    def close(self) -> None:
        for index, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as err:  # the user's code, as in reset
                raise self._raised("raised in close()", index, err) from err

    def _raised(self, what: str, index: int, err: Exception) -> EnvironmentFailed:
        return self._failed(what, index, got=loading.told(err))

    def _checked(self, values: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """One NaN here is NaN in every weight one step later, where nobody can tell whence."""
        if not np.isfinite(values).all():
            index = int(np.flatnonzero(~np.isfinite(values.reshape(self.num_envs, -1)).all(axis=1))[0])
            got = str(values[index])[:200]
            raise self._failed(f"returned {name} that is not finite", index, got=got, wanted="finite numbers")
        return values

    def _failed(self, what: str, index: int, *, got: str, wanted: str = "") -> EnvironmentFailed:
        return EnvironmentFailed(
            f"environment '{self._config.id}' {what} in environment {index} of its slice "
            f"after {self._steps_taken} steps",
            got=got,
            wanted=wanted,
            next="correct the environment; its slice starts again with new seeds"
            if wanted
            else "see the worker's log for its stack; the slice starts again with new seeds",
        )


def import_environment(environment_id: str) -> gym.envs.registration.EnvSpec:
    """The modules that making one would import first. Raises UserError for an id that does not exist."""
    spec = _find(environment_id)
    if isinstance(entry := spec.entry_point, str):
        what = f"environment '{environment_id}' is made by a module that"
        loading.module(entry.partition(":")[0], what=what, next="install what it needs in the env image")
    return spec


def _find(environment_id: str) -> gym.envs.registration.EnvSpec:
    module, _, name = environment_id.rpartition(":")
    if module:
        what = f"environment '{environment_id}' names module '{module}', which"
        loading.module(module, what=what, next="install it in the env image, or correct the id")
    spec = gym.registry.get(name)
    if spec is None:
        # Exact ids only: Gymnasium takes "CartPole" for the newest version, so a run would change with its upgrade.
        known = {known_id.lower(): known_id for known_id in gym.registry}
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
        raise UserError(
            f"environment '{environment_id}' does not exist",
            got=f"'{name}'",
            wanted=f"one of {', '.join(known[match] for match in close)}" if close else "an id registered in Gymnasium",
            next="correct the id; for your own environment write 'module:Id-v0' with the module that registers it",
        )
    return spec


def _make_all(spec: gym.envs.registration.EnvSpec, config: EnvironmentConfig) -> list[gym.Env[Any, Any]]:
    # Without gymnasium's passive checker: it costs a fifth of a CartPole step and only warns.
    make = partial(gym.make, spec, disable_env_checker=True, **config.kwargs)
    what = f"environment '{config.id}' cannot be made"
    remedy = f"check its arguments ({dict(config.kwargs)!r}) and what its package needs in the env image"
    envs: list[gym.Env[Any, Any]] = []
    try:
        for _ in range(config.num_envs):
            envs.append(loading.call(make, what=what, next=remedy, correct=remedy))
    except RLinfError:
        for env in envs:
            env.close()
        raise
    return envs


def _obs_shape(space: gym.Space[Any], environment_id: str) -> tuple[int, ...]:
    if not isinstance(space, gym.spaces.Box):
        raise NotSupportedYet(
            f"environment '{environment_id}' has observations that are no plain array",
            got=type(space).__name__,
            wanted="Box",
            next="wrap it in gymnasium.wrappers.FlattenObservation in your own module and name that id",
        )
    return tuple(space.shape)


def _actions(space: gym.Space[Any], environment_id: str) -> tuple[Actions, Callable[[Array], Array]]:
    """What the policy chooses from, and how a batch of its choices becomes an action per environment."""
    if isinstance(space, gym.spaces.Discrete):
        start = int(space.start)
        return Actions("discrete", int(space.n)), lambda action: action + start
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        low, high = space.low, space.high
        return Actions("continuous", space.shape[0]), lambda action: np.clip(action, low, high)
    raise NotSupportedYet(
        f"environment '{environment_id}' has actions of a kind that no policy here makes",
        got=str(space),
        wanted="Discrete, or Box of one dimension",
        next="wrap the environment so that its actions are one of these",
    )
