"""The same sequence of conditions and the same end, whether a job runs under `rljob run` or on a real cluster."""

import pytest

from tests.conformance.recorder import normal
from tests.conformance.scenario import Outcome, Scenario, like
from tests.conformance.scenarios import SCENARIOS

BATCH_S = 1500
"""All scenarios of a back end run before its first test: their own waits bound each of them."""
BACKENDS = ["local", pytest.param("cluster", marks=pytest.mark.cluster)]
pytestmark = pytest.mark.timeout(BATCH_S)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("backend", BACKENDS, scope="session")
def test_conformance(scenario: Scenario, backend: str, outcome: Outcome):
    assert not outcome.error, outcome.story()
    for label, expected in scenario.expected.items():
        assert outcome.transitions[label] == normal([[change] for change in expected.transitions]), outcome.story()
        assert outcome.ends[label] == like(expected.end, outcome.ends[label]), outcome.story()
