"""What a loss took, and whom it kept waiting: Recoveries under a clock that the test turns."""

from typing import Any

from rlinf_api.names import WorkerId
from rlinf_worker.driver.recovery import BETWEEN, Recoveries
from tests.builders_driver import Clock, make_job

ENV, ROLLOUT, ACTOR = WorkerId("env/0"), WorkerId("rollout/0"), WorkerId("actor/0")


class Told:
    def __init__(self) -> None:
        self.clock, self.events = Clock(), list[dict[str, Any]]()
        job = make_job().known(self.clock)
        job.event = self._event  # type: ignore[method-assign]
        self.recoveries = Recoveries(job)

    def _event(self, kind: str, message: str, **fields: Any) -> None:
        assert kind == "recovered"
        self.events.append({"message": message, **fields})

    def step(self, waits: dict[WorkerId, float], *, between: float = 0.0, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        accounts = {str(wid): {"wait_data": value, "compute": 9.0, BETWEEN: between} for wid, value in waits.items()}
        self.recoveries.step(accounts, ended_at=self.clock.now)

    def back(self, worker: WorkerId, *, start_s: float = 0.0) -> None:
        self.recoveries.back(worker, started_at=self.clock.now - start_s)

    def lose(self, worker: WorkerId, **fields: Any) -> None:
        self.recoveries.lost([worker], who=worker, role=worker.partition("/")[0], why="it was killed", **fields)


def test_a_recovery_ends_when_the_worker_is_back_and_is_told_with_the_accounts_of_that_step():
    told = Told()
    told.lose(ENV)
    told.clock.now += 2.5
    told.back(ENV, start_s=2.0)
    assert told.events == []
    told.step({ROLLOUT: 3.0, ACTOR: 1.0})
    [event] = told.events
    assert (event["who"], event["seconds"], event["start_s"]) == ("env/0", 2.5, 2.0)
    assert event["lost_s"] == {"actor": 1.0, "rollout": 3.0}
    assert "the others lost actor 1.0 s, rollout 3.0 s" in event["message"]
    assert told.recoveries.count == {"env": 1}
    assert told.recoveries.seconds == {"env": 2.5}
    told.step({ROLLOUT: 3.0, ACTOR: 1.0})
    assert len(told.events) == 1, "told once"


def test_what_a_role_waits_anyway_is_not_lost():
    told = Told()
    for usual in (0.4, 0.6, 0.5):
        told.step({ROLLOUT: usual, ENV: 0.1})
    told.lose(ENV)
    told.back(ENV)
    told.step({ROLLOUT: 2.0, ENV: 5.0})
    assert told.events[0]["lost_s"] == {"rollout": 1.5}, "and its own wait is not the others'"


def test_waiting_between_two_steps_counts_too():
    told = Told()
    told.step({ROLLOUT: 0.5})
    told.lose(ACTOR)
    told.back(ACTOR)
    told.step({ROLLOUT: 0.5}, between=4.0)
    assert told.events[0]["lost_s"] == {"rollout": 4.0}


def test_a_pod_is_back_with_the_last_of_its_workers():
    told = Told()
    since = told.clock.now - 1.5
    told.recoveries.lost([ENV, ROLLOUT], who="pod cpu-0", role="", why="its agent is gone", since=since)
    told.lose(ENV)  # dies again as it starts: still the same absence
    told.back(ENV)
    told.clock.now += 1
    told.step({ACTOR: 1.0})
    assert told.events == []
    told.back(ROLLOUT)
    told.step({ACTOR: 1.0})
    assert [event["who"] for event in told.events] == ["pod cpu-0"]
    assert told.events[0]["seconds"] == 3.5
    assert told.recoveries.count == {"pod": 1}
    assert told.events[0]["lost_s"] == {"actor": 2.0}


def test_from_when_others_do_its_work_on_nobody_has_waited_for_it():
    told = Told()
    told.step({ACTOR: 1.0})
    told.lose(ENV)
    told.lose(ROLLOUT)
    told.recoveries.rehomed({ENV})
    told.step({ACTOR: 30.0})
    told.step({ACTOR: 5.0})  # waits for the other
    told.back(ROLLOUT)
    told.step({ACTOR: 4.0})
    told.step({ACTOR: 2.0})  # as it usually waits with one env less
    told.clock.now += 86_400
    told.back(ENV)
    told.step({ACTOR: 2.0})
    assert [event["who"] for event in told.events] == ["rollout/0", "env/0"]
    assert told.events[1]["seconds"] > 86_400
    assert [event["lost_s"]["actor"] for event in told.events] == [4.0 + 3.0, 29.0]
    told.lose(ROLLOUT)
    told.back(ROLLOUT)
    told.step({ACTOR: 9.0})
    assert told.events[2]["lost_s"] == {"actor": 7.0}, "and steps since then tell what is usual"


def test_of_two_losses_at_once_a_second_is_charged_to_one():
    told = Told()
    told.lose(ENV)
    told.lose(ROLLOUT)
    told.back(ENV)
    told.back(ROLLOUT)
    told.step({ACTOR: 2.0})
    assert sum(event["lost_s"].get("actor", 0.0) for event in told.events) == 2.0
    assert told.recoveries.lost_s == {"actor": 2.0}


def test_a_worker_that_a_plan_drops_is_awaited_no_longer():
    told = Told()
    told.lose(ENV)
    told.recoveries.forget(ENV)
    told.step({ACTOR: 1.0})
    assert told.events == []
    assert told.recoveries.under_way == []


def test_the_end_of_a_job_tells_what_is_over():
    told = Told()
    told.lose(ENV)
    told.lose(ROLLOUT)
    told.back(ENV)
    told.recoveries.tell()
    assert [event["who"] for event in told.events] == ["env/0"]


def test_who_came_back_as_the_step_ended_is_told_with_it_and_who_came_later_is_not():
    told = Told()
    told.lose(ENV)
    told.clock.now += 1.0
    told.back(ENV)
    told.recoveries.tell(until=told.clock.now - 0.001)
    assert told.events == []
    told.recoveries.tell(until=told.clock.now)
    assert [event["who"] for event in told.events] == ["env/0"]


def test_a_new_driver_tells_how_long_nobody_drove_by_the_agents_word():
    told = Told()  # the new driver begins
    told.clock.now += 0.5
    told.recoveries.driver_lost(told.clock.now - 2.0)
    told.recoveries.driver_lost(told.clock.now - 2.25)  # another agent noticed it sooner
    told.clock.now += 0.25
    told.recoveries.driver_back()
    told.step({ENV: 1.0})
    [event] = told.events
    assert (event["who"], event["seconds"], event["start_s"]) == ("driver", 2.5, 0.75)
    assert event["lost_s"] == {"env": 1.0}
    assert told.recoveries.count == {"driver": 1}


def test_an_agent_that_comes_after_its_workers_tells_of_it_too_and_the_next_does_not_again():
    told = Told()
    told.clock.now += 0.5
    told.recoveries.driver_back()
    told.clock.now += 0.25
    told.recoveries.driver_lost(told.clock.now - 2.0)
    told.step({ENV: 1.0})
    told.recoveries.driver_lost(told.clock.now - 2.0)
    told.step({ENV: 1.0})
    [event] = told.events
    assert (event["who"], event["seconds"]) == ("driver", 1.75), "until all were ready, not until it was heard of"
