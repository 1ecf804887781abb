"""An RLRuntime under a job: whose word wins, layer by layer, and what is wrong with one, in sentences."""

import copy
import json

import pytest

from rlinf_api import runtimes, supported, unknown
from rlinf_api.job import RLJobSpec
from rlinf_operator.manifests import pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import DEFAULTS
from tests.builders import UID, ppo_job


def manifest(**spec):
    return {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLRuntime", "metadata": {"name": "gpu"}, "spec": spec}


def runtime(**spec):
    found, problems = runtimes.examine(manifest(**spec))
    assert not problems, problems
    return found


def said(**spec):
    return [str(problem) for problem in runtimes.examine(manifest(**spec))[1]]


def env(name, value, *, container="agent"):
    return {"spec": {"containers": [{"name": container, "env": [{"name": name, "value": value}]}]}}


def job_of(raw):
    examined = supported.examine({**ppo_job().build(), "spec": raw})
    assert not examined.wrong
    assert examined.spec is not None
    return examined.spec


def rendered(spec, pool=""):
    job = JobMeta(namespace="team", name="math", uid=UID)
    if not pool:
        return pods.driver(job, spec, attempt=1, life=1, settings=DEFAULTS).manifest
    return pods.worker(job, spec, pool=pool, ordinal=0, attempt=1, life=1, settings=DEFAULTS).manifest


def value_of(pod, name):
    return next(e["value"] for e in pod["spec"]["containers"][0]["env"] if e["name"] == name)


LAYERS = (
    ("runtime", "template"), ("runtime", "poolDefaults"), ("runtime", "pools"), ("job", "template"), ("job", "pools"),
)  # fmt: skip
"""Of a worker's pod, the most general first."""


def of_layers(layers):
    """A runtime and a job's spec in which each of these layers sets the same variable to its own name."""
    of_runtime, spec = {}, ppo_job().build()["spec"]
    for owner, field in layers:
        template = env("WHO", f"{owner}.{field}")
        if owner == "runtime":
            of_runtime[field] = {
                "template": template, "poolDefaults": {"template": template},
                "pools": [{"name": "sim", "template": template}],
            }[field]  # fmt: skip
        elif field == "template":
            spec["template"] = template
        else:
            next(p for p in spec["pools"] if p["name"] == "sim")["template"] = template
    return runtime(**of_runtime), spec


@pytest.mark.parametrize("lower", range(len(LAYERS)))
@pytest.mark.parametrize("upper", range(len(LAYERS)))
def test_of_two_layers_the_more_special_wins_and_nothing_of_a_runtime_is_over_the_job(lower, upper):
    if lower >= upper:
        return
    layers = (LAYERS[lower], LAYERS[upper])
    found, spec = of_layers(layers)
    assert value_of(rendered(job_of(runtimes.over(spec, found)), "sim"), "WHO") == ".".join(LAYERS[upper])


def test_a_pool_of_another_name_has_the_defaults_alone():
    found, spec = of_layers(LAYERS[:3])
    assert value_of(rendered(job_of(runtimes.over(spec, found)), "train"), "WHO") == "runtime.poolDefaults"


def test_a_driver_is_under_its_own_words_then_the_jobs():
    found = runtime(
        template=env("A", "runtime", container="driver"), driver={"template": env("A", "driver", container="driver")}
    )
    spec = ppo_job().build()["spec"]
    assert value_of(rendered(job_of(runtimes.over(spec, found))), "A") == "driver"
    spec["template"] = env("A", "job", container="driver")
    assert value_of(rendered(job_of(runtimes.over(spec, found))), "A") == "job"
    spec["driver"] = {"template": env("A", "the job's driver", container="driver")}
    assert value_of(rendered(job_of(runtimes.over(spec, found))), "A") == "the job's driver"


def test_what_both_say_is_joined_and_no_container_strays_into_the_others_pod():
    found = runtime(
        template={"spec": {"tolerations": [{"key": "gpu"}], "imagePullSecrets": [{"name": "ours"}]}},
        poolDefaults={"template": env("B", "2")}, driver={"template": env("C", "3", container="driver")},
    )  # fmt: skip
    spec = ppo_job().build()["spec"]
    spec["template"] = {
        "spec": {
            "tolerations": [{"key": "mine"}],
            "containers": [
                {"name": "agent", "env": [{"name": "X", "value": "1"}]},
                {"name": "driver", "env": [{"name": "Y", "value": "1"}]},
                {"name": "log", "image": "log:1"},
            ],
        }
    }
    made = job_of(runtimes.over(spec, found))
    worker, driver = rendered(made, "sim"), rendered(made)
    keys = [t["key"] for t in worker["spec"]["tolerations"]]
    assert keys[-2:] == ["gpu", "mine"]
    assert keys.count("mine") == 1
    assert worker["spec"]["imagePullSecrets"] == [{"name": "ours"}]
    assert [c["name"] for c in worker["spec"]["containers"]] == ["agent", "log"]
    assert [c["name"] for c in driver["spec"]["containers"]] == ["driver", "log"]
    assert (value_of(worker, "B"), value_of(worker, "X"), value_of(driver, "C"), value_of(driver, "Y")) == (
        "2", "1", "3", "1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of_runtime", "of_job", "image"),
    [
        ({"poolDefaults": {"image": "defaults"}}, {}, "defaults"),
        ({"poolDefaults": {"image": "defaults"}, "pools": [{"name": "sim", "image": "named"}]}, {}, "named"),
        ({"poolDefaults": {"image": "defaults"}}, {"pool": {"image": "mine"}}, "mine"),
        (
            {"template": {"spec": {"containers": [{"name": "agent", "image": "all"}]}}},
            {"pool": {"image": "mine"}},
            "mine",
        ),
        (
            {"poolDefaults": {"template": {"spec": {"containers": [{"name": "agent", "image": "t"}]}}}},
            {"pool": {"image": "mine"}},
            "mine",
        ),
        (
            {"pools": [{"name": "sim", "image": "named"}]},
            {"template": {"spec": {"containers": [{"name": "agent", "image": "job"}]}}},
            "job",
        ),
    ],
)
def test_whose_image_it_is(of_runtime, of_job, image):
    spec = ppo_job().build()["spec"]
    next(p for p in spec["pools"] if p["name"] == "sim").update(of_job.get("pool", {}))
    spec |= {"template": of_job["template"]} if "template" in of_job else {}
    made = job_of(runtimes.over(spec, runtime(**of_runtime)))
    assert rendered(made, "sim")["spec"]["containers"][0]["image"] == image


GPU = {"resource": "a.com/x", "cpu": "6", "hostMemory": "8Gi"}


@pytest.mark.parametrize(
    ("defaults", "own", "slots"),
    [
        ({"perPod": 8, "memory": "80Gi"}, {}, {"perPod": 8, "memory": "80Gi"}),
        ({"perPod": 8, "memory": "80Gi"}, {"perPod": 1}, {"perPod": 1, "memory": "80Gi"}),
        ({"perPod": 8, "memory": "80Gi"}, {"memory": "2Gi"}, {"perPod": 8, "memory": "2Gi"}),
        ({"resource": "a.com/x"}, {"resource": ""}, {"resource": "a.com/x"}),
        ({"resource": "a.com/x"}, {"cpu": "2"}, {"cpu": "2"}),
        ({"cpu": "2"}, {"resource": "a.com/x"}, {"resource": "a.com/x"}),
        (GPU, {"cpu": "2"}, {"cpu": "2"}),
        (GPU, {"resource": "a.com/y"}, {**GPU, "resource": "a.com/y"}),
        (GPU, {"cpu": "2", "resource": "a.com/x"}, {**GPU, "cpu": "2"}),
        (GPU, {"cpu": "2", "hostMemory": "1Gi"}, {**GPU, "cpu": "2", "hostMemory": "1Gi"}),
        ({"cpu": "2"}, GPU, GPU),
    ],
)
def test_slots_are_joined_field_by_field_and_are_one_thing(defaults, own, slots):
    made = runtimes.over({"pools": [{"name": "sim", "slots": own}]}, runtime(poolDefaults={"slots": defaults}))
    assert made["pools"][0]["slots"] == slots


def test_a_named_pools_slots_are_over_the_defaults():
    found = runtime(
        poolDefaults={"slots": {"resource": "a.com/x", "perPod": 8}}, pools=[{"name": "sim", "slots": {"cpu": "4"}}]
    )
    made = runtimes.over({"pools": [{"name": "sim"}, {"name": "train"}]}, found)
    assert [p["slots"] for p in made["pools"]] == [{"perPod": 8, "cpu": "4"}, {"resource": "a.com/x", "perPod": 8}]


def test_a_queue_is_the_jobs_own_where_it_names_one_or_none():
    job, found = ppo_job().build(), runtime(queue="team")
    label = "kueue.x-k8s.io/queue-name"
    assert runtimes.with_runtime(job, found)["metadata"]["labels"][label] == "team"
    for own in ("other", ""):
        job["metadata"]["labels"] = {label: own}
        assert runtimes.with_runtime(job, found)["metadata"]["labels"][label] == own


def test_nothing_that_was_given_is_changed_and_no_runtime_is_named_any_more():
    found, spec = of_layers(LAYERS)
    spec["runtime"] = "gpu"
    before = copy.deepcopy(spec), found.model_dump_json()
    made = runtimes.over(spec, found)
    assert (spec, found.model_dump_json()) == before
    assert RLJobSpec.model_validate(made).runtime is None


@pytest.mark.parametrize(
    "part", [{"template": 3}, {"driver": []}, {"pools": 3}, {"pools": [3, {"name": "sim", "slots": 1}]}]
)
def test_what_is_no_spec_is_left_for_whoever_examines_it(part):
    found, spec = of_layers(LAYERS[:3])
    made = runtimes.over({**spec, **part}, found)
    assert supported.examine({**ppo_job().build(), "spec": made}).wrong


def test_a_job_read_from_the_cluster_has_the_runtime_that_its_status_keeps():
    job = ppo_job().build()
    slots = [p.get("slots") for p in job["spec"]["pools"]]
    kept = {"name": "gpu", "spec": {"poolDefaults": {"slots": {"perPod": 3}}, "later": 1}}
    job["spec"]["runtime"], job["status"] = "gpu", {"runtime": kept}
    for pool in job["spec"]["pools"]:
        pool.pop("slots", None)
    assert [p["slots"]["perPod"] for p in runtimes.of_job(job)["spec"]["pools"]] == [3] * len(slots)
    job["spec"]["runtime"] = "other"
    assert runtimes.of_job(job) == job


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"pool": {}},
            "spec.pool: is not a field; did you mean 'pools'? Known here: driver, poolDefaults, pools, queue, template",
        ),
        ({"queue": "Team A"}, "spec.queue: got 'Team A', wanted"),
        ({"template": {"spce": {}}}, "spec.template.spce: is not a field of a pod template; write metadata or spec"),
        ({"template": {"spec": {"hostNetwork": True}}}, "spec.template.spec.hostNetwork: got true, which would take"),
        (
            {"driver": {"template": env("A", "1")}},
            "spec.driver.template: names container 'agent', which a driver's pod has not",
        ),
        ({"poolDefaults": {"slots": {"hostMemory": "lots"}}}, "spec.poolDefaults.slots.hostMemory: got 'lots'"),
        ({"pools": [{"name": "a", "slots": {"memory": "lots"}}]}, "spec.pools[a].slots.memory: got 'lots'"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "spec.pools: name 'a' is used twice; rename one"),
        (
            {
                "pools": [
                    {"name": "a", "image": "x", "template": {"spec": {"containers": [{"name": "agent", "image": "y"}]}}}
                ]
            },
            "spec.pools[a].image: got 'x', but container agent of the pool's template has 'y'; remove one",
        ),
        (
            {"template": {"spec": {"x": "y" * 40_000}}},
            "spec: has 40033 bytes as JSON, wanted at most 32768, as each job",
        ),
    ],
)
def test_a_wrong_runtime_is_answered_with_what_to_write(spec, sentence):
    (found,) = said(**spec)
    assert found.startswith(sentence)


def test_a_manifest_of_another_kind_or_with_a_strange_field_is_named():
    strange = {**manifest(), "apiVersion": "v1", "spek": {}}
    del strange["spec"]
    sentences = [str(problem) for problem in runtimes.examine(strange)[1]]
    assert sentences == [
        "apiVersion: got 'v1', wanted 'rlinf.io/v1alpha1'; write that",
        "spek: is not a field of an RLRuntime; did you mean 'spec'?",
    ]


def test_a_runtime_that_is_kept_says_the_same_again():
    found, _ = of_layers(LAYERS)
    kept = json.loads(json.dumps(unknown.compact(found)))
    assert runtimes.kept_spec(kept) == found
