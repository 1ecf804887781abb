"""The rule of turns against every state of a small job: from each of them a step can still be made.

The explorer (tests.fakes.turns_model) also holds that no lease set is ever held by two roles, no unit is lost, nobody
who is well is killed, and no worker has two orders on its way.
"""

import pytest

from tests.fakes.turns_model import Job, explore

pytestmark = pytest.mark.timeout(300)  # 100,000 states take 20 s of CPU, which other work may make minutes


@pytest.mark.parametrize("units", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_without_faults_every_state_leads_to_a_step(units):
    found = explore(Job(units=units, faults=0))
    assert not found.stuck
    assert found.states > 2000


def test_a_role_that_leaves_so_fast_that_it_says_so_only_afterwards_blocks_nobody():
    assert not explore(Job(faults=0, quiet=True)).stuck


def test_a_role_that_loads_beside_the_last_work_of_another_blocks_nobody():
    assert not explore(Job(faults=0, preload=True)).stuck


def test_the_explorer_finds_that_an_idle_role_must_give_its_turn_back():
    found = explore(Job(faults=0, rule_b=False))
    assert found.stuck
    assert found.steps == 0, "a rollout that waits for units holds the slots of the actor for ever"


@pytest.mark.parametrize("units", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_role_that_waits_for_a_quarter_does_not_wait_for_ever(units):
    assert not explore(Job(units=units, faults=0, counted=False, fed_inside=False)).stuck


def test_the_explorer_finds_that_a_role_must_not_wait_for_a_quarter_without_end():
    """One unit waits for a rollout that gave its turn back idle, the others need it in the same round."""
    found = explore(Job(units=3, faults=0, counted=False, fed_inside=False, patience=False))
    assert found.stuck
    assert found.steps > 0, "it goes well for a while"


@pytest.mark.slow
def test_the_explorer_finds_that_one_rank_alone_must_not_end_the_turn():
    """A rank that is idle leaves while the other is about to begin the collective, and waits for it there."""
    found = explore(Job(units=3, faults=0, whole_gang=False))
    assert found.stuck
    assert found.steps > 0, "it goes well for a while"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"preload": True, "quiet": True}, {"counted": False, "fed_inside": False}])
def test_a_death_or_a_hang_in_any_state_leaves_every_state_with_a_way_to_a_step(options):
    found = explore(Job(faults=1, **options))
    assert not found.stuck
    assert found.states > 20_000
