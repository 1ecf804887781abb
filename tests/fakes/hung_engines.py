"""Rollouts whose engine hangs once in a run, as a call into a library that never returns."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from rlinf_api import names
from rlinf_worker.roles.rollout.engine import Engine
from rlinf_worker.roles.rollout.language import TransformersRole
from rlinf_worker.roles.rollout.vllm_role import VllmRole

HANGS_IN: Final = 20
"""The step of the engine: in the middle of the job's third step, of 8 tokens each."""


def hanging(engine: Engine) -> Engine:
    steps, taken = engine.step, 0

    def step() -> int:
        nonlocal taken
        taken += 1
        if taken == HANGS_IN and _first():
            time.sleep(600.0)  # longer than any test waits
        return steps()

    engine.step = step  # type: ignore[method-assign]
    return engine


def _first() -> bool:
    """Whether none of the run has hung yet."""
    try:
        Path(os.environ[names.ENV_OUTPUT_DIR], "hung").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class HungTransformersRole(TransformersRole):
    def engine(self, config: Any, **options: Any) -> tuple[Engine, int]:
        engine, rows = super().engine(config, **options)
        return hanging(engine), rows


class HungVllmRole(VllmRole):
    def engine(self, config: Any, **options: Any) -> tuple[Engine, int]:
        engine, rows = super().engine(config, **options)
        return hanging(engine), rows
