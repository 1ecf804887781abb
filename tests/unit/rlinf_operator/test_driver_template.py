"""The administrator's template of driver pods: merged as a pool's is, refused at the start where it cannot be."""

import dataclasses
import json

import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_operator import process
from rlinf_operator.manifests import pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_operator.settings import DEFAULTS, DriverTemplate
from rlinf_scheduler.service import Planning
from tests.builders import NOW, UID, ppo_job
from tests.fakes.cluster import AUTHORITY, QUICK, Cluster

JOB = JobMeta(namespace="team", name="math", uid=UID)
VARIABLE = "RLINF_OPERATOR_DRIVER_TEMPLATE"


def with_template(settings, **template):
    return dataclasses.replace(settings, driver_template=DriverTemplate(json.dumps(template)))


def driver(**template):
    return pods.driver(JOB, ppo_job().parsed(), attempt=1, life=1, settings=with_template(DEFAULTS, **template))


def test_a_driver_is_placed_and_sized_by_the_template():
    resources = {"requests": {"cpu": "2", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}
    rendered = driver(
        metadata={"labels": {"cost-centre": "42"}},
        spec={
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "cpu-only", "operator": "Exists"}],
            "priorityClassName": "training",
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "containers": [
                {"name": "driver", "resources": resources, "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
            ],
        },
    )
    assert rendered.conflicts == ()
    pod = rendered.manifest
    assert pod["metadata"]["labels"]["cost-centre"] == "42"
    assert pod["metadata"]["labels"][names.LABEL_COMPONENT] == "driver"
    spec = pod["spec"]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"pool": "cpu"}, "training")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert {t["key"] for t in spec["tolerations"]} == {
        "cpu-only", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable",
    }  # fmt: skip
    (container,) = spec["containers"]
    assert container["resources"] == resources, "as a whole: driver_memory's request would be above this limit"
    assert {m["mountPath"] for m in container["volumeMounts"]} >= {"/data", names.MOUNT_TLS}


def test_what_is_overridden_is_told_without_what_may_be_a_token():
    container = {"name": "driver", "command": ["sh", "-c", "TOKEN=hunter2 run"], "env": {"TOKEN": "hunter2"}}
    variable = {"name": names.ENV_JOB_NAME, "value": "hunter2"}
    for more in ({}, {"env": [variable]}):
        (first, *rest) = driver(spec={"containers": [{**container, **more}]}).conflicts
        assert "spec.containers[driver].command is a list; the operator sets ['python', '-m', 'rlinf_worker'" in first
        assert len(rest) == 1
        assert "hunter2" not in rest[0]


def test_without_a_template_a_driver_is_what_the_settings_say():
    (container,) = driver().manifest["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": DEFAULTS.driver_memory}


def test_workers_are_left_alone():
    settings = with_template(DEFAULTS, spec={"nodeSelector": {"pool": "cpu"}})
    rendered = pods.worker(JOB, ppo_job().parsed(), pool="sim", ordinal=0, attempt=1, life=1, settings=settings)
    assert "nodeSelector" not in rendered.manifest["spec"]


async def test_what_the_operator_owns_wins_and_an_event_says_so():
    cluster = Cluster()
    template = {"restartPolicy": "Always", "containers": [{"name": "driver", "image": "mine:1", "command": ["sh"]}]}
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=lambda _: cluster.drivers, authority=AUTHORITY,
        settings=with_template(QUICK, spec=template), clock=lambda: NOW,
    )  # fmt: skip
    await cluster.apply()
    await cluster.settle()
    pod = await cluster.store.get("Pod", "math-driver-a1", namespace="team")
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["containers"][0]["image"] == DEFAULTS.driver_image
    told = [e["message"] for e in (await cluster.store.list("Event", namespace="team")).items]
    for field in ("spec.restartPolicy", "spec.containers[driver].image", "spec.containers[driver].command"):
        assert [m for m in told if m.startswith(f"the operator's driver_template.{field} is")], told


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "a pod template as JSON"),
        ("[]", "wanted a JSON object with metadata, spec or both"),
        ('{"nodeSelector": {}}', "driver_template.nodeSelector is not a field of a pod template"),
        ('{"spec": []}', "driver_template.spec got .*, wanted a mapping"),
        ('{"spec": {"containers": [{"image": "x"}]}}', "driver_template.spec.containers wanted a list of entries"),
        ('{"spec": {"hostNetwork": true}}', "out of its job's NetworkPolicy"),
    ],
)
def test_a_template_that_cannot_be_merged_ends_the_operator_at_its_start(text, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        process.read({}, {VARIABLE: text})
    assert VARIABLE in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"containers": [{"env": [{"name": "TOKEN", "value": "hunter2"}]}]}},
        {"spec": [{"env": [{"name": "TOKEN", "value": "hunter2"}]}]},
        {"metadata": "hunter2"},
        ["hunter2"],
        "hunter2",
    ],
)
def test_a_refused_template_is_not_shown_as_it_may_hold_a_token(template):
    for text in (json.dumps(template), json.dumps(template)[:-1]):
        with pytest.raises(UserError) as caught:
            process.read({}, {VARIABLE: text})
        assert "hunter2" not in str(caught.value)


def test_a_template_arrives_as_it_was_written():
    _, operator = process.read({}, {VARIABLE: '{"spec": {"priorityClassName": "high"}}'})
    assert operator.driver_template.parsed() == {"spec": {"priorityClassName": "high"}}
