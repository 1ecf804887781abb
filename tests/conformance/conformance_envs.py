"""CartPole whose pace and failures the suite commands, by files in the folder that it shares with the pods.

Pods have this file from a ConfigMap: it imports nothing of the tests.

| file in $CONFORMANCE_DIR | effect |
|---|---|
| go | steps take no time; without it a step of the environment takes PACE_S |
| hold | no environment is made as long as it is there: the scenario takes it away once it has seen what it waits for |
| crash-once | the next step raises, and the file is gone |
"""

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

PACE_S = 0.05
HOLD_S = 120.0
"""More than a scenario waits for anything: nobody is left to take the file away then."""
FOLDER = Path(os.environ.get("CONFORMANCE_DIR", "."))


def held() -> None:
    deadline = time.monotonic() + HOLD_S
    while (FOLDER / "hold").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the file `hold` was still there after {HOLD_S:g} s")
        time.sleep(0.02)


class Paced(CartPoleEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        held()

    def step(self, action: Any) -> Any:
        if (FOLDER / "crash-once").exists():
            (FOLDER / "crash-once").unlink()
            raise RuntimeError("the pole broke once")
        if not (FOLDER / "go").exists():
            time.sleep(PACE_S)
        return super().step(action)


class Broken(gym.Env[Any, Any]):
    def __init__(self, **_: Any) -> None:
        held()
        raise RuntimeError("no licence for this simulator")


for kind in (Paced, Broken):
    gym.register(f"{kind.__name__}-v0", entry_point=f"{__name__}:{kind.__name__}")
