"""Local mode refuses by name what it cannot carry out, and has a reason for what it ignores."""

import json
import re

import pytest

from rljob.local import podspec


def pod(container=None, **spec):
    return {
        "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "main", "command": ["x"]} | (container or {})]} | spec,
    }


VOLUME = {"volumes": [{"name": "v", "emptyDir": {}}]}


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (pod(hostNetwork=True), "spec.hostNetwork is not carried out in local mode; leave it out"),
        (pod(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), r"hostPath .* use a persistentVolumeClaim"),
        (pod(volumes=[{"name": "v", "emptyDir": {"medium": "HugePages"}}]), "emptyDir.medium=HugePages .* use Memory"),
        (pod(automountServiceAccountToken=True), "write false"),
        (pod({"livenessProbe": {}}), r"containers\[0\] \(main\).livenessProbe"),
        (pod({"readinessProbe": {"grpc": {"port": 1}}}), "readinessProbe.grpc .* use tcpSocket or exec"),
        (pod({"command": []}), "write the command"),
        (pod({"volumeMounts": [{"name": "w", "mountPath": "/w"}]}), "names volume 'w', but spec.volumes has"),
        (
            pod({"volumeMounts": [{"name": "v", "mountPath": "/", "subPathExpr": "x"}]}, **VOLUME),
            "subPathExpr .* use subPath",
        ),
        (pod({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]}), "resourceFieldRef .* write the number"),
        (
            pod({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]}),
            "fieldPath=status.phase",
        ),
        (pod({"ports": [{"containerPort": 1, "hostPort": 1}]}), r"ports\[0\].hostPort"),
        (pod(initContainers=[{"name": "i", "command": ["x"], "restartPolicy": "Always"}]), r"\(i\).restartPolicy"),
        ({"metadata": {}, "spec": {"containers": []}}, "write at least one"),
    ],
)
def test_it_refuses_by_name(refused, sentence):
    assert re.search(sentence, "; ".join(podspec.refusals(refused)))


def test_every_ignored_field_has_a_reason_and_is_let_through():
    for kind, fields in podspec.IGNORED.items():
        assert not set(fields) & set(podspec.HONOURED[kind])
        assert all(len(reason) > 10 for reason in fields.values())
    container: dict[str, dict[str, str]] = {field: {} for field in podspec.IGNORED["container"]}
    everything = pod(container, **{field: {} for field in podspec.IGNORED["pod"]})
    assert podspec.refusals(everything) == []


def test_several_problems_are_several_sentences():
    assert len(podspec.refusals(pod({"lifecycle": {}}, hostPID=True, hostIPC=True))) == 3


MADE = {("ConfigMap", "a-job"): ("job.json",)}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            pod({"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "tok", "key": "t"}}}]}),
            r"spec.containers\[0\] \(main\).env\[0\] \(T\) names Secret 'tok', which nobody makes in a run on this "
            "machine; write what it holds, say optional: true, or run this job on a cluster",
        ),
        (
            pod({"env": [{"name": "T", "valueFrom": {"configMapKeyRef": {"name": "a-job", "key": "x"}}}]}),
            r".*env\[0\] \(T\) names key 'x' of ConfigMap 'a-job', which has job.json; name one of these, or say .*",
        ),
        (pod({"envFrom": [{"configMapRef": {"name": "c"}}]}), r".*envFrom\[0\] names ConfigMap 'c', which nobody .*"),
        (pod(volumes=[{"name": "v", "secret": {"secretName": "s"}}]), r"spec.volumes\[0\] \(v\) names Secret 's', .*"),
        (
            pod(volumes=[{"name": "v", "projected": {"sources": [{"downwardAPI": {}}, {"configMap": {"name": "c"}}]}}]),
            r"spec.volumes\[0\] \(v\).projected.sources\[1\] names ConfigMap 'c', .*",
        ),
        (
            pod(volumes=[{"name": "v", "configMap": {"name": "a-job", "items": [{"key": "k", "path": "p"}]}}]),
            r"spec.volumes\[0\] \(v\) names key 'k' of ConfigMap 'a-job', .*",
        ),
        (
            pod(initContainers=[{"name": "i", "command": ["x"], "envFrom": [{"secretRef": {"name": "s"}}]}]),
            r"spec.initContainers\[0\] \(i\).envFrom\[0\] names Secret 's', .*",
        ),
    ],
)
def test_what_nobody_makes_is_named_unless_the_pod_can_do_without(asked, sentence):
    [found] = podspec.unmade(asked, made=MADE)
    assert re.fullmatch(sentence, found), found
    text = re.sub(r'("name"|"secretName"): ("(?:tok|a-job|c|s)")', r'\1: \2, "optional": true', json.dumps(asked))
    asked = json.loads(text)
    assert list(podspec.unmade(asked, made=MADE)) == []


def test_what_the_operator_makes_is_not_missed():
    asked = pod({"env": [{"name": "T", "valueFrom": {"configMapKeyRef": {"name": "a-job", "key": "job.json"}}}]})
    assert list(podspec.unmade(asked, made=MADE)) == []
