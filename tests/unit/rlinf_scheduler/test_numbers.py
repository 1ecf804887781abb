"""The scheduler's numbers that nobody sets, by hand: how late, how many. Each stands in the code with its reason; here
it is read once more by somebody who changes it."""

from types import ModuleType

import pytest

from rlinf_scheduler import __main__ as process
from rlinf_scheduler import jobs, kept, plan_writer, service
from rlinf_scheduler.planner import initial
from rlinf_scheduler.replan import decide, fit, others

NUMBERS: dict[ModuleType, dict[str, float]] = {
    initial: {"MAX_STAGES": 64, "DEFAULT_SLICES": 2},
    process: {"API_TIMEOUT_S": 8.0, "STOP_GRACE_S": 2.0, "FILES_POLL_S": 0.5},
    service: {"MAX_TRIES": 10},
    jobs: {"MAX_JOBS": 1_000, "MAX_REPORTS": 100, "KEEP_S": 600.0},
    kept: {"MAX_KEPT": 50, "MAX_KEPT_BYTES": 524_288, "READ_S": 2.0},
    plan_writer: {"MAX_PLANS": 500},
    fit: {
        "MOVE_BYTES_PER_S": 8 * 2**30,
        "EXCHANGE_BYTES_PER_S": 8 * 2**30,
        "HAND_OVER_MS": 2.0,
        "HOP_MS": 1.0,
        "TURN_MS": 2.0,
        "UNEVEN": 0.30,
        "APART": 1.3,
        "OVERLAP": 1.5,
        "FEW": 8,
    },
    decide: {
        "MIN_GAIN": 0.05,
        "PROBE_GAIN": 0.10,
        "SAFETY": 2.0,
        "PROBE_SHARE": 0.05,
        "VERIFIED_STEPS": 5,
        "WORSE": 0.02,
        "DRIFT": 0.10,
        "ALTERNATIVES": 4,
    },
    others: {"IN_PLACE_S": 0.2, "START_S": 30.0},
}


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_schedulers_numbers_are_these(module):
    assert {name: vars(module)[name] for name in NUMBERS[module]} == NUMBERS[module]
