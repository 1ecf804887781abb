"""The Gymnasium slice: exact episode ends, keyed episodes, errors that say which environment and which step."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlinf_api.errors import InvariantBroken, NotSupportedYet, UserError
from rlinf_worker.algorithms.policy_spec import Actions
from rlinf_worker.roles.env.environment import Environment, EnvironmentConfig, EnvironmentFailed


class Counting(gym.Env[np.ndarray, Any]):
    """Observation [steps in this episode, number of the episode]; ends or misbehaves where told to."""

    made = 0

    def __init__(
        self,
        *,
        terminates_at: int = 10**9,
        raises_at: int = 10**9,
        raises_in_reset: bool = False,
        nan_at: int = 10**9,
        raises_when_made: bool = False,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        buffer: np.ndarray | None = None,
    ) -> None:
        if raises_when_made:
            raise RuntimeError("no display\nsecond line")
        self.observation_space = observation_space or gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = action_space or gym.spaces.Discrete(3, start=5)
        self._index = Counting.made  # the vector environment makes them in order
        Counting.made += 1
        self._terminates_at, self._raises_at, self._nan_at = terminates_at, raises_at, nan_at
        self._raises_in_reset, self._buffer = raises_in_reset, buffer
        self._episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if self._raises_in_reset and self._index == 1:
            raise RuntimeError("no ground to stand on")
        self._steps, self._episode = 0, self._episode + 1
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self.last_action = action
        if self._steps == self._raises_at and self._index == 1:
            raise ZeroDivisionError("the robot fell through the floor")
        return self._obs(), 2.0, self._steps >= self._terminates_at, False, {}

    def _obs(self) -> np.ndarray:
        if self._steps == self._nan_at and self._index == 1:
            return np.array([np.nan, 0.0], np.float32)
        obs = np.empty(2, np.float32) if self._buffer is None else self._buffer
        obs[:] = self._steps, self._episode
        return obs


class Grown(Counting):
    """Its last observation has a number too many."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return np.zeros(3, np.float32) if terminated else obs, reward, terminated, truncated, info


class Flags(Counting):
    """Says how an episode ended in numbers."""

    def step(self, action: Any) -> tuple[np.ndarray, float, Any, Any, dict[str, Any]]:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, int(terminated), 1.0, info


@pytest.fixture(autouse=True)
def registered_environments() -> Iterator[None]:
    Counting.made = 0
    gym.register("Counting-v0", entry_point=lambda **kwargs: Counting(**kwargs))
    gym.register("CountingTo7-v0", entry_point=lambda **kwargs: Counting(**kwargs), max_episode_steps=7)
    gym.register("Grown-v0", entry_point=lambda **kwargs: Grown(**kwargs))
    gym.register("Flags-v0", entry_point=lambda **kwargs: Flags(**kwargs), disable_env_checker=True)
    yield
    for name in ("Counting-v0", "CountingTo7-v0", "Grown-v0", "Flags-v0"):
        gym.registry.pop(name)


@pytest.fixture
def make() -> Iterator[Callable[..., Environment]]:
    made: list[Environment] = []

    def make_one(environment_id: str, *, num_envs: int = 2, **kwargs: Any) -> Environment:
        made.append(Environment(EnvironmentConfig(id=environment_id, num_envs=num_envs, kwargs=kwargs)))
        return made[-1]

    yield make_one
    for environment in made:
        environment.close()


ZEROS = np.zeros(2, np.int64)


def test_cartpole_is_described_as_the_network_needs_it(make: Callable[..., Environment]) -> None:
    cartpole, pendulum = make("CartPole-v1"), make("Pendulum-v1")

    assert (cartpole.num_envs, cartpole.obs_shape, cartpole.actions) == (2, (4,), Actions("discrete", 2))
    assert (pendulum.obs_shape, pendulum.actions) == ((3,), Actions("continuous", 1))


def test_flags_that_an_environment_says_in_numbers_are_flags(make: Callable[..., Environment]) -> None:
    environment = make("Flags-v0", terminates_at=1)
    environment.reset(seed=0, slice_index=0)
    out = environment.step(ZEROS)
    assert [flags.dtype.name for flags in (out.terminated, out.truncated)] == ["bool", "bool"]
    assert out.terminated.all()
    assert out.truncated.all()


def test_an_episode_ends_and_the_next_begins_in_the_same_step(make: Callable[..., Environment]) -> None:
    environment = make("Counting-v0", terminates_at=3)
    assert environment.reset(seed=0, slice_index=0).tolist() == [[0, 0], [0, 0]]
    for _ in range(2):
        before = environment.step(ZEROS)
    ending, after = environment.step(ZEROS), environment.step(ZEROS)

    assert before.obs.tolist() == before.final_obs.tolist() == [[2, 0], [2, 0]]
    assert ending.terminated.all()
    assert ending.ended.all()
    assert not ending.truncated.any()
    assert ending.obs.tolist() == [[0, 1], [0, 1]]
    assert ending.final_obs.tolist() == [[3, 0], [3, 0]]
    assert ending.episode_returns.tolist() == [6.0, 6.0]
    assert after.obs.tolist() == [[1, 1], [1, 1]]
    assert after.episode_returns.tolist() == [2.0, 2.0]
    assert ending.obs.tolist() == [[0, 1], [0, 1]], "an array that was handed out was written to again"


def test_a_reset_forgets_what_the_episodes_had_come_to(make: Callable[..., Environment]) -> None:
    environment = make("Counting-v0", terminates_at=3)
    environment.reset(seed=0, slice_index=0)
    environment.step(ZEROS)
    environment.reset(seed=0, slice_index=0)
    out = environment.step(ZEROS)

    assert out.episode_returns.tolist() == [2.0, 2.0]


def test_a_time_limit_truncates_and_does_not_terminate(make: Callable[..., Environment]) -> None:
    environment = make("CountingTo7-v0")
    environment.reset(seed=0, slice_index=0)
    outs = [environment.step(ZEROS) for _ in range(7)]

    assert [bool(out.truncated.any()) for out in outs] == [False] * 6 + [True]
    assert not any(out.terminated.any() for out in outs)
    assert outs[-1].final_obs[:, 0].tolist() == [7, 7]


@pytest.mark.parametrize("environment_id", ["Counting-v0", "CountingTo7-v0"])
def test_an_environment_that_fills_one_buffer_again_and_again_keeps_its_last_observations(make, environment_id):
    """Simulators do so, and all of a slice may share it."""
    environment = make(environment_id, terminates_at=9, buffer=np.zeros(2, np.float32))
    environment.reset(seed=0, slice_index=0)
    steps = 9 if environment_id == "Counting-v0" else 7
    outs = [environment.step(ZEROS) for _ in range(steps)]

    assert outs[-1].ended.all()
    assert outs[-1].final_obs.tolist() == [[steps, 0], [steps, 0]]
    assert outs[-1].obs.tolist() == [[0, 1], [0, 1]]
    assert outs[-2].obs.tolist() == outs[-2].final_obs.tolist() == [[steps - 1, 0], [steps - 1, 0]]


def test_a_last_observation_of_another_shape_says_which_environment_it_came_from(make):
    environment = make("Grown-v0", terminates_at=2)
    environment.reset(seed=0, slice_index=0)
    environment.step(ZEROS)

    with pytest.raises(EnvironmentFailed, match=r"raised in step\(\) in environment 0 .* could not broadcast"):
        environment.step(ZEROS)


def test_a_slice_of_cartpole_is_the_same_as_its_environments_alone(make: Callable[..., Environment]) -> None:
    """Against plain gymnasium.make, one environment at a time, through several episodes."""
    from rlinf_worker.algorithms.sampling import environment_seeds

    num_envs, steps = 3, 150
    environment = make("CartPole-v1", num_envs=num_envs)
    seeds = environment_seeds(11, slice_index=4, step=0, num_envs=num_envs)
    actions = np.random.default_rng(0).integers(0, 2, (steps, num_envs))
    first = environment.reset(seed=11, slice_index=4)
    outs = [environment.step(action) for action in actions]
    assert sum(int(out.ended.sum()) for out in outs) >= 6

    for index, seed in enumerate(seeds):
        alone = gym.make("CartPole-v1")
        obs, _ = alone.reset(seed=seed)
        np.testing.assert_array_equal(first[index], obs)
        for out, action in zip(outs, actions[:, index], strict=True):
            obs, reward, terminated, truncated, _ = alone.step(action)
            np.testing.assert_array_equal(out.final_obs[index], obs)
            assert (out.reward[index], out.terminated[index], out.truncated[index]) == (reward, terminated, truncated)
            if terminated or truncated:
                obs, _ = alone.reset()
            np.testing.assert_array_equal(out.obs[index], obs)
        alone.close()


def test_episodes_depend_on_seed_slice_and_starting_step_only(make: Callable[..., Environment]) -> None:
    environment, other = make("CartPole-v1"), make("CartPole-v1")
    first = environment.reset(seed=1, slice_index=0)

    np.testing.assert_array_equal(other.reset(seed=1, slice_index=0), first)
    starts = [other.reset(seed=2, slice_index=0), other.reset(seed=1, slice_index=1)]
    starts.append(other.reset(seed=1, slice_index=0, step=5))
    assert not any(np.array_equal(start, first) for start in starts)


def test_actions_reach_the_environment_in_its_own_terms(make: Callable[..., Environment]) -> None:
    bounds = gym.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32))
    discrete, continuous = make("Counting-v0"), make("Counting-v0", action_space=bounds)
    taken: list[Any] = []
    for environment, action in ((discrete, np.array([0, 2])), (continuous, np.array([[9, 1.5], [0, -9]], np.float32))):
        environment.reset(seed=0, slice_index=0)
        environment.step(action)
        taken += [env.unwrapped.last_action for env in environment._envs]  # type: ignore[attr-defined]

    assert taken[:2] == [5, 7]  # Discrete(3, start=5)
    np.testing.assert_array_equal(taken[2:], [[1, 1.5], [0, -2]])


def test_an_unknown_id_is_answered_with_the_closest_known_ones() -> None:
    with pytest.raises(UserError, match=r"'CartPol-v1' does not exist: got 'CartPol-v1', wanted one of .*CartPole-v1"):
        Environment(EnvironmentConfig(id="CartPol-v1", num_envs=1))
    with pytest.raises(UserError, match="write 'module:Id-v0' with the module that registers it"):
        Environment(EnvironmentConfig(id="qqqqqqqq", num_envs=1))


def test_an_id_without_version_is_not_guessed() -> None:
    with pytest.raises(UserError, match=r"'CartPole' does not exist.*CartPole-v1"):
        Environment(EnvironmentConfig(id="CartPole", num_envs=1))


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(UserError, match="names module 'no_such_module', which cannot be imported"):
        Environment(EnvironmentConfig(id="no_such_module:Reach-v0", num_envs=1))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"gravity": 3}, "cannot be made: got TypeError.*'gravity'.*check its arguments"),
        ({"raises_when_made": True}, "'Counting-v0' cannot be made: got RuntimeError: no display .*; check"),
        (
            {"observation_space": gym.spaces.Dict(x=gym.spaces.Discrete(2))},
            "observations that are no plain array: got Dict, wanted Box",
        ),
        ({"action_space": gym.spaces.MultiBinary(2)}, "no policy here makes: got MultiBinary"),
    ],
)
def test_what_the_manifest_must_change_is_said_before_the_first_step(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Environment(EnvironmentConfig(id="Counting-v0", num_envs=2, kwargs=kwargs))


def test_spaces_that_no_policy_fits_are_a_missing_feature_not_a_mistake() -> None:
    with pytest.raises(NotSupportedYet):
        Environment(EnvironmentConfig(id="Counting-v0", num_envs=1, kwargs={"action_space": gym.spaces.MultiBinary(2)}))


def test_a_slice_without_environments_is_refused() -> None:
    with pytest.raises(UserError, match="got num_envs 0, wanted 1 or more"):
        Environment(EnvironmentConfig(id="CartPole-v1", num_envs=0))


def test_an_environment_that_raises_is_named_with_its_step(make: Callable[..., Environment]) -> None:
    environment = make("Counting-v0", num_envs=3, raises_at=4)
    environment.reset(seed=0, slice_index=0)
    actions = np.zeros(3, np.int64)
    for _ in range(3):
        environment.step(actions)

    with pytest.raises(
        EnvironmentFailed,
        match=r"'Counting-v0' raised in step\(\) in environment 1 of its slice after 3 steps: "
        r"got ZeroDivisionError: the robot fell through the floor .*; see the worker's log for its stack",
    ) as caught:
        environment.step(actions)

    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert environment.reset(seed=0, slice_index=0, step=1).shape == (3, 2), "a failed slice can start again"


def test_an_environment_that_cannot_start_is_named(make: Callable[..., Environment]) -> None:
    with pytest.raises(EnvironmentFailed, match=r"raised in reset\(\) in environment 1 .*no ground to stand on"):
        make("Counting-v0", raises_in_reset=True).reset(seed=0, slice_index=0)


def test_an_observation_that_is_not_finite_stops_before_it_reaches_a_weight(make: Callable[..., Environment]) -> None:
    environment = make("Counting-v0", nan_at=1)
    environment.reset(seed=0, slice_index=0)

    with pytest.raises(
        EnvironmentFailed, match=r"is not finite in environment 1 .*got \[nan.*; correct the environment"
    ):
        environment.step(ZEROS)


def test_actions_of_another_slice_are_refused(make: Callable[..., Environment]) -> None:
    environment = make("Counting-v0")
    environment.reset(seed=0, slice_index=0)

    with pytest.raises(InvariantBroken, match="got 5, wanted 2"):
        environment.step(np.zeros(5, np.int64))
