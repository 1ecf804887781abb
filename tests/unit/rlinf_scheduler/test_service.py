"""The scheduler's service: revisions, infeasible answers, profiles, who may call."""

import datetime as dt
import json
from dataclasses import dataclass
from unittest.mock import patch

import grpc
import pytest
from prometheus_client import CollectorRegistry

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2 as pb
from rlinf_api._pb.rlinf.scheduler.v1alpha1 import scheduler_pb2_grpc
from rlinf_api.errors import ClusterBusy, RLinfError, UserError, WorkerUnreachable
from rlinf_api.plan import JobRef
from rlinf_api.profile import Number, Profile, RoleProfile
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_operator.clients.scheduler import GrpcScheduler
from rlinf_operator.manifests import certificates
from rlinf_scheduler.__main__ import MeasuredPlanning
from rlinf_scheduler.service import ALLOWED, Planning, serve_on
from rljob.local.store import MemoryStore
from tests.builders import UID, ppo_job


async def world():
    store = MemoryStore()
    job = ppo_job().build()
    created = await store.create(job)
    return store, created


async def test_the_first_plan_is_revision_1_and_owned_by_its_job():
    store, job = await world()
    answer = await Planning(store).request_plan(job, reason="Initial", highest_revision=0)
    assert (answer.plan, answer.revision, answer.infeasible) == ("math-p1", 1, ())
    plan = await store.get("RLPlan", "math-p1", namespace="team")
    assert plan["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert plan["metadata"]["labels"][names.LABEL_JOB] == "math"
    assert plan["spec"]["job"] == {"name": "math", "uid": job["metadata"]["uid"]}


async def test_the_object_of_a_plan_is_this():
    store, job = await world()
    await Planning(store).request_plan(job, reason="CapacityChanged", highest_revision=2)
    found = await store.get("RLPlan", "math-p3", namespace="team")
    uid = job["metadata"]["uid"]
    assert (found["apiVersion"], found["kind"]) == ("rlinf.io/v1alpha1", "RLPlan")
    assert found["metadata"]["labels"] == {
        "rlinf.io/job": "math", "rlinf.io/job-uid": uid, "app.kubernetes.io/name": "rlinf",
        "app.kubernetes.io/managed-by": "rlinf-scheduler",
    }  # fmt: skip
    assert found["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "name": "math", "uid": uid, "controller": True,
            "blockOwnerDeletion": True,
        }
    ]  # fmt: skip
    assert (found["spec"]["revision"], found["spec"]["reason"]["code"]) == (3, "CapacityChanged")


async def test_the_plan_of_a_job_with_a_queue_says_how_few_pods_would_do():
    store, job = await world()
    job["spec"]["pools"][0] |= {"pods": {"min": 1, "max": 3}}
    job["spec"]["roles"][0]["workers"] = {"min": 5, "max": 9}
    job["metadata"]["labels"] = {names.LABEL_QUEUE: "team"}
    await Planning(store).request_plan(job, reason="Initial", highest_revision=0)
    found = await store.get("RLPlan", "math-p1", namespace="team")
    most, said = found["spec"]["pools"][0]["pods"], json.loads(found["metadata"]["annotations"]["rlinf.io/fewest-pods"])
    assert (most, said) == (2, {"sim": 2})
    del job["metadata"]["labels"]
    await Planning(store).request_plan(job, reason="Initial", highest_revision=1)
    assert "annotations" not in (await store.get("RLPlan", "math-p2", namespace="team"))["metadata"]


async def test_a_reason_that_this_version_does_not_know_is_a_first_plan_and_a_job_of_no_namespace_is_in_default():
    store, job = await world()
    del job["metadata"]["namespace"]
    await Planning(store).request_plan(job, reason="Whim", highest_revision=0)
    assert (await store.get("RLPlan", "math-p1", namespace="default"))["spec"]["reason"]["code"] == "Initial"


async def test_a_request_that_is_repeated_finds_its_own_plan():
    store, job = await world()
    planning = Planning(store)
    for _ in range(2):
        assert (await planning.request_plan(job, reason="Initial", highest_revision=0)).plan == "math-p1"


async def test_a_revision_that_somebody_took_is_passed_over():
    store, job = await world()
    planning = Planning(store)
    await store.create({"kind": "RLPlan", "metadata": {"name": "math-p1", "namespace": "team"}, "spec": {"other": 1}})
    assert (await planning.request_plan(job, reason="Initial", highest_revision=0)).plan == "math-p2"
    assert (await planning.request_plan(job, reason="CapacityChanged", highest_revision=4)).plan == "math-p5"


async def test_a_name_that_was_taken_and_given_back_meanwhile_is_passed_over():
    class GivenBack(MemoryStore):
        async def create(self, obj):
            if obj["metadata"]["name"] == "math-p1":
                raise AlreadyExists("RLPlan team/math-p1 exists")
            return await super().create(obj)

    _, job = await world()
    answer = await Planning(GivenBack()).request_plan(job, reason="Initial", highest_revision=0)
    assert (answer.plan, answer.revision) == ("math-p2", 2)


async def test_it_does_not_try_for_ever():
    store, job = await world()
    for revision in range(1, 11):
        meta = {"name": f"math-p{revision}", "namespace": "team"}
        await store.create({"kind": "RLPlan", "metadata": meta, "spec": {"other": 1}})
    with pytest.raises(ClusterBusy, match="10 plan names of job team/math above revision 0 are taken"):
        await Planning(store).request_plan(job, reason="Initial", highest_revision=0)


async def test_an_infeasible_job_is_an_answer_and_writes_nothing():
    store, job = await world()
    job["spec"]["pools"][1]["slots"]["perPod"] = 1
    answer = await Planning(store).request_plan(job, reason="Initial", highest_revision=0)
    assert answer.plan == ""
    assert "role 'actor' needs 1 worker" in answer.infeasible[0]
    assert (await store.list("RLPlan")).items == []


async def test_an_invalid_job_is_answered_with_its_sentences():
    store, job = await world()
    job["spec"]["flow"]["setps"] = 1
    answer = await Planning(store).request_plan(job, reason="Initial", highest_revision=0)
    assert "spec.flow.setps: is not a field" in answer.infeasible[0]


async def test_other_errors_of_the_api_server_are_not_swallowed():
    class Broken:
        async def create(self, obj):
            raise RLinfError("forbidden")

        async def get(self, kind, name, *, namespace="default"):
            assert kind == "RLProfile"
            raise NotFound(name)

        async def list(self, kind, *, namespace, label_selector):
            raise AssertionError("Must not be called!")

        async def patch(self, kind, name, *, patch, namespace="default"):
            raise AssertionError("Must not be called!")

        async def delete(self, kind, name, *, namespace="default"):
            raise AssertionError("Must not be called!")

    _, job = await world()
    with pytest.raises(RLinfError, match="forbidden"):
        await Planning(Broken()).request_plan(job, reason="Initial", highest_revision=0)


def report(revision=1, *, job=UID, name="math", **changes):
    role = RoleProfile(name="env", pool="sim", workers=1, seconds={"compute": Number(value=0.5)})
    said = {"key": "sha256:" + "0" * 64, "first_step": 1, "last_step": 1, "steps": 1, "roles": [role]}
    of = {"job": JobRef(name=name, uid=job), "revision": revision, "step_seconds": Number(value=1.0)}
    return Profile(**{**said, **of, **changes})


@dataclass(frozen=True)
class Planned:
    """A job with its first plan."""

    planning: MeasuredPlanning
    store: MemoryStore
    uid: str
    registry: CollectorRegistry

    def counted(self, answer):
        return self.registry.get_sample_value("rlinf_scheduler_profiles_total", {"answer": answer})

    async def report(self, said):
        await self.planning.report_profile(said, namespace="team", job_uid=self.uid)


@pytest.fixture
async def planned():
    store, job = await world()
    registry = CollectorRegistry()
    planning = MeasuredPlanning(store, registry=registry)
    await planning.request_plan(job, reason="Initial", highest_revision=0)
    return Planned(planning, store, job["metadata"]["uid"], registry)


async def test_a_profile_of_a_plan_that_is_there_is_kept_for_the_planner(planned):
    for step in (1, 2):
        await planned.report(report(job=planned.uid, first_step=step, last_step=step).to_json())
    kept = planned.planning.jobs.of(planned.uid)
    assert [(profile.revision, profile.last_step) for profile in kept] == [(1, 1), (1, 2)]
    assert [planned.counted(answer) for answer in ("accepted", "refused", "unanswered")] == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"job": "other"}, "a profile is of another job: got math, uid other, wanted uid "),
        ({"revision": 7}, "is of plan revision 7: got a plan that is not there, wanted RLPlan team/math-p7"),
        ({"name": "else"}, "wanted RLPlan team/else-p1"),
    ],
)
async def test_a_profile_of_another_job_or_plan_is_refused_in_a_sentence_and_counted(planned, said, sentence):
    with pytest.raises(UserError) as caught:
        await planned.report(report(**{"job": planned.uid, **said}).to_json())
    assert sentence in str(caught.value)
    assert planned.planning.jobs.of(planned.uid) == ()
    assert (planned.counted("accepted"), planned.counted("refused")) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        ("NaN", "profile.roles[env].seconds.compute.value: got nan: Input should be a finite number"),
        ("-0.5", "profile.roles[env].seconds.compute.value: got -0.5, wanted at least 0.0"),
        ("x", "a profile is not JSON"),
    ],
)
async def test_a_number_that_nobody_can_have_measured_is_refused_in_a_sentence_and_counted(planned, number, sentence):
    with pytest.raises(UserError) as caught:
        await planned.report(report(job=planned.uid).to_json().replace("0.5", number))
    assert sentence in str(caught.value)
    assert (planned.counted("accepted"), planned.counted("refused")) == (0.0, 1.0)


async def test_a_plan_of_the_same_name_of_a_job_that_was_there_before_is_none_of_this_one(planned):
    wanted = rf"got RLPlan team/math-p1 of job uid {planned.uid}, wanted a plan of job uid later"
    with pytest.raises(UserError, match=wanted):
        await planned.planning.report_profile(report(job="later").to_json(), namespace="team", job_uid="later")


async def test_a_profile_whose_plan_cannot_be_looked_at_is_tried_again_by_the_driver_and_counted(planned):
    async def get(kind, name, *, namespace="default"):
        raise ClusterBusy("get of RLPlan", got="no answer")

    planned.store.get = get
    with pytest.raises(ClusterBusy):
        await planned.report(report(job=planned.uid).to_json())
    assert (planned.counted("unanswered"), planned.counted("refused")) == (1.0, 0.0)


async def test_a_plan_is_looked_at_once(planned, monkeypatch):
    await planned.report(report(job=planned.uid).to_json())
    monkeypatch.delattr(planned.planning, "_store")
    await planned.report(report(job=planned.uid).to_json())
    assert planned.counted("accepted") == 2.0


def test_every_call_of_the_contract_has_one_part_that_may_make_it():
    methods = pb.DESCRIPTOR.services_by_name["Scheduler"].methods
    assert {f"/rlinf.scheduler.v1alpha1.Scheduler/{method.name}" for method in methods} == set(ALLOWED)
    assert sorted(map(sorted, ALLOWED.values())) == [["driver"], ["operator"]]


@pytest.fixture
async def served(tmp_path):
    """A scheduler behind mTLS; `dial(part, uid)` is a caller with that certificate."""
    now = dt.datetime.now(dt.UTC)
    life = dt.timedelta(days=1)
    authority = certificates.make_authority(now=now, life=life)

    def folder(part, namespace="*", uid="*"):
        path = tmp_path / f"{part}-{uid}".replace(":", "-").replace("*", "any")
        path.mkdir()
        leaf = certificates.issue(authority, part=part, namespace=namespace, job_uid=uid, now=now, life=life)
        for name, content in leaf.files().items():
            (path / name).write_bytes(content)
        return rpc.TlsFolder(path)

    store, job = await world()
    planning = Planning(store)
    server = grpc.aio.server(interceptors=[rpc.Gatekeeper(ALLOWED, job_uid="*")], options=list(rpc.SERVER_OPTIONS))
    serve_on(server, planning)
    port = server.add_secure_port("127.0.0.1:0", folder("scheduler").server_credentials())
    await server.start()
    channels = []

    async def dial(part, uid="*"):
        tls = folder(part, namespace="team", uid=uid)
        channels.append(await rpc.dial(f"127.0.0.1:{port}", tls=tls, server=names.tls_name("scheduler")))
        return scheduler_pb2_grpc.SchedulerStub(channels[-1])

    yield planning, job, dial, f"127.0.0.1:{port}", folder
    for channel in channels:
        await channel.close()
    await server.stop(None)


async def test_the_operators_client_gets_a_plan_over_grpc(served):
    _, job, _, address, folder = served
    client = GrpcScheduler(address, tls=folder("operator"), timeout_s=5)
    try:
        answer = await client.request_plan(job, reason="Initial", highest_revision=0)
        assert (answer.plan, answer.revision) == ("math-p1", 1)
        job["spec"]["pools"][1]["slots"]["perPod"] = 1
        answer = await client.request_plan(job, reason="Initial", highest_revision=1)
        assert "role 'actor' needs 1 worker" in answer.infeasible[0]
    finally:
        await client.close()


async def test_a_job_that_no_plan_can_hold_is_no_scheduler_that_is_away(served):
    _, job, _, address, folder = served
    client = GrpcScheduler(address, tls=folder("operator"), timeout_s=5)
    job["spec"]["flow"]["config"] = {"channels": {"trajectories": {"depth": 2_000_000}}}
    try:
        answer = await client.request_plan(job, reason="Initial", highest_revision=0)
    finally:
        await client.close()
    [said] = answer.infeasible
    assert "ChannelPlan.depth: got 2000000, wanted at most 1000000" in said


async def test_a_scheduler_that_is_away_is_named(served):
    _, job, _, _, folder = served
    client = GrpcScheduler("127.0.0.1:1", tls=folder("operator"), timeout_s=1)
    with pytest.raises(WorkerUnreachable, match=r"the scheduler at 127.0.0.1:1 gave no plan"):
        await client.request_plan(job, reason="Initial", highest_revision=0)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_a_driver_reports_its_own_jobs_profile_and_nothing_else(served):
    planning, job, dial, _, _ = served
    uid = job["metadata"]["uid"]
    stub = await dial("driver", uid)
    await planning.request_plan(job, reason="Initial", highest_revision=0)
    own = pb.ReportProfileRequest(namespace="team", job_uid=uid, profile_json=report(job=uid).to_json())
    answer = await stub.ReportProfile(own, timeout=5)
    assert (answer.accepted, answer.message) == (True, "")
    assert planning.jobs.of(uid) == (report(job=uid),)
    code, details = await code_of(stub.ReportProfile(pb.ReportProfileRequest(job_uid="other"), timeout=5))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert "report your own" in details
    bad = pb.ReportProfileRequest(namespace="team", job_uid=uid, profile_json=report(9, job=uid).to_json())
    answer = await stub.ReportProfile(bad, timeout=5)
    assert not answer.accepted
    assert "a profile is of plan revision 9" in answer.message
    assert len(planning.jobs.of(uid)) == 1
    died = pb.ReportProfileRequest(namespace="team", job_uid=uid, killed={"env": 2}, revision=1)
    with patch.object(planning.jobs, "killed") as killed:
        assert (await stub.ReportProfile(died, timeout=5)).accepted
    killed.assert_called_once_with({"env": 2}, revision=1, job_uid=uid)
    code, _ = await code_of(stub.RequestPlan(pb.RequestPlanRequest(), timeout=5))
    assert code == grpc.StatusCode.PERMISSION_DENIED


async def test_a_request_that_makes_no_sense_is_refused_with_a_sentence(served):
    _, job, dial, _, _ = served
    stub = await dial("operator")
    code, details = await code_of(stub.RequestPlan(pb.RequestPlanRequest(job_json="{"), timeout=5))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "job_json is not JSON" in details
    code, details = await code_of(stub.RequestPlan(pb.RequestPlanRequest(job="x", job_json=json.dumps(job)), timeout=5))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "job_json is another job than the one asked for" in details
    for text, said in (("[1]", "got a list"), ('{"metadata": 1}', "job_json is no Kubernetes object")):
        code, details = await code_of(stub.RequestPlan(pb.RequestPlanRequest(job_json=text), timeout=5))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert said in details


async def test_what_the_operator_sends_is_what_the_plan_is_made_of(served):
    _, job, dial, _, _ = served
    meta = job["metadata"]
    request = pb.RequestPlanRequest(
        namespace="team", job="math", job_uid=meta["uid"], reason="CapacityChanged", highest_revision=4,
        job_json=json.dumps(job),
    )  # fmt: skip
    stub = await dial("operator")
    assert await stub.RequestPlan(request, timeout=5) == pb.RequestPlanResponse(plan="math-p5", revision=5)
    for field, value in (("namespace", "other"), ("job_uid", "other"), ("job", "other")):
        wrong = pb.RequestPlanRequest()
        wrong.CopyFrom(request)
        setattr(wrong, field, value)
        assert (await code_of(stub.RequestPlan(wrong, timeout=5)))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_api_server_that_is_away_is_an_answer_that_may_be_asked_for_again(served, monkeypatch):
    planning, job, dial, _, _ = served

    async def busy(*_, **__):
        raise ClusterBusy("create of RLPlan team/math-p1")

    monkeypatch.setattr(planning, "request_plan", busy)
    request = pb.RequestPlanRequest(
        namespace="team", job="math", job_uid=job["metadata"]["uid"], job_json=json.dumps(job)
    )
    code, details = await code_of((await dial("operator")).RequestPlan(request, timeout=5))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "create of RLPlan team/math-p1")
