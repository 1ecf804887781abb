"""The RLJobs that Kopf's watch has told of, and what shows that it tells no more."""

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from rlinf_api import times
from rlinf_api.errors import RetryableError, RLinfError
from rlinf_operator.handlers.known import ECHO_S, FINISHED_PER_S, FINISHED_S, KnownJobs, Sight, state_of
from rlinf_operator.manifests.metadata import JobKey
from rlinf_operator.metrics import Metrics

ONE, TWO, THREE = (JobKey(namespace="team", name=name) for name in ("one", "two", "three"))


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.wishes: list[tuple[JobKey, float]] = []
        self.metrics = Metrics()
        self.listed: list[Sight] = []
        self.lists = 0
        self.error: RLinfError | None = None
        self.known = KnownJobs(
            enqueue=self._enqueue, metrics=self.metrics, look=self._look, look_every_s=90.0, clock=lambda: self.now
        )

    async def _look(self) -> AsyncIterator[Sight]:
        self.lists += 1
        for sight in self.listed:
            yield sight
        if self.error is not None:
            raise self.error

    def _enqueue(self, key: JobKey, *, after_s: float = 0.0) -> None:
        self.wishes.append((key, after_s))

    def seen(
        self, key: JobKey, version: int, *, state: str = "Running", is_listed: bool = False, is_long_over: bool = True
    ) -> None:
        sight = Sight(key=key, version=version, state=state, is_listed=is_listed, is_long_over=is_long_over)
        self.known.seen(sight)

    def wrote(self, key: JobKey, version: int) -> None:
        self.known.wrote(Sight(key=key, version=version))

    def passes(self) -> list[JobKey]:
        """Wished for since the last look."""
        found, self.wishes = [key for key, _ in self.wishes], []
        return found

    def later(self, seconds: float, *, beats: bool = True) -> None:
        self.now += seconds
        if beats:
            self.known.beat()
        self.known.tick()

    @property
    def missed(self) -> float | None:
        return self.metrics.registry.get_sample_value("rlinf_operator_missed_deletions_total")


@pytest.fixture
def bench():
    return Bench()


def test_each_change_is_a_pass_and_the_echo_of_the_last_own_write_is_less_urgent(bench):
    bench.seen(ONE, 6)
    for version in (7, 9):
        bench.wrote(ONE, version)
    for version in (7, 8, 9, 10, 0):
        bench.seen(ONE, version)
    assert bench.wishes == [(ONE, 0.0), (ONE, 0.0), (ONE, 0.0), (ONE, ECHO_S), (ONE, 0.0), (ONE, 0.0)]


def test_a_list_of_what_is_known_already_is_no_pass(bench):
    bench.seen(ONE, 6, is_listed=True)
    bench.seen(TWO, 7, is_listed=True)
    assert bench.passes() == [ONE, TWO]
    bench.seen(ONE, 6, is_listed=True)
    bench.seen(TWO, 8, is_listed=True)
    assert bench.passes() == [TWO]


def test_finished_jobs_of_the_first_list_come_behind_those_that_work_and_one_by_one(bench):
    """A restart beside a night's finished jobs: `works` is listed last, and looked at first."""
    finished = [JobKey(namespace="team", name=f"done-{number}") for number in range(100)]
    for number, key in enumerate(finished):
        bench.seen(key, 6, state=("Complete", "Failed")[number % 2], is_listed=True)
    works = JobKey(namespace="team", name="works")
    bench.seen(works, 6, is_listed=True)
    after = dict(bench.wishes)
    assert after[works] == 0.0
    assert [after[key] for key in finished] == pytest.approx([FINISHED_S + n / FINISHED_PER_S for n in range(100)])
    bench.seen(ONE, 6, state="Complete", is_listed=True, is_long_over=False)
    assert bench.wishes[-1] == (ONE, 0.0), "its pods may still go, and others wait for its quota"
    bench.later(60.0)
    bench.seen(JobKey(namespace="team", name="later"), 6, state="Complete", is_listed=True)
    assert bench.wishes[-1][1] == FINISHED_S, "the others had theirs"


def test_a_job_whose_end_is_told_is_looked_at_at_once_though_it_is_finished(bench):
    bench.seen(ONE, 6, state="Complete", is_listed=True)
    bench.seen(ONE, 7, state="Complete")
    bench.seen(TWO, 8, state="Complete")
    assert bench.wishes == [(ONE, FINISHED_S), (ONE, 0.0), (TWO, 0.0)]


def test_a_job_that_a_new_list_leaves_out_is_looked_at_once_the_list_is_over(bench):
    for key in (ONE, TWO, THREE):
        bench.seen(key, 6, is_listed=True)
    bench.later(40.0)
    bench.passes()
    bench.seen(ONE, 6, is_listed=True)
    bench.later(29.0)
    bench.seen(TWO, 6, is_listed=True)
    bench.later(29.0)
    assert bench.passes() == [], "a list of many pages is under way"
    bench.later(2.0)
    assert bench.passes() == [THREE]
    bench.later(100.0)
    assert bench.passes() == [], "once"
    bench.known.gone(THREE)
    assert bench.missed == 1
    bench.known.gone(THREE)
    assert bench.missed == 1, "nothing told of it since"


def test_the_first_list_and_what_was_told_while_a_list_went_on_are_left_alone(bench):
    bench.seen(ONE, 6, is_listed=True)
    bench.seen(TWO, 7, is_listed=True)
    bench.passes()
    bench.later(60.0)
    assert bench.passes() == []
    bench.seen(ONE, 6, is_listed=True)
    bench.seen(THREE, 9)
    bench.seen(TWO, 10)
    bench.passes()
    bench.later(31.0)
    assert bench.passes() == []


async def run_for(bench, seconds, monkeypatch):
    """Of `run`, as the clock goes."""
    end = bench.now + seconds

    async def sleep(pause_s):
        bench.now += pause_s
        if bench.now > end:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await bench.known.run()


async def test_jobs_are_listed_where_watches_are_silent_and_no_more_often_than_one_is_given_up(bench, monkeypatch):
    """Kopf opens a silent watch anew where it was, and behind the same silence it learns of no new job."""
    bench.seen(ONE, 6)
    bench.passes()
    await run_for(bench, 200.0, monkeypatch)
    assert bench.lists == 0, "nothing is wrong"
    bench.listed = [
        Sight(key=ONE, version=6, state="Running", is_listed=True),
        Sight(key=TWO, version=9, is_listed=True),
    ]
    for _ in range(3):
        bench.known.silent()
        await run_for(bench, 20.0, monkeypatch)
    assert (bench.lists, bench.passes()) == (1, [TWO])
    await run_for(bench, 200.0, monkeypatch)
    assert bench.lists == 2, "once more, as it was silent since"
    await run_for(bench, 200.0, monkeypatch)
    assert bench.lists == 2


async def test_a_list_that_fails_is_tried_again_at_the_next_silence(bench, monkeypatch, caplog):
    bench.error = RetryableError("the API server does not answer")
    bench.known.silent()
    await run_for(bench, 10.0, monkeypatch)
    assert [r.message for r in caplog.records] == ["jobs are not listed"]
    bench.known.silent()
    await run_for(bench, 100.0, monkeypatch)
    assert bench.lists == 2


def test_an_own_write_whose_echo_does_not_come_is_a_watch_that_is_behind(bench, caplog):
    bench.seen(ONE, 6)
    bench.wrote(ONE, 7)
    bench.passes()
    bench.later(10.0)
    assert (bench.known.behind_s(), bench.passes()) == (0.0, [])
    bench.wrote(ONE, 9)
    with caplog.at_level(logging.WARNING):
        bench.later(5.0)
        bench.later(5.0)
    assert caplog.messages == ["kopf's watch is behind"], "said once"
    assert (bench.known.behind_s(), bench.passes()) == (10.0, [ONE, ONE])
    bench.seen(ONE, 6)
    assert bench.known.behind_s() == 10.0, "an older state is no echo"
    bench.seen(ONE, 7)
    assert bench.known.behind_s() == 0.0, "the oldest of them has come: the watch tells"


@pytest.mark.parametrize("end", ["a change by others", "its end", "a pass finds it gone", "its namespace is refused"])
def test_what_ends_the_wait_for_an_echo(bench, end):
    bench.seen(ONE, 6)
    bench.wrote(ONE, 7)
    match end:
        case "a change by others":
            bench.seen(ONE, 8)
        case "its end":
            bench.seen(ONE, 0)
        case "a pass finds it gone":
            bench.known.gone(ONE)
        case _:
            bench.known.excuse("other")
            bench.later(70.0)
            assert bench.known.behind_s() == 60.0
            bench.known.excuse("team")
    bench.later(100.0)
    assert bench.known.behind_s() == 0.0


def test_an_echo_that_came_before_the_answer_to_the_write_is_not_waited_for(bench):
    bench.seen(ONE, 7)
    bench.wrote(ONE, 7)
    bench.later(100.0)
    assert bench.known.behind_s() == 0.0


def test_a_loop_of_kopfs_that_hangs_is_a_watch_that_is_behind(bench):
    bench.later(5.0, beats=False)
    assert bench.known.behind_s() == 0.0
    bench.later(7.0, beats=False)
    assert bench.known.behind_s() == 7.0
    bench.known.beat()
    assert bench.known.behind_s() == 0.0


def test_own_writes_are_known_of_four_thousand_jobs(bench):
    for number in range(4097):
        bench.wrote(JobKey(namespace="team", name=str(number)), 1)
    bench.seen(JobKey(namespace="team", name="0"), 1)
    bench.seen(JobKey(namespace="team", name="1"), 1)
    assert [after for _, after in bench.wishes] == [0.0, ECHO_S], "the oldest is forgotten"


def test_jobs_are_counted_by_state_and_those_of_another_controller_are_not(bench):
    for number, state in enumerate(("Running", "Complete", "Pending", "Running", "")):
        bench.seen(JobKey(namespace="team", name=str(number)), 1, state=state)
    bench.seen(JobKey(namespace="team", name="0"), 0)
    assert bench.known.counts() == {
        "Pending": 1, "Running": 1, "Suspended": 0, "Complete": 1, "Failed": 0, "Invalid": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, "Pending"),
        ({"Valid": "False"}, "Invalid"),
        ({"Suspended": "True"}, "Suspended"),
        ({"Complete": "True", "Running": "False"}, "Complete"),
        ({"Failed": "True"}, "Failed"),
    ],
)
def test_states_are_one_word(conditions, state):
    assert state_of({"status": {"conditions": [{"type": k, "status": v} for k, v in conditions.items()]}}) == state


@pytest.mark.parametrize(("seconds", "is_long_over"), [(None, False), (10.0, False), (290.0, False), (310.0, True)])
def test_a_job_is_long_over_five_minutes_after_its_end(seconds, is_long_over):
    status: dict[str, object] = {"conditions": [{"type": "Complete", "status": "True"}]}
    if seconds is not None:
        status["completionTime"] = times.text(times.utc_now() - timedelta(seconds=seconds))
    job = {"metadata": {"name": "one", "namespace": "team", "resourceVersion": "7"}, "spec": {}, "status": status}
    sight = Sight.of(job, is_listed=True)
    assert (sight.state, sight.is_long_over) == ("Complete", is_long_over)
