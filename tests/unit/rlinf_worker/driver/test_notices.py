"""What people are told of workers that are quiet, or do not reach others."""

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from tests.builders_driver import make_job
from tests.fakes.driver_world import World

ACTOR = WorkerId("actor/0")


async def test_a_pair_that_is_parted_is_an_event_now_and_then_and_in_the_message_while_it_lasts(monkeypatch):
    world, events = World(make_job(envs=1)), list[str]()
    await world.run_until(lambda: world.driver.job.begun)
    monkeypatch.setattr(world.driver.job, "event", lambda kind, message, **_: events.append(f"{kind}: {message}"))
    lost = pb.PeerLost(worker="env/0", attempt=1, reason="refused", units=pb.Keys(channel="trajectories", keys=["x"]))
    driver, said = world.driver, []
    for second in range(35):
        driver.on_worker_message(ACTOR, pb.WorkerMessage(peer_lost=lost))
        driver.notices.look(world.clock.now)
        said.append("actor/0 has not reached env/0" in driver.job.standing.message)
        if second == 10:
            assert "actor/0 has not reached env/0 for 10 s: refused" in driver.job.standing.message
        world.clock.now += 1
    assert said == [False] * 3 + [True] * 32
    assert events == ["peer-lost: actor/0 lost env/0 (attempt 1): refused"] * 2
    world.clock.now += 5
    driver.notices.look(world.clock.now)
    assert "not reached" not in driver.job.standing.message


async def test_three_of_the_pairs_that_are_parted_are_named_and_none_that_only_lacks_what_was_asked_for():
    world = World(make_job(envs=1))
    await world.run_until(lambda: world.driver.job.begun)
    for _ in range(5):
        world.clock.now += 1
        lost = [pb.PeerLost(worker=f"env/{n}", attempt=9, reason="refused", missing=n == 0) for n in range(5)]
        for said in lost:
            world.driver.on_worker_message(ACTOR, pb.WorkerMessage(peer_lost=said))
    world.driver.notices.look(world.clock.now)
    phrases = [f"actor/0 has not reached env/{n} for 4 s: refused" for n in (1, 2, 3)]
    assert world.driver.job.standing.message == "; ".join(phrases)
