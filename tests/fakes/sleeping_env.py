"""A simulator that takes its time and no core: tests.fakes.sleeping_env:Sleeps-v0."""

import time
from typing import Any

import gymnasium as gym

from tests.fakes.broken_envs import Working

STEP_S = 0.005


class Sleeps(Working):
    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


gym.register("Sleeps-v0", entry_point=f"{__name__}:{Sleeps.__name__}")
