"""A rank's steps with its driver: what it says to begin and to commit, what a hello repeats, each step's account."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded
from rlinf_api.names import WorkerId
from rlinf_worker.channels.account import Account
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.roles.protocol import StepCommit
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.steps import Steps
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import Amount, End, MemoryUse


class HostOfSteps:
    peer_wait_s = 60.0

    def __init__(self) -> None:
        self.now = 100.0
        self.waits, self.recorder = Waits(), Recorder(clock=lambda: self.now)
        self.told: list[pb.WorkerMessage] = []
        self.accounts: list[Account] = []
        self.memory: Callable[[], MemoryUse | None] = lambda: None

    def tell(self, message: pb.WorkerMessage) -> None:
        copy = pb.WorkerMessage()
        copy.CopyFrom(message)
        self.told.append(copy)


ENDED = [pb.Ended(key=key, tickets=[key], units=1) for key in ("a@7", "b@7")]


class Rank:
    """Rank 2 of a gang; the test is its driver."""

    def __init__(self) -> None:
        self.host = HostOfSteps()
        me = WorkerIdentity(worker=WorkerId("actor/2"), role="actor", kind="fsdp", rank=2, world=4)
        self.steps = Steps(me, cast(Any, self.host), driver=lambda: cast(Any, None))

    async def begin(self, version: pb.PolicyVersion) -> PolicyVersion:
        beginning = await begun(self.steps.ready(version=None))
        self.steps.on_begin(pb.Begin(version=version))
        return cast(PolicyVersion, await beginning)

    def greeted(self) -> pb.Hello:
        hello = pb.Hello()
        self.steps.greet(hello)
        return hello


async def begun(waiting: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    return task


@pytest.fixture
async def rank():
    return Rank()


VERSION = pb.PolicyVersion(branch=1, number=6)


async def test_a_rank_says_what_it_has_restored_and_begins_where_the_driver_says(rank):
    beginning = await begun(rank.steps.ready(version=PolicyVersion(1, 4), highest_branch=3))
    ready = pb.Ready(version=pb.PolicyVersion(branch=1, number=4), restored=True, highest_branch=3)
    assert rank.host.told == [pb.WorkerMessage(ready=ready)]
    assert [name for name, _ in rank.host.waits.current()] == ["the driver's Begin for actor/2"]
    assert rank.host.waits.gated == [], "off its slots it is told to begin all the same"
    rank.steps.on_begin(pb.Begin(version=pb.PolicyVersion(branch=4, number=4)))
    assert await beginning == PolicyVersion(4, 4)


async def test_a_rank_without_a_checkpoint_has_restored_nothing(rank):
    beginning = await begun(rank.steps.ready(version=None))
    assert rank.host.told == [pb.WorkerMessage(ready=pb.Ready())]
    assert not rank.host.told[0].ready.HasField("version")
    beginning.cancel()


async def test_a_begin_that_nobody_waits_for_or_that_is_told_twice_changes_nothing(rank):
    rank.steps.on_begin(pb.Begin(version=VERSION))
    assert rank.greeted() == pb.Hello()
    assert await rank.begin(VERSION) == PolicyVersion(1, 6)
    rank.steps.on_begin(pb.Begin(version=pb.PolicyVersion(branch=9, number=9)))
    assert rank.steps.begun == PolicyVersion(1, 6)


async def test_readiness_is_told_again_to_each_driver_until_it_is_answered(rank):
    rank.steps.on_welcome(driver_attempt=1)
    assert rank.host.told == []
    beginning = await begun(rank.steps.ready(version=None, highest_branch=2))
    rank.steps.on_welcome(driver_attempt=2)
    assert rank.host.told == [pb.WorkerMessage(ready=pb.Ready(highest_branch=2))] * 2
    rank.steps.on_begin(pb.Begin(version=VERSION))
    await beginning
    rank.steps.on_welcome(driver_attempt=3)
    assert len(rank.host.told) == 2


async def test_a_welcome_wakes_whoever_waits_for_one(rank):
    waiting = await begun(rank.steps.news.wait())
    rank.steps.on_welcome(driver_attempt=1)
    async with asyncio.timeout(5):
        await waiting


async def test_a_step_is_done_by_this_rank_and_committed_by_the_driver(rank):
    rank.steps.on_welcome(driver_attempt=5)
    await rank.begin(VERSION)
    rank.host.told.clear()
    doing = await begun(
        rank.steps.done(
            7, branch=1, keys=("env:1@7", "env:0@7"), metrics={"loss": 1, "kl": 0.5}, ended=[ENDED[1], ENDED[0]]
        )
    )
    done = pb.StepDone(
        step=7, branch=1, rank=2, keys=["env:1@7", "env:0@7"], metrics_json='{"loss": 1.0, "kl": 0.5}',
        ended=ENDED, highest_driver_attempt=5,
    )  # fmt: skip
    assert rank.host.told == [pb.WorkerMessage(step_done=done)]
    assert [name for name, _ in rank.host.waits.current()] == ["the commit of step 7"]
    assert rank.greeted() == pb.Hello(ready=True, steps_done=[done], committed=VERSION)
    committed = pb.StepCommit(
        step=7, version=pb.PolicyVersion(branch=1, number=7), checkpoint=True, state_json='{"s": 1}', last=True
    )
    rank.steps.on_commit(committed)
    assert await doing == StepCommit(
        step=7, version=PolicyVersion(1, 7), checkpoint=True, state_json='{"s": 1}', last=True
    )
    assert rank.greeted() == pb.Hello(ready=True, last_commit=committed, committed=committed.version)


async def test_an_edit_of_the_job_is_heard_with_the_begin_and_with_each_step(rank):
    assert (rank.steps.of_job, rank.steps.kept) == (0, 0)
    beginning = await begun(rank.steps.ready(version=None))
    rank.steps.on_begin(pb.Begin(version=VERSION, steps=9, checkpoint_keep=2))
    await beginning
    assert (rank.steps.of_job, rank.steps.kept) == (9, 2)
    doing = await begun(rank.steps.done(7, branch=1, keys=(), metrics={}, ended=()))
    rank.steps.on_commit(pb.StepCommit(step=7, version=VERSION, steps=12, checkpoint_keep=1))
    assert (rank.steps.of_job, rank.steps.kept) == (9, 2), "this rank is not behind that step yet"
    await doing
    assert (rank.steps.of_job, rank.steps.kept) == (12, 1)
    doing = await begun(rank.steps.done(8, branch=1, keys=(), metrics={}, ended=()))
    rank.steps.on_commit(pb.StepCommit(step=8, version=VERSION))
    await doing
    assert (rank.steps.of_job, rank.steps.kept) == (12, 1), "a driver of before says nothing"


async def test_what_is_done_is_said_to_the_next_driver_as_of_the_one_that_has_welcomed_last(rank):
    doing = await begun(rank.steps.done(1, branch=0, keys=(), metrics={}, ended=()))
    assert rank.host.told[0].step_done.highest_driver_attempt == 0
    rank.steps.on_welcome(driver_attempt=8)
    assert [done.highest_driver_attempt for done in rank.greeted().steps_done] == [8]
    doing.cancel()


async def test_a_commit_of_another_life_or_told_twice_is_nobodys(rank):
    rank.steps.on_commit(pb.StepCommit(step=3, version=VERSION))
    assert rank.greeted() == pb.Hello()
    doing = await begun(rank.steps.done(4, branch=1, keys=(), metrics={}, ended=()))
    rank.steps.on_commit(pb.StepCommit(step=4, version=VERSION))
    rank.steps.on_commit(pb.StepCommit(step=4, version=pb.PolicyVersion(branch=9)))
    assert (await doing).version == PolicyVersion(1, 6)


@pytest.mark.parametrize(
    ("waiting", "words"),
    [
        (lambda steps: steps.ready(version=None), "Begin for actor/2 .* a rank of its gang that is not ready"),
        (
            lambda steps: steps.done(3, branch=0, keys=(), metrics={}, ended=()),
            "the commit of step 3 .* another rank of the gang, or the driver",
        ),
    ],
)
async def test_a_wait_for_the_driver_is_bounded_and_says_who_is_missing(rank, waiting, words):
    rank.host.peer_wait_s = 0.001
    with pytest.raises(DeadlineExceeded, match=words):
        await waiting(rank.steps)


class TestAccounts:
    """A worker's time of one step, closed by the driver's clock where it is this machine's."""

    def commit(self, rank: Rank, step: int, *, time: float, seconds: float = 0.0, branch: int = 0) -> list[pb.Account]:
        rank.host.told.clear()
        version = pb.PolicyVersion(branch=branch, number=step)
        rank.steps.on_commit(pb.StepCommit(step=step, version=version, time=time, seconds=seconds))
        return [message.account for message in rank.host.told]

    async def test_an_account_has_all_of_the_step(self, rank):
        rank.host.recorder.add("compute", 101.0, 103.0)
        rank.host.now = 110.0
        (account,) = self.commit(rank, 3, time=110.0, branch=2)
        assert account.instrument_s >= 0.0
        account.instrument_s = 0.0
        seconds = dict(account.seconds)
        assert (seconds.pop("compute"), seconds.pop("other")) == (2.0, 8.0)
        assert set(seconds.values()) == {0.0}
        assert "between" not in seconds
        account.ClearField("seconds")
        compute = pb.Batches(count=1, seconds=2.0, seconds_squared=4.0)
        assert account == pb.Account(step=3, branch=2, window_s=10.0, busy_s=2.0, busy=[1.0, 3.0], batches=[compute])

    async def test_what_a_profile_needs_goes_with_it_and_is_told_once(self, rank):
        recorder = rank.host.recorder
        into, out = (Account(channel="samples", side=side, recorder=recorder) for side in ("consumer", "producer"))
        rank.host.accounts, rank.host.memory = [into, out], lambda: MemoryUse(resident=5, peak=7, offloaded=1)
        into.items, into.bytes = 3, 300
        recorder.took(3, 0, into.end)
        recorder.took(4, 0, into.end)
        recorder.add("wait_data", 101.0, 104.0, on=into.end)
        recorder.add("wait_data", 104.0, 104.5, on=End())
        recorder.add("compute", 105.0, 106.0, amount=Amount(units=3, tokens=12))
        recorder.sums.moved("load", 0.5, 1000)
        rank.host.now = 107.0
        recorder.released("results", 3, 0)
        rank.host.now = 110.0
        (account,) = self.commit(rank, 3, time=110.0)
        assert list(account.traffic) == [
            pb.Traffic(wait_s=0.5),
            pb.Traffic(channel="samples", side="consumer", wait_s=3.0, items=3, bytes=300, of_step=1),
            pb.Traffic(channel="results", side="producer", of_step=1),
        ]  # fmt: skip
        assert list(account.batches) == [
            pb.Batches(size=3, count=1, units=3, tokens=12, seconds=1.0, seconds_squared=1.0, tokens_squared=144,
                       token_seconds=12)
        ]  # fmt: skip
        assert list(account.moves) == [pb.Moves(what="load", count=1, seconds=0.5, seconds_squared=0.25, bytes=1000)]
        assert list(account.releases) == [pb.Releases(channel="results", count=1, seconds=[7.0])]
        assert account.memory == pb.Memory(resident=5, peak=7, offloaded=1)
        rank.host.memory = lambda: None
        into.items, out.items = 7, 2
        (account,) = self.commit(rank, 4, time=110.0)
        assert list(account.traffic) == [
            pb.Traffic(channel="samples", side="consumer", items=4, of_step=1),
            pb.Traffic(channel="samples", side="producer", items=2),
        ]
        assert (list(account.batches), list(account.moves), list(account.releases)) == ([], [], [])
        assert not account.HasField("memory")

    async def test_the_cpu_of_adding_up_is_told_with_the_next_account(self, rank, monkeypatch):
        cpu = count(0.0, 0.25)
        monkeypatch.setattr(time, "thread_time", lambda: next(cpu))
        told = [self.commit(rank, step, time=100.0)[0].instrument_s for step in (1, 2)]
        assert told == [0.25, 0.5]

    async def test_the_cpu_of_recording_is_told(self, rank):
        rank.host.recorder.instrument_s = 5.0
        (account,) = self.commit(rank, 1, time=100.0)
        assert account.instrument_s >= 5.0

    @pytest.mark.parametrize(
        ("heard_after_s", "window_s"), [(0.0, 10.0), (0.0625, 10.0), (1.0, 11.0), (-1.0, 9.0), (-0.0625, 9.9375)]
    )
    async def test_a_commit_happened_when_the_driver_says_where_clocks_are_one(self, rank, heard_after_s, window_s):
        """Where they are not, the smallest delay is their difference; it is never later than now."""
        rank.host.now = 110.0 + heard_after_s
        (account,) = self.commit(rank, 1, time=110.0)
        assert account.window_s == pytest.approx(window_s)

    async def test_the_smallest_delay_so_far_is_what_clocks_are_apart(self, rank):
        rank.host.now = 112.0
        self.commit(rank, 1, time=110.0)
        rank.host.now = 125.0
        (account,) = self.commit(rank, 2, time=120.0)
        assert account.window_s == pytest.approx(10.0), "the other 3 s were a slow message"

    async def test_a_step_that_lasted_less_leaves_what_was_before_it_out(self, rank):
        rank.host.now = 110.0
        self.commit(rank, 1, time=110.0)
        rank.host.recorder.add("wait_data", 110.0, 114.0)
        rank.host.now = 120.0
        (account,) = self.commit(rank, 2, time=120.0, seconds=6.0)
        assert (account.window_s, account.seconds["between"]) == (6.0, 4.0)

    async def test_a_step_is_accounted_for_once_and_none_without_a_time(self, rank):
        assert self.commit(rank, 3, time=0.0) == []
        assert len(self.commit(rank, 3, time=100.0)) == 1
        assert self.commit(rank, 3, time=100.0) == []
        assert self.commit(rank, 2, time=100.0) == []
        assert len(self.commit(rank, 2, time=100.0, branch=1)) == 1, "made again on another branch"

    async def test_the_first_step_of_all_has_an_account(self, rank):
        assert len(self.commit(rank, 0, time=100.0)) == 1


async def test_numbers_are_json_of_floats(rank):
    doing = await begun(rank.steps.done(1, branch=0, keys=(), metrics={"n": True}, ended=()))
    assert json.loads(rank.host.told[0].step_done.metrics_json) == {"n": 1.0}
    doing.cancel()
