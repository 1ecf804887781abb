"""What workers leave of units: whoever has the unit next is given it, within a bound, and it is forgotten in time."""

from typing import Any

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.driver import partials
from rlinf_worker.driver.partials import Partials
from rlinf_worker.queues.units import Age, UnitId
from tests.builders_driver import make_job
from tests.fakes.driver_world import World


def uid(key: str) -> UnitId:
    return UnitId(0, key)


def test_the_last_word_counts_and_what_nobody_speaks_of_goes_first(monkeypatch):
    monkeypatch.setattr(partials, "MAX_BYTES", 10)
    kept = Partials()
    for key, text in (("a", b"1234"), ("b", b"1234"), ("a", b"12"), ("c", b"12345")):
        kept.keep(uid(key), Age(0, 1), text)
    assert [kept.of(uid(key)) for key in "abc"] == [b"12", b"", b"12345"]
    kept.keep(uid("d"), Age(0, 2), b"x" * 11)
    assert len(kept) == 0, "it has no room at all"
    kept.keep(uid("e"), Age(0, 2), b"x" * 10)
    kept.close(Age(0, 1))
    assert len(kept) == 1
    kept.close(Age(0, 2))
    assert (len(kept), kept._bytes) == (0, 0)


async def begun() -> tuple[World, str, str]:
    """A world in which env/0 holds a ticket; its key, and what the queue is called."""
    world = World(make_job(envs=2, slices=2, steps=4))
    await world.run_until(lambda: bool(world.driver.job.ledger.open_steps))
    core = world.driver.exchange.queue("segments").core

    def holds() -> list[str]:
        return [e.unit.key for e in core.book.loads.of(WorkerId("env/0")) if e.state.value == "held"]

    await world.run_until(lambda: bool(holds()))
    return world, holds()[0], "segments"


def heard(world: World, worker: str, **said: Any) -> None:
    world.driver.on_worker_message(WorkerId(worker), pb.WorkerMessage(partial=pb.Partial(**said)))


async def test_whoever_is_given_a_unit_next_is_given_what_there_is_of_it():
    world, key, channel = await begun()
    heard(world, "env/0", channel=channel, key="another", branch=0, json=b"[8]")
    heard(world, "env/0", channel=channel, key=key, branch=0, json=b"[1]")
    heard(world, "env/1", channel=channel, key=key, branch=0, json=b"[9]")  # which does not hold it
    queue = world.driver.exchange.queue(channel)
    assert len(queue._partials) == 1
    told = list[pb.Unit]()
    tell = world.driver.job.sessions.tell

    def listening(worker: WorkerId, **kind: Any) -> None:
        if (assign := kind.get("assign")) is not None:
            told.extend(assign.units)
        tell(worker, **kind)

    world.driver.job.sessions.tell = listening  # type: ignore[method-assign]
    world.kill("env/0")
    await world.run_until(lambda: any(unit.key == key for unit in told))
    assert [(unit.key, unit.partial) for unit in told if unit.partial] == [(key, b"[1]")]
    await world.run()
    assert len(queue._partials) == 0, "its step has committed"


async def test_a_unit_that_is_acknowledged_leaves_nothing():
    world, key, channel = await begun()
    heard(world, "env/0", channel=channel, key=key, branch=0, json=b"[1]")
    queue = world.driver.exchange.queue(channel)
    queue.acked(WorkerId("env/0"), pb.Keys(channel=channel, keys=[key], branch=0))
    assert len(queue._partials) == 0


async def test_of_a_branch_that_is_void_nothing_is_kept():
    world, key, channel = await begun()
    heard(world, "env/0", channel=channel, key=key, branch=0, json=b"[1]")
    world.driver.exchange.cancel(0)
    assert len(world.driver.exchange.queue(channel)._partials) == 0
