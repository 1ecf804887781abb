"""A first plan that a person wrote: refused with a sentence before anything starts, else the one that the job has."""

import pytest
import yaml

from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import RLPlanSpec
from rljob import by_hand, run
from rljob.local.runner import LocalRun, WorkDir
from tools import workloads

ENTRY = {
    "name": "small",
    "items": 4,
    "pools": [{"name": "gpu", "slots": 4, "memory": 100, "roles": ["rollout", "train"]}],
    "roles": [
        {"name": "rollout", "service": "serial", "time": {"perItemMs": 1.0}, "memory": {"resident": 10, "peak": 60}},
        {
            "name": "train", "service": "serial", "time": {"perItemMs": 1.0}, "memory": {"resident": 20, "peak": 30},
            "gang": True, "ranks": [1, 2, 4],
        },
    ],
    "edges": [{"from": "rollout", "to": "train"}],
}  # fmt: skip
MANIFEST = workloads.job(ENTRY, steps=2)
SPEC = RLJobSpec.model_validate(MANIFEST["spec"])


def plan(*, rollout="gpu/0/[0-1]", train="gpu/0/[2-3]", **fields):
    workers = [{"role": "rollout", "count": 2, "slots": rollout}, {"role": "train", "count": 2, "slots": train}]
    return {"pools": [{"name": "gpu", "pods": 1}], "workers": workers, **fields}


def turns(name, slots, *roles):
    return {"name": name, "slots": slots, "turns": [{"role": role} for role in roles]}


@pytest.mark.parametrize("given", [plan(), {"spec": plan()}, {"kind": "RLPlan", "metadata": {}, "spec": plan()}])
def test_what_need_not_be_written_is_filled_in(given):
    first = by_hand.first(given, job="small", spec=SPEC)
    made = by_hand.filled_in(first, job="small", uid="u-1", revision=1)
    assert (made.job.name, made.job.uid, made.revision, made.source) == ("small", "u-1", 1, "User")
    assert [(w.role, w.count, w.slots) for w in made.workers] == [
        ("rollout", 2, "gpu/0/[0-1]"), ("train", 2, "gpu/0/[2-3]"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (plan(train="gpu/0/[1-2]"), "got slot gpu/0/1, held by role 'rollout' too"),
        (plan(train="gpu/0/2,gpu/0/2"), "slot range names a slot twice: got gpu/0/2"),
        (plan(train="gpu/0/[3-4]"), "got slot gpu/0/4, wanted ordinal below 1 and index below 4"),
        (plan(train="tpu/0/[0-1]"), "got slot tpu/0/0, wanted a slot of a pool that may run the role"),
        (plan(workers=[{"role": "critic", "count": 1, "slots": "gpu/0/0"}]), "got a role the job does not have"),
        (plan(workers=[{"role": "rollout", "count": 1, "slots": "gpu/0/0"}]), "has no worker of role 'train'"),
        (plan(workers=[*plan()["workers"][:1], {"role": "train", "count": 3, "slots": "gpu/0/[1-3]"}]), "gpu/0/1"),
        (
            plan(rollout="gpu/0/0,gpu/0/2", leaseSets=[turns("a", "gpu/0/2", "rollout", "train")]),
            "gang 'train' does not lie in one lease set: got train/1 in none and train/0 in lease set 'a'",
        ),
        (
            plan(workers=[plan()["workers"][0], {"role": "train", "count": 1, "slots": "gpu/0/[2-3]"}]),
            "needs 1 x 1 slots: got 2 in 'gpu/0/[2-3]'",
        ),
        (plan(pools=[{"name": "gpu", "pods": 2}]), "it has 2 pods of pool 'gpu', spec.pools[gpu].pods allows 1"),
        (plan(stage=3), "spec.stage"),
        (plan(job={"name": "another"}), "the plan is of another job: got 'another', wanted small"),
        ({"spec": plan(), "sepc": {}}, "the plan has 'sepc' beside spec"),
        ({"kind": "RLJob", "spec": plan()}, "the file holds no plan: got kind 'RLJob', wanted RLPlan"),
        ([plan()], "the plan is no mapping"),
        (
            plan(train="gpu/0/[0-1]", leaseSets=[turns("a", "gpu/0/[0-1]", "rollout", "train")],
                 workers=[{**plan()["workers"][0], "memory": {"peak": "90Mi"}},
                          {**plan()["workers"][1], "slots": "gpu/0/[0-1]", "memory": {"offloaded": "20Mi"}}]),
            "slot gpu/0/0 has 104857600 bytes and rollout, train need 115343360",
        ),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused_with_a_sentence(given, sentence):
    with pytest.raises(InvalidManifest) as caught:
        by_hand.first(given, job="small", spec=SPEC)
    assert sentence in str(caught.value)


def test_a_run_with_a_bad_plan_starts_nothing_and_says_which_file(tmp_path, capsys):
    job, file, work = tmp_path / "job.yaml", tmp_path / "plan.yaml", tmp_path / "work"
    job.write_text(yaml.safe_dump(MANIFEST))
    file.write_text(yaml.safe_dump(plan(train="gpu/0/[1-2]")))
    assert run.run(run.Options(file=job, plan=file, work_dir=work)) == run.EXIT_BAD_MANIFEST
    assert f"plan {file} cannot be used: got plan revision 1: workers of role 'train'" in capsys.readouterr().err
    assert not work.exists()


def test_a_job_that_no_rule_places_may_have_a_plan_by_hand(tmp_path):
    """The first plan's rule knows less than a person: two roles on one slot, of which neither says its memory."""
    roles = [{**role, "memory": {"resident": 0, "peak": 0}} for role in ENTRY["roles"]]  # type: ignore[attr-defined]
    pools = [{**ENTRY["pools"][0], "slots": 1}]  # type: ignore[index]
    job, file = tmp_path / "job.yaml", tmp_path / "plan.yaml"
    job.write_text(yaml.safe_dump(workloads.job({**ENTRY, "pools": pools, "roles": roles}, steps=2)))
    file.write_text(
        yaml.safe_dump(
            plan(workers=[{"role": r, "count": 1, "slots": "gpu/0/0"} for r in ("rollout", "train")],
                 leaseSets=[turns("a", "gpu/0/0", "rollout", "train")])
        )
    )  # fmt: skip
    assert run._checked(run.Options(file=job)).problems
    checked = run._checked(run.Options(file=job, plan=file))
    assert checked.problems == ()
    assert run._first_plan(run.Options(file=job, plan=file), checked) is not None


async def test_the_first_plan_is_pinned_before_anybody_looks(tmp_path):
    local = LocalRun(MANIFEST, SPEC, work_dir=WorkDir(tmp_path), plan=plan(revision=4))
    await local._create()
    job, listed = await local.job(), await local.store.list("RLPlan", label_selector="rlinf.io/job=small")
    assert (job["spec"]["placement"]["mode"], job["spec"]["placement"]["pin"]) == ("Pinned", "small-p4")
    (made,) = listed.items
    spec = RLPlanSpec.model_validate(made["spec"])
    assert (made["metadata"]["name"], spec.revision, spec.source) == ("small-p4", 4, "User")
    assert spec.job.uid == job["metadata"]["uid"] == made["metadata"]["ownerReferences"][0]["uid"]


async def test_without_one_the_scheduler_is_asked(tmp_path):
    local = LocalRun(MANIFEST, SPEC, work_dir=WorkDir(tmp_path))
    await local._create()
    assert (await local.job())["spec"]["placement"]["mode"] == "Auto"
    assert not (await local.store.list("RLPlan")).items
