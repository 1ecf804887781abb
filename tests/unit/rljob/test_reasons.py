"""`rljob plan explain | history | what-if`: what a work dir says of its plans, and of other capacity."""

import re

import pytest
import yaml

from rlinf_api import names
from rlinf_api.errors import InvalidManifest, UserError
from rlinf_api.job import RLJobSpec, dump
from rlinf_api.profile import key_of
from rlinf_scheduler.jobs import plan_manifest
from rlinf_scheduler.planner.problem import PlanProblem, Pool
from rlinf_scheduler.replan.evidence import steps_of
from rljob import reasons
from rljob.reasons import OtherPools
from tests.rljob_runs import rljob
from tools.prove.world import World
from tools.workloads import entries


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    """A run of drawn-14 that was placed anew, as it lies there afterwards."""
    world = World.of_entry(entries()["drawn-14"], steps=60)
    world.run()
    folder = tmp_path_factory.mktemp("run")
    (folder / "objects").mkdir()
    job = {"metadata": {"name": "job"}, "spec": dump(world.job), "status": {"plan": {"current": "job-p3"}}}
    (folder / "objects" / "rljob-default-job.yaml").write_text(yaml.safe_dump(job))
    for plan in world.plans:
        found = plan_manifest(plan, namespace="default")
        if plan.revision == 3:
            took = steps_of([p for p in world.profiles if p.revision == 3])
            found["metadata"]["annotations"] = {names.ANNOTATION_STAYS: "Best: none pays"}
            found["status"] = {
                "conditions": [{"type": "Applied", "status": "True"}],
                "measured": {"periodSeconds": took.mean, "steps": took.count, "ratioToPrediction": 1.04},
            }
        (folder / "objects" / f"rlplan-default-job-p{plan.revision}.yaml").write_text(yaml.safe_dump(found))
    (folder / "profiles.jsonl").write_text("".join(f"{profile.to_json()}\n" for profile in world.profiles))
    return folder


def test_the_history_has_every_plan_with_its_reason_promise_and_measurement(work_dir):
    lines = reasons.history(work_dir).splitlines()
    assert [line[2:].split()[0] for line in lines[::2]] == ["job-p1", "job-p2", "job-p3"]
    assert re.search(r"job-p3  Profiled  Applied  promised 1\.\d+ s  took 1\.\d+ s \(\d+ steps\)", lines[4])
    assert "instead of" in lines[5]


def test_a_plan_is_explained_with_its_parts_and_those_that_lost(work_dir):
    text = reasons.explain(work_dir, "")
    assert text.startswith("job-p3, because of Profiled: ")
    assert "\nafter revision 2\n" in text
    assert re.search(r"\npromised 1\.\d+ s a step \(compute \d", text)
    assert re.search(r"\ntook 1\.\d+ s a step over \d+ steps, 1\.04 of it", text)
    assert "\nstays, Best: none pays\n" in text
    assert re.search(r"\ninstead, \d+\.?\d* s: .* slower: ", text)
    assert reasons.explain(work_dir, "job-p1").startswith("job-p1, because of Initial: ")
    with pytest.raises(UserError, match="this job has no plan 'job-p9': wanted one of job-p1, job-p2, job-p3"):
        reasons.explain(work_dir, "job-p9")


ASKED = ("--slots", "2", "--memory", "90", "--pods", "main=4")


def periods(text):
    return [float(line.split()[0]) for line in text.splitlines() if re.match(r" +\d", line)]


def test_what_if_nothing_changed_the_best_is_no_worse_than_now(work_dir):
    now, best, *others = periods(reasons.what_if(work_dir, OtherPools(), more=False))
    assert best <= now
    assert all(other >= best for other in others)


def test_with_twice_the_pods_a_step_is_shorter_and_with_little_memory_there_is_no_plan(work_dir):
    now, best, *_ = periods(reasons.what_if(work_dir, OtherPools(pods={"main": 2}), more=False))
    assert best < 0.9 * now
    said = reasons.what_if(work_dir, OtherPools(memory_gib=20), more=False)
    assert "no plan then: role 'rollout' peaks at 43.3 GiB on a slot of 20.0 GiB" in said


def test_pods_and_their_slots_are_told_of_one_pool_or_of_every():
    def there(**instead):
        return [(p.slots, p.slots_per_pod, p.memory_mib) for p in OtherPools(**instead).of(problem).pools]

    gpu, cpu = (Pool(name=n, slots=8, slots_per_pod=4, memory_mib=1024, roles=("a",)) for n in ("gpu", "cpu"))
    problem = PlanProblem(roles=(), edges=(), pools=(gpu, cpu), items=1)
    assert there() == [(8, 4, 1024)] * 2
    assert there(slots={"": 2}) == [(4, 2, 1024)] * 2, "each pool keeps its two pods"
    assert there(slots={"": 2, "gpu": 8}, memory_gib=2) == [(16, 8, 2048), (4, 2, 2048)]
    assert there(slots={"gpu": 8}, pods={"gpu": 3, "cpu": 0}) == [(24, 8, 1024)]
    with pytest.raises(UserError, match="the job has no pool 'tpu': wanted one of cpu, gpu"):
        there(slots={"tpu": 1})


def test_more_says_what_a_slot_and_memory_would_bring(work_dir):
    said = reasons.what_if(work_dir, OtherPools(), more=True)
    assert "1 slot more of pool main: " in said
    assert "10% more memory of pool main's slots: " in said


@pytest.fixture
def manifest(work_dir, tmp_path):
    """The job of the run, as a manifest, with the key that its profiles say."""
    job = yaml.safe_load((work_dir / "objects" / "rljob-default-job.yaml").read_text())
    spec = RLJobSpec.model_validate(job["spec"])
    whole = {"apiVersion": names.API_VERSION, "kind": "RLJob", "metadata": {"name": "job"}, "spec": job["spec"]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(whole))
    measured = [p.model_copy(update={"key": key_of(spec)}) for p in reasons.measured(work_dir)]
    (tmp_path / "profiles.jsonl").write_text("".join(f"{profile.to_json()}\n" for profile in measured))
    return tmp_path / "job.yaml"


def test_of_a_job_that_has_not_begun_an_earlier_ones_profile_tells(work_dir, manifest):
    began = reasons.what_if_it_began(manifest, manifest.parent, OtherPools(), more=False)
    _, best, *_ = periods(reasons.what_if(work_dir, OtherPools(), more=False))
    assert "now, as simulated" not in began
    assert periods(began)[0] == pytest.approx(best, rel=0.02)
    done = rljob("plan", "what-if", str(manifest), "--profile", str(manifest.parent), *ASKED)
    assert done.returncode == 0, done.stderr
    assert periods(done.stdout)[0] < 0.9 * best


def test_what_a_job_has_of_its_runtime_is_its_own_beside_it_or_in_a_file(work_dir, manifest):
    plain = reasons.what_if_it_began(manifest, manifest.parent, OtherPools(), more=False)
    whole = yaml.safe_load(manifest.read_text())
    slots = whole["spec"]["pools"][0].pop("slots")
    whole["spec"]["runtime"] = "ours"
    runtime = {
        "apiVersion": names.API_VERSION, "kind": "RLRuntime", "metadata": {"name": "ours"},
        "spec": {"poolDefaults": {"slots": slots}},
    }  # fmt: skip
    manifest.write_text(yaml.safe_dump_all([whole, runtime]))
    assert reasons.what_if_it_began(manifest, manifest.parent, OtherPools(), more=False) == plain
    manifest.write_text(yaml.safe_dump(whole))
    (manifest.parent / "ours.yaml").write_text(yaml.safe_dump(runtime))
    with pytest.raises(InvalidManifest, match=r"spec\.runtime: names RLRuntime 'ours', which no file here holds"):
        reasons.what_if_it_began(manifest, manifest.parent, OtherPools(), more=False)
    beside = "--runtime", str(manifest.parent / "ours.yaml")
    done = rljob("plan", "what-if", str(manifest), "--profile", str(manifest.parent), *beside)
    assert (done.returncode, done.stdout) == (0, f"{plain}\n"), done.stderr


def test_another_jobs_profile_and_a_wrong_manifest_are_refused(work_dir, manifest):
    with pytest.raises(UserError, match=r"profile .* is of another job: got job, key sha256:0000.*wanted key sha256:"):
        reasons.what_if_it_began(manifest, work_dir, OtherPools(), more=False)
    whole = yaml.safe_load(manifest.read_text())
    whole["spec"]["flow"]["setps"] = 1
    manifest.write_text(yaml.safe_dump(whole))
    with pytest.raises(UserError, match=r"job\.yaml is no job that could begin: got spec\.flow\.setps: is not a field"):
        reasons.what_if_it_began(manifest, manifest.parent, OtherPools(), more=False)


def test_what_cannot_be_asked_is_a_sentence(work_dir, tmp_path):
    with pytest.raises(UserError, match="the job has no pool 'gpu': wanted one of main"):
        reasons.what_if(work_dir, OtherPools(pods={"gpu": 1}), more=False)
    with pytest.raises(UserError, match="no work dir of a run: got 0 RLJobs"):
        reasons.history(tmp_path)
    with pytest.raises(UserError, match="wanted POOL=N, as gpu=3"):
        reasons.numbers_of("--pods", ["gpu"])
    with pytest.raises(UserError, match=r"--slots names .* wanted POOL=N, as gpu=3, or N for every pool"):
        reasons.numbers_of("--slots", ["gpu=many"], may_be_bare=True)
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "rljob-default-a.yaml").write_text("spec: [")
    with pytest.raises(UserError, match=r"rljob-default-a.yaml cannot be read"):
        reasons.history(tmp_path)


def test_a_run_of_which_nothing_was_measured_says_so(work_dir, tmp_path):
    (tmp_path / "objects").mkdir()
    for path in (work_dir / "objects").iterdir():
        (tmp_path / "objects" / path.name).write_text(path.read_text())
    with pytest.raises(UserError, match=r"nothing was measured in .* yet: got profile.json: No such file"):
        reasons.what_if(tmp_path, OtherPools(), more=False)
