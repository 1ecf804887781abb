"""The driver's numbers that nobody sets, by hand: how often, how late, how many. Each stands in the code with its
reason; here it is read once more by somebody who changes it."""

from dataclasses import fields
from types import ModuleType

import pytest

from rlinf_worker.driver import (
    commits,
    core,
    flow_queue,
    idle,
    main,
    notices,
    output,
    profile,
    recovery,
    reporting,
    routes,
    server,
    spares,
    toll,
    turns,
    workforce,
)
from rlinf_worker.driver.settings import DriverSettings

NUMBERS: dict[ModuleType, dict[str, float]] = {
    commits: {"CHECKPOINT_RETRY_S": 10.0, "STEPS_KEPT": 16, "KEYS_KEPT": 100_000},
    core: {"MAX_ROUNDS": 64},
    flow_queue: {"ROUNDS_PER_STEP": 100_000},
    idle: {"MAX_SLOTS": 64, "STEPS_KEPT": 16},
    main: {"MAX_URI": 1024, "MAX_FIELDS": 8, "TICK_S": 0.2},
    notices: {"MAX_NAMED": 8, "SAY_AGAIN_S": 30.0, "LASTS_S": 3.0},
    output: {"MAX_FILE_BYTES": 256 << 20, "LONGEST_LINE": 64 << 10, "CHUNK": 1 << 20, "MAX_ACCOUNTS": 64},
    profile: {"STEPS_KEPT": 16, "REPORTS_KEPT": 8, "SAMPLES": 4096, "SIZES": 64},
    reporting: {"FIRST_PAUSE_S": 1.0, "LAST_S": 1.0},
    recovery: {"USUAL_STEPS": 20, "MAX_UNDER_WAY": 64},
    routes: {"MIN_CREDIT": 8, "RELAYS": 2},
    server: {"HELLO_TIMEOUT_S": 10.0, "WATCH_INTERVAL_S": 1.0},
    spares: {"STOP_GRACE_S": 1.0},
    turns: {"NUMBERS_PER_DRIVER": 1 << 40},
    toll: {"SAME_DEATHS": 3},
    workforce: {"ATTEMPTS_PER_DRIVER": 1000},
}


@pytest.mark.parametrize("module", NUMBERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_drivers_numbers_are_these(module):
    assert {name: vars(module)[name] for name in NUMBERS[module]} == NUMBERS[module]


def test_the_drivers_times_are_these():
    found = DriverSettings()
    assert {field.name: getattr(found, field.name) for field in fields(found) if field.name != "limits"} == {
        "broken_agent_s": 1.5,
        "broken_worker_s": 1.5,
        "restart_delay_s": 0.2,
        "restart_delay_max_s": 10.0,
        "spare_calm_s": 2.0,
        "spare_delay_max_s": 60.0,
        "stall_notice_s": 10.0,
        "first_stall_notice_s": 30.0,
        "stall_deadline_s": 60.0,
        "step_notice_factor": 10.0,
        "step_notice_min_s": 30.0,
        "save_timeout_s": 120.0,
        "prepare_timeout_s": 600.0,
        "commit_timeout_s": 5.0,
        "dismiss_grace_s": 2.0,
        "gang_checkpoint_timeout_s": 600.0,
        "linger_s": 20.0,
        "profile_interval_s": 30.0,
        "report_timeout_s": 5.0,
        "report_tries": 5,
        "plan_timeout_s": 60.0,
    }
