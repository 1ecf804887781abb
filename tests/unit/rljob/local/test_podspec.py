"""Local mode refuses by name what it cannot carry out, and has a reason for what it ignores."""

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
