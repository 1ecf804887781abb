"""spec.pools[*].topology and spec.placement.topology: what pods have of them, and what a queue is asked."""

from typing import Any

import pytest

from rlinf_api import names, supported
from rlinf_operator.manifests import asking, pods
from rlinf_operator.manifests.asking import Share
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import OperatorSettings
from tests.builders import ppo_job

RACK, HOST = "example.com/rack", "kubernetes.io/hostname"
JOB = JobMeta(namespace="team", name="math", uid="u1")
SETTINGS = OperatorSettings()


def spec_of(*, job: dict[str, Any] | None = None, sim: dict[str, Any] | None = None, template: Any = None):
    manifest = ppo_job().build()
    if job is not None:
        manifest["spec"].setdefault("placement", {})["topology"] = job
    pool = next(p for p in manifest["spec"]["pools"] if p["name"] == "sim")
    pool |= {"topology": sim} if sim is not None else {}
    pool |= {"template": template} if template is not None else {}
    found = supported.examine(manifest)
    assert (found.wrong, found.later) == ((), ())
    assert found.spec is not None
    return found.spec


def made(spec, pool: str) -> dict[str, Any]:
    one = pods.worker(JOB, spec, pool=pool, ordinal=0, attempt=1, life=1, settings=SETTINGS)
    return one.manifest["spec"]  # type: ignore[no-any-return]


def group(*pools: str) -> dict[str, Any]:
    return {
        "matchLabels": {names.LABEL_JOB_UID: "u1"},
        "matchExpressions": [{"key": names.LABEL_POOL, "operator": "In", "values": list(pools)}],
    }


def test_pods_of_all_pools_are_kept_together_and_those_of_one_with_its_own_are_not():
    spec = spec_of(job={"preferred": RACK}, sim={"spread": HOST})
    wish = {"weight": 100, "podAffinityTerm": {"topologyKey": RACK, "labelSelector": group("train")}}
    near = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    assert made(spec, "train")["affinity"] == near
    assert "topologySpreadConstraints" not in made(spec, "train")
    apart = {"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": group("sim")}
    assert made(spec, "sim")["topologySpreadConstraints"] == [apart]
    assert "affinity" not in made(spec, "sim")
    term = {"topologyKey": RACK, "labelSelector": group("sim", "train")}
    both = spec_of(job={"required": RACK})
    for pool in ("sim", "train"):
        assert made(both, pool)["affinity"]["podAffinity"] == {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def test_the_driver_is_of_no_group():
    driver = pods.driver(JOB, spec_of(job={"required": RACK}), attempt=1, life=1, settings=SETTINGS).manifest
    assert "affinity" not in driver["spec"]


def test_what_the_template_says_of_affinity_stays():
    theirs = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "cache"}}}
    own = {
        "nodeAffinity": {"a": "b"},
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [theirs]},
    }
    found = made(spec_of(sim={"required": RACK}, template={"spec": {"affinity": own}}), "sim")["affinity"]
    terms = found["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert found["nodeAffinity"] == {"a": "b"}
    assert terms == [theirs, {"topologyKey": RACK, "labelSelector": group("sim")}]


def test_a_queue_is_asked_for_each_pool_and_for_no_driver():
    spec = spec_of(job={"preferred": RACK}, sim={"required": HOST})
    sets = asking.pod_sets(JOB, spec, {"sim": 2, "train": 1}, settings=SETTINGS)
    assert {one.name: dict(one.topology) for one in sets} == {
        "driver": {}, "sim": {"required": HOST}, "train": {"preferred": RACK},
    }  # fmt: skip
    apart = asking.pod_sets(JOB, spec_of(sim={"spread": HOST}), {"sim": 2}, settings=SETTINGS)
    assert all(not one.topology for one in apart)
    plain = asking.pod_sets(JOB, spec_of(), {"sim": 2, "train": 1}, settings=SETTINGS)
    assert asking.inputs(plain) != asking.inputs(sets)


def test_one_domain_for_several_pools_in_a_queue_is_refused_by_name():
    manifest = ppo_job().with_spec(placement={"topology": {"required": RACK}}).build()
    assert supported.examine(manifest).later == ()
    manifest["metadata"].setdefault("labels", {})[names.LABEL_QUEUE] = "team"
    [problem] = supported.examine(manifest).later
    assert str(problem).startswith("spec.placement.topology.required: pods of pools sim, train in one example.com/rack")
    assert "write preferred, or spec.pools[*].topology" in str(problem)
    manifest["spec"]["pools"][0]["topology"] = {"required": RACK}
    assert supported.examine(manifest).later == (), "each pool has one that is asked for"


@pytest.mark.parametrize("said", [{}, {"required": RACK, "spread": HOST}, {"required": "a rack"}, {"near": RACK}])
def test_a_topology_is_one_of_three_and_names_a_label(said):
    manifest = ppo_job().with_spec(placement={"topology": said}).build()
    problems = [str(problem) for problem in supported.examine(manifest).wrong]
    assert problems
    assert all("spec.placement.topology" in problem for problem in problems)


def test_a_pod_whose_node_the_queue_chooses_waits_at_its_gate():
    share = Share(count=1, gates=("kueue.x-k8s.io/topology",))
    template = {"spec": {"schedulingGates": [{"name": "theirs"}]}}
    one = pods.worker(JOB, spec_of(template=template), pool="sim", ordinal=0, attempt=1, life=1, settings=SETTINGS)
    gated = asking.placed(one.manifest, share)["spec"]["schedulingGates"]
    assert gated == [{"name": "theirs"}, {"name": "kueue.x-k8s.io/topology"}]
    assert "schedulingGates" not in asking.placed(made_whole(), Share(count=1))["spec"]


def made_whole() -> dict[str, Any]:
    return pods.worker(JOB, spec_of(), pool="sim", ordinal=0, attempt=1, life=1, settings=SETTINGS).manifest
