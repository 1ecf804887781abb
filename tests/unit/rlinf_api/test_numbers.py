"""The numbers of the contract, by hand. Operator, scheduler and workers of several versions meet over them; manifests,
dashboards and policies outside of this repository repeat them.
"""

import importlib

import pytest

NUMBERS: dict[str, dict[str, float]] = {
    "declared": {"MIB": 1 << 20},
    "names": {
        "PROTOCOL": 1,
        "MAX_JOB_NAME": 40,
        "MAX_POOL_NAME": 12,
        "PORT_DRIVER_GRPC": 7070,
        "PORT_METRICS": 7072,
        "PORT_DATA_BASE": 7100,
        "POD_UID": 65532,
        "EXIT_OK": 0,
        "EXIT_USER_ERROR": 64,
        "EXIT_BUG": 70,
        "EXIT_RETRYABLE": 75,
        "EXIT_STALE": 76,
        "EXIT_TERMINATED": 143,
        "MAX_TERMINATION_BYTES": 4096,
    },
    "quantities": {"MOST": 2**63 - 1},
    "report": {"REPEATED_S": 10.0},
    "rpc": {"MAX_MESSAGE_BYTES": 16 << 20, "RESOLVE_TIMEOUT_S": 5.0},
    "sentences": {"MAX_SHOWN": 80},
    "slots": {"MAX_SLOTS": 100_000},
    "storable": {"MAX_SIZE": 3 << 20, "MAX_DEPTH": 100, "MAX_TOLD": 20},
}


@pytest.mark.parametrize("module", NUMBERS)
def test_the_contracts_numbers_are_these(module):
    found = vars(importlib.import_module(f"rlinf_api.{module}"))
    assert {name: found[name] for name in NUMBERS[module]} == NUMBERS[module]
