"""Who is there, and which routes that asks for."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from rlinf_api.names import WorkerId
from rlinf_worker.driver import routes
from rlinf_worker.driver.members import Members, WorkerRecord, WorkerState
from rlinf_worker.driver.routes import (
    concerns_itself_alone,
    homes,
    homes_meanwhile,
    pairs,
    partners,
    relays,
    wanted,
    wanted_of,
)
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology, WeightsSpec
from tests.builders_driver import make_job
from tests.fakes.driver_world import World

ACTIONS = CycleSpec(channel="actions", asker="env", answerer="rollout")
TOPOLOGY = Topology(cycles=(ACTIONS,), weights=(WeightsSpec(producer="actor", consumer="rollout"),))


def members(**job) -> Members:
    found = Members()
    found.adopt(make_job(**job).placement)
    return found


@given(askers=st.integers(1, 12), answerers=st.integers(1, 12))
def test_a_cycle_leaves_nobody_out_and_each_of_the_many_has_one(askers, answerers):
    there = pairs(askers, answerers)
    assert {a for a, _ in there} == set(range(askers))
    assert {b for _, b in there} == set(range(answerers))
    assert len(there) == max(askers, answerers)
    assert len(pairs(askers, answerers, anybody=True)) == askers * answerers


@given(
    askers=st.integers(1, 9), answerers=st.integers(1, 9), anybody=st.booleans(), down=st.sets(st.integers(0, 17)),
    moved=st.integers(0, 17),
)  # fmt: skip
def test_the_routes_of_one_are_those_of_all_that_it_is_an_end_of(askers, answerers, anybody, down, moved):
    there, topology = members(envs=askers, rollouts=answerers), Topology(cycles=(replace(ACTIONS, anybody=anybody),))
    workers = [record for record in there.workers.values() if record.placed.role != "actor"]
    for number, record in enumerate(workers):
        record.state, record.attempt = (WorkerState.DOWN if number in down else WorkerState.READY), number + 1
    one = workers[moved % len(workers)].placed.id
    ends = {route for route in wanted(topology, there) if one in (route.producer, route.consumer)}
    assert wanted_of(topology, there, [one]) == ends
    assert concerns_itself_alone(topology, there, [one])


def test_who_has_weights_or_comes_beside_a_plan_concerns_others():
    there = two_of_each()
    found = {str(w): concerns_itself_alone(TOPOLOGY, there, [w]) for w in there.workers}
    assert {name for name, alone in found.items() if alone} == {"env/0", "env/1"}
    assert not concerns_itself_alone(TOPOLOGY, there, [WorkerId("env/0"), WorkerId("rollout/0")])
    assert not concerns_itself_alone(TOPOLOGY, there, [WorkerId("env/9")]), "it is in no plan any more"
    there.prepare([], pods=[])
    assert concerns_itself_alone(TOPOLOGY, there, [WorkerId("env/0")])
    there.prepare([there.workers[WorkerId("env/1")].placed], pods=[])
    assert not concerns_itself_alone(TOPOLOGY, there, [WorkerId("env/0")])


async def test_of_one_that_dies_and_comes_back_nobody_looks_at_all(monkeypatch):
    world = World(make_job(envs=3, steps=6))
    await world.run_until(lambda: world.driver.job.ledger.committed >= 1)
    looked = list[str]()
    monkeypatch.setattr(world, "_check_routes", lambda: None)
    monkeypatch.setattr(routes, "wanted", lambda *_, **__: looked.append("all"))
    world.kill("env/1")
    attempt = world.attempts["env/1"]
    record = world.driver.job.members.workers[WorkerId("env/1")]
    await world.run_until(lambda: record.attempt > attempt and record.state is WorkerState.READY)
    assert looked == []
    assert any("env/1" in (route.producer, route.consumer) for route in world.driver.exchange.routes._numbers)


def test_all_are_ready_when_nobody_is_awaited_whoever_was_last():
    there = members(envs=3)
    assert not there.all_ready()
    for record in there.workers.values():
        record.state = WorkerState.READY
    assert there.all_ready()
    there.workers[WorkerId("env/1")].state = WorkerState.CONNECTED
    assert not there.all_ready()
    assert there.all_ready(besides={WorkerId("env/1")})
    assert not there.all_ready(besides=set(there.workers)), "nobody is left"
    there.workers[WorkerId("env/0")].state = WorkerState.DOWN
    assert not there.all_ready(besides={WorkerId("env/1")})
    assert not Members().all_ready()


def test_where_anybody_answers_each_asker_has_all_that_are_there():
    there, anybody = two_of_each(), Topology(cycles=(replace(ACTIONS, anybody=True),))
    assert len(wanted(anybody, there)) == 4
    there.workers[WorkerId("rollout/1")].state = WorkerState.DOWN
    assert {(r.producer, r.consumer) for r in wanted(anybody, there)} == {
        ("env/0", "rollout/0"),
        ("env/1", "rollout/0"),
    }


def test_weights_go_from_rank_0_to_every_consumer_and_holders_are_told_of_each_other():
    there = two_of_each()
    found = {(r.producer, r.consumer) for r in wanted(Topology(weights=TOPOLOGY.weights), there)}
    relayed = {("rollout/0", "rollout/1"), ("rollout/1", "rollout/0")}
    assert found == {("actor/0", "rollout/0"), ("actor/0", "rollout/1")} | relayed
    there.workers[WorkerId("actor/0")].state = WorkerState.DOWN
    assert {(r.producer, r.consumer) for r in wanted(TOPOLOGY, there) if r.channel == "weights"} == relayed


def test_a_worker_has_links_with_its_ends_of_cycles_of_weights_and_of_queues():
    queue = QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True)
    topology, placement = replace(TOPOLOGY, queues=(queue,)), make_job(envs=2).placement
    assert partners(topology, placement=placement, of=WorkerId("env/1")) == {"rollout/0", "actor/0"}
    assert partners(topology, placement=placement, of=WorkerId("rollout/0")) == {"env/0", "env/1", "actor/0"}


@given(consumers=st.integers(0, 9))
def test_each_consumer_of_weights_is_told_two_others_and_each_is_told_of_by_two(consumers):
    found = relays(consumers)
    assert len(set(found)) == len(found) == consumers * min(2, max(0, consumers - 1))
    assert all(holder != asker for holder, asker in found)
    for one in range(consumers):
        assert sum(a == one for a, _ in found) == sum(b == one for _, b in found) == min(2, consumers - 1)


def test_only_routes_with_both_ends_present_are_wanted():
    there = members(envs=2)
    for wid in ("env/0", "rollout/0"):
        there.workers[WorkerId(wid)].state, there.workers[WorkerId(wid)].attempt = WorkerState.CONNECTED, 3
    routes = wanted(TOPOLOGY, there)
    assert sorted(routes) == [("actions", "env/0", 3, "rollout/0", 3)]
    there.workers[WorkerId("env/0")].attempt = 4
    assert not routes & wanted(TOPOLOGY, there), "a next life is another route"


@given(affinities=st.integers(0, 30), consumers=st.integers(1, 8), data=st.data())
def test_units_of_those_that_are_away_are_shared_out_and_nobody_elses_move(affinities, consumers, data):
    away = data.draw(st.frozensets(st.integers(0, consumers - 1), max_size=consumers - 1))
    usual, meanwhile = homes(affinities, consumers), homes_meanwhile(affinities, consumers, away)
    assert not away & set(meanwhile)
    assert all(now == before for now, before in zip(meanwhile, usual, strict=True) if before not in away)
    loads = [meanwhile.count(c) for c in range(consumers) if c not in away]
    assert max(loads) - min(loads) <= 1
    assert homes_meanwhile(affinities, consumers, frozenset(range(consumers))) == usual, "there is nobody else"


def test_another_has_the_routes_of_one_that_is_away():
    there = two_of_each()
    there.workers[WorkerId("rollout/1")].state = WorkerState.DOWN
    assert ends(there) == {("env/0", "rollout/0")}
    away = frozenset({WorkerId("rollout/1")})
    with_stand_in = ends(there, away=away)
    assert with_stand_in == {("env/0", "rollout/0"), ("env/1", "rollout/0")}


def test_who_takes_over_units_needs_no_routes_of_the_one_that_is_away():
    there = two_of_each()
    there.workers[WorkerId("env/1")].state = WorkerState.DOWN
    away, rehomed = frozenset({WorkerId("env/1")}), frozenset({"env"})
    assert ends(there, away=away, rehomed=rehomed) == ends(there)


def two_of_each() -> Members:
    found = members(envs=2)
    first = found.workers[WorkerId("rollout/0")]
    placed = replace(first.placed, id=WorkerId("rollout/1"), rank=1)
    found.workers[placed.id] = WorkerRecord(placed)
    for record in found.workers.values():
        record.state = WorkerState.READY
    return found


def ends(there: Members, **options) -> set[tuple[str, str]]:
    return {(r.producer, r.consumer) for r in wanted(Topology(cycles=(ACTIONS,)), there, **options)}


def test_a_worker_that_stays_in_the_next_plan_keeps_its_life():
    there = members(envs=2)
    there.workers[WorkerId("env/0")].attempt = 5
    there.adopt(make_job(envs=1, revision=2).placement)
    assert there.workers[WorkerId("env/0")].attempt == 5
    assert "env/1" not in there.workers


def test_what_is_missing_is_named_pods_first_then_workers_of_the_pods_that_are_there():
    there = members(envs=1)
    there.pods[("sim", 0)].attached = True
    there.pods[("sim", 0)].pod, there.pods[("sim", 0)].node = "j-sim-0-a1", "n7"
    assert there.missing() == ["agent of pod gpu-0", "worker env/0 in pod j-sim-0-a1 on node n7: down"]
    there.workers[WorkerId("env/0")].state = WorkerState.READY
    assert there.missing() == ["agent of pod gpu-0"]
    assert not there.all_ready()


def test_only_workers_whose_agent_is_there_and_whose_pause_is_over_may_start():
    there = members(envs=2)
    there.pods[("sim", 0)].attached = True
    there.workers[WorkerId("env/1")].start_at = 10.0
    assert [r.placed.id for r in there.next_start(9.9)] == ["env/0"]
    assert [r.placed.id for r in there.next_start(10.0)] == ["env/0", "env/1"]


@given(st.integers(1, 200), st.integers(1, 40))
def test_one_consumer_more_moves_its_own_share_and_no_other(affinities, consumers):
    before, after = homes(affinities, consumers), homes(affinities, consumers + 1)
    moved = [a for a in range(affinities) if before[a] != after[a]]
    assert all(after[a] == consumers for a in moved)
    assert len(moved) == affinities // (consumers + 1)
    loads = [after.count(c) for c in range(consumers + 1)]
    assert max(loads) - min(loads) <= 1
