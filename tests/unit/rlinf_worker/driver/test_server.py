"""The driver's face without a network: who is let in, how a refusal is told, what the operator's calls do."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import grpc.aio
import pytest

from rlinf_api import names, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvariantBroken, RetryableError, RLinfError
from rlinf_api.report import DriverState
from rlinf_worker.driver import server, status, turns
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.uplink.outbox import Outbox
from tests.builders_driver import JOB_UID, Clock, make_job
from tests.fakes.driver_world import World

NOW = DriverSettings(plan_timeout_s=0.001)
SIM, ENV = ("sim", 0), names.WorkerId("env/0")


def driver(**facts: Any) -> Driver:
    return make_job(steps=3).driver(Clock(), settings=NOW, **facts)


def servicer(of: Driver, *, on_plan: Any = None) -> server.JobServicer:
    return server.JobServicer(of, on_plan=on_plan or (lambda: None), seen_end=lambda: None)


def hello(**fields: Any) -> agents_pb2.Hello:
    said = {"job_uid": JOB_UID, "pod": "j-sim-0-a1", "pool": "sim", "attempt": 1, "protocol": names.PROTOCOL}
    return agents_pb2.Hello(**{**said, **fields})


# --- reception --------------------------------------------------------------------------------------------------------
async def test_an_agent_of_a_planned_pod_is_welcomed_with_what_it_has_to_keep_to():
    one, outbox = driver(attempt=2), Outbox[Any]()
    one.switch.first(make_job().plan, switches=0)
    agents = server.AgentsServicer(one)
    await agents.admit(hello(ordinal=0), "pool:sim", outbox)
    [welcome, *_] = outbox._messages
    assert welcome == agents_pb2.DriverMessage(
        welcome=agents_pb2.Welcome(
            driver_attempt=2,
            protocol=names.PROTOCOL,
            heartbeat_interval_s=one.job.settings.limits.heartbeat_interval_s,
        )
    )
    assert one.job.members.pods[agents.key(hello(ordinal=0))].attached
    agents.heard(SIM, agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat()), more=False)
    agents.gone(SIM, outbox)
    assert not one.job.members.pods[SIM].attached


async def test_a_certificate_of_another_pool_speaks_for_no_pod_of_this_one():
    with pytest.raises(Refuse) as caught:
        await server.AgentsServicer(driver()).admit(hello(), "pool:gpu", Outbox[Any]())
    assert str(caught.value) == "certificate of 'pool:gpu' may not speak for pool 'sim'"
    assert (caught.value.exit_code, caught.value.why) == (names.EXIT_USER_ERROR, "certificate")


@pytest.mark.parametrize("part", ["pool:gpu", "pool:other", "operator", "pool:"])
async def test_a_certificate_of_a_pool_without_the_role_registers_no_worker_of_it(part):
    channels = server.ChannelsServicer(driver())
    said = pb.Hello(job_uid=JOB_UID, worker="env/0", attempt=1, protocol=names.PROTOCOL)
    assert channels.key(said) == "env/0"
    with pytest.raises(Refuse) as caught:
        await channels.admit(said, part, Outbox[Any]())
    assert str(caught.value) == f"certificate of {part!r} may not register a worker of role 'env'"
    assert (caught.value.exit_code, caught.value.why) == (names.EXIT_USER_ERROR, "certificate")


async def test_who_comes_before_the_plan_is_told_to_come_again():
    one = driver()
    worker = pb.Hello(job_uid=JOB_UID, worker="env/0", attempt=1, protocol=names.PROTOCOL)
    for reception, said in ((server.AgentsServicer(one), hello()), (server.ChannelsServicer(one), worker)):
        admit: Any = reception.admit
        with pytest.raises(Refuse) as caught:
            await admit(said, "pool:sim", Outbox[Any]())
        assert caught.value.exit_code == names.EXIT_RETRYABLE


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (Refuse("no", exit_code=65, why="w"), 65, "w"),
        (Refuse("no", exit_code=names.EXIT_STALE), names.EXIT_STALE, "stale"),
        (Refuse("no", exit_code=names.EXIT_RETRYABLE), names.EXIT_RETRYABLE, "early"),
        (Refuse("no", exit_code=names.EXIT_USER_ERROR), names.EXIT_USER_ERROR, "other"),
        (RetryableError("no"), names.EXIT_RETRYABLE, "RetryableError"),
    ],
)
def test_a_refusal_names_the_exit_code_and_is_counted(error, code, why):
    one = driver()
    agent = server.AgentsServicer(one).refused(hello(), error)
    worker = server.ChannelsServicer(one).refused(pb.Hello(worker="env/0"), error)
    assert agent == agents_pb2.DriverMessage(refusal=agents_pb2.Refusal(message="no", exit_code=code))
    assert worker == pb.DriverMessage(refusal=pb.Refusal(message="no", exit_code=code))
    assert one.job.sessions.refused == {why: 2}
    assert not one.job.ended.is_set()


def test_a_hello_that_meets_a_bug_ends_the_job_with_who_said_it():
    for said, who in (("agent", "agent of pod j-sim-0-a1"), ("worker", "worker env/0")):
        one = driver()
        if said == "agent":
            server.AgentsServicer(one).refused(hello(), InvariantBroken("b"))
        else:
            server.ChannelsServicer(one).refused(pb.Hello(worker="env/0"), InvariantBroken("b"))
        end = one.job.standing
        assert (end.state, end.reason) == (DriverState.FAILED, "InternalError")
        assert end.message.startswith(f"hello of {who}: b")


def test_a_message_that_cannot_be_worked_on_ends_the_job_with_who_sent_it(monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("k")

    for name, hear, who in (
        ("on_agent_message", lambda d: server.AgentsServicer(d).heard(SIM, Mock(), more=False), "pod sim-0"),
        ("on_worker_message", lambda d: server.ChannelsServicer(d).heard(ENV, Mock(), more=True), "env/0"),
    ):
        one = driver()
        monkeypatch.setattr(one, name, broken)
        hear(one)
        end = one.job.standing
        assert (end.state, end.reason, end.message) == (
            DriverState.FAILED, "InternalError", f"message of {who}: KeyError: 'k'",
        )  # fmt: skip


def test_a_workers_stream_is_the_drivers_to_hear_and_to_lose(monkeypatch):
    one, outbox, said = driver(), Outbox[Any](), list[Any]()
    monkeypatch.setattr(one, "on_worker_message", lambda *a, **k: said.append((a, k)))
    monkeypatch.setattr(one, "on_worker_gone", lambda *a: said.append(a))
    channels = server.ChannelsServicer(one)
    channels.heard(ENV, "m", more=True)  # type: ignore[arg-type]
    channels.gone(ENV, outbox)
    assert said == [(("env/0", "m"), {"more": True}), ("env/0", outbox)]


# --- the operator's calls ---------------------------------------------------------------------------------------------
def request(job: Any, revision: int = 1, **fields: Any) -> job_pb2.PlanRequest:
    return job_pb2.PlanRequest(plan_json=job.plan.model_dump_json(by_alias=True), revision=revision, **fields)


async def test_the_first_plan_is_prepared_then_committed_and_then_the_flow_runs():
    one, ran = driver(), list[int]()
    job = servicer(one, on_plan=lambda: ran.append(one.job.revision))
    assert await job.PreparePlan(request(make_job()), Mock()) == job_pb2.PlanResponse(ok=True)
    assert (one.job.revision, ran) == (0, [])
    commit = job_pb2.PlanRequest(revision=1, plan_switches=5)
    assert await job.CommitPlan(commit, Mock()) == job_pb2.PlanResponse(ok=True)
    assert (one.job.revision, ran, one.switch.number) == (1, [1], 5)
    assert one.job.sequence == 1, "whoever watches is told"
    assert (await job.PreparePlan(request(make_job()), Mock())).ok
    assert (await job.CommitPlan(commit, Mock())).ok
    assert ran == [1], "told again, nothing changes"


async def test_a_plan_in_force_is_answered_at_once():
    world = World(make_job(steps=3))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    job = servicer(world.driver)
    expected = job_pb2.PlanResponse(ok=True)
    assert await job.PreparePlan(request(make_job(steps=3)), Mock()) == expected
    assert await job.CommitPlan(request(make_job(steps=3)), Mock()) == expected


@pytest.mark.parametrize("call", ["PreparePlan", "CommitPlan"])
@pytest.mark.parametrize(("meant_for", "ok"), [(0, True), (2, True), (1, False), (3, False)])
async def test_a_word_about_plans_that_was_meant_for_another_driver_is_refused(call, meant_for, ok):
    one = driver(attempt=2)
    job = servicer(one)
    await job.PreparePlan(request(make_job()), Mock())
    answer = await getattr(job, call)(request(make_job(), driver_attempt=meant_for), Mock())
    assert (answer.ok, answer.message) == (ok, "" if ok else "this is driver attempt 2")
    assert one.job.sessions.refused == ({} if ok else {"stale": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "plan revision 2: it is no JSON: got "),
        ("{}", "plan revision 2: spec.job: "),
        ("null", "plan revision 2: "),
        (make_job(revision=3).plan.model_dump_json(by_alias=True), "plan revision 2: its plan says revision 3"),
    ],
)
async def test_what_is_no_plan_of_this_job_is_refused_in_a_sentence(text, says):
    one = driver()
    answer = await servicer(one).PreparePlan(job_pb2.PlanRequest(plan_json=text, revision=2), Mock())
    assert not answer.ok
    assert says in answer.message
    assert one.job.sessions.refused == {"plan": 1}
    assert one.switch.failed == (0, ""), "a driver without a plan has none that failed"


async def test_a_plan_that_cannot_be_is_refused_in_the_reports_of_a_running_job_too():
    world = World(make_job(steps=3))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    answer = await servicer(world.driver).PreparePlan(job_pb2.PlanRequest(plan_json="{", revision=2), Mock())
    failed, why = world.driver.switch.failed
    assert (failed, answer.message) == (2, f"plan revision 2: {why}")
    assert status.report(world.driver).plan_failed == 2


@pytest.mark.parametrize("fails", ["as it is read", "as it is checked", "as it is prepared"])
async def test_the_report_says_of_which_object_the_plan_was_that_failed(fails, monkeypatch):
    world = World(make_job(steps=3, elastic=True))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    job, said = servicer(world.driver), request(make_job(steps=3, elastic=True, envs=3, revision=2), 2)
    said.plan_uid = "a5"
    if fails == "as it is read":
        said.plan_json = "{"
    elif fails == "as it is checked":
        monkeypatch.setattr(turns, "check", Mock(side_effect=RLinfError("no room")))
    await job.PreparePlan(said, Mock())
    if fails == "as it is prepared":
        assert (status.report(world.driver).plan_failed, status.report(world.driver).plan_failed_uid) == (0, "")
        world.driver.switch.abort("worker env/2 failed", failed=True)
    report = status.report(world.driver)
    assert (report.plan_failed, report.plan_failed_uid) == (2, "a5")
    assert wire.report_from_pb(wire.report_to_pb(report)).plan_failed_uid == "a5"
    monkeypatch.undo()
    said = request(make_job(steps=3, elastic=True, envs=3, revision=2), 2, plan_uid="b6")
    assert (await job.PreparePlan(said, Mock())).ok
    report = status.report(world.driver)
    assert (report.plan_preparing, report.plan_failed, report.plan_failed_uid) == (2, 0, "")


async def test_a_plan_that_was_written_anew_takes_the_place_of_the_one_that_is_prepared():
    world = World(make_job(steps=3, elastic=True))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    job = servicer(world.driver)
    first = request(make_job(steps=3, elastic=True, envs=2, revision=2), 2, plan_uid="a5")
    anew = request(make_job(steps=3, elastic=True, envs=3, revision=2), 2, plan_uid="b6")
    for said in (first, first):
        assert (await job.PreparePlan(said, Mock())).ok
    before = world.driver.switch.pending
    assert before is not None
    assert (await job.PreparePlan(anew, Mock())).ok
    pending = world.driver.switch.pending
    assert pending is not None
    assert pending is not before
    assert sum(entry.count for entry in pending.plan.workers if entry.role == "env") == 3
    report = status.report(world.driver)
    assert (report.plan_preparing, report.plan_pending_uid) == (2, "b6")
    assert wire.report_from_pb(wire.report_to_pb(report)).plan_pending_uid == "b6"
    refused = await job.CommitPlan(first, Mock())
    assert (refused.ok, refused.message) == (False, "revision 2 is not prepared")


async def test_a_plan_that_is_written_anew_and_refused_is_not_called_what_the_one_before_it_waits_for(monkeypatch):
    world = World(make_job(steps=3, elastic=True))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    job, envs = servicer(world.driver), make_job(steps=3, elastic=True, envs=3, revision=2)
    assert (await job.PreparePlan(request(envs, 2, plan_uid="a5"), Mock())).ok

    async def refuses(*_: object, **__: object) -> str:
        return "the flow declares other channels under it"

    monkeypatch.setattr(server, "would_run", refuses)
    assert not (await job.PreparePlan(request(envs, 2, plan_uid="b6"), Mock())).ok
    report = status.report(world.driver)
    assert (report.plan_preparing, report.plan_pending_uid) == (0, "")
    assert (report.plan_failed, report.plan_failed_uid) == (2, "b6")
    assert report.plan_message == "the flow declares other channels under it"


async def test_the_report_says_of_which_object_the_plan_in_force_is():
    world = World(make_job(steps=9, elastic=True))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    job, envs = servicer(world.driver), make_job(steps=9, elastic=True, envs=3, revision=2)
    assert status.report(world.driver).plan_uid == "", "nobody has named it"
    world.pinned = envs.plan
    assert (await job.PreparePlan(request(envs, 2, plan_uid="a5"), Mock())).ok
    await world.run_until(lambda: world.driver.job.revision == 2)
    report = status.report(world.driver)
    assert (report.plan_uid, report.plan_pending_uid) == ("a5", "")
    assert wire.report_from_pb(wire.report_to_pb(report)).plan_uid == "a5"


async def test_a_plan_that_nobody_prepared_or_that_was_taken_back_is_not_committed():
    one = driver()
    job = servicer(one)
    for _ in range(2):
        answer = await job.CommitPlan(job_pb2.PlanRequest(revision=1), Mock())
        assert (answer.ok, answer.message) == (False, "revision 1 is not prepared")
        await job.PreparePlan(request(make_job()), Mock())
        assert await job.AbortPlan(job_pb2.PlanRequest(revision=1), Mock()) == job_pb2.PlanResponse(ok=True)
    assert one.job.revision == 0


@pytest.mark.parametrize(("said", "why"), [("", "it is not wanted any more"), ("full", "full")])
async def test_a_plan_is_taken_back_for_the_reason_that_is_said(monkeypatch, said, why):
    one, told = driver(), list[Any]()
    monkeypatch.setattr(one.switch, "abort", lambda *a, **k: told.append((a, k)))
    await servicer(one).AbortPlan(job_pb2.PlanRequest(revision=4, reason=said), Mock())
    assert told == [((why,), {"revision": 4})]


async def test_a_change_that_was_not_prepared_is_not_committed_in_a_running_job():
    world = World(make_job(steps=3))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    answer = await servicer(world.driver).CommitPlan(job_pb2.PlanRequest(revision=2), Mock())
    assert (answer.ok, answer.message) == (False, "revision 2 is not prepared")


# --- drain, status ---------------------------------------------------------------------------------------
async def test_a_drain_answers_with_the_end_and_the_checkpoint(monkeypatch):
    one = driver()
    monkeypatch.setattr(one, "drain", lambda: one.job.finish(saved=True))
    answer = await servicer(one).Drain(job_pb2.DrainRequest(), Mock())
    assert answer == job_pb2.DrainResponse(drained=True, message="stopped after step 0 of 3")


async def test_a_job_that_fails_is_not_drained():
    one = driver()
    one.fail(Reason.USER_ERROR, "no")
    answer = await servicer(one).Drain(job_pb2.DrainRequest(), Mock())
    assert answer == job_pb2.DrainResponse(drained=False, message="no")


async def test_a_drain_whose_time_is_over_names_the_step_that_it_waited_for():
    world = World(make_job(steps=9))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    answer = await servicer(world.driver).Drain(job_pb2.DrainRequest(deadline_s=0.001), Mock())
    assert answer == job_pb2.DrainResponse(drained=False, message="step 2 did not end in time")


async def test_the_status_is_that_of_the_driver():
    one = driver()
    assert await servicer(one).GetStatus(Mock(), Mock()) == wire.report_to_pb(status.report(one))


def test_every_call_of_the_driver_has_one_part_that_may_make_it():
    files = (job_pb2, agents_pb2, pb)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    assert {f"/{s.full_name}/{method.name}" for s in services for method in s.methods} == set(server.ALLOWED)
    assert {len(parts) for parts in server.ALLOWED.values()} == {1}


async def test_who_watches_is_told_at_once_and_no_more_once_they_hang_up():
    one, seen = driver(), list[str]()
    job = server.JobServicer(one, on_plan=lambda: None, seen_end=lambda: seen.append("end"))
    context = Mock()
    context.cancelled.side_effect = [False, True]
    reports = job.Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL), context)
    first = await anext(reports)
    assert first == wire.report_to_pb(status.report(one))
    one.job.ending_at = 1.0  # so that the pause is short
    one.job.show()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(10):
            await anext(reports)
    assert seen == [], "it was not the end"


async def test_who_has_been_told_the_end_is_told_nothing_more():
    one, seen = driver(), list[str]()
    job = server.JobServicer(one, on_plan=lambda: None, seen_end=lambda: seen.append("end"))
    one.job.finish(saved=True)
    context = Mock()
    context.cancelled.return_value = False
    assert len([report async for report in job.Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL), context)]) == 1
    assert seen == ["end"]


async def test_an_operator_of_another_version_is_told_so_and_hears_nothing():
    context = Mock(cancelled=lambda: False, abort=AsyncMock(side_effect=grpc.aio.AbortError))
    with pytest.raises(grpc.aio.AbortError):
        await anext(aiter(servicer(driver()).Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL + 1), context)))
    code, said = context.abort.await_args.args
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"another protocol: got {names.PROTOCOL + 1}, wanted {names.PROTOCOL}" in said


async def test_a_report_is_as_long_with_many_workers_as_with_few():
    few, many = (World(make_job(envs=count, steps=9)) for count in (1, 4))
    await few.run_until(lambda: few.driver.job.ledger.committed == 1)
    await many.run_until(lambda: many.driver.job.ledger.committed == 1)
    lengths = [len(wire.report_to_pb(status.report(world.driver)).SerializeToString()) for world in (few, many)]
    assert abs(lengths[1] - lengths[0]) <= 2, lengths
