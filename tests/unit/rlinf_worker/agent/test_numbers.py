"""The agent's numbers that nobody sets, by hand: how often, how late, how many. Each stands in the code with its
reason; here it is read once more by somebody who changes it."""

from types import ModuleType

import pytest

from rlinf_worker import memory
from rlinf_worker.agent import attach, main, slots, vacancy, watchdog, worker_log
from rlinf_worker.driver.settings import DriverSettings

NUMBERS: dict[ModuleType, dict[str, float]] = {
    attach: {"MIN_BEAT_S": 0.02, "MAX_BEAT_S": 10.0},
    main: {"_LOOK_S": 0.2, "_BREAK_S": DriverSettings().broken_agent_s},
    memory: {"FREED_SHARE": 0.5, "LIMIT_S": 30.0},
    slots: {"HELLO_TIMEOUT_S": 30.0, "STOP_SERVER_S": 0.2},
    vacancy: {"LIMIT_S": 45.0, "FLAT_S": 1.0},
    watchdog: {"LIMIT_S": 10.0},
    worker_log: {"ACCOUNT_EVERY": 200},
}


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_agents_numbers_are_these(module):
    assert {name: vars(module)[name] for name in NUMBERS[module]} == NUMBERS[module]
