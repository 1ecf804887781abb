"""A role that does not commit steps and forms a gang all the same, as a user's kind may: its ranks begin together."""

from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.driver.changes import between
from rlinf_worker.driver.topology import QueueSpec, Topology
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_roles import ROLES, SimEnv
from tests.fakes.driver_world import World
from tests.unit.rlinf_worker.driver.test_switch import changed, check, elastic


class GangEnv(SimEnv):
    """Ready in the roster that has this life of it, and in no other."""

    def load(self) -> None:
        self.roster = 0
        if self.size == 1:
            super().load()
            return
        self.waiting, self.asked, self.unanswered_questions = [], 0, set()
        self.unanswered["join"] = pb.WorkerMessage(join=pb.Join())
        self.tell(join=self.unanswered["join"].join)

    def on_roster(self, roster: pb.Roster) -> None:
        lives = [(m.endpoint.worker, m.endpoint.attempt) for m in roster.members]
        if self.life in lives and self.unanswered.pop("join", None) is not None:
            self.roster = roster.number
            self.say_ready()


def gang(world: World) -> list[Any]:
    return [worker for wid, worker in sorted(world.workers.items()) if wid.startswith("env/")]


@pytest.fixture(autouse=True)
def envs_are_a_gang(monkeypatch):
    monkeypatch.setitem(ROLES, "env", GangEnv)


@pytest.mark.parametrize("envs", [3, 1])
async def test_a_plan_that_changes_its_size_forms_it_anew(envs):
    world = await changed({"envs": envs})
    lives = {worker.life for worker in gang(world)}
    await world.run()
    check(world)
    assert world.driver.job.revision == 2
    assert len(gang(world)) == envs
    assert lives.isdisjoint(worker.life for worker in gang(world))
    assert len({worker.roster for worker in gang(world)}) == 1
    assert world.driver.workforce.restarts == 0


async def test_a_rank_that_dies_takes_the_others_with_it():
    world = World(elastic(1))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    before = {worker.roster for worker in gang(world)}
    world.kill("env/1")
    await world.run()
    check(world)
    after = {worker.roster for worker in gang(world)}
    assert len(after) == 1
    assert after.isdisjoint(before)


def test_the_ranks_of_any_gang_are_all_kept_or_all_start_again():
    old, new = elastic(1).placement, elastic(2, envs=3).placement
    assert sorted(between(old, new, gang_roles=("actor",)).beside) == ["env/2"]
    found = between(old, new, gang_roles=("actor",), gangs={"env"})
    assert (sorted(found.after), sorted(found.gone), found.gang) == (
        ["env/0", "env/1", "env/2"],
        ["env/0", "env/1"],
        False,
    )
    same = between(old, elastic(2, micro_batch=1).placement, gang_roles=("actor",), gangs={"env"})
    assert (same.beside, same.after, same.gone) == (frozenset(),) * 3


def test_whoever_takes_rounds_is_a_gang_also_where_another_role_commits():
    job = make_job()
    driver = job.driver(Clock())
    driver.switch.first(job.plan, switches=1)
    kinds = (("segments", "", "env", False), ("scores", "env", "rollout", True), ("trajectories", "env", "actor", True))
    queues = [QueueSpec(channel=c, producer=p, consumer=to, rounds=rounds) for c, p, to, rounds in kinds]
    driver.declare(Topology(queues=tuple(queues)))
    assert [role for role in ("env", "rollout", "actor", "") if driver.gangs.is_gang(role)] == ["rollout", "actor"]
