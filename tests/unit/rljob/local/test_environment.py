"""$(VAR) expansion and translated paths."""

import sys

import pytest

from rljob.local import environment
from rljob.local.environment import Paths, PodFacts, Sources

PATHS = Paths(mounts=(("/run/rlinf", "/tmp/rlj/run"), ("/run", "/tmp/rlj/all"), ("/tmp", "/tmp/rlj/tmp")))
FACTS = PodFacts(
    pod={"metadata": {"name": "a", "namespace": "n", "uid": "u", "annotations": {"x": "1"}}, "spec": {}},
    pod_ip="127.1.0.9",
    host_ip="127.0.0.1",
    node_name="local",
)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(A)", "x1y1"),
        ("$(NO)", "$(NO)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A $ $(A", "$A $ $(A"),
        ("a$$", "a$"),
    ],
)
def test_references_expand_as_kubernetes_does(text, expanded):
    assert environment.expand(text, {"A": "1"}) == expanded


@pytest.mark.parametrize(
    ("text", "translated"),
    [
        ("/run/rlinf", "/tmp/rlj/run"),
        ("/run/rlinf/a.sock", "/tmp/rlj/run/a.sock"),
        ("/run/rlinfx", "/tmp/rlj/all/rlinfx"),
        ("/running", "/running"),
        ("file:///run/rlinf/ck", "file:///tmp/rlj/run/ck"),
        ("file:///tmp/runs/1/checkpoints", "file:///tmp/runs/1/checkpoints"),
        ("file://elsewhere", "file://elsewhere"),
        ("--x=/run/rlinf", "--x=/run/rlinf"),
        ("", ""),
    ],
)
def test_the_longest_mount_path_that_ends_at_a_slash_wins(text, translated):
    assert PATHS.translate(text) == translated


def test_a_translated_value_is_not_translated_again_through_a_reference():
    container = {
        "command": ["python", "--dir=$(RUN)/x", "$(SOCK)"],
        "env": [{"name": "RUN", "value": "/run/rlinf"}, {"name": "SOCK", "value": "$(RUN)/a.sock"}],
    }
    env = environment.container_env(container, facts=FACTS, sources=Sources(found={}), paths=PATHS)
    assert env == {"RUN": "/tmp/rlj/run", "SOCK": "/tmp/rlj/run/a.sock"}
    assert environment.argv(container, env=env, paths=PATHS) == [
        sys.executable,
        "--dir=/tmp/rlj/run/x",
        "/tmp/rlj/run/a.sock",
    ]


def test_fields_of_a_pod():
    assert environment.field_value("metadata.annotations['x']", FACTS) == "1"
    assert environment.field_value("metadata.labels['none']", FACTS) == ""
    assert environment.field_value("metadata.annotations", FACTS) == 'x="1"'
    assert environment.field_value("status.podIP", FACTS) == "127.1.0.9"
    assert environment.field_value("status.startTime", FACTS) is None


def test_of_the_shell_a_pod_sees_only_what_a_machine_has(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    env = environment.inherited()
    assert "SECRET_TOKEN" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "0"


def test_sources_are_found_wherever_a_pod_names_them():
    pod = {
        "spec": {
            "containers": [
                {
                    "envFrom": [{"configMapRef": {"name": "c1"}}],
                    "env": [{"valueFrom": {"secretKeyRef": {"name": "s1"}}}],
                }
            ],
            "volumes": [
                {"secret": {"secretName": "s2"}},
                {"projected": {"sources": [{"secret": {"name": "s3"}}, {"configMap": {"name": "c2"}}]}},
            ],
        }
    }
    assert environment.sources_named(pod) == {
        ("Secret", "s1"),
        ("Secret", "s2"),
        ("Secret", "s3"),
        ("ConfigMap", "c1"),
        ("ConfigMap", "c2"),
    }
