"""A simulator that takes its time and no core: tests.fakes.sleeping_env:Sleeps-v0."""

import time
from typing import Any

import gymnasium as gym
import numpy as np

STEP_S = 0.005


class Sleeps(gym.Env[Any, Any]):
    """Observations of four numbers, two actions, episodes of ten steps."""

    observation_space: gym.Space[Any] = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps >= 10, False, {}


gym.register("Sleeps-v0", entry_point=f"{__name__}:{Sleeps.__name__}")
