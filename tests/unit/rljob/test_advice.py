"""What `rljob validate` says of a manifest that is right."""

import copy

import pytest
import yaml

from rlinf_api.job import RLJobSpec
from rljob.manifest import advice
from tests.rljob_runs import EXAMPLE, rljob

JOB = yaml.safe_load(EXAMPLE.read_text())


def job(resource="nvidia.com/gpu", **resources):
    found = copy.deepcopy(JOB)
    (pool,) = found["spec"]["pools"]
    pool["slots"] = {"perPod": pool["slots"]["perPod"], "resource": resource}
    pool["template"] = {"spec": {"containers": [{"name": "agent", **({"resources": resources} if resources else {})}]}}
    return found


def advised(manifest):
    return list(advice(RLJobSpec.model_validate(manifest["spec"])))


def test_a_pool_of_accelerators_that_asks_for_nothing_else_is_named():
    (said,) = advised(job())
    assert said.startswith("spec.pools[cpu]: its pods ask for nvidia.com/gpu and for no cpu and no memory: ")
    assert said.endswith("write cpu and hostMemory of spec.pools[cpu].slots")


@pytest.mark.parametrize(
    ("resources", "missing"),
    [
        ({"requests": {"cpu": "4", "memory": "8Gi"}}, []),
        ({"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}}, []),
        ({"limits": {"memory": "8Gi"}}, ["for no cpu:"]),
        ({"requests": {"cpu": "4"}, "limits": None}, ["for no memory:"]),
        ({"requests": 5, "limits": ["cpu", "memory"]}, ["for no cpu and no memory:"]),
    ],
)
def test_what_is_asked_for_in_the_template_is_not_missed(resources, missing):
    said = advised(job(**resources))
    assert len(said) == len(missing)
    assert all(part in text for part, text in zip(missing, said, strict=True))


@pytest.mark.parametrize(
    ("slots", "missing"),
    [
        ({"cpu": "4", "hostMemory": "8Gi"}, []),
        ({"cpu": "4", "memory": "80Gi"}, ["for no memory: they", "write hostMemory of"]),
        ({"hostMemory": "8Gi"}, ["for no cpu: they", "write cpu of"]),
    ],
)
def test_what_is_asked_for_by_slots_is_not_missed(slots, missing):
    manifest = job()
    manifest["spec"]["pools"][0]["slots"] |= slots
    said = advised(manifest)
    assert len(said) == (1 if missing else 0)
    assert all(part in said[0] for part in missing)


def test_the_example_needs_no_advice():
    assert advised(JOB) == []


def test_validate_says_it_and_passes(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job()))
    done = rljob("validate", path)
    assert (done.returncode, done.stdout) == (0, f"{path}: RLJob cartpole is valid\n")
    assert done.stderr.startswith("note: spec.pools[cpu]: its pods ask for nvidia.com/gpu")
