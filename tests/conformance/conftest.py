"""Runs the chosen scenarios of a back end, several at once, before the first of its tests; each test judges one.

    outcome     of the scenario and the back end that the test is parametrised with
    refused     calls of the operator on the cluster that its rights refused, once all scenarios are over

`make test` runs on this machine a scenario of each kind (IN_MAKE_TEST); the others are slow there. On the cluster all
of them run with a sidecar in each pod (back end `injected`), and a few without one (`cluster`).

The cluster is that of tests/cluster: one for the whole test run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import worker_image
from tests.cluster.conftest import cluster
from tests.cluster.control_plane import refused_calls
from tests.conformance import scenario as scenarios
from tests.conformance.in_cluster import ClusterBackend, control_plane
from tests.conformance.local import LocalBackend
from tests.conformance.scenario import Outcome, Scenario
from tests.conformance.scenarios import IN_MAKE_TEST
from tests.conformance.world import Backend

__all__ = ["cluster"]


def pytest_itemcollected(item: pytest.Item) -> None:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    scenario = params.get("scenario")
    if params.get("backend") == "local" and isinstance(scenario, Scenario) and scenario.name not in IN_MAKE_TEST:
        item.add_marker(pytest.mark.slow("a whole job, of a kind of which make test has another"))


@pytest.fixture(scope="session")
def refused() -> list[str]:
    return []


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, backend: str, refused: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """By the scenario's name. What ran them has ended when they are handed out."""
    if backend == "local":
        return _run(LocalBackend(), _chosen(request, backend), tmp_path_factory.mktemp("local"))
    made = request.getfixturevalue("cluster")
    worker_image.load(made)
    folder = tmp_path_factory.mktemp("plane")
    shared = Path("/var/tmp") / f"rlinf-conformance-{os.getpid()}"  # pods may not look into pytest's own folder
    shared.mkdir(mode=0o755)
    try:
        with control_plane(made, folder) as plane:
            told = _run(ClusterBackend(made, plane, injects=backend == "injected"), _chosen(request, backend), shared)
            refused += refused_calls(plane.operator)
            return told
    finally:
        shutil.rmtree(shared, ignore_errors=True)


@pytest.fixture
def outcome(outcomes: dict[str, Outcome], scenario: Scenario) -> Outcome:
    return outcomes[scenario.name]


def _chosen(request: pytest.FixtureRequest, backend: str) -> list[Scenario]:
    """Those of the selected tests: `-k` runs one scenario alone."""
    calls: list[Any] = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return [p["scenario"] for p in calls if p.get("backend") == backend and isinstance(p.get("scenario"), Scenario)]


def _run(backend: Backend, chosen: Sequence[Scenario], folder: Path) -> dict[str, Outcome]:
    return asyncio.run(_run_all(backend, chosen, folder))


async def _run_all(backend: Backend, chosen: Sequence[Scenario], folder: Path) -> dict[str, Outcome]:
    room = asyncio.Semaphore(backend.at_once)
    outcomes: dict[str, Outcome] = {}

    async def one(scenario: Scenario) -> None:
        async with room:
            outcomes[scenario.name] = await scenarios.run(scenario, backend, folder / scenario.name)

    async with asyncio.TaskGroup() as together:
        for scenario in (s for s in chosen if not s.alone):
            together.create_task(one(scenario))
    for scenario in (s for s in chosen if s.alone):
        await one(scenario)
    return outcomes
