"""Turns in one real agent: sets that it runs alone, sets that it relays, and workers that do not let go."""

from typing import Any

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from tests.fakes.pod import running, start, until_metric


def lease_sets(*, by_driver: bool = False) -> agents_pb2.LeaseSets:
    turns = [agents_pb2.Turn(role=name, workers=[f"{name}/0"]) for name in ("env", "rollout")]
    return agents_pb2.LeaseSets(sets=[agents_pb2.LeaseSet(name="all", by_driver=by_driver, turns=turns)])


async def test_a_set_inside_the_pod_changes_hands_without_the_driver(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        assert (await driver.instruct(lease_sets=lease_sets())).ok
        await running(driver, worker="env/0")
        await running(driver, worker="rollout/0")
        await until_metric(one, "rlinf_agent_turns_total", at_least=2.0)
        await driver.instruct(stop=agents_pb2.Stop(worker="env/9"))  # whatever was said before this answer is here
        assert not [m for _, m in driver.seen if m.WhichOneof("kind") == "turn"]


async def test_who_does_not_leave_the_slots_is_killed_and_the_next_is_granted(pod):
    one = pod(turn_release_s=0.3)
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        assert (await driver.instruct(lease_sets=lease_sets())).ok
        assert (await driver.instruct(start=start(worker="env/0", stuck=True))).ok
        exited = (await driver.wait("exited")).exited
        assert exited.failure.reason == "Hung"
        assert exited.failure.message.endswith("lease set 'all' not released within 0.3 s")
        assert not exited.asked
        await running(driver, worker="rollout/0")
        await until_metric(one, "rlinf_agent_turns_total", at_least=2.0)


async def test_turns_of_a_set_over_pods_are_the_drivers_and_stand_in_the_hello(pod):
    one = pod()
    async with one.driver(attempt=1) as driver:
        one.start(driver)
        await driver.wait("hello")
        assert (await driver.instruct(lease_sets=lease_sets(by_driver=True))).ok
        await running(driver)
        said = (await driver.wait("turn", lambda m: m.turn.standing != "away")).turn  # away: before it had asked
        assert (said.lease_set, said.worker, said.attempt, said.standing) == ("all", "env/0", 1, "wants")
        order: dict[str, Any] = {"lease_set": "all", "worker": "env/0", "kind": "grant", "number": 7}
        driver.send(turn=agents_pb2.TurnOrder(attempt=1, **order))
        await driver.wait("turn", lambda m: (m.turn.standing, m.turn.seen) == ("holds", 7))
        stale = await driver.instruct(turn=agents_pb2.TurnOrder(attempt=2, **order))
        assert not stale.ok
        assert "got attempt 2, wanted attempt 1" in stale.error
    async with one.driver(attempt=2, port=driver.port) as second:
        hello = (await second.wait("hello")).hello
        assert [(t.worker, t.standing, t.seen) for t in hello.turns] == [("env/0", "holds", 7)]
        kill = agents_pb2.TurnOrder(lease_set="all", worker="env/0", attempt=1, kind="kill")
        second.send(turn=kill)
        await second.wait("turn", lambda m: m.turn.standing == "away")  # its slots are free
