"""Environments that do not work, as a user's module would hold them: tests.fakes.broken_envs:RaisesInStep-v0."""

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Working(gym.Env[Any, Any]):
    """Observations of four numbers, two actions, episodes of ten steps. Each of the others breaks one thing."""

    observation_space: gym.Space[Any] = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps >= 10, False, {}


def breaks() -> None:
    """Into the worker's log: tests ask how long it takes until a person is told."""
    print(f"breaks at {time.time()}", flush=True)


class RaisesInConstructor(Working):
    def __init__(self) -> None:
        raise RuntimeError("no licence for this simulator")


class RaisesInReset(Working):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        breaks()
        raise RuntimeError("the robot is not connected")


class RaisesInStep(Working):
    def step(self, action: Any) -> Any:
        if self.steps == 3:
            breaks()
            raise ZeroDivisionError("float division by zero")
        return super().step(action)


class HangsInStep(Working):
    def step(self, action: Any) -> Any:
        if self.steps == 3:
            breaks()
            time.sleep(3600)
        return super().step(action)


class NotANumber(Working):
    def step(self, action: Any) -> Any:
        breaks()
        return np.full(4, np.nan, np.float32), 1.0, False, False, {}


class Exits(Working):
    def step(self, action: Any) -> Any:
        os._exit(3)


class Pictures(Working):
    """A space that no policy here fits."""

    observation_space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (8, 8), np.uint8)})


for _broken in (Working, RaisesInConstructor, RaisesInReset, RaisesInStep, HangsInStep, NotANumber, Exits, Pictures):
    gym.register(f"{_broken.__name__}-v0", entry_point=f"{__name__}:{_broken.__name__}")
