"""The clock is put back, by NTP or with another replica of the operator: what was written lies ahead of it."""

from tests.builders import World, ppo_job

HOUR_S = 3600.0


def ended_again() -> World:
    """sim-1 has ended twice; the second time its successor waits for its pause, when the clock is put back."""
    world = ppo_job().with_spec(failurePolicy={"maxRestarts": 20}).world().started()
    world.step()
    world.exited("math-sim-1-a1", 1).step()
    world.all_ready().exited("math-sim-1-a2", 1).step()
    assert "math-sim-1-a3" not in world.names()
    return world.later(-HOUR_S)


def test_a_pause_is_not_longer_by_what_the_clock_was_put_back():
    world = ended_again()
    world.step()
    assert "math-sim-1-a3" in world.names()


def test_pods_that_fail_from_then_on_have_their_pauses_nevertheless():
    world = ended_again()
    world.step()
    world.all_ready().exited("math-sim-1-a3", 1)
    decision = world.step()
    assert not decision.create_pods
    assert decision.requeue_after_s == 2.0
    world.later(2.0).step()
    assert "math-sim-1-a4" in world.names()
    assert len(world.status.restarts) == 3, "what lies ahead counts as before"
