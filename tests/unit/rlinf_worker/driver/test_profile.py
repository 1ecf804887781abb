"""Accounts added up to a profile: numbers held, who fed whom, when a report is due, which steps are left out."""

import json
import math
from typing import Any

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.profile import MemoryProfile, Number, Profile, Releases, key_of
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.members import WorkerRecord
from rlinf_worker.driver.profile import (
    OUTCOMES,
    REPORTS_KEPT,
    SAMPLES,
    SIZES,
    STEPS_KEPT,
    Killed,
    ProfileBook,
    route_of,
)
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.driver.steps import Committed
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology, WeightsSpec
from tests.builders_driver import JOB_UID, Job, make_job
from tests.fakes.driver_world import World

TOPOLOGY = Topology(
    cycles=(CycleSpec(channel="actions", asker="env", answerer="rollout"),),
    queues=(
        QueueSpec(channel="segments", producer="", consumer="env"),
        QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True),
    ),
    weights=(WeightsSpec(producer="actor", consumer="rollout"),),
    results=(QueueSpec(channel="scores", producer="env", consumer=""),),
)


class Site:
    """A driver's job with two env workers, a rollout and an actor; the test is its workers and its clock."""

    def __init__(self, *, output: str = "", profile_steps: int = 3, staleness: int = 0, **facts: Any) -> None:
        made = make_job(envs=2, staleness=staleness)
        placement = made.spec.placement.model_copy(update={"profile_steps": profile_steps})
        self.made = Job(made.spec.model_copy(update={"placement": placement}), made.plan)
        self.now, self.losses, self.away = 1000.0, 0, False
        self.job = self.made.known(lambda: self.now, output=output, **facts)
        self.job.topology, self.job.placement = TOPOLOGY, self.made.placement
        for placed in self.made.placement.workers:
            self.job.members.workers[placed.id] = WorkerRecord(placed)
        self.profiles = ProfileBook(self.job, losses=lambda: self.losses, is_away=lambda: self.away)

    def heard(self, worker: str, step: int, **said: Any) -> None:
        self.profiles.heard(
            self.job.members.workers[WorkerId(worker)].placed,
            pb.Account(step=step, branch=self.job.ledger.version.branch, **said),
        )

    def committed(self, step: int, *, seconds: float = 2.0, rare: bool = False, checkpoint: bool = False) -> None:
        done = Committed(
            step=step,
            version=PolicyVersion(self.job.ledger.version.branch, step),
            keys={"actor": ()},
            metrics={},
            seconds=seconds,
            rare=rare,
            checkpoint=checkpoint,
            last=False,
        )
        self.profiles.committed(done)

    def step(
        self, number: int, *, seconds: float = 2.0, rare: bool = False, checkpoint: bool = False, **said: Any
    ) -> None:
        """It ends, and all say so."""
        self.committed(number, seconds=seconds, rare=rare, checkpoint=checkpoint)
        for worker in self.job.members.workers:
            self.heard(worker, number, window_s=seconds, **said)

    def told(self) -> list[tuple[int, int, int]]:
        """First and last step, and how many, of each report."""
        return [(found.first_step, found.last_step, found.steps) for found in self.profiles.reports]


def waited(kind: str = "wait_data", seconds: float = 1.0, channel: str = "segments") -> dict[str, Any]:
    return {"seconds": {kind: seconds}, "traffic": [pb.Traffic(channel=channel, side="consumer", wait_s=seconds)]}


def role(profile: Profile, name: str) -> Any:
    [found] = [role for role in profile.roles if role.name == name]
    return found


def traffic(channel: str, side: str, items: int, *, bytes: int, of_step: int | None = None) -> pb.Traffic:
    return pb.Traffic(
        channel=channel, side=side, items=items, bytes=bytes, of_step=items if of_step is None else of_step
    )


def test_times_waits_and_batches_are_means_with_the_spread_of_all_workers_and_steps():
    site = Site(profile_steps=0)  # one report of both
    for step, of_env in ((1, (1.0, 2.0)), (2, (3.0, 6.0))):
        site.committed(step, seconds=10.0 * step)
        for rank, seconds in enumerate(of_env):
            site.heard(
                f"env/{rank}", step, seconds={"compute": seconds, "wait_data": 0.5},
                batches=[
                    pb.Batches(size=4, count=2, units=8, tokens=40, seconds=seconds, seconds_squared=seconds**2 / 2,
                               tokens_squared=800, token_seconds=20 * seconds),
                ],
                traffic=[
                    pb.Traffic(channel="segments", side="consumer", items=4, bytes=100, wait_s=0.5),
                    pb.Traffic(channel="trajectories", side="producer", items=4, bytes=400),
                ],
                moves=[pb.Moves(what="load", count=1, seconds=seconds, seconds_squared=seconds**2, bytes=100)],
                releases=[pb.Releases(channel="trajectories", count=4, seconds=[seconds * n for n in (1, 2, 3, 4)])],
                memory=pb.Memory(resident=5 + rank, peak=9 - rank, process=step, process_peak=2 * step),
            )  # fmt: skip
    site.profiles.end()
    [profile] = site.profiles.reports
    assert (profile.revision, profile.first_step, profile.last_step, profile.steps) == (1, 1, 2, 2)
    assert (profile.job.uid, profile.key) == (JOB_UID, key_of(site.job.spec))
    assert profile.step_seconds == Number(value=15.0, spread=math.sqrt(50), count=2)
    env = role(profile, "env")
    assert (env.pool, env.workers, env.slots_per_worker) == ("sim", 2, 1)
    assert env.seconds == {
        "compute": Number(value=3.0, spread=math.sqrt(14 / 3), count=4),
        "wait_data": Number(value=0.5, count=4),
    }
    [batch] = env.batches
    assert (batch.size, batch.units, batch.tokens) == (4, 4, 20)
    assert (batch.tokens_squared, batch.token_seconds) == (400, 20 * 12 / 8)
    assert batch.seconds == Number(value=1.5, spread=math.sqrt((25 - 8 * 1.5**2) / 7), count=8)
    [move] = env.moves
    assert (move.what, move.bytes, move.seconds.value, move.seconds.count) == ("load", 100, 3.0, 4)
    assert [(e.channel, e.side, e.units, e.bytes, e.wait_seconds) for e in env.ends] == [
        ("segments", "consumer", 4, 100, Number(value=0.5, count=4)),
        ("trajectories", "producer", 4, 400, Number(value=0.0, count=4)),
    ]
    assert env.releases == [
        Releases(channel="trajectories", count=16, seconds=sorted(n * s for n in (1, 2, 3, 4) for s in (1, 2, 3, 6)))
    ]
    assert env.memory == MemoryProfile(resident=6, peak=9, process=2, process_peak=4)


def test_an_end_at_which_a_worker_did_nothing_counts_as_nothing_and_not_as_absent():
    site = Site()
    site.committed(1)
    site.heard("env/0", 1, **waited(seconds=3.0))
    site.heard("env/1", 1, seconds={"compute": 3.0})
    site.committed(2)
    env = role(site.profiles.reports[0], "env")
    assert env.ends[0].wait_seconds == Number(value=1.5, spread=math.sqrt(4.5), count=2)
    assert env.seconds["wait_data"].value == 1.5


def test_the_graph_has_who_fed_whom_with_how_much_in_a_step():
    site = Site()
    site.committed(1)
    for rank, items in ((0, 3), (1, 5)):
        site.heard(f"env/{rank}", 1, traffic=[
            traffic("segments", "consumer", items, bytes=items),
            traffic("actions", "producer", 10 * items, bytes=100 * items),
            traffic("actions", "consumer", 10 * items, bytes=20 * items),
            traffic("trajectories", "producer", items, bytes=1000 * items),
            traffic("scores", "producer", 1, bytes=2),
        ])  # fmt: skip
    site.heard("rollout/0", 1, traffic=[
        traffic("actions", "consumer", 80, bytes=800),
        traffic("actions", "producer", 80, bytes=160),
        pb.Traffic(channel="weights", side="consumer", items=1, bytes=4096),
    ])  # fmt: skip
    site.heard("actor/0", 1, traffic=[
        traffic("trajectories", "consumer", 8, bytes=8000),
        pb.Traffic(channel="weights", side="producer", items=1, bytes=4096),
    ])  # fmt: skip
    site.committed(2)
    found = {(c.name, c.mode, c.producer, c.consumer): (c.units.value, c.bytes.value)
             for c in site.profiles.reports[0].channels}  # fmt: skip
    assert found == {
        ("segments", "Queue", "", "env"): (8, 8),
        ("actions", "Cycle", "env", "rollout"): (80, 800),
        ("actions", "Cycle", "rollout", "env"): (80, 160),
        ("trajectories", "Queue", "env", "actor"): (8, 8000),
        ("scores", "Queue", "env", ""): (2, 4),
        ("weights", "Weights", "actor", "rollout"): (1, 4096),
    }


def test_a_unit_counts_in_its_own_step_however_far_ahead_of_it_it_went():
    """With staleness an env has made the last steps' units before: 8 of steps 1 and 2 in the time of step 1."""
    site = Site(profile_steps=0)
    for step, items in ((1, 16), (2, 0)):
        site.committed(step)
        site.heard("env/0", step, traffic=[traffic("segments", "consumer", items, bytes=10 * items, of_step=8)])
    site.profiles.end()
    [profile] = site.profiles.reports
    [channel] = profile.channels
    assert (channel.units, channel.bytes) == (Number(value=8, count=2), Number(value=80, count=2))
    assert role(profile, "env").ends[0].units == 8


def test_what_a_gang_takes_beside_its_work_is_what_the_rank_says_that_waited_least():
    site = Site(profile_steps=0)
    for step, seconds in ((1, (0.25, 1.5)), (2, (2.0, 0.75))):
        site.committed(step)
        for rank, comm in enumerate(seconds):
            site.heard(f"env/{rank}", step, seconds={"comm": comm})
        site.heard("rollout/0", step, seconds={"comm": 1.0})
    site.profiles.end()
    [profile] = site.profiles.reports
    [exchange] = role(profile, "env").moves
    assert (exchange.what, exchange.seconds.value, exchange.seconds.count) == ("exchange", 0.5, 2)
    assert role(profile, "rollout").moves == [], "one rank waits for nobody"


def test_release_times_stand_for_as_many_units_as_they_were_chosen_of():
    site = Site()
    site.committed(1)
    for rank, (count, seconds) in enumerate(((1000, [1.0] * 128), (128, [5.0] * 128))):
        said = pb.Releases(channel="trajectories", count=count, seconds=seconds)
        site.heard(f"env/{rank}", 1, releases=[said])
    site.committed(2)
    [found] = role(site.profiles.reports[0], "env").releases
    assert (found.count, len(found.seconds)) == (1128, 128)
    assert found.seconds.count(5.0) == pytest.approx(128 * 128 / 1128, abs=1)


async def test_a_driver_adds_up_what_its_workers_say_with_each_step():
    world = World(make_job(steps=4, every_steps=100))
    driver = world.driver
    committed = driver.commits.on_committed

    def say(done: Committed) -> None:
        committed(done)
        for worker in driver.job.members.workers:
            account = pb.Account(step=done.step, seconds={"compute": 0.5})
            driver.on_worker_message(worker, pb.WorkerMessage(account=account))

    driver.commits.on_committed = say
    await world.run_until(lambda: driver.job.ledger.committed == 3)
    first, second = driver.profiles.reports
    assert [(found.last_step, found.steps) for found in (first, second)] == [(1, 1), (2, 1)]
    assert {found.name for found in first.roles} == {"env", "rollout", "actor"}
    assert role(first, "env").seconds == {"compute": Number(value=0.5, count=2)}


async def test_a_worker_that_is_killed_for_memory_is_told_at_once():
    world = World(make_job(steps=4))
    driver = world.driver
    await world.run_until(lambda: driver.job.begun)
    assert driver.profiles.take() is None
    record = driver.job.members.workers[WorkerId("env/0")]
    failure = agents_pb2.Failure(role="env", reason="OOMKilled", exit_code=137)
    driver.workforce.exited(
        agents_pb2.WorkerExited(worker="env/0", attempt=record.attempt, exit_code=137, failure=failure)
    )
    assert driver.profiles.take() == Killed(1, {"env": 1})
    assert driver.profiles.take() is None


def test_a_channel_that_nobody_declared_is_no_edge():
    assert route_of(TOPOLOGY, "other", "env", "consumer") is None
    assert route_of(TOPOLOGY, "segments", "env", "producer") is None


def test_each_of_the_first_steps_is_told_and_then_all_of_half_a_minute_together():
    site = Site(profile_steps=2)
    for step in range(1, 41):
        site.step(step)
        site.now += 2.0
    assert site.told() == [(1, 1, 1), (2, 2, 1), (3, 7, 5), (8, 22, 15), (23, 37, 15)]
    site.profiles.end()
    assert site.told()[-1] == (38, 40, 3)
    site.profiles.end()
    assert len(site.told()) == 6, "nothing is told twice"


def slower_from(first, *, last):
    """A job whose steps take a quarter longer from `first` on."""
    site = Site(profile_steps=1, settings=DriverSettings(profile_interval_s=1e9))
    for step in range(1, last + 1):
        site.step(step, seconds=2.0 if step < first else 2.5)
        site.now += 2.0
    return site


def test_steps_that_take_longer_than_those_before_are_told_apart_from_them_and_at_once():
    site = slower_from(12, last=19)
    # 2 to 6 judge the plan; 7 to 11 were as those; of 12 to 16 each took a quarter longer.
    assert site.told() == [(1, 1, 1), (2, 6, 5), (7, 11, 5), (12, 16, 5)]
    assert [found.step_seconds.value for found in site.profiles.reports] == [2.0, 2.0, 2.0, 2.5]
    for step in range(20, 40):  # as slow as they are now is what is usual
        site.step(step, seconds=2.5)
    assert len(site.told()) == 4
    for step in range(40, 60):  # faster is told as well
        site.step(step, seconds=2.0)
        site.now += 2.0
    assert site.told()[-1][0] > 40


def test_a_report_does_not_mix_steps_from_before_and_after_a_change():
    site = slower_from(14, last=20)
    assert site.told() == [(1, 1, 1), (2, 6, 5), (7, 13, 7), (14, 18, 5)]
    assert [found.step_seconds.value for found in site.profiles.reports] == [2.0, 2.0, 2.0, 2.5]


def test_nor_does_one_whose_interval_is_over_as_the_steps_change():
    site = Site(profile_steps=1, settings=DriverSettings(profile_interval_s=30.0))
    for step in range(1, 20):
        site.step(step, seconds=10.0 if step < 9 else 15.0)
        site.now += 10.0
    assert all(found.step_seconds.spread == 0.0 for found in site.profiles.reports)
    assert site.told()[-3:] == [(8, 8, 1), (9, 13, 5), (14, 16, 3)]


def test_steps_that_stick_out_bring_no_report_where_the_five_from_the_first_on_are_as_ever():
    site = Site(profile_steps=1, settings=DriverSettings(profile_interval_s=1e9))
    for step in range(1, 60):
        site.step(step, seconds=2.6 if step in (8, 9) else 1.5 if step == 12 else 2.0)
        site.now += 2.0
    assert site.told() == [(1, 1, 1), (2, 6, 5)]


def test_no_two_reports_of_a_job_that_jumps_about_are_within_a_second():
    site = Site(profile_steps=1, settings=DriverSettings(profile_interval_s=1e9))
    for step in range(1, 200):
        site.step(step, seconds=0.01 if step // 5 % 2 else 0.02)
        site.now += 0.01
    assert len(site.told()) <= 2 + 2 * 2  # a first step, a first block; a pair for each second of the two


def test_without_profile_steps_a_plan_is_not_judged():
    site = Site(profile_steps=0)
    for step in range(1, 14):
        site.step(step, seconds=2.0 if step < 7 else 4.0)
        site.now += 2.0
    assert site.told() == []


def test_how_long_a_worker_takes_to_be_ready_is_a_move():
    site = Site(profile_steps=1)
    for seconds in (1.0, 3.0):
        site.profiles.started("env", seconds=seconds)
    site.step(1)
    site.profiles.end()
    [found] = site.profiles.reports
    starts = {role.name: [move for move in role.moves if move.what == "start"] for role in found.roles}
    assert [(move.seconds.value, move.seconds.count) for move in starts["env"]] == [(2.0, 2)]
    assert starts["rollout"] == []


def test_a_step_is_told_as_the_next_one_commits_by_when_all_have_said_theirs():
    site = Site()
    news: list[int] = []
    site.profiles.on_report = lambda: news.append(len(site.profiles.reports))
    site.step(1)
    assert news == []
    site.committed(2)
    assert (news, role(site.profiles.reports[0], "env").workers) == ([1], 2)


def test_another_plan_begins_anew_with_its_first_steps_and_none_is_of_two():
    site = Site(profile_steps=1)
    for step in (1, 2, 3):
        site.step(step)
    changed = make_job(envs=2, revision=2)
    site.job.placement = changed.placement
    for step in (4, 5):
        site.step(step)
    site.profiles.end()
    assert [(found.revision, found.first_step, found.last_step) for found in site.profiles.reports] == [
        (1, 1, 1), (1, 2, 3), (2, 4, 4), (2, 5, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "left_out"), [("a worker is lost", (2, 3)), ("somebody is away", (3,)), ("the steps are made again", (3,))]
)
def test_steps_in_which_somebody_was_lost_are_left_out(what, left_out):
    """And the one before: it may have committed before anybody knew, with what the worker did of it never told."""
    site = Site()
    site.step(1)
    site.step(2)
    if what == "a worker is lost":
        site.losses += 1
    elif what == "somebody is away":
        site.away = True
    else:
        site.job.ledger.rewind(PolicyVersion(0, 2))
    site.step(3)
    site.away = False
    site.step(4)
    site.step(5)
    site.profiles.end()
    assert site.told() == [(step, step, 1) for step in range(1, 6) if step not in left_out]


def test_the_last_step_is_left_out_where_somebody_was_lost_behind_it():
    site = Site()
    site.step(1)
    site.step(2)
    site.losses += 1
    site.profiles.end()
    assert site.told() == [(1, 1, 1)]


def test_a_step_with_an_evaluation_is_left_out():
    """With nine times the units of the others in the mean, a plan would be made for a step that there never is."""
    site = Site(profile_steps=0)
    for step in range(1, 6):
        items = 288 if step == 3 else 32
        said = [traffic("segments", "consumer", items, bytes=items)]
        site.step(step, seconds=items / 16, rare=step == 3, traffic=said)
    site.profiles.end()
    [profile] = site.profiles.reports
    [segments] = [channel for channel in profile.channels if channel.name == "segments"]
    assert (profile.steps, profile.step_seconds) == (4, Number(value=2.0, count=4))
    assert segments.units == Number(value=32 * len(site.job.members.workers), count=4)
    assert site.profiles.measured == Number(value=2.0, count=3), "the first one warmed up"


def test_a_save_is_of_the_time_of_the_step_behind_it_which_is_left_out():
    site = Site(profile_steps=0)
    for step in range(1, 9):
        site.step(step, seconds=9.0 if step in (4, 7) else 2.0, checkpoint=step % 3 == 0)
    site.profiles.end()
    [profile] = site.profiles.reports
    assert profile.step_seconds == Number(value=2.0, count=6)


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_every_step_has_is_not_rare(staleness):
    """An evaluation is worked on in the time of as many steps as are open at once; of more in a row it is one each."""
    site = Site(profile_steps=0, staleness=staleness)
    for step in range(1, 21):
        site.step(step, rare=True, checkpoint=True)
    site.profiles.end()
    first = 3 + staleness  # the first save is in the time of step 2
    assert site.told() == [(first, 20, 21 - first)]


def test_steps_that_are_made_again_are_in_it_already_and_a_report_over_a_branch_goes_out():
    site = Site(profile_steps=0)
    for number in range(1, 8):
        site.step(number)
    site.losses += 1
    site.job.ledger.version = PolicyVersion(1, 3)
    for number in range(4, 12):
        site.step(number, seconds=3.0)
    site.profiles.end()
    assert site.told() == [(1, 11, 11)], "6 of the first branch, and those behind them of the next"
    measured = site.profiles.measured
    assert (measured.value, measured.count) == ((5 * 2.0 + 5 * 3.0) / 10, 10), "the first one warmed up"
    assert site.profiles.outcomes["contradictory"] == 0


def test_what_is_said_late_of_a_step_counts_for_none_that_is_made_again():
    site = Site()
    for step in (1, 2):
        site.step(step)
    site.committed(3)
    site.profiles.heard(site.made.placement.workers[0], pb.Account(step=2, seconds={"compute": 9.0}))
    site.job.ledger.rewind(PolicyVersion(0, 1))
    for step in (2, 3):
        site.step(step, seconds=1.0)
        site.profiles._was = (0, 1)  # calm again
    site.profiles.end()
    assert role(site.profiles.reports[-1], "env").seconds == {}


def test_the_first_step_that_a_later_driver_sees_is_left_out_as_it_began_under_another():
    site = Site(attempt=2)
    for step in (7, 8):
        site.step(step)
    site.profiles.end()
    assert site.told() == [(8, 8, 1)]


def test_a_step_of_which_nobody_says_anything_is_in_no_profile_and_who_says_it_twice_counts_once():
    site = Site()
    site.committed(1)
    site.committed(2)
    for worker, seconds in (("env/0", 1.0), ("env/1", 1.0), ("env/0", 5.0)):
        site.heard(worker, 2, **waited(seconds=seconds))
    site.profiles.end()
    assert site.told() == [(2, 2, 1)]
    assert role(site.profiles.reports[0], "env").seconds["wait_data"] == Number(value=1.0, count=2)


def test_what_a_worker_cannot_have_measured_is_left_out_with_a_word_and_the_job_goes_on(tmp_path):
    site = Site(output=str(tmp_path))
    site.step(1, seconds=2.0)
    site.committed(2)
    site.heard("env/0", 2, seconds={"compute": math.nan}, batches=[pb.Batches(size=1, count=0)],
               moves=[pb.Moves(what="load")], releases=[pb.Releases(channel="scores")])  # fmt: skip
    site.step(3)
    site.profiles.end()
    assert site.told() == [(1, 1, 1), (3, 3, 1)]
    assert site.profiles.outcomes["contradictory"] == 1
    [said] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert said["event"] == "profile"
    assert said["message"] == "steps 2 to 2 are left out: value: Input should be a finite number"


def test_profile_json_has_the_plans_steps_but_for_the_first_once_there_is_another(tmp_path):
    site = Site(output=str(tmp_path))
    for step in (1, 2, 3, 4):
        site.step(step, seconds=float(step))
    found = [Profile.from_json((tmp_path / "profile.json").read_text())]
    site.profiles.end()
    found.append(Profile.from_json((tmp_path / "profile.json").read_text()))
    assert [(one.first_step, one.last_step, one.step_seconds.value) for one in found] == [(2, 3, 2.5), (2, 4, 3.0)]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_profile_that_finds_no_room_is_lost_and_counted(tmp_path):
    site = Site(output=str(tmp_path))
    (tmp_path / "profile.json").mkdir()
    site.step(1)
    site.committed(2)
    assert (site.told(), site.job.output.lost) == ([(1, 1, 1)], {"profile": 1})


def test_everything_is_bounded():
    site = Site(profile_steps=1000)
    for step in range(1, REPORTS_KEPT + 6):
        site.step(step, batches=[pb.Batches(size=1000 * step + n, count=1, seconds=1) for n in range(20)])
    assert (len(site.profiles.reports), site.profiles.outcomes["overtaken"]) == (REPORTS_KEPT, 4)
    site = Site(profile_steps=0, settings=DriverSettings(profile_interval_s=1e9))
    for step in range(1, SIZES + 20):
        site.step(
            step,
            batches=[pb.Batches(size=1100 + step, count=1, units=1100 + step, seconds=1)],
            releases=[pb.Releases(channel="trajectories", count=128, seconds=[0.01 * n * step for n in range(128)])],
        )
    for step in range(5000, 5000 + 2 * STEPS_KEPT):
        site.heard("env/0", step)
    assert len(site.profiles._said) <= STEPS_KEPT
    totals = site.profiles._of_report
    assert totals is not None
    found = totals.roles["env", "sim"]
    assert len(found.released["trajectories"].samples) <= SAMPLES
    profile = totals.profile(
        site.profiles._profile(totals).job, key=key_of(site.job.spec), topology=TOPOLOGY, starts={}
    )
    env = role(profile, "env")
    assert (len(env.batches), sum(batch.seconds.count for batch in env.batches)) == (SIZES + 1, 2 * totals.steps.count)
    assert env.releases[0].count == 128 * 2 * totals.steps.count
    assert (len(env.releases[0].seconds), env.releases[0].seconds[0]) == (128, 0.0)
    assert env.releases[0].seconds[-1] == pytest.approx(0.01 * 127 * totals.steps.count)


def test_outcomes_are_there_from_the_start():
    assert dict(Site().profiles.outcomes) == dict.fromkeys(OUTCOMES, 0)
