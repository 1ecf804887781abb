"""The same sequence of conditions and the same end, whether a job runs under `rljob run` or on a real cluster."""

import pytest

from tests.conformance.recorder import normal
from tests.conformance.scenario import Outcome, Scenario, beside_a_sidecar, like
from tests.conformance.scenarios import (
    BEGINNINGS,
    EDITS,
    FAILURES,
    IN_MAKE_TEST,
    PAUSES_AND_ENDS,
    RULES,
    SCENARIOS,
    SIDECARS,
)

BATCH_S = 1500
"""All scenarios of a back end run before its first test: their own waits bound each of them."""
BACKENDS = ["local", *(pytest.param(name, marks=pytest.mark.cluster) for name in ("cluster", "injected"))]
pytestmark = pytest.mark.timeout(BATCH_S)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("backend", BACKENDS, scope="session")
def test_conformance(scenario: Scenario, backend: str, outcome: Outcome):
    assert not outcome.error, outcome.story()
    for label, alone in scenario.expected.items():
        expected = beside_a_sidecar(alone) if backend == "injected" else alone
        assert outcome.transitions[label] == normal([[change] for change in expected.transitions]), outcome.story()
        assert outcome.ends[label] == like(expected.end, outcome.ends[label]), outcome.story()


@pytest.mark.parametrize("backend", BACKENDS[1:], scope="session")
def test_the_operator_asks_for_nothing_that_its_rights_refuse(
    backend: str, outcomes: dict[str, Outcome], refused: list[str]
):
    assert refused == [], f"in the course of {sorted(outcomes)}"


@pytest.mark.parametrize("kind", [BEGINNINGS, PAUSES_AND_ENDS, EDITS, FAILURES, RULES, SIDECARS])
def test_make_test_has_a_scenario_of_each_kind(kind: tuple[Scenario, ...]):
    assert IN_MAKE_TEST & {scenario.name for scenario in kind}
    assert {scenario.name for scenario in SCENARIOS} >= IN_MAKE_TEST
