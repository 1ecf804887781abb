"""Templates against the fields of a pod: what no API server would take is said before it is asked."""

import copy
import json
from typing import Any

import pytest
import yaml

from rljob import manifest, pod_fields
from tests.rljob_runs import EXAMPLE
from tools import gen_pod_fields

JOB = yaml.safe_load(EXAMPLE.read_text())
AGENT = "spec.containers[agent]"
VERSION = json.loads(gen_pod_fields.FILE.read_text())["version"]


NO_FIELD = f"is not a field of a pod in Kubernetes {VERSION}"


def test_the_committed_file_is_what_the_client_says():
    assert gen_pod_fields.FILE.read_text() == gen_pod_fields.document(), "run `make generate`"
    assert len(gen_pod_fields.fields()) > 90


def said(template):
    return [str(problem) for problem in pod_fields.check("spec.template", template)]


def agent(**fields):
    return {"spec": {"containers": [{"name": "agent", **fields}]}}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"spec": {"nodeSelecter": {}}}, f"spec.nodeSelecter: {NO_FIELD}; did you mean 'nodeSelector'?"),
        (agent(ressources={}), f"{AGENT}.ressources: {NO_FIELD}; did you mean 'resources'?"),
        ({"metadata": {"lables": {}}}, f"metadata.lables: {NO_FIELD}; did you mean 'labels'?"),
        ({"spec": {"xyzzy": 1}}, f"spec.xyzzy: {NO_FIELD}; remove it"),
        (agent(env=[{"name": "A", "value": 5}]), f"{AGENT}.env[A].value: got 5, wanted text; write it in quotes"),
        (agent(env=[{"name": "A", "value": True}]), f"{AGENT}.env[A].value: got true, wanted text; write it in quotes"),
        (agent(env={"A": "5"}), f"{AGENT}.env: got a mapping, wanted a list; write that"),
        (agent(args="--x"), f"{AGENT}.args: got text, wanted a list; write that"),
        (agent(args=[1]), f"{AGENT}.args[0]: got 1, wanted text; write it in quotes"),
        (
            agent(ports=[{"containerPort": "80"}]),
            f"{AGENT}.ports[0].containerPort: got '80', wanted a whole number; write that",
        ),
        ({"spec": {"priority": True}}, "spec.priority: got true, wanted a whole number; write that"),
        ({"spec": {"hostNetwork": "yes"}}, "spec.hostNetwork: got 'yes', wanted true or false; write that"),
        ({"spec": {"nodeSelector": {"gpu": True}}}, "spec.nodeSelector.gpu: got true, wanted text; write it in quotes"),
        ({"spec": {"securityContext": "none"}}, "spec.securityContext: got text, wanted a mapping; write that"),
        (
            {"spec": {"tolerations": [{"key": {"a": "b"}}]}},
            "spec.tolerations[0].key: got a mapping, wanted text; write that",
        ),
    ],
)  # fmt: skip
def test_what_is_no_pods_is_answered_with_the_field_and_what_to_write(template, sentence):
    assert said(template) == [f"spec.template.{sentence}"]


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"spec": 3},
        agent(resources={"limits": {"cpu": 2, "memory": "1Gi", "x.com/y": 0.5}}),
        agent(livenessProbe={"httpGet": {"port": 80}}, readinessProbe={"httpGet": {"port": "http"}}),
        {"spec": {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": 5}}], "priorityClassName": None}},
        {"metadata": {"annotations": {"a": yaml.safe_load("2026-01-01")}}},
    ],
)
def test_what_an_api_server_takes_is_left_alone(template):
    assert said(template) == []


def test_a_token_that_stands_where_it_should_not_is_not_repeated():
    (sentence,) = said(agent(env=[{"name": "A", "value": {"token": "s3cret"}}]))
    assert "s3cret" not in sentence


@pytest.mark.parametrize("at", ["template", "driver", "pools"])
def test_validate_looks_at_each_template_of_a_job(at):
    job = copy.deepcopy(JOB)
    template: dict[str, Any] = {"spec": {"nodeSelecter": {}}}
    if at == "pools":
        job["spec"]["pools"][0]["template"] = template
    else:
        job["spec"][at] = template if at == "template" else {"template": template}
    field = {"template": "spec.template", "driver": "spec.driver.template", "pools": "spec.pools[cpu].template"}[at]
    assert [problem.field for problem in manifest.check(job).problems] == [f"{field}.spec.nodeSelecter"]


def test_and_at_each_of_a_runtime():
    template: dict[str, Any] = {"spec": {"nodeSelecter": {}}}
    spec = {
        "template": template, "driver": {"template": template}, "poolDefaults": {"template": template},
        "pools": [{"name": "a", "template": template}],
    }  # fmt: skip
    runtime = {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLRuntime", "metadata": {"name": "gpu"}, "spec": spec}
    assert [problem.field.removesuffix(".spec.nodeSelecter") for problem in manifest.runtime_problems(runtime)] == [
        "spec.template", "spec.driver.template", "spec.poolDefaults.template", "spec.pools[a].template",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("agnet", "is a container of its own, beside agent; did you mean 'agent'?"),
        ("agent", None),
        ("istio-proxy", None),
    ],
)
def test_a_container_that_is_nearly_ours_is_said(name, note):
    job = copy.deepcopy(JOB)
    job["spec"]["pools"][0]["template"] = {"spec": {"containers": [{"name": name, "image": "x"}]}}
    found = manifest.check(job)
    assert found.problems == ()
    assert found.spec is not None
    notes = [line for line in manifest.advice(found.spec) if ".containers[" in line]
    assert notes == ([] if note is None else [f"spec.pools[cpu].template.spec.containers[{name}]: {note}"])
