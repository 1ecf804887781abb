"""Local mode refuses by name what it cannot carry out, and has a reason for what it ignores."""

import json
import re

import pytest

from rljob.local import podspec, podvalues


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
        (pod(initContainers=[{"name": "i", "command": ["x"], "restartPolicy": "Always"}]), "under spec.containers"),
        ({"metadata": {}, "spec": {"containers": []}}, "write at least one"),
    ],
)
def test_it_refuses_by_name(refused, sentence):
    assert re.search(sentence, "; ".join(podspec.refusals(refused)))


@pytest.mark.parametrize(
    "container",
    [
        {"ports": [{"containerPort": 1, "protocol": "SCTP"}]},
        {"terminationMessagePath": ""},
        {"terminationMessagePath": None, "terminationMessagePolicy": None},
        {"env": [{"name": "A", "value": None}]},
        {"readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": None}},
    ],
)
def test_what_an_api_server_takes_for_left_out_is_no_problem(container):
    assert list(podspec.refusals(pod(container))) == []


def test_every_ignored_field_has_a_reason_and_is_let_through():
    for kind, fields in podspec.IGNORED.items():
        assert not set(fields) & set(podvalues.FIELDS[kind])
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


def one(kind, **fields):
    """A pod with one thing of this kind in it, whose fields these are."""
    volume, item = {"name": "v", "emptyDir": {}}, {"key": "k", "path": "p"}
    made = {
        "pod": lambda: pod(**fields),
        "container": lambda: pod(fields),
        "port": lambda: pod({"ports": [fields]}),
        "env": lambda: pod({"env": [{"name": "A"} | fields]}),
        "envFrom": lambda: pod({"envFrom": [{"secretRef": {"name": "s"}} | fields]}),
        "mount": lambda: pod({"volumeMounts": [{"name": "v", "mountPath": "/v"} | fields]}, volumes=[volume]),
        "volume": lambda: pod(volumes=[volume | fields]),
        "claim": lambda: pod(volumes=[{"name": "v", "persistentVolumeClaim": fields}]),
        "secret": lambda: pod(volumes=[{"name": "v", "secret": {"secretName": "s"} | fields}]),
        "item": lambda: pod(volumes=[{"name": "v", "configMap": {"name": "c", "items": [item | fields]}}]),
        "probe": lambda: pod({"readinessProbe": {"exec": {"command": ["x"]}} | fields}),
        "get": lambda: pod({"ports": [{"name": "web", "containerPort": 80}], "readinessProbe": {"httpGet": fields}}),
    }
    return made[kind]()


SOME = {"name": "s", "key": "k"}
WORD = "wanted at most 63 of a-z 0-9 '-', a letter or digit at both ends; rename it"


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (
            "pod",
            {"terminationGracePeriodSeconds": "abc"},
            "Seconds: got 'abc', wanted a whole number from 0 on; write one",
        ),
        (
            "pod",
            {"terminationGracePeriodSeconds": True},
            "Seconds: got true, wanted a whole number from 0 on; write one",
        ),
        (
            "pod",
            {"restartPolicy": "never"},
            "spec.restartPolicy: got 'never', wanted Never; write",
        ),
        ("container", {"name": "../x"}, f"spec.containers[0] (../x).name: got '../x', {WORD}"),
        ("container", {"name": "a\n"}, f".name: got 'a\\n', {WORD}"),
        (
            "container",
            {"command": "sleep 1"},
            "(main).command: got text, wanted a list of texts without NUL characters;",
        ),
        (
            "container",
            {"args": ["a", 5]},
            "(main).args: got a list, wanted a list of texts without NUL characters; write",
        ),
        ("container", {"workingDir": 5}, "(main).workingDir: got 5, wanted text; write a path"),
        (
            "container",
            {"terminationMessagePath": "/v/../x"},
            "Path: got '/v/../x', wanted an absolute path without '..';",
        ),
        ("port", {"containerPort": "abc"}, "ports[0].containerPort: got 'abc', wanted a whole number from 1 to 65535;"),
        ("port", {"containerPort": 70000}, "ports[0].containerPort: got 70000, wanted a whole number from 1 to 65535;"),
        (
            "port",
            {"name": "a"},
            "ports[0].containerPort: got nothing (null), wanted a whole number from 1 to 65535; write",
        ),
        (
            "port",
            {"containerPort": 1, "protocol": "QUIC"},
            "ports[0].protocol: got 'QUIC', wanted TCP or UDP or SCTP; write that",
        ),
        ("env", {"name": "A=B"}, "(A=B).name: got 'A=B', wanted printable ASCII characters without '='; rename it"),
        (
            "env",
            {"value": "to\0ken"},
            "env[0] (A).value: got text, wanted text without a NUL character; write it in quotes",
        ),
        (
            "env",
            {"value": 5},
            "env[0] (A).value: got a number, wanted text without a NUL character; write it in quotes",
        ),
        (
            "env",
            {"valueFrom": {}},
            "env[0] (A).valueFrom names no source; write one of fieldRef, secretKeyRef, configMapK",
        ),
        (
            "env",
            {"valueFrom": {"secretKeyRef": None, "configMapKeyRef": "c"}},
            "env[0] (A).valueFrom names no source; write one of fieldRef, secretKeyRef, configMapK",
        ),
        (
            "env",
            {"valueFrom": {"secretKeyRef": SOME, "configMapKeyRef": SOME}},
            "env[0] (A).valueFrom names 2 sources, secretKeyRef and configMapKeyRef; write one of them",
        ),
        (
            "env",
            {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}, "secretKeyRef": SOME}},
            "env[0] (A).valueFrom names 2 sources, fieldRef and secretKeyRef; write one of them",
        ),
        (
            "envFrom",
            {"secretRef": None},
            "envFrom[0] names no source; write one of secretRef, configMapRef",
        ),
        (
            "envFrom",
            {"configMapRef": {"name": "c"}},
            "envFrom[0] names 2 sources, secretRef and configMapRef; write one of them",
        ),
        (
            "envFrom",
            {"prefix": "A="},
            "envFrom[0].prefix: got 'A=', wanted printable ASCII characters without '='; rename",
        ),
        (
            "mount",
            {"mountPath": "v"},
            "volumeMounts[0].mountPath: got 'v', wanted an absolute path without '..'; write one",
        ),
        (
            "mount",
            {"subPath": "../../x"},
            "volumeMounts[0].subPath: got '../../x', wanted a relative path without '..';",
        ),
        ("volume", {"name": "../../x"}, f"spec.volumes[0] (../../x).name: got '../../x', {WORD}"),
        ("claim", {"claimName": "../../x"}, "Claim.claimName: got '../../x', wanted at most 253 of a-z 0-9 '-' '.', a"),
        ("claim", {}, "(v).persistentVolumeClaim.claimName: got nothing (null), wanted at most 253 of a-z 0-9"),
        ("secret", {"defaultMode": "0440"}, "(v).secret.defaultMode: got '0440', wanted a whole number from 0 to 511;"),
        (
            "item",
            {"path": "../../x"},
            "(v).configMap.items[0].path: got '../../x', wanted a relative path without '..'",
        ),
        (
            "item",
            {"mode": 0o1777},
            "(v).configMap.items[0].mode: got 1023, wanted a whole number from 0 to 511; write one",
        ),
        (
            "probe",
            {"periodSeconds": "abc"},
            "readinessProbe.periodSeconds: got 'abc', wanted a number of seconds from 0.01 on;",
        ),
        (
            "probe",
            {"exec": {"command": "x"}},
            "readinessProbe.exec.command: got text, wanted a list of texts without NUL",
        ),
        ("probe", {"exec": {}}, "readinessProbe.exec.command is empty; write the command"),
        (
            "get",
            {"port": "wep"},
            "httpGet.port: got 'wep', wanted a whole number from 1 to 65535, or one of web; write one",
        ),
        (
            "get",
            {"port": "web", "scheme": "https"},
            "httpGet.scheme: got 'https', wanted HTTP or HTTPS; write that, or",
        ),
    ],
)
def test_a_value_that_cannot_be_carried_out_is_named(kind, fields, sentence):
    told = podspec.refusals(one(kind, **fields))
    assert any(sentence in line for line in told), told
    assert "to\0ken" not in "".join(told), "a value of a variable is for its process"


def test_a_probe_that_probes_nothing_is_named():
    asked = pod({"readinessProbe": {"periodSeconds": 1}})
    assert podspec.refusals(asked) == [
        "spec.containers[0] (main).readinessProbe names nothing to probe; write one of exec, httpGet, tcpSocket"
    ]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("container", {"args": None, "workingDir": None, "env": None, "ports": None}),
        ("env", {"name": "a.b-c d", "value": ""}),
        ("env", {"valueFrom": {"fieldRef": None, "secretKeyRef": SOME, "configMapKeyRef": None}}),
        ("envFrom", {"configMapRef": None}),
        ("mount", {"subPath": ""}),
        ("mount", {"mountPath": "/a/..b/", "subPath": "a/..b"}),
        ("claim", {"claimName": "a.b-c", "readOnly": True}),
        ("get", {"port": "web", "path": "/x", "httpHeaders": [{"name": "A", "value": "b"}]}),
    ],
)
def test_what_an_api_server_takes_and_local_mode_can_is_let_through(kind, fields):
    assert podspec.refusals(one(kind, **fields)) == []
