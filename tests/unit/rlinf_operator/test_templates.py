"""Templates of all pods, of the driver and of a pool, and a pool's image: what a pod is made from, and who wins."""

import dataclasses
import json

import pytest

from rlinf_api import names, supported, templates
from rlinf_operator.manifests import pods
from rlinf_operator.manifests.metadata import JobMeta, inputs
from rlinf_operator.settings import DEFAULTS, DriverTemplate
from tests.builders import UID, ppo_job

JOB = JobMeta(namespace="team", name="math", uid=UID)


def job(pool=None, **spec):
    made = ppo_job().with_spec(**spec)
    made.spec["pools"][0] |= pool or {}
    return made.parsed()


def worker(spec, *, pool="sim", settings=DEFAULTS):
    return pods.worker(JOB, spec, pool=pool, ordinal=0, attempt=1, life=1, settings=settings)


def driver(spec, administrators=None):
    settings = dataclasses.replace(DEFAULTS, driver_template=DriverTemplate(json.dumps(administrators or {})))
    return pods.driver(JOB, spec, attempt=1, life=1, settings=settings)


def own(rendered):
    return rendered.manifest["spec"]["containers"][0]


SECRETS = {"imagePullSecrets": [{"name": "registry"}], "priorityClassName": "low"}
SHIPPER = {"name": "shipper", "image": "s:1"}


def test_what_the_job_says_holds_for_all_of_its_pods_and_is_no_conflict():
    spec = job(template={"metadata": {"labels": {"team": "a"}}, "spec": {**SECRETS, "containers": [SHIPPER]}})
    for rendered in (worker(spec), worker(spec, pool="train"), driver(spec)):
        assert rendered.conflicts == ()
        pod = rendered.manifest
        assert pod["metadata"]["labels"]["team"] == "a"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["spec"]["priorityClassName"] == "low"
        assert [c["name"] for c in pod["spec"]["containers"]][1:] == ["shipper"]


def test_what_it_says_of_our_containers_is_of_those_pods_that_have_them():
    said = [{"name": "agent", "env": [{"name": "A", "value": "1"}]}, {"name": "driver", "env": [{"name": "D"}]}]
    spec = job(template={"spec": {"containers": said}})
    agent, of_driver = own(worker(spec)), own(driver(spec))
    assert (agent["name"], of_driver["name"]) == ("agent", "driver")
    assert {"A", "D"} & {e["name"] for e in agent["env"]} == {"A"}
    assert {"A", "D"} & {e["name"] for e in of_driver["env"]} == {"D"}
    assert len(worker(spec).manifest["spec"]["containers"]) == len(driver(spec).manifest["spec"]["containers"]) == 1


def test_the_more_special_wins_and_lists_of_named_things_are_joined():
    base = {"spec": {**SECRETS, "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]}}
    special = {
        "spec": {
            "priorityClassName": "high", "imagePullSecrets": [{"name": "other"}],
            "tolerations": [{"key": "spot", "operator": "Exists"}],
        }
    }  # fmt: skip
    for rendered in (
        worker(job({"template": special}, template=base)),
        driver(job(template=base, driver={"template": special})),
    ):
        spec = rendered.manifest["spec"]
        assert rendered.conflicts == ()
        assert spec["priorityClassName"] == "high"
        assert [s["name"] for s in spec["imagePullSecrets"]] == ["registry", "other"]
        assert {"operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
        assert {"key": "spot", "operator": "Exists"} in spec["tolerations"]
        assert any(t.get("key") == "node.kubernetes.io/unreachable" for t in spec["tolerations"])


def test_two_tolerations_of_one_key_are_two():
    base, over = {"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}
    spec = job({"template": {"spec": {"tolerations": [over, base]}}}, template={"spec": {"tolerations": [base]}})
    assert [t for t in worker(spec).manifest["spec"]["tolerations"] if t["key"] == "gpu"] == [base, over]


def test_a_container_of_two_templates_has_what_both_say():
    base = {"name": "agent", "env": [{"name": "A", "value": "1"}]}
    over = {"name": "agent", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}
    spec = job(
        {"template": {"spec": {"containers": [over | {"tty": True}]}}},
        template={"spec": {"containers": [base | {"stdin": True}]}},
    )
    agent = own(worker(spec))
    assert (agent["tty"], agent["stdin"]) == (True, True)
    assert [e for e in agent["env"] if e["name"] == "A"] == over["env"], "a variable has one source"


def test_a_variable_that_two_templates_have_is_the_special_ones():
    def env(value):
        return {"spec": {"containers": [{"name": "agent", "env": [{"name": "A", "value": value}]}]}}

    listed = own(worker(job({"template": env("pool")}, template=env("job"))))["env"]
    assert [e["value"] for e in listed if e["name"] == "A"] == ["pool"]


def test_a_jobs_word_of_its_driver_is_over_the_administrators():
    resources = {"requests": {"cpu": "4"}}
    container = {"name": "driver", "resources": resources, "image": "mine:1"}
    spec = job(driver={"template": {"spec": {"nodeSelector": {"zone": "b"}, "containers": [container]}}})
    rendered = driver(spec, {"spec": {"nodeSelector": {"zone": "a", "arch": "amd64"}}})
    assert rendered.conflicts == ()
    assert rendered.manifest["spec"]["nodeSelector"] == {"zone": "b", "arch": "amd64"}
    assert (own(rendered)["resources"], own(rendered)["image"]) == (resources, "mine:1")
    assert own(worker(spec))["image"] == DEFAULTS.worker_image


def test_what_the_operator_owns_it_keeps_and_says_whose_word_it_did_not_take():
    spec = job(driver={"template": {"spec": {"restartPolicy": "Always"}}})
    assert driver(spec).conflicts == ("spec.driver.template.spec.restartPolicy is 'Always'; the operator sets 'Never'",)
    spec = job(template={"spec": {"restartPolicy": "Always"}})
    assert worker(spec).conflicts == (
        "spec.template or spec.pools[sim].template.spec.restartPolicy is 'Always'; the operator sets 'Never'",
    )


NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"


def defaults_of_ones_own(container):
    def tolerated(key, **more):
        return {"key": key, "operator": "Exists", **more}

    return {
        "spec": {
            "securityContext": {"runAsUser": 0, "runAsGroup": 1000, "fsGroup": 2000},
            "tolerations": [
                tolerated(NOT_READY, effect="NoExecute", tolerationSeconds=300),
                tolerated(UNREACHABLE, effect="NoExecute", tolerationSeconds=0),
                tolerated(NOT_READY, effect="NoSchedule"),
            ],
            "volumes": [
                {"name": "rlinf-shm", "emptyDir": {"sizeLimit": "32Gi"}},
                {"name": "rlinf-tmp", "emptyDir": {"sizeLimit": "5Gi"}},
            ],
            "containers": [{"name": container, "securityContext": {"readOnlyRootFilesystem": False}}],
        }
    }


@pytest.mark.parametrize("container", ["agent", "driver"])
def test_ids_root_file_system_shared_memory_and_the_time_of_a_lost_node_are_the_templates(container):
    template = defaults_of_ones_own(container)
    rendered = worker(job({"template": template})) if container == "agent" else driver(job(), template)
    spec, said = rendered.manifest["spec"], template["spec"]
    assert rendered.conflicts == ()
    assert spec["securityContext"].items() >= said["securityContext"].items()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["tolerations"] == said["tolerations"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["rlinf-shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert volumes["rlinf-tmp"]["emptyDir"] == {"sizeLimit": "5Gi"}
    security = own(rendered)["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (False, False)


def test_what_a_pod_must_be_is_not_the_templates_and_neither_is_another_source_of_our_volumes():
    security = {"allowPrivilegeEscalation": True}
    spec = {
        "securityContext": {"runAsNonRoot": False}, "containers": [{"name": "agent", "securityContext": security}],
        "volumes": [{"name": "rlinf-shm", "hostPath": {"path": "/dev/shm"}}],
    }  # fmt: skip
    rendered = worker(job({"template": {"spec": spec}}))
    told = [text.partition(" is ")[0].removeprefix("spec.pools[sim].template.spec.") for text in rendered.conflicts]
    assert told == [
        "securityContext.runAsNonRoot", "containers[agent].securityContext.allowPrivilegeEscalation",
        "volumes[rlinf-shm]",
    ]  # fmt: skip


def test_a_toleration_whose_effect_is_a_mapping_is_left_to_the_api_server():
    odd = {"key": NOT_READY, "effect": {"no": "text"}}
    assert worker(job({"template": {"spec": {"tolerations": [odd]}}})).manifest["spec"]["tolerations"][-1] == odd


def test_the_grace_of_a_template_is_the_pods_and_what_its_agent_is_told():
    longer = {"spec": {"terminationGracePeriodSeconds": 300}}
    for spec in (job({"template": longer}), job(template=longer)):
        rendered = worker(spec)
        told = {e["name"]: e.get("value") for e in own(rendered)["env"]}[names.ENV_GRACE]
        assert (rendered.manifest["spec"]["terminationGracePeriodSeconds"], told) == (300, "300")
        assert rendered.conflicts == ()
    of_drivers = (driver(job(template=longer)), driver(job(driver={"template": longer})), driver(job(), longer))
    assert [made.manifest["spec"]["terminationGracePeriodSeconds"] for made in of_drivers] == [300, 300, 300]
    assert [made.conflicts for made in of_drivers] == [(), (), ()]
    assert driver(job({"template": longer})).manifest["spec"]["terminationGracePeriodSeconds"] == 30


def image(name):
    return {"spec": {"containers": [{"name": "agent", "image": name}]}}


@pytest.mark.parametrize(
    ("pool", "base", "wanted"),
    [
        ({}, {}, DEFAULTS.worker_image),
        ({}, image("job:1"), "job:1"),
        ({"image": "pool:1"}, image("job:1"), "pool:1"),
        ({"template": image("template:1")}, image("job:1"), "template:1"),
        ({"image": "same:1", "template": image("same:1")}, {}, "same:1"),
    ],
)
def test_the_image_of_a_pools_pods(pool, base, wanted):
    assert own(worker(job(pool, template=base)))["image"] == wanted


def test_the_driver_of_a_flow_of_ones_own_has_the_image_of_the_first_pool_that_names_one():
    spec = job({"image": "flows:1"}, flow={"name": "mine.flows:train"})
    assert own(driver(spec))["image"] == "flows:1"


def said(**spec):
    pool = spec.pop("pool", {})
    made = ppo_job().with_spec(**spec)
    made.spec["pools"][0] |= pool
    return [str(problem) for problem in supported.validate(made.build())[1]]


def test_a_template_that_cannot_be_is_refused_by_its_field():
    host = {"spec": {"hostNetwork": True}}
    words = "got true, which would take the driver out of the job's NetworkPolicy; write it into a pool's template"
    assert said(template=host) == [f"spec.template.spec.hostNetwork: {words}"]
    assert said(driver={"template": host}) == [f"spec.driver.template.spec.hostNetwork: {words}"]
    assert said(driver={"template": image("x")}) == [
        "spec.driver.template: names container 'agent', which a driver's pod has not; write driver"
    ]
    assert said(template={"specs": {}}) == [
        "spec.template.specs: is not a field of a pod template; write metadata or spec"
    ]
    assert said(pool={"image": "a:1", "template": image("b:1")}) == [
        "spec.pools[sim].image: got 'a:1', but container agent of the pool's template has 'b:1'; remove one"
    ]


def test_a_pod_is_made_anew_for_what_its_own_templates_say_and_for_no_other_reason():
    plain = job()
    of_all = job(template={"spec": SECRETS})
    of_driver = job(driver={"template": {"spec": SECRETS}})
    of_pool = job({"image": "a:1"})
    labels = job(template={"metadata": {"labels": {"a": "b"}}})

    def moved(spec):
        return [part for part in ("", "sim", "train") if inputs(spec, part) != inputs(plain, part)]

    assert moved(of_all) == ["", "sim", "train"]
    assert moved(of_driver) == [""]
    assert moved(of_pool) == ["sim"]
    assert moved(labels) == []


def test_neither_template_is_changed():
    base, over = {"spec": {"containers": [{"name": "a"}]}}, {"spec": {"containers": [{"name": "a", "image": "x"}]}}
    before = json.dumps([base, over])
    assert templates.overlay(base, over)["spec"]["containers"] == [{"name": "a", "image": "x"}]
    assert json.dumps([base, over]) == before
