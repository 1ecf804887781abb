"""The rule of turns against every state of a small job: from each of them a step can still be made.

The explorer (tests.fakes.turns_model) also holds that no lease set is ever held by two roles, no unit is lost, nobody
who is well is killed, and no worker has two orders on its way.
"""

import pytest

from rlinf_worker.turns import rule
from tests.fakes.turns_model import Job, explore

pytestmark = pytest.mark.timeout(300)  # 100,000 states take 20 s of CPU, which other work may make minutes


@pytest.mark.parametrize("units", [2, pytest.param(3, marks=pytest.mark.long("explores every state of three units"))])
def test_without_faults_every_state_leads_to_a_step(units):
    found = explore(Job(units=units, faults=0))
    assert not found.stuck
    assert found.states > 2000


def test_a_role_that_leaves_so_fast_that_it_says_so_only_afterwards_blocks_nobody():
    assert not explore(Job(faults=0, quiet=True)).stuck


def test_a_role_that_loads_beside_the_last_work_of_another_blocks_nobody():
    assert not explore(Job(faults=0, preload=True)).stuck


@pytest.mark.parametrize("units", [2, pytest.param(3, marks=pytest.mark.long("explores every state of three units"))])
def test_a_role_that_waits_for_a_quarter_does_not_wait_for_ever(units):
    assert not explore(Job(units=units, faults=0, counted=False, fed_inside=False)).stuck


def test_the_explorer_finds_a_standstill_where_patience_has_no_end(monkeypatch):
    """One unit waits for a rollout that gave its turn back idle, the others need it in the same round."""
    monkeypatch.setattr(rule, "is_patience_needed", lambda lease, state: False)
    found = explore(Job(units=3, faults=0, counted=False, fed_inside=False))
    assert found.stuck
    assert found.steps > 0, "it goes well for a while"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"counted": False, "fed_inside": False},
        *(
            pytest.param({"overtakes": True, **options}, marks=pytest.mark.long("ten times as many states"))
            for options in ({}, {"counted": False, "fed_inside": False})
        ),
    ],
)
def test_a_turn_that_is_told_to_end_at_any_time_blocks_nobody(options):
    assert not explore(Job(faults=0, ends=True, **options)).stuck


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.long("explores every state once more"))
            for options in ({"quiet": True}, {"preload": True}, {"counted": False, "fed_inside": False})
        ),
    ],
)
def test_roles_that_had_slots_to_themselves_come_to_take_turns_on_them(options):
    """A plan puts them into sets while each is loaded: nobody else loads before all of another role have left."""
    assert not explore(Job(faults=0, were_apart=True, **options)).stuck


def test_the_explorer_finds_a_standstill_where_nobody_out_of_turn_is_told_to_leave(monkeypatch):
    monkeypatch.setattr(rule, "_out_of_turn", lambda lease, state, actions: state)
    assert explore(Job(faults=0, were_apart=True)).stuck


@pytest.mark.long("explores every state with a fault in each of them, of roles that come to take turns")
def test_a_death_while_roles_come_to_take_turns_leaves_every_state_with_a_way_to_a_step():
    assert not explore(Job(faults=1, were_apart=True)).stuck


@pytest.mark.slow("explores every state with a fault in each of them")
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.long("explores every state with a fault in each once more"))
            for options in ({"preload": True, "quiet": True}, {"counted": False, "fed_inside": False})
        ),
    ],
)
def test_a_death_or_a_hang_in_any_state_leaves_every_state_with_a_way_to_a_step(options):
    found = explore(Job(faults=1, **options))
    assert not found.stuck
    assert found.states > 20_000
