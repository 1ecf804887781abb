"""The driver's report on the wire: with its certificate, to a scheduler that answers, refuses, hangs or is away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from rlinf_api import rpc
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2 as pb
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2_grpc
from rlinf_api.profile import Profile
from rlinf_worker.driver.reporting import Reporter
from rlinf_worker.driver.settings import DriverSettings
from tests.builders_driver import JOB_UID, make_job
from tests.fakes.certs import Authority
from tests.unit.rlinf_worker.driver.test_profile import Site

REPORT = "/rlinf.scheduler.v1alpha1.Scheduler/ReportProfile"
AWAY, UNKNOWN = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Gives `answers` in turn, then accepts: a response, a code to abort with, or None for no answer at all."""

    def __init__(self) -> None:
        self.asked: list[pb.ReportProfileRequest] = []
        self.callers: list[str] = []
        self.answers: list[pb.ReportProfileResponse | grpc.StatusCode | None] = []

    async def ReportProfile(self, request: pb.ReportProfileRequest, context: Any) -> pb.ReportProfileResponse:  # noqa: N802
        self.asked.append(request)
        self.callers.append(rpc.peer_identity(context).job_uid)
        answer = self.answers.pop(0) if self.answers else pb.ReportProfileResponse(accepted=True)
        if answer is None:
            await asyncio.sleep(60)
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "said so")
        assert isinstance(answer, pb.ReportProfileResponse)
        return answer

    async def RequestPlan(self, request: pb.RequestPlanRequest, context: Any) -> pb.RequestPlanResponse:  # noqa: N802
        raise AssertionError("Must not be called!")


class Bench:
    def __init__(self, site: Any, scheduler: FakeScheduler, pauses: list[float]) -> None:
        self.site, self.scheduler, self.pauses = site, scheduler, pauses

    @property
    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.site.profiles.outcomes.items() if count}

    async def told(self, count: int = 1) -> dict[str, int]:
        await until(lambda: sum(self.outcomes.values()) >= count)
        return self.outcomes


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Any]:
    """`async with bench(...) as b`: a driver's reporter beside a scheduler; `address` takes the place of its own."""
    authority, scheduler = Authority(), FakeScheduler()
    server = grpc.aio.server(
        interceptors=[rpc.Gatekeeper({REPORT: frozenset({"driver"})}, job_uid="*")], options=list(rpc.SERVER_OPTIONS)
    )
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
    tls = authority.folder(tmp_path / "scheduler", part="scheduler", job_uid="*", namespace="*")
    port = rpc.bind(server, "127.0.0.1:0", tls=rpc.TlsFolder(tls))
    await server.start()

    @asynccontextmanager
    async def opened(
        *, address: str = f"127.0.0.1:{port}", part: str = "driver", timeout_s: float = 5.0
    ) -> AsyncIterator[Bench]:
        pauses: list[float] = []

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0)

        own = authority.folder(tmp_path / part.replace(":", "-"), part=part, job_uid=JOB_UID)
        site = Site()
        async with Reporter(
            site.profiles, address=address, tls=rpc.TlsFolder(own), namespace="team", job_uid=JOB_UID,
            settings=DriverSettings(report_timeout_s=timeout_s, report_tries=3), pause=pause,
        ):  # fmt: skip
            yield Bench(site, scheduler, pauses)

    yield opened
    await server.stop(None)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def reported(site: Any, steps: int = 1) -> None:
    for step in range(1, steps + 2):
        site.step(step)


async def test_a_profile_is_reported_with_the_certificate_of_the_driver(bench):
    async with bench() as b:
        reported(b.site, steps=2)
        assert await b.told(2) == {"accepted": 2}
        first, second = b.scheduler.asked
        assert (first.namespace, first.job_uid, b.scheduler.callers[0]) == ("team", JOB_UID, JOB_UID)
        profiles = [Profile.from_json(request.profile_json) for request in (first, second)]
        assert [(p.job.uid, p.revision, p.first_step, p.last_step) for p in profiles] == [
            (JOB_UID, 1, 1, 1), (JOB_UID, 1, 2, 2),
        ]  # fmt: skip
        assert {role.name for role in profiles[0].roles} == {"env", "rollout", "actor"}
        assert not b.site.profiles.reports


async def test_who_was_killed_for_memory_is_told_without_a_step(bench):
    async with bench() as b:
        for role in ("rollout", "env", "rollout"):
            b.site.profiles.killed(role)
        assert await b.told() == {"accepted": 1}, "the newest numbers alone"
        [asked] = b.scheduler.asked
        assert (dict(asked.killed), asked.revision, asked.profile_json) == ({"rollout": 2, "env": 1}, 1, "")
        b.site.job.placement = make_job(envs=2, revision=2).placement
        b.site.profiles.killed("env")
        await b.told(2)
        assert (dict(b.scheduler.asked[1].killed), b.scheduler.asked[1].revision) == ({"env": 1}, 2)


async def test_a_refusal_is_heard_once_and_for_good(bench, caplog):
    async with bench() as b:
        b.scheduler.answers = [
            pb.ReportProfileResponse(message="steps run backwards"),
            grpc.StatusCode.PERMISSION_DENIED,
        ]
        reported(b.site, steps=2)
        assert await b.told(2) == {"refused": 2}
        assert (len(b.scheduler.asked), b.pauses) == (2, [])
    assert [r.error for r in caplog.records if r.name.endswith("reporting")] == ["steps run backwards", "said so"]


async def test_a_scheduler_that_is_away_for_a_moment_is_asked_again_after_longer_and_longer_pauses(bench):
    async with bench(timeout_s=2.0) as b:
        b.scheduler.answers = [AWAY, None]
        reported(b.site)
        assert await b.told() == {"accepted": 1}
        assert (len(b.scheduler.asked), b.pauses) == (3, [1.0, 2.0])


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[grpc.aio.Channel]:
    """The channels that there were."""
    made, dial = list[grpc.aio.Channel](), rpc.dial

    async def noted(*args: Any, **kwargs: Any) -> grpc.aio.Channel:
        made.append(await dial(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(rpc, "dial", noted)
    return made


async def test_a_driver_stays_with_the_scheduler_that_it_has(bench, dialled):
    async with bench() as b:
        reported(b.site, steps=2)
        await b.told(2)
        b.site.profiles.killed("env")
        assert await b.told(3) == {"accepted": 3}
        [channel] = dialled
        assert channel.get_state() is grpc.ChannelConnectivity.READY
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize(
    ("answer", "becomes"),
    [(AWAY, {"accepted": 2}), (None, {"accepted": 2}), (UNKNOWN, {"refused": 1, "accepted": 1})],
    ids=["it is away", "it hangs", "its certificate is another"],
)
async def test_after_a_call_that_failed_it_is_dialled_anew(bench, dialled, answer, becomes):
    """With the certificates of that moment, at the address of that moment."""
    async with bench(timeout_s=2.0) as b:
        b.scheduler.answers = [answer]
        reported(b.site, steps=2)
        assert await b.told(2) == becomes
        first, second = dialled
        states = (first.get_state(), second.get_state())
        assert states == (grpc.ChannelConnectivity.SHUTDOWN, grpc.ChannelConnectivity.READY)
    assert second.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_one_that_stays_away_costs_the_report_and_nothing_else(bench, caplog):
    async with bench() as b:
        b.scheduler.answers = [AWAY] * 3
        reported(b.site, steps=2)
        assert await b.told(2) == {"unanswered": 1, "accepted": 1}
        assert len(b.scheduler.asked) == 4
        assert not b.site.profiles.scheduler_away, "it took the second one"
    assert [r.getMessage() for r in caplog.records if r.name.endswith("reporting")] == [
        "no scheduler took a profile; the job goes on"
    ]


async def test_an_address_at_which_nobody_is_costs_no_more(bench):
    async with bench(address="127.0.0.1:1") as b:
        reported(b.site)
        assert await b.told() == {"unanswered": 1}
        assert b.site.profiles.scheduler_away


async def test_a_pool_may_not_report(bench):
    async with bench(part="pool:gpu") as b:
        reported(b.site)
        assert await b.told() == {"refused": 1}
        assert not b.scheduler.asked


async def test_without_an_address_nothing_is_sent_and_the_newest_are_kept(bench):
    async with bench(address="") as b:
        reported(b.site, steps=3)
    assert (b.scheduler.asked, len(b.site.profiles.reports), b.outcomes) == ([], 3, {})


async def test_the_last_report_goes_out_before_the_end(bench):
    async with bench() as b:
        reported(b.site)
        await b.told()
        b.site.profiles.end()
    assert b.outcomes == {"accepted": 2}


async def test_an_end_does_not_wait_for_a_scheduler_that_hangs(bench):
    async with asyncio.timeout(20), bench(timeout_s=300.0) as b:
        b.scheduler.answers = [None]
        reported(b.site)
        await until(lambda: b.scheduler.asked)
    assert b.outcomes == {}
