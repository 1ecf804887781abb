"""CartPole that no machine is quick at until there is a file `go`: a job is then under faults for as long as they take,
with few steps, and ends soon after the last of them. Workers import it from the folder that rljob runs in."""

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

PACE_S = 0.0015


class Paced(CartPoleEnv):
    def __init__(self, *, go: str, **options: Any) -> None:
        super().__init__(**options)
        self._go = Path(go)

    def step(self, action: Any) -> Any:
        if not self._go.exists():
            time.sleep(PACE_S)
        return super().step(action)


gym.register("Paced-v0", entry_point=f"{__name__}:Paced", max_episode_steps=500)
