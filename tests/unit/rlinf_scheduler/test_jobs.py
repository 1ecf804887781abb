"""What becomes of reports: plans in the store, one decision per report, and what goes wrong costs one decision."""

import asyncio
import contextlib
import time

from rlinf_api import names
from rlinf_api.errors import ClusterBusy, DeadlineExceeded, RLinfError
from rlinf_api.plan import JobRef, RLPlanSpec
from rlinf_scheduler import jobs
from rlinf_scheduler.jobs import Jobs, case_of, plan_manifest
from rlinf_scheduler.replan.decide import NextPlan, Stay
from rlinf_scheduler.replan.known import Case
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tools import workloads
from tools.prove.world import World

ENTRY = workloads.entries()["drawn-14"]


class Site:
    """A job in a store, its first plan, and the world that reports of it."""

    def __init__(self, store, world, job):
        self.store, self.world, self.uid = store, world, job["metadata"]["uid"]
        self.decisions: list[str] = []
        self.jobs = Jobs(store, on_decision=lambda code, seconds: self.decisions.append(code))

    @classmethod
    async def made(cls, *, steps=60):
        store = MemoryStore()
        job = await store.create(workloads.job(ENTRY, steps=steps))
        world = World.of_entry(ENTRY, steps=steps)
        ref = JobRef(name="drawn-14", uid=job["metadata"]["uid"])
        await store.create(plan_manifest(world.begin().model_copy(update={"job": ref}), namespace="default"))
        return cls(store, world, job)

    async def steps(self, first, last, *, revision=1, seconds=5.2):
        for step in range(first, last + 1):
            plan = await self.plan(revision)
            profile = self.world.profile(plan, self.world.truth, [seconds], last=step)
            self.jobs.add(profile, namespace="default")
            await self.jobs.consider(self.uid)

    async def plan(self, revision):
        found = await self.store.get("RLPlan", names.plan_name("drawn-14", revision))
        return RLPlanSpec.model_validate(found["spec"])

    async def revisions(self):
        listed = await self.store.list("RLPlan", namespace="default")
        return sorted(p["spec"]["revision"] for p in listed.items)


async def test_reports_bring_a_probe_and_then_a_better_plan_into_the_store():
    site = await Site.made()
    await site.steps(1, 3)
    assert site.decisions == ["Profiling", "Profiling", "Probe"]
    assert site.jobs.said(site.uid) is None
    await site.steps(4, 6, revision=2)
    assert site.decisions[3:] == ["Profiling", "Profiling", "Profiled"]
    plan = await site.store.get("RLPlan", "drawn-14-p3")
    assert plan["metadata"]["ownerReferences"][0]["uid"] == site.uid
    assert plan["spec"]["source"] == "Scheduler"
    assert plan["spec"]["basedOn"] == {"revision": 2, "profile": "sha256:" + "0" * 64}
    assert 0 < plan["spec"]["predicted"]["periodSeconds"] < 3


async def test_a_plan_under_which_workers_die_of_memory_is_taken_back_with_the_second_of_a_role():
    site = await Site.made()
    await site.steps(1, 3)
    await site.steps(4, 6, revision=2)
    for count, code in ((1, "Pending"), (2, "RolledBack"), (3, "Pending")):
        site.jobs.killed({"rollout": count}, revision=3, job_uid=site.uid)
        await site.jobs.consider(site.uid)
        assert site.decisions[-1] == code
    assert (await site.plan(4)).based_on.revision == 3


async def test_workers_of_a_job_that_nothing_was_measured_of_are_no_news():
    site = await Site.made()
    site.jobs.killed({"rollout": 2}, revision=3, job_uid="nobody")
    await site.jobs.consider("nobody")
    assert site.decisions == []


async def test_workers_that_die_before_a_scheduler_that_is_started_again_hears_a_report_count_with_it():
    site = await Site.made()
    await site.steps(1, 3)
    await site.steps(4, 6, revision=2)
    site.jobs = Jobs(site.store, on_decision=lambda code, seconds: site.decisions.append(code))
    site.jobs.killed({"rollout": 2}, revision=3, job_uid=site.uid)
    await site.steps(7, 7, revision=2)
    assert site.decisions[-1] == "RolledBack"
    assert (await site.plan(4)).based_on.revision == 3


async def test_what_is_heard_of_workers_that_died_is_bounded(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_JOBS", 1)
    site = await Site.made()
    await site.steps(1, 3)
    await site.steps(4, 6, revision=2)
    site.jobs.killed({"rollout": 2}, revision=3, job_uid=site.uid)
    site.jobs.killed({"rollout": 2}, revision=3, job_uid="another")
    await site.jobs.consider(site.uid)
    assert site.decisions[-1] == "Pending", "it is forgotten"


async def test_a_scheduler_that_is_started_again_goes_on_where_the_one_before_stood():
    site = await Site.made()
    await site.steps(1, 3)
    site.jobs = Jobs(site.store)
    await site.steps(4, 6, revision=2)
    assert await site.revisions() == [1, 2, 3]


async def test_a_report_of_a_plan_that_is_being_replaced_changes_nothing():
    site = await Site.made()
    await site.steps(1, 5)
    assert site.decisions == ["Profiling", "Profiling", "Probe", "Pending", "Pending"]
    said = site.jobs.said(site.uid)
    assert isinstance(said, Stay)
    assert said.why == "revision 2 is on its way"


async def test_why_a_plan_stays_stands_at_the_plan_once_for_each_search():
    site = await Site.made()
    writes = []
    really = site.store.patch

    async def patch(kind, name, *, patch, namespace):
        if kind == "RLPlan":
            writes.append((kind, name, patch["metadata"]["annotations"][names.ANNOTATION_STAYS]))
        return await really(kind, name, patch=patch, namespace=namespace)

    site.store.patch = patch
    await site.steps(1, 3)
    await site.steps(4, 6, revision=2)
    expected = await site.plan(3)
    assert expected.predicted is not None
    seconds = expected.predicted.period_seconds
    await site.steps(7, 14, revision=3, seconds=seconds)
    assert site.decisions[6:] == 2 * ["Profiling"] + 3 * ["Verifying"] + ["Best"] + 2 * ["Verified"]
    assert [(kind, name) for kind, name, _ in writes] == [("RLPlan", "drawn-14-p3")]
    assert writes[0][2].startswith(f"Best: revision 3 takes {seconds:.4g} s a step, the best other would take ")
    plan = await site.store.get("RLPlan", "drawn-14-p3")
    assert plan["metadata"]["annotations"][names.ANNOTATION_STAYS] == writes[0][2]


async def test_a_plan_that_cannot_be_improved_on_says_so_once_and_again_where_it_could_not_be_written(caplog):
    site = await Site.made()
    really, site.world.profile = site.store.patch, silent(site.world.profile)

    async def forbidden(kind, name, *, patch, namespace):
        raise RLinfError("patch of RLPlan", got="403", next="look at the scheduler's Role")

    site.store.patch = forbidden
    await site.steps(1, 3)
    assert site.decisions[-1] == "Unfit"
    assert "why the plan stays cannot be written" in caplog.text
    writes = []

    async def patch(kind, name, *, patch, namespace):
        writes.append(name)
        return await really(kind, name, patch=patch, namespace=namespace)

    site.store.patch = patch
    await site.steps(4, 6)
    assert writes == ["drawn-14-p1"]
    plan = await site.store.get("RLPlan", "drawn-14-p1")
    assert plan["metadata"]["annotations"][names.ANNOTATION_STAYS].startswith("Unfit: role 'env' has not said what")


def silent(profile):
    """As of a role that does not say what it worked on."""

    def told(*what, **more):
        found = profile(*what, **more)
        roles = [role.model_copy(update={"batches": []}) if role.name == "env" else role for role in found.roles]
        return found.model_copy(update={"roles": roles})

    return told


async def test_a_job_that_is_gone_and_a_store_that_does_not_answer_cost_one_decision():
    site = await Site.made()
    await site.steps(1, 2)

    async def busy(kind, *, namespace, label_selector):
        raise ClusterBusy("list of RLPlans", got="no answer")

    really, site.store.list = site.store.list, busy
    await site.jobs.consider(site.uid)
    site.store.list = really
    await site.steps(3, 3)
    await site.store.delete("RLJob", "drawn-14")
    await site.jobs.consider(site.uid)
    assert site.decisions[2:] == ["Unread", "Probe", "Unread"]
    await site.jobs.consider("nobody's")
    assert len(site.decisions) == 5


async def test_another_job_of_the_name_is_none_of_it():
    site = await Site.made()
    await site.steps(1, 2)
    await site.store.delete("RLJob", "drawn-14")
    await site.store.create(workloads.job(ENTRY))
    await site.jobs.consider(site.uid)
    assert site.decisions[-1] == "Unread"


async def test_a_decision_that_breaks_is_counted_and_the_next_one_is_made(monkeypatch):
    site = await Site.made()
    await site.steps(1, 2)

    def broken(case):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "decide", broken)
        await site.jobs.consider(site.uid)
    await site.steps(3, 3)
    assert site.decisions[2:] == ["Broke", "Probe"]


async def test_all_candidates_are_looked_at_again_after_an_edit_and_when_there_may_be_nodes(monkeypatch):
    site, cases, again_at = await Site.made(), list[Case](), [0.0]

    def noted(case):
        cases.append(case)
        return Stay("Best", "none is better", considered=1, again_at=again_at[0])

    monkeypatch.setattr(jobs, "decide", noted)
    await site.steps(1, 2)
    await site.store.patch("RLJob", "drawn-14", patch={"spec": {"flow": {"steps": 61}}}, namespace="default")
    await site.steps(3, 3)
    again_at[0] = time.time() - 1.0
    await site.steps(4, 4)
    again_at[0] = time.time() + 60.0
    await site.steps(5, 6)
    assert [case.again for case in cases] == [False, False, True, False, True, False]
    assert time.time() - 10 < cases[-1].now <= time.time(), "pools without nodes wait by it"


async def test_an_edit_whose_plan_could_not_be_written_is_looked_at_again_with_the_next_report(monkeypatch):
    site, cases = await Site.made(), list[Case]()
    other = (await site.plan(1)).model_copy(update={"revision": 2})

    def noted(case):
        cases.append(case)
        return NextPlan(other) if case.again else Stay("Best", "none is better", considered=1)

    monkeypatch.setattr(jobs, "decide", noted)
    await site.steps(1, 1)
    await site.store.patch("RLJob", "drawn-14", patch={"spec": {"flow": {"steps": 61}}}, namespace="default")
    create, tries = site.store.create, []

    async def once_in_vain(manifest):
        tries.append(manifest["metadata"]["name"])
        if len(tries) == 1:
            raise DeadlineExceeded("a create", timeout_s=1.0)
        return await create(manifest)

    monkeypatch.setattr(site.store, "create", once_in_vain)
    await site.steps(2, 4)
    assert [case.again for case in cases] == [False, True, True, False]
    assert site.decisions == ["Best", "Unread", "Initial", "Best"]
    assert tries == ["drawn-14-p2"] * 2


async def test_what_was_decided_on_one_plan_is_told_of_it_though_a_report_of_the_next_has_come_meanwhile(monkeypatch):
    site = await Site.made()
    first = await site.plan(1)
    second = first.model_copy(update={"revision": 2})
    await site.store.create(plan_manifest(second, namespace="default"))

    def slow(case):
        site.jobs.add(site.world.profile(second, site.world.truth, [5.2], last=2), namespace="default")
        return Stay("Unfit", "no cost of role env")

    monkeypatch.setattr(jobs, "decide", slow)
    await site.steps(1, 1)
    said = {n: (await site.store.get("RLPlan", f"drawn-14-p{n}"))["metadata"].get("annotations", {}) for n in (1, 2)}
    assert said[1] == {names.ANNOTATION_STAYS: "Unfit: no cost of role env"}
    assert names.ANNOTATION_STAYS not in said[2]


async def test_a_revision_that_somebody_took_meanwhile_is_left_to_them():
    site = await Site.made()
    await site.steps(1, 2)
    taken = plan_manifest((await site.plan(1)).model_copy(update={"revision": 2}), namespace="default")
    really = site.store.list

    async def before(kind, *, namespace, label_selector):
        found = await really(kind, namespace=namespace, label_selector=label_selector)
        await site.store.create(taken)
        return found

    site.store.list = before
    await site.steps(3, 3)
    assert site.decisions[-1] == "Unread"
    assert (await site.plan(2)).reason.code == "Initial"


async def test_the_task_decides_once_for_reports_that_came_together():
    site = await Site.made()
    plan = await site.plan(1)
    for step in (1, 2, 3):
        site.jobs.add(site.world.profile(plan, site.world.truth, [5.2], last=step), namespace="default")
    task = asyncio.create_task(site.jobs.run())
    try:
        async with asyncio.timeout(20):
            while not site.decisions:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert site.decisions == ["Probe"]
    assert await site.revisions() == [1, 2]


async def test_only_the_newest_reports_of_the_newest_jobs_are_kept(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_JOBS", 2)
    site = await Site.made()
    plan = await site.plan(1)

    def report(uid, step):
        found = site.world.profile(plan, site.world.truth, [5.2], last=step)
        return found.model_copy(update={"job": JobRef(name="drawn-14", uid=uid)})

    for step in range(1, 120):
        site.jobs.add(report("a", step), namespace="default")
    assert [p.last_step for p in site.jobs.of("a")] == list(range(20, 120))
    site.jobs.add(report("b", 1), namespace="default")
    site.jobs.add(report("a", 120), namespace="default")
    site.jobs.add(report("c", 1), namespace="default")
    assert site.jobs.of("b") == ()
    assert [len(site.jobs.of(uid)) for uid in ("a", "c")] == [100, 1]


async def test_plans_that_cannot_be_read_are_counted_by_their_names_and_those_of_others_are_not_read():
    site = await Site.made()
    mine = plan_manifest(await site.plan(1), namespace="default")
    failed = plan_manifest((await site.plan(1)).model_copy(update={"revision": 3}), namespace="default")
    failed["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "PrepareFailed", "message": "no",
                                        "lastTransitionTime": "2026-01-01T00:00:00Z"}]}  # fmt: skip
    applied = failed["status"]["conditions"][0] | {"type": "Applied"}
    mine["status"] = {"conditions": [applied | {"status": "False"}]}
    again = plan_manifest((await site.plan(1)).model_copy(update={"revision": 4}), namespace="default")
    again["status"] = {"conditions": [applied]}
    unreadable = {"metadata": {"name": "drawn-14-p7"}, "spec": {"no": "plan"}}
    others = plan_manifest(
        (await site.plan(1)).model_copy(update={"revision": 9, "job": JobRef(name="drawn-14", uid="other")}),
        namespace="default",
    )
    case = case_of(site.world.job, [failed, unreadable, others, again, mine], job_uid=site.uid, profiles=())
    found = [(p.spec.revision, p.failed, p.was_in_force, p.is_in_force) for p in case.plans]
    assert found == [(1, False, True, False), (3, True, False, False), (4, False, True, True)]
    assert case.highest == 9


# --- several schedulers -----------------------------------------------------------------------------------------------
async def report(planning, site, *, step, revision=1):
    profile = site.world.profile(await site.plan(revision), site.world.truth, [5.2], last=step)
    await planning.report_profile(profile.to_json(), namespace="default", job_uid=site.uid)
    await planning.jobs.consider(site.uid)


async def test_a_driver_that_comes_to_another_scheduler_is_decided_on_as_by_one():
    """Whoever stands behind the Service: the second goes on from what the first has kept."""
    site = await Site.made()
    codes: list[str] = []
    first, second = (Planning(site.store, on_decision=lambda code, seconds: codes.append(code)) for _ in range(2))
    for step in (1, 2, 3):
        await report(first, site, step=step)
    for step in (4, 5, 6):
        await report(second, site, step=step, revision=2)
    assert codes == ["Profiling", "Profiling", "Probe", "Profiling", "Profiling", "Profiled"]
    assert await site.revisions() == [1, 2, 3]
    assert [one.last_step for one in second.jobs.of(site.uid)] == [1, 2, 3, 4, 5, 6]
    alone = await Site.made()
    await alone.steps(1, 3)
    await alone.steps(4, 6, revision=2)
    assert (await site.plan(3)).workers == (await alone.plan(3)).workers


async def test_two_schedulers_that_hear_the_same_write_one_plan():
    """A report whose answer was lost goes to the next one, while the first still decides."""
    site = await Site.made()
    codes: list[str] = []
    both = [Planning(site.store, on_decision=lambda code, seconds: codes.append(code)) for _ in range(2)]
    for step in (1, 2, 3):
        await asyncio.gather(*(report(planning, site, step=step) for planning in both))
    assert await site.revisions() == [1, 2]
    assert sorted(codes[4:]) in (["Probe", "Unread"], ["Pending", "Probe"])
    await asyncio.gather(*(report(planning, site, step=4) for planning in both))
    assert codes[6:] == ["Pending", "Pending"]
