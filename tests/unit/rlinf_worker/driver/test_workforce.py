"""Workforce under a clock that the test turns: who is started, noticed as gone, and started again."""

from typing import Any

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.names import WorkerId
from rlinf_api.report import Failure
from rlinf_worker import clock
from rlinf_worker.driver.agents import Agents
from rlinf_worker.driver.job import Dirty
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.workforce import Workforce
from rlinf_worker.uplink.outbox import Outbox
from tests.builders_driver import Clock, make_job

SIM = ("sim", 0)


class Site:
    def __init__(self, *, driver_attempt: int = 1, **job: Any) -> None:
        made = make_job(**job)
        self.clock = Clock()
        self.job = made.known(clock.Clock(notice_s=5.0, raw=self.clock), attempt=driver_attempt)
        self.sessions, self.members, self.settings = self.job.sessions, self.job.members, self.job.settings
        self.members.adopt(made.placement)
        self.job.placement, self.job.roster = made.placement, 2
        self.failed: list[tuple[str, str, Failure | None]] = []
        self.job.fail = self._fail  # type: ignore[method-assign]
        self.force = Workforce(self.job)
        self.agents = Agents(self.job, self.force)
        self._gone: list[tuple[str, str]] = []

    def _fail(self, reason: str, message: str, failure: Failure | None = None) -> None:
        self.failed.append((reason, message, failure))

    def tick(self) -> None:
        self.agents.tick()
        self.force.tick()

    @property
    def gone(self) -> list[tuple[str, str]]:
        """Who has gone so far, and why."""
        for gone in self.force.take_gone():
            assert gone.placed.id not in self.members.prepared
            self._gone.append((gone.placed.id, gone.why))
        return self._gone

    @property
    def silent(self) -> list[str]:
        return list(self.agents.silent)

    def attach(
        self, key: tuple[str, int] = SIM, *, attempt: int = 1, workers: dict[str, int] | None = None
    ) -> Outbox[Any]:
        states = [agents_pb2.WorkerState(worker=w, attempt=a) for w, a in (workers or {}).items()]
        pod = f"j-{key[0]}-{key[1]}-a{attempt}"
        outbox = Outbox[Any]()
        hello = agents_pb2.Hello(pod=pod, pool=key[0], ordinal=key[1], attempt=attempt, workers=states)
        self.agents.attach(hello, outbox)
        return outbox

    def exit(
        self, worker: str, attempt: int, code: int, *, asked: bool = False, message: str = "", reason: str = ""
    ) -> None:
        role, _, number = worker.partition("/")
        failure = agents_pb2.Failure(
            role=role, worker=int(number), pod="j-sim-0-a1", node="n1", exit_code=code, message=message,
            reason=reason or "ExitCode",
        )  # fmt: skip
        exited = agents_pb2.WorkerExited(worker=worker, attempt=attempt, exit_code=code, asked=asked, failure=failure)
        self.agents.heard(SIM, agents_pb2.AgentMessage(exited=exited))

    def beat(self, key: tuple[str, int] = SIM) -> None:
        self.agents.heard(key, agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat()))

    def later(self, seconds: float, *, beating: bool = True) -> None:
        while seconds > 0:
            self.clock.now += min(seconds, 1.0)
            seconds -= 1.0
            for key, pod in self.members.pods.items():
                if beating and pod.attached:
                    self.beat(key)
            self.tick()
            self.force.start_workers()

    def record(self, worker: str) -> WorkerRecord:
        return self.members.workers[WorkerId(worker)]

    def welcome(self, worker: str, attempt: int, outbox: Outbox[Any]) -> None:
        self.force.welcome(WorkerId(worker), attempt, outbox)

    def stream_ended(self, worker: str, outbox: Outbox[Any]) -> None:
        self.force.stream_ended(WorkerId(worker), outbox)


def told(outbox: Outbox[Any]) -> list[tuple[str, str, int]]:
    """(start or stop, worker, attempt) since the last look."""
    said = []
    for message in outbox._messages:
        kind = message.instruction.WhichOneof("kind")
        inner = getattr(message.instruction, kind)
        said.append((kind, inner.worker, inner.attempt if kind == "start" else 0))
    outbox._messages.clear()
    return said


def started(**job: Any) -> tuple[Site, Outbox[Any]]:
    site = Site(envs=1, **job)
    outbox = site.attach()
    site.force.start_workers()
    assert told(outbox) == [("start", "env/0", 1)]
    return site, outbox


def test_an_instruction_says_which_driver_it_is_of_and_what_to_start():
    site = Site(envs=2)
    outbox = site.attach()
    site.force.start_workers()
    first, second = (m.instruction for m in outbox._messages)
    assert first.driver_attempt == 1
    assert (first.id, second.id) == (1, 2)
    start = second.start
    assert (start.worker, start.role, start.kind, start.rank, start.world) == ("env/1", "env", "gymnasium", 1, 2)
    assert list(start.slots) == [1]


def test_the_pause_before_the_next_life_doubles_up_to_its_bound_and_begins_anew_after_ready():
    site, outbox = started(max_restarts=100)
    record = site.record("env/0")
    pauses = []
    for attempt in range(1, 11):
        site.exit("env/0", attempt, 1)
        pauses.append(record.start_at - site.clock.now)
        site.later(pauses[-1] - 0.01)
        assert told(outbox) == []
        site.later(0.02)
        assert told(outbox) == [("start", "env/0", attempt + 1)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0])
    record.failures = 0  # as the core does on Ready
    site.exit("env/0", 11, 1)
    assert record.start_at - site.clock.now == pytest.approx(0.2)


def test_too_many_failures_fail_the_job_with_the_first_of_them():
    site, _ = started(max_restarts=2)
    for attempt in (1, 2, 3):
        assert site.failed == []
        site.exit("env/0", attempt, 1, message=f"death {attempt}")
        site.later(2)
    ((reason, message, failure),) = site.failed
    assert reason == "TooManyRestarts"
    assert "failed 3 times" in message
    assert "more than spec.failurePolicy.maxRestarts=2 allows" in message
    assert message.endswith("death 3")
    assert failure is not None
    assert (failure.message, failure.role, failure.pod) == ("death 1", "env", "j-sim-0-a1")


def test_who_waits_in_vain_for_a_pod_that_is_not_there_has_not_failed():
    site = Site(envs=2, pods=2, max_restarts=1)
    for key in site.members.pods:
        if key != ("sim", 1):
            site.attach(key)
    site.force.start_workers()
    for attempt in (1, 2, 3):
        site.exit("env/0", attempt, names.EXIT_RETRYABLE, reason="DeadlineExceeded", message="no roster in 1800 s")
        site.later(2)
    assert site.failed == []
    assert site.record("env/0").restarts == 3
    site.attach(("sim", 1))
    for attempt in (4, 5):
        site.exit("env/0", attempt, names.EXIT_RETRYABLE, reason="DeadlineExceeded", message="no roster in 1800 s")
        site.later(2)
    assert [reason for reason, _, _ in site.failed] == ["TooManyRestarts"]


@pytest.mark.parametrize(("code", "reason"), [(names.EXIT_USER_ERROR, "UserError"), (names.EXIT_BUG, "InternalError")])
def test_an_exit_that_no_restart_can_help_fails_the_job(code, reason):
    site, _ = started()
    site.exit("env/0", 1, code, message="no such environment")
    assert [(r, m) for r, m, _ in site.failed] == [(reason, "worker env/0: no such environment")]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("CheckpointUnreadable", "CheckpointUnreadable"),
        ("CheckpointUnwritable", "CheckpointUnwritable"),
        ("InvalidManifest", "UserError"),
        ("TooManyRestarts", "UserError"),
    ],
)
def test_what_a_worker_says_is_the_jobs_reason_where_it_is_one_of_the_users(said, reason):
    site, _ = started()
    site.exit("env/0", 1, names.EXIT_USER_ERROR, message="no", reason=said)
    assert [r for r, _, _ in site.failed] == [reason]


def test_an_exit_that_was_asked_for_is_no_failure_and_what_an_older_life_says_is_nothing():
    site, outbox = started()
    site.exit("env/0", 1, 0, asked=True)
    site.later(0.1)
    assert told(outbox) == [("start", "env/0", 2)]
    site.exit("env/0", 1, 137)
    assert site.record("env/0").state is WorkerState.STARTING
    assert site.force.restarts == 0


def test_who_was_killed_for_memory_is_told_by_role():
    site, _ = started()
    killed: list[str] = []
    site.force.on_killed = killed.append
    for attempt, (code, reason, asked) in enumerate(
        ((137, "OOMKilled", True), (137, "Killed", False), (137, "OOMKilled", False), (1, "KeyError", False)), 1
    ):
        site.exit("env/0", attempt, code, reason=reason, asked=asked)
        site.later(60.0)
    assert killed == ["env"]


def test_a_silent_agent_is_lost_after_its_bound_with_all_that_it_ran():
    site, _ = started()
    site.clock.now += 3.9
    site.tick()
    assert site.gone == []
    site.clock.now += 0.2
    site.tick()
    assert site.gone == [("env/0", "the agent of pod j-sim-0-a1 is silent")]
    assert not site.members.pods[SIM].attached


def test_a_driver_that_stood_still_does_not_take_its_own_silence_for_that_of_others():
    site, _ = started()
    site.clock.now += 8.0
    site.tick()
    assert site.gone == []
    site.later(4.1, beating=False)
    assert site.gone == [("env/0", "the agent of pod j-sim-0-a1 is silent")], "it is silent after all"


def test_nor_do_streams_that_broke_before_it_stood_still_lose_their_time_to_come_back():
    site, outbox = started()
    site.agents.detached(SIM, outbox)
    site.clock.now += 8.0
    site.tick()
    assert site.gone == []


def test_a_broken_agent_has_its_time_to_come_back():
    site, outbox = started()
    site.agents.detached(SIM, outbox)
    site.later(1.4)
    again = site.attach(workers={"env/0": 1})
    site.later(1.4)
    assert site.gone == []
    assert told(again) == []
    site.agents.detached(SIM, outbox)  # the older connection ends late
    assert site.members.pods[SIM].attached
    site.agents.detached(SIM, again)
    site.later(1.6)
    assert site.gone == [("env/0", "the agent of pod j-sim-0-a1 is gone")]


def test_what_an_agent_says_it_runs_is_the_truth_about_processes():
    site = Site(envs=3)
    outbox = site.attach(workers={"env/0": 3, "env/9": 1})
    site.force.start_workers()
    assert told(outbox) == [("stop", "env/9", 0), ("start", "env/1", 1), ("start", "env/2", 1)]
    assert site.record("env/0").attempt == 3
    again = site.attach(workers={"env/0": 3, "env/1": 1})
    assert site.gone == [("env/2", "the agent of pod j-sim-0-a1 does not have it")]
    assert told(again) == []


def test_a_driver_gives_no_worker_a_number_that_the_driver_before_may_have_given():
    """That one was lost together with the pod: nobody is left who knows how often the worker was started."""
    site = Site(driver_attempt=4, envs=2)
    outbox = site.attach(workers={"env/0": 7})
    site.force.start_workers()
    assert told(outbox) == [("start", "env/1", 3001)]
    site.exit("env/0", 7, 1)
    site.later(5)
    assert told(outbox)[-1] == ("start", "env/0", 3001)


def test_a_worker_that_was_given_up_is_stopped_when_its_agent_comes_back_with_it():
    """Its units went elsewhere: taking it back would give them to two."""
    site, _ = started()
    site.later(4.5, beating=False)
    assert site.gone == [("env/0", "the agent of pod j-sim-0-a1 is silent")]
    again = site.attach(workers={"env/0": 1})
    site.later(1)
    assert told(again) == [("stop", "env/0", 0), ("start", "env/0", 2)]
    with pytest.raises(Refuse, match="attempt 1, which was given up"):
        site.welcome("env/0", 1, Outbox[Any]())


def test_a_pod_that_took_the_place_of_another_fences_it():
    site, old = started()
    site.attach(attempt=2)
    assert old.closed == "a newer connection of this peer came"
    assert site.gone == [("env/0", "pod j-sim-0-a1 was replaced by j-sim-0-a2")]
    with pytest.raises(Refuse, match="attempt 2 has taken its place") as caught:
        site.attach(attempt=1)
    assert caught.value.exit_code == names.EXIT_STALE
    with pytest.raises(Refuse, match="the plan has no pod sim-7"):
        site.attach(("sim", 7))


def test_the_agent_of_a_planned_pod_without_workers_is_a_member_and_its_loss_fails_nothing():
    """Refused as stale it would be replaced again and again, until the job failed for too many restarts."""
    site = Site(envs=2, pods=3)
    site.attach(("sim", 2))
    site.later(4.5, beating=False)
    assert not site.members.pods["sim", 2].attached
    assert site.gone == []
    assert site.failed == []
    assert site.force.restarts == 0


def test_a_worker_whose_stream_broke_has_its_time_to_come_back():
    site, outbox = started()
    first = Outbox[Any]()
    site.record("env/0").state = WorkerState.CONNECTED
    site.welcome("env/0", 1, first)
    site.stream_ended("env/0", first)
    site.later(1.4)
    second = Outbox[Any]()
    site.welcome("env/0", 1, second)
    site.stream_ended("env/0", first)  # late
    site.later(1.4)
    assert site.gone == []
    site.stream_ended("env/0", second)
    site.later(1.6)
    assert site.gone == [("env/0", "its connection to the driver broke")]
    assert told(outbox) == [("stop", "env/0", 0)]


def test_a_worker_that_does_not_connect_in_time_is_started_again():
    site, outbox = started()
    site.later(62)
    assert site.gone == [("env/0", "it did not connect within 60 s of its start")]
    assert told(outbox) == [("stop", "env/0", 0), ("start", "env/0", 2)]


def test_a_worker_that_its_agent_gives_longer_to_start_is_given_that_by_the_driver_too():
    """The deadline stands in the pool's template, which the driver does not see; the agent kills at it, with stacks."""
    site, outbox = started()

    def starting_for(seconds):
        for _ in range(seconds):
            starting = agents_pb2.Progress(worker="env/0", phase="start", deadline_s=180.0)
            site.agents.heard(SIM, agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=[starting])))
            site.later(1)

    starting_for(182)
    assert site.gone == []
    starting_for(4)
    assert site.gone == [("env/0", "it did not connect within 184 s of its start")]
    told(outbox)
    site.later(62)  # the next life's agent has said nothing yet
    assert site.gone[1:] == [("env/0", "it did not connect within 60 s of its start")]


def test_a_worker_whose_slots_had_to_be_freed_first_has_its_whole_time_to_start():
    site, _ = started()

    def heard(**progress):
        said = agents_pb2.Progress(worker="env/0", **progress)
        site.agents.heard(SIM, agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=[said])))

    for _ in range(44):
        heard(phase="waits for its slots")
        site.later(1)
    for second in range(183):
        heard(phase="start", deadline_s=180.0, age_s=second)
        site.later(1)
    assert site.gone == []
    site.later(2)
    assert site.gone == [("env/0", "it did not connect within 184 s of its start")]


def test_a_gang_is_restarted_whole_and_the_next_life_is_not_blamed_for_the_last_ones_stream():
    site = Site(actors=2)
    outbox = site.attach(("gpu", 0))
    site.force.start_workers()
    told(outbox)
    streams = [Outbox[Any](), Outbox[Any]()]
    for rank, stream in enumerate(streams):
        site.welcome(f"actor/{rank}", 1, stream)
        site.record(f"actor/{rank}").state = WorkerState.READY
    site.stream_ended("actor/1", streams[1])
    site.force.restart_gangs(("actor",), why="it is formed anew", besides=site.record("actor/0"))
    assert told(outbox) == [("stop", "actor/1", 0)]
    site.later(0.3)
    assert told(outbox) == [("start", "actor/1", 2)]
    site.later(1.4)
    assert site.record("actor/1").state is WorkerState.STARTING
    assert site.force.restarts == 0


def test_how_long_a_worker_has_been_quiet_is_kept():
    site, _ = started()
    progress = agents_pb2.Progress(worker="env/0", phase="step", age_s=12.4)
    beat = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=[progress]))
    assert site.agents.heard(SIM, beat)
    assert not site.agents.heard(SIM, beat), "no change, nothing to show"
    assert site.record("env/0").silent_s == 12.4


@pytest.mark.parametrize(("obeyed", "lost"), [(1, True), (2, False), (0, False)])
def test_only_an_agent_that_obeyed_a_driver_before_this_one_tells_of_that_ones_loss(obeyed, lost):
    """One that has obeyed this driver comes back to it, and one that has obeyed none is new."""
    site = Site(driver_attempt=2)
    hello = agents_pb2.Hello(pod="j-sim-0-a1", pool="sim", ordinal=0, attempt=1, driverless_s=3.0)
    hello.highest_driver_attempt = obeyed
    site.agents.attach(hello, Outbox[Any]())
    assert [known.who for known in site.force.recoveries.under_way] == (["driver"] if lost else [])
    assert all(known.since == site.clock.now - 3.0 for known in site.force.recoveries.under_way)


def test_a_worker_that_no_plan_has_any_more_has_time_to_end_and_one_that_was_given_up_has_none():
    site = Site(envs=2)
    outbox = site.attach(workers={"env/0": 1, "env/1": 1})
    stream = Outbox[Any]()
    site.welcome("env/1", 1, stream)
    site.force.dismiss(site.record("env/1"), "not so in plan revision 2")
    site.force.give_up(site.record("env/0"), "silent")
    stops = [m.instruction.stop for m in outbox._messages if m.instruction.HasField("stop")]
    assert [(stop.worker, stop.grace_s) for stop in stops] == [("env/1", site.settings.dismiss_grace_s), ("env/0", 0.0)]
    assert (stream.closed, stream.deaf) == (None, True), "its agent ends it; what it still says counts no more"


# --- agents that only another pod helps -------------------------------------------------------------------------------
def attached(**job: Any) -> tuple[Site, dict[tuple[str, int], Outbox[Any]]]:
    """All agents are."""
    site = Site(**job)
    return site, {key: site.attach(key) for key in site.members.pods}


def test_an_agent_that_stays_away_is_told_to_be_silent_until_it_is_back():
    site, outboxes = attached(envs=1)
    site.agents.detached(SIM, outboxes[SIM])
    site.later(59)
    site.job.take_marks()
    site.later(2)
    assert site.silent == ["sim-0"]
    assert Dirty.SHOWN in site.job.take_marks(), "the operator hears of it"
    site.attach(SIM, attempt=2)
    site.later(1)
    assert site.silent == []


@pytest.mark.parametrize("silent_s", [59, 61])
def test_a_frozen_agent_is_away_from_when_it_was_given_up(silent_s):
    site, outboxes = attached(envs=1)
    site.later(4 + silent_s, beating=False)
    assert ("sim-0" in site.silent) == (silent_s > 60)
    del outboxes


def test_an_agent_that_a_new_driver_never_heard_is_told_too_as_it_may_have_been_frozen_before():
    site = Site(envs=1, driver_attempt=2)
    site.attach(("gpu", 0))
    site.later(59)
    assert site.silent == []
    site.later(3)
    assert site.silent == ["sim-0"]


def test_where_most_of_several_are_silent_none_is_told_as_the_driver_itself_may_be_cut_off():
    site, outboxes = attached(envs=4, pods=4)
    for ordinal in range(2):
        site.agents.detached(("sim", ordinal), outboxes["sim", ordinal])
    site.later(62)
    assert site.silent == ["sim-0", "sim-1"], "two of five"
    site.agents.detached(("sim", 2), outboxes["sim", 2])
    site.later(62)
    assert site.silent == []


def test_a_pod_that_no_plan_in_force_has_is_waited_for_by_its_preparation():
    site, _ = attached(envs=1)
    site.members.prepare([], pods=[("sim", 1)])
    site.later(70)
    assert site.silent == []
