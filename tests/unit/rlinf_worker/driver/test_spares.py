"""Warm spares under a clock that the test turns: which are started, taken, lost and stopped."""

import json
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_worker.driver.members import PodKey, WorkerState
from rlinf_worker.driver.spares import Spares, SpareState
from tests.builders_driver import Clock, Job, make_job

SIM, GPU = ("sim", 0), ("gpu", 0)
ENV, ACTOR = names.spare_id("env", 0), names.spare_id("actor", 0)


class Site:
    """Two env workers in pod sim-0, a rollout and an actor in gpu-0; all are ready."""

    def __init__(self, *, driver_attempt: int = 1, max_restarts: int = 20, **spares: int) -> None:
        made = make_job(envs=2, max_restarts=max_restarts)
        roles = [r.model_copy(update={"spares": spares.get(r.name, 0)}) for r in made.spec.roles]
        spec = made.spec.model_copy(update={"roles": roles})
        self.clock, self.above = Clock(), (driver_attempt - 1) * 1000
        self.job = Job(spec, made.plan).known(self.clock)
        self.job.instruct = self._instruct  # type: ignore[method-assign, assignment]
        self.job.event = lambda kind, message, **fields: self.events.append(kind)  # type: ignore[method-assign]
        self.members = self.job.members
        self.told: list[tuple[PodKey, str, str, int]] = []
        self.events: list[str] = []
        self.placement = made.placement
        self.members.adopt(made.placement)
        for pod in self.members.pods.values():
            pod.attached = True
        self.ready(True)
        self.spares = Spares(self.job)

    def _instruct(self, key: PodKey, **kind: Any) -> int:
        ((what, said),) = kind.items()
        self.told.append((key, what, said.worker, said.attempt if what == "start" else 0))
        if what == "start":
            assert said.spare
            assert not said.slots
            assert json.loads(said.flow_json)["name"] == "ppo"
        return len(self.told)

    def ready(self, value: bool) -> None:
        for record in self.members.workers.values():
            record.state = WorkerState.READY if value else WorkerState.DOWN

    def later(self, seconds: float) -> list[tuple[PodKey, str, str, int]]:
        """What was told meanwhile, by a tick at each end."""
        self.told.clear()
        self.spares.advance(attempts_from=self.above)
        self.clock.now += seconds
        self.spares.advance(attempts_from=self.above)
        return list(self.told)

    def warm(self, key: PodKey, spare: WorkerId) -> None:
        self.spares.heard(key, agents_pb2.Progress(worker=spare, phase="load"))
        self.spares.heard(key, agents_pb2.Progress(worker=spare, phase="idle"))

    def exit(self, key: PodKey, spare: WorkerId, attempt: int, *, asked: bool = False) -> None:
        self.spares.exited(key, agents_pb2.WorkerExited(worker=spare, attempt=attempt, exit_code=137, asked=asked))

    def take(self, worker: str, *, failures: int = 1) -> str:
        record = self.members.workers[WorkerId(worker)]
        record.failures = failures
        return self.spares.take(record)

    def state(self, key: PodKey, spare: WorkerId) -> SpareState:
        return self.spares._records[key, spare].state


def warm_actor(**options: Any) -> Site:
    site = Site(actor=1, **options)
    assert site.later(2.1) == [(GPU, "start", ACTOR, 1)]
    site.warm(GPU, ACTOR)
    return site


def test_a_job_that_asks_for_none_has_none():
    site = Site()
    assert site.later(60.0) == []
    assert site.take("actor/0") == ""


def test_spares_begin_one_by_one_in_a_pod_when_all_workers_have_been_ready_for_a_while():
    site = Site(env=2, actor=1)
    assert site.later(1.9) == [], "the workers' own first steps come first"
    assert site.later(0.2) == [(GPU, "start", ACTOR, 1), (SIM, "start", ENV, 1)]
    assert site.later(5.0) == [], "imports of two would take each other's CPU"
    site.warm(SIM, ENV)
    assert site.later(0.1) == [(SIM, "start", names.spare_id("env", 1), 1)]


def test_while_a_worker_is_away_or_a_plan_is_prepared_none_begins():
    site = Site(actor=1)
    site.ready(False)
    assert site.later(10.0) == []
    site.ready(True)
    site.members.prepare([site.placement.workers[0]], pods=[])
    assert site.later(10.0) == []
    site.members.prepared.clear()
    assert site.later(2.1) == [(GPU, "start", ACTOR, 1)]


def test_a_worker_whose_work_others_do_keeps_no_spare_from_beginning():
    site = Site(actor=1)
    env = WorkerId("env/1")
    site.members.workers[env].state = WorkerState.DOWN
    assert site.later(10.0) == []
    site.members.away = frozenset({env})
    assert site.later(2.1) == [(GPU, "start", ACTOR, 1)]


def test_a_pod_has_no_more_spares_of_a_role_than_workers():
    site = Site(actor=16)
    site.later(2.1)
    site.warm(GPU, ACTOR)
    assert site.later(60.0) == []


def test_a_lost_worker_takes_a_warm_spare_of_its_own_pod_and_role_and_another_is_started_in_the_calm():
    site = warm_actor()
    assert site.take("env/0") == ""
    assert site.take("rollout/0") == ""
    assert site.take("actor/0") == ACTOR
    assert site.take("actor/0") == "", "there was one"
    assert site.spares.taken == {"actor": 1}
    site.ready(False)
    assert site.later(30.0) == []
    site.ready(True)
    assert site.later(2.1) == [(GPU, "start", ACTOR, 2)]
    assert site.events == ["spare-warm", "spare-taken"]


def test_one_that_still_imports_is_not_taken():
    site = Site(actor=1)
    site.later(2.1)
    site.spares.heard(GPU, agents_pb2.Progress(worker=ACTOR, phase="load"))
    assert site.take("actor/0") == ""


def test_a_worker_that_failed_before_it_was_ready_starts_from_nothing():
    site = warm_actor()
    assert site.take("actor/0", failures=2) == ""
    assert site.state(GPU, ACTOR) is SpareState.WARM


def test_a_worker_of_a_plan_that_is_prepared_takes_none():
    site = warm_actor()
    actor = next(w for w in site.placement.workers if w.role == "actor")
    site.members.prepare([actor], pods=[])
    assert site.spares.take(site.members.prepared[actor.id]) == ""


def test_a_beat_from_before_a_promotion_makes_no_second_spare():
    site = warm_actor()
    site.take("actor/0")
    site.warm(GPU, ACTOR)
    assert site.state(GPU, ACTOR) is SpareState.AWAY


def test_a_spare_that_dies_is_started_again_after_a_pause_that_doubles_and_nobody_else_hears_of_it():
    site = warm_actor(max_restarts=100)
    pauses = []
    for attempt in range(1, 12):
        site.exit(GPU, ACTOR, attempt)
        record = site.spares._records[GPU, ACTOR]
        pauses.append(record.start_at - site.clock.now)
        assert site.later(pauses[-1] - 0.01) == []
        assert site.later(0.02) == [(GPU, "start", ACTOR, attempt + 1)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0])
    assert site.members.workers[WorkerId("actor/0")].failures == 0


def test_one_that_dies_too_often_waits_until_the_failures_are_old():
    site = warm_actor(max_restarts=2)
    for attempt in (1, 2, 3):
        site.exit(GPU, ACTOR, attempt)
        site.later(5.0)
    assert site.events[-1] == "spare-given-up"
    assert site.later(3500.0) == []
    assert site.later(100.0) == [(GPU, "start", ACTOR, 4)]


def test_an_end_that_was_asked_for_and_the_word_of_an_older_life_are_no_failures():
    site = warm_actor()
    site.exit(GPU, ACTOR, 0)
    assert site.state(GPU, ACTOR) is SpareState.WARM
    site.exit(GPU, ACTOR, 1, asked=True)
    assert site.events == ["spare-warm"]
    assert site.later(0.1) == [(GPU, "start", ACTOR, 2)]


def test_a_lost_pods_spares_are_lost_with_it():
    site = warm_actor()
    site.spares.lost(GPU)
    site.members.pods[GPU].attached = False
    assert site.take("actor/0") == ""
    assert site.later(5.0) == []
    site.members.pods[GPU].attached = True
    assert site.later(0.1) == [(GPU, "start", ACTOR, 2)]


def test_a_new_driver_keeps_the_spares_that_an_agent_holds_and_numbers_above_them():
    site = Site(driver_attempt=2, actor=1)
    idle = agents_pb2.WorkerState(worker=ACTOR, attempt=7, progress=agents_pb2.Progress(phase="idle"))
    stranger = agents_pb2.WorkerState(worker="spare.actor/5", attempt=1)
    running = {ACTOR: idle, WorkerId("spare.actor/5"): stranger}
    site.spares.adopt(GPU, running)
    assert list(running) == ["spare.actor/5"], "what is left is stopped by the workforce"
    assert site.take("actor/0") == ACTOR
    assert site.later(2.1) == [(GPU, "start", ACTOR, 1001)]


def test_a_spare_whose_promotion_was_lost_with_a_stream_is_not_taken_back():
    """The worker was started from nothing meanwhile, or will be: nobody knows what this process was told."""
    site = warm_actor()
    site.take("actor/0")
    running = {ACTOR: agents_pb2.WorkerState(worker=ACTOR, attempt=1, progress=agents_pb2.Progress(phase="idle"))}
    site.spares.adopt(GPU, running)
    assert list(running) == [ACTOR]


def test_one_that_its_agent_does_not_have_any_more_is_started_again():
    site = warm_actor()
    site.spares.adopt(GPU, {})
    assert site.later(0.1) == [(GPU, "start", ACTOR, 2)]


def test_an_agent_that_is_away_for_a_moment_comes_back_with_its_spare():
    site = warm_actor()
    site.members.pods[GPU].attached = False
    assert site.later(1.0) == []
    site.members.pods[GPU].attached = True
    running = {ACTOR: agents_pb2.WorkerState(worker=ACTOR, attempt=1, progress=agents_pb2.Progress(phase="idle"))}
    site.spares.adopt(GPU, running)
    assert running == {}
    assert site.later(5.0) == []
    assert site.events == ["spare-warm"]
    assert site.take("actor/0") == ACTOR


def test_a_start_that_nobody_answers_is_given_up_and_made_again_later():
    site = Site(actor=1)
    site.later(2.1)
    assert site.later(419.0) == []
    assert site.later(1.1) == [(GPU, "stop", ACTOR, 0)]
    assert site.later(59.0) == []
    assert site.later(1.1) == [(GPU, "start", ACTOR, 2)]


def test_a_plan_that_takes_a_role_from_a_pod_takes_its_spare_too():
    site = warm_actor()
    others = tuple(w for w in site.placement.workers if w.role != "actor")
    fields = {name: getattr(site.placement, name) for name in Placement.__slots__} | {"workers": others}
    site.members.adopt(Placement(**fields))
    assert site.later(0.0) == [(GPU, "stop", ACTOR, 0)]
    assert site.later(5.0) == []


def test_counts_show_what_the_plan_wants_by_state():
    site = Site(actor=1, env=2)
    assert site.spares.counts()["env", "away"] == 2
    site.later(2.1)
    site.warm(GPU, ACTOR)
    counts = {key: number for key, number in site.spares.counts().items() if number}
    assert counts == {("actor", "warm"): 1, ("env", "starting"): 1, ("env", "away"): 1}
