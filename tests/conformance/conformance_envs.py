"""CartPole whose pace and failures the suite commands, by files in the folder that it shares with the pods.

Pods have this file from a ConfigMap: it imports nothing of the tests.

| file in $CONFORMANCE_DIR | effect |
|---|---|
| go | steps take no time; without it a step of the environment takes PACE_S |
| slow-start | making an environment takes SLOW_START_S: a recovery that outlasts the driver's interval of reports |
| crash-once | the next step raises, and the file is gone |
| crash | a step raises, LIVES_S after the environment was made: so long that its steps were reported |
"""

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

PACE_S = 0.05
LIVES_S = 3.0
SLOW_START_S = 2.5
FOLDER = Path(os.environ.get("CONFORMANCE_DIR", "."))


class Paced(CartPoleEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if (FOLDER / "slow-start").exists():
            time.sleep(SLOW_START_S)
        self._made_at = time.monotonic()

    def step(self, action: Any) -> Any:
        if (FOLDER / "crash").exists() and time.monotonic() - self._made_at > LIVES_S:
            raise RuntimeError("the pole is broken")
        if (FOLDER / "crash-once").exists():
            (FOLDER / "crash-once").unlink()
            raise RuntimeError("the pole broke once")
        if not (FOLDER / "go").exists():
            time.sleep(PACE_S)
        return super().step(action)


class Broken(gym.Env[Any, Any]):
    def __init__(self, **_: Any) -> None:
        time.sleep(SLOW_START_S)  # the plan was reported by then
        raise RuntimeError("no licence for this simulator")


for kind in (Paced, Broken):
    gym.register(f"{kind.__name__}-v0", entry_point=f"{__name__}:{kind.__name__}")
