"""The reference: PPO of Stable-Baselines3 on CartPole-v1 with the hyper-parameters of rl-baselines3-zoo, as a program.

For: foundation.py, which runs it with our own Python, torch and gymnasium and Stable-Baselines3 on the path. Prints one
JSON object. The rate is that of the whole learn(), rollouts and updates, as ours is that of all steps of a job; what
comes before it (imports, making environments) counts in neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from stable_baselines3 import PPO  # type: ignore[import-not-found]
from stable_baselines3.common.callbacks import BaseCallback  # type: ignore[import-not-found]
from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

SOLVED, WINDOW, ENVS = 475.0, 100, 8


class _Watch(BaseCallback):  # type: ignore[misc]
    """The environment step at which the mean of the last 100 training episodes reached 475."""

    solved_at: int | None = None

    def _on_step(self) -> bool:
        episodes = self.model.ep_info_buffer
        is_full = self.solved_at is None and len(episodes) == WINDOW
        if is_full and statistics.fmean(episode["r"] for episode in episodes) >= SOLVED:
            self.solved_at = self.num_timesteps
        return True


def _linear(value: float) -> Any:
    return lambda remaining: remaining * value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    env = make_vec_env("CartPole-v1", ENVS, seed=options.seed)
    model = PPO(
        "MlpPolicy",
        env,
        seed=options.seed,
        device="cpu",
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=_linear(1e-3),
        clip_range=_linear(0.2),
    )
    watch = _Watch()
    started = time.perf_counter()
    model.learn(options.steps, callback=watch)
    took_s = time.perf_counter() - started
    env.close()
    print(json.dumps({"env_steps_per_s": model.num_timesteps / took_s, "solved_at": watch.solved_at}))


if __name__ == "__main__":
    main()
