"""The numbers that the operator's code has beside its settings, by hand: how often, how late, how many. Each stands in
the code with its reason; here it is read once more by somebody who changes it.
"""

import importlib

import pytest

NUMBERS: dict[str, dict[str, float]] = {
    "clients.api_errors": {"MAX_SENTENCE": 500},
    "clients.cache": {"MOST_DOUBTS": 16_384},
    "clients.driver": {
        "RETRY_MIN_S": 0.1,
        "RETRY_MAX_S": 2.0,
        "LAST_WORD_S": 60.0,
        "FIRST_REPORT_S": 60.0,
        "LOOK_S": 1.0,
    },
    "clients.kube": {"PAGE": 100, "RETRY_MIN_S": 0.2, "MAX_LINE_BYTES": 32 << 20, "CONNECTIONS": 48},
    "clients.reflector": {
        "RETRY_MIN_S": 0.2,
        "RETRY_MAX_S": 30.0,
        "STEADY_S": 1.0,
        "SERVER_TIMEOUT_S": 300,
        "TOMBSTONES": 4096,
    },
    "clients.scheduler": {"AT_ONCE": 8, "PATIENCE_S": 2.0, "AWAY_S": 5.0},
    "handlers.known": {
        "ECHO_S": 10.0,
        "LATE_S": 10.0,
        "BEAT_S": 5.0,
        "LISTED_S": 30.0,
        "TICK_S": 5.0,
        "OWN_JOBS": 4096,
    },
    "handlers.probes": {"PATIENCE": 2.0},
    "handlers.rljobs": {"STOP_TIMEOUT_S": 2.0},
    "leading": {"FIRST_LIST_S": 120.0, "TRIM_S": 30.0},
    "manifests.metadata": {"HASH_LENGTH": 16, "MAX_POD_MESSAGE": 500},
    "manifests.pods": {"MIN_SHM_BYTES": 64 << 20},
    "policies.failure": {"UNKNOWN_EXIT": 255, "KILLED": 137},
    "policies.restart": {"MAX_ENTRIES": 1000},
    "reconcile.draft": {"MAX_MESSAGE": 4000},
    "reconcile.examining": {"MAX_SHOWN": 500},
    "reconcile.events": {"MESSAGE_CHARS": 500},
    "reconcile.loop": {
        "WORKERS": 24,
        "GOOD_NEWS_S": 1.0,
        "FINISHED_S": 2.0,
        "FINISHED_PER_S": 1.0,
        "TOO_MANY_SILENT": 3,
        "DOUBTS_TOLD_S": 60.0,
        "PROGRESS_PER_S": 20,
    },
    "reconcile.plans": {"PLANS_IN_VAIN": 8},
    "reconcile.queue": {"SLACK": 64},
}


@pytest.mark.parametrize("module", NUMBERS)
def test_the_operators_numbers_are_these(module):
    found = vars(importlib.import_module(f"rlinf_operator.{module}"))
    assert {name: found[name] for name in NUMBERS[module]} == NUMBERS[module]
