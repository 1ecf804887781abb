"""The scheduler's numbers that nobody sets, by hand: how late, how many. Each stands in the code with its reason; here
it is read once more by somebody who changes it."""

from types import ModuleType

import pytest

from rlinf_scheduler import __main__ as process
from rlinf_scheduler import service
from rlinf_scheduler.planner import initial

NUMBERS: dict[ModuleType, dict[str, float]] = {
    initial: {"MAX_STAGES": 64, "DEFAULT_SLICES": 2},
    process: {"API_TIMEOUT_S": 8.0, "STOP_GRACE_S": 2.0, "FILES_POLL_S": 0.5},
    service: {"MAX_TRIES": 10, "MAX_JOBS": 1_000, "MAX_REPORTS": 100},
}


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_schedulers_numbers_are_these(module):
    assert {name: vars(module)[name] for name in NUMBERS[module]} == NUMBERS[module]
