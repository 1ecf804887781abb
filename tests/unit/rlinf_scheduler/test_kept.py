"""What was measured outlives the scheduler: an object per key, bounded, and nothing that goes wrong with one is more
than a job that measures anew."""

import asyncio

import pytest

from rlinf_api import names
from rlinf_api.errors import ClusterBusy, RLinfError
from rlinf_api.plan import JobRef
from rlinf_api.profile import KEPT_REPORTS, Number, Profile, RLProfileSpec, RoleProfile
from rlinf_scheduler import kept
from rlinf_scheduler.jobs import Jobs
from rlinf_scheduler.kept import KeptProfiles
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tests.unit.rlinf_scheduler.test_jobs import Site

KEY = "sha256:" + "7" * 64


def report(last=1, *, key=KEY, uid="1b4e", **changes):
    role = RoleProfile(name="env", pool="sim", workers=1, seconds={"compute": Number(value=0.5)})
    of = {"first_step": last, "last_step": last, "steps": 1, "step_seconds": Number(value=1.0), "roles": [role]}
    return Profile(**{"key": key, "job": JobRef(name="math", uid=uid), "revision": 1, **of, **changes})


async def test_what_was_written_is_read_by_key_and_namespace():
    store = MemoryStore()
    reports = (report(1), report(2))
    assert await KeptProfiles(store).write(reports, namespace="team")
    assert await KeptProfiles(store).read(KEY, namespace="team") == reports
    assert await KeptProfiles(store).read(KEY, namespace="other") == ()
    assert await KeptProfiles(store).read("sha256:" + "8" * 64, namespace="team") == ()
    found = await store.get("RLProfile", names.profile_name(KEY), namespace="team")
    spec = found["spec"]
    assert (spec["key"], spec["job"], spec["steps"]) == (KEY, {"name": "math", "uid": "1b4e"}, 2)
    assert "ownerReferences" not in found["metadata"]  # it outlives the job


async def test_a_half_of_the_hash_that_is_the_same_is_not_the_same_key():
    store, twin = MemoryStore(), KEY[:-1] + "8"
    await KeptProfiles(store).write([report()], namespace="team")
    assert names.profile_name(twin) == names.profile_name(KEY)
    assert await KeptProfiles(store).read(twin, namespace="team") == ()


async def test_the_last_job_with_a_key_stays_and_of_it_what_fits(monkeypatch):
    store = MemoryStore()
    await KeptProfiles(store).write([report(n) for n in range(1, 4)], namespace="team")
    mixed = [report(1, uid="first"), report(2, key="sha256:" + "8" * 64), *(report(n) for n in range(3, 33))]
    await KeptProfiles(store).write(mixed, namespace="team")
    found = await KeptProfiles(store).read(KEY, namespace="team")
    assert len(found) == KEPT_REPORTS
    assert [one.last_step for one in found][-1] == 32
    assert {one.job.uid for one in found} == {"1b4e"}
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 2 * len(report(32).to_json()))
    await KeptProfiles(store).write(mixed, namespace="team")
    assert [one.last_step for one in await KeptProfiles(store).read(KEY, namespace="team")] == [31, 32]


async def test_a_report_too_large_is_not_kept_and_said(monkeypatch, caplog):
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 10)
    store = MemoryStore()
    assert not await KeptProfiles(store).write([report()], namespace="team")
    assert (await store.list("RLProfile")).items == []
    assert "too large to be stored" in caplog.text


async def test_the_oldest_of_a_namespace_go(monkeypatch):
    monkeypatch.setattr(kept, "MAX_KEPT", 3)
    store = MemoryStore()
    await KeptProfiles(store).write([report(key=f"sha256:{0:064x}")], namespace="other")
    for number in range(5):
        key = f"sha256:{number:x}" + 63 * "0"
        at = f"2026-11-26T12:00:0{number}Z"
        monkeypatch.setattr("rlinf_api.times.text", lambda moment, at=at: at)
        await KeptProfiles(store).write([report(key=key)], namespace="team")
    there = [one["spec"]["key"][7] for one in (await store.list("RLProfile", namespace="team")).items]
    assert sorted(there) == ["2", "3", "4"]
    assert len((await store.list("RLProfile", namespace="other")).items) == 1


class Refusing(MemoryStore):
    """Every call about profiles ends so."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    async def get(self, kind, name, *, namespace="default", live=True):
        if kind == "RLProfile":
            raise self.error
        return await super().get(kind, name, namespace=namespace)

    async def patch(self, kind, name, *, patch, namespace="default", subresource=""):
        if kind == "RLProfile":
            raise self.error
        return await super().patch(kind, name, patch=patch, namespace=namespace)


@pytest.mark.parametrize("error", [RLinfError("403", next="look at the Role"), ClusterBusy("no answer")], ids=str)
async def test_a_store_that_refuses_costs_a_warning(error, caplog):
    store = Refusing(error)
    assert await KeptProfiles(store).read(KEY, namespace="team") == ()
    assert not await KeptProfiles(store).write([report()], namespace="team")
    assert "a stored profile cannot be read" in caplog.text
    assert "a profile cannot be stored" in caplog.text


async def test_a_store_that_is_silent_holds_no_first_plan_up(monkeypatch, caplog):
    class Silent(MemoryStore):
        async def get(self, kind, name, *, namespace="default", live=True):
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(kept, "READ_S", 0.01)
    assert await KeptProfiles(Silent()).read(KEY, namespace="team") == ()
    assert caplog.records[-1].__dict__["error"] == "no answer"


@pytest.mark.parametrize(
    "change",
    [{"reports": []}, {"key": "77ab"}, {"job": {"name": "math", "uid": "other"}}, {"reports": [{"steps": -1}]}],
    ids=lambda change: next(iter(change)),
)
async def test_an_object_that_somebody_edited_is_not_used(change, caplog):
    store = MemoryStore()
    await KeptProfiles(store).write([report()], namespace="team")
    await store.patch("RLProfile", names.profile_name(KEY), patch={"spec": change}, namespace="team")
    assert await KeptProfiles(store).read(KEY, namespace="team") == ()
    assert "a stored profile cannot be used" in caplog.text
    assert await KeptProfiles(store).write([report()], namespace="team")  # the next write mends it
    assert await KeptProfiles(store).read(KEY, namespace="team") == (report(),)


def test_reports_of_two_jobs_are_no_profile():
    with pytest.raises(ValueError, match="a report is of job uid other"):
        RLProfileSpec(
            key=KEY, job=JobRef(name="math", uid="1b4e"), steps=1, updated="", reports=[report(uid="other")]
        )  # fmt: skip


# --- of jobs that run -------------------------------------------------------------------------------------------------
async def stored(site):
    found = (await site.store.list("RLProfile")).items
    return [RLProfileSpec.model_validate(one["spec"]) for one in found]


async def test_a_decision_that_learnt_something_is_kept_and_no_other():
    site = await Site.made()
    await site.steps(1, 2)
    assert await stored(site) == []  # Profiling
    await site.steps(3, 3)
    assert [one.steps for one in await stored(site)] == [3]  # a probe is written
    await site.steps(4, 5, revision=2)
    assert [one.steps for one in await stored(site)] == [3]
    await site.steps(6, 6, revision=2)
    assert [one.steps for one in await stored(site)] == [6]  # Profiled


async def test_what_nobody_learnt_from_is_kept_now_and_then(monkeypatch):
    site = await Site.made()
    await site.steps(1, 4)
    assert [one.steps for one in await stored(site)] == [3]  # step 4: the probe is on its way
    known = site.jobs._known[site.uid]
    assert known.keep_at == pytest.approx(asyncio.get_running_loop().time() + 600, abs=60)
    known.keep_at = asyncio.get_running_loop().time()
    await site.steps(5, 5)
    assert [one.steps for one in await stored(site)] == [5]


async def test_a_scheduler_that_is_started_again_knows_what_the_one_before_measured():
    """Without it the second one would ask for three more steps of the new plan before it decides."""
    site = await Site.made()
    await site.steps(1, 3)
    await site.steps(4, 6, revision=2)
    plan = await site.plan(2)
    later = site.world.profile(plan, site.world.truth, [5.2], last=7)
    again = Planning(site.store)
    await again.report_profile(later.to_json(), namespace="default", job_uid=site.uid)
    assert [one.last_step for one in again.jobs.of(site.uid)] == [1, 2, 3, 4, 5, 6, 7]
    forgetful = Jobs(site.store)
    forgetful.add(later, namespace="default")
    assert [one.last_step for one in forgetful.of(site.uid)] == [7]


async def test_of_another_job_with_the_key_nothing_is_recalled_and_nothing_twice():
    store = MemoryStore()
    await KeptProfiles(store).write([report(1), report(2)], namespace="team")
    jobs = Jobs(store)
    await jobs.recall(report(1, uid="other"), namespace="team")
    assert jobs.of("other") == ()
    await jobs.recall(report(2), namespace="team")  # a report that was sent again
    assert [one.last_step for one in jobs.of("1b4e")] == [1]
    jobs.add(report(2), namespace="team")
    await jobs.recall(report(3), namespace="team")
    assert [one.last_step for one in jobs.of("1b4e")] == [1, 2]
