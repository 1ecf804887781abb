"""The same sequence of conditions and the same end, whether a job runs under `rljob run` or on a real cluster."""

import pytest

from tests.conformance.recorder import normal
from tests.conformance.scenario import Outcome, Scenario, beside_a_sidecar, like
from tests.conformance.scenarios import (
    BEGINNINGS,
    EDITS,
    FAILURES,
    IN_MAKE_TEST,
    IN_PLAIN_PODS,
    ON_BACKEND,
    PAUSES_AND_ENDS,
    RULES,
    SCENARIOS,
    SIDECARS,
)

BATCH_S = 1500
"""All scenarios of a back end run before its first test: their own waits bound each of them."""
ON_A_CLUSTER = [pytest.param(name, marks=pytest.mark.cluster) for name in ON_BACKEND if name != "local"]
CASES = [
    pytest.param(
        backend, scenario, id=f"{backend}-{scenario.name}", marks=() if backend == "local" else pytest.mark.cluster
    )
    for backend, scenarios in ON_BACKEND.items()
    for scenario in scenarios
]
pytestmark = pytest.mark.timeout(BATCH_S)


@pytest.mark.parametrize(("backend", "scenario"), CASES, scope="session")
def test_conformance(scenario: Scenario, backend: str, outcome: Outcome):
    assert not outcome.error, outcome.story()
    for label, alone in scenario.expected.items():
        expected = beside_a_sidecar(alone) if backend == "injected" else alone
        assert outcome.transitions[label] == normal([[change] for change in expected.transitions]), outcome.story()
        assert outcome.ends[label] == like(expected.end, outcome.ends[label]), outcome.story()


@pytest.mark.parametrize("backend", ON_A_CLUSTER, scope="session")
def test_the_operator_asks_for_nothing_that_its_rights_refuse(
    backend: str, outcomes: dict[str, Outcome], refused: list[str]
):
    assert refused == [], f"in the course of {sorted(outcomes)}"


@pytest.mark.parametrize("kind", [BEGINNINGS, PAUSES_AND_ENDS, EDITS, FAILURES, RULES, SIDECARS])
def test_make_test_has_a_scenario_of_each_kind(kind: tuple[Scenario, ...]):
    assert IN_MAKE_TEST & {scenario.name for scenario in kind}
    assert {scenario.name for scenario in SCENARIOS} >= IN_MAKE_TEST


def test_each_scenario_is_run_on_both_back_ends_and_with_an_injected_sidecar_once():
    names = {backend: [scenario.name for scenario in found] for backend, found in ON_BACKEND.items()}
    assert sorted(names["local"]) == sorted({scenario.name for scenario in SCENARIOS})
    assert set(names["cluster"]) == IN_PLAIN_PODS
    same = [name.removesuffix("-beside-a-sidecar") for name in names["local"]]
    assert sorted(names["injected"]) == sorted(set(same)), "but for those that are injected by themselves"
