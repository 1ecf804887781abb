"""$(VAR) expansion and translated paths."""

import sys

import pytest

from rlinf_api import names
from rljob.local import environment
from rljob.local.environment import Paths, PodFacts

PATHS = Paths(mounts=(("/run/rlinf", "/tmp/rlj/run"), ("/run", "/tmp/rlj/all"), ("/tmp", "/tmp/rlj/tmp")))
FACTS = PodFacts(
    pod={"metadata": {"name": "a", "namespace": "n", "uid": "u", "annotations": {"x": "1"}}, "spec": {}},
    pod_ip="127.1.0.9",
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
        ("file://localhost/run/rlinf/ck", "file://localhost/tmp/rlj/run/ck"),
        ("file:///tmp/x", "file:///tmp/rlj/tmp/x"),
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
    env = environment.container_env(container, facts=FACTS, sources={}, paths=PATHS, checkpoint_uri="file:///w")
    assert env == {"RUN": "/tmp/rlj/run", "SOCK": "/tmp/rlj/run/a.sock"}
    assert environment.argv(container, env=env, paths=PATHS) == [
        sys.executable,
        "--dir=/tmp/rlj/run/x",
        "/tmp/rlj/run/a.sock",
    ]


OPERATORS = tuple((mount, f"/scratch{mount}") for mount in ("/tmp", "/dev/shm", "/run/rlinf", "/var/cache/rlinf"))
CLAIM = ("/data", "/w/lr#1 $(RUN)$$/claims/c")


def place_of_checkpoints(uri, *, own="file:///w/checkpoints"):
    written = [{"name": "RUN", "value": "r"}, {"name": names.ENV_CHECKPOINT_URI, "value": uri}]
    paths = Paths(mounts=(*OPERATORS, CLAIM))
    env = environment.container_env({"env": written}, facts=FACTS, sources={}, paths=paths, checkpoint_uri=own)
    return env[names.ENV_CHECKPOINT_URI]


@pytest.mark.parametrize("scheme", ["", "file://", "file://localhost"])
@pytest.mark.parametrize("mount", ["/tmp", "/dev/shm", "/run/rlinf", "/var/cache/rlinf"])
def test_checkpoints_are_not_kept_where_they_go_with_the_pod(scheme, mount):
    assert place_of_checkpoints(f"{scheme}{mount}/ck") == f"{scheme}{mount}/ck"


def test_checkpoints_on_a_claim_go_to_its_folder_and_a_folder_is_what_it_says():
    assert place_of_checkpoints("/data/$(RUN)") == "/w/lr#1 $(RUN)$$/claims/c/r"
    assert place_of_checkpoints("file:///data/$(RUN)") == "file:///w/lr%231%20%24%28RUN%29%24%24/claims/c/r"


@pytest.mark.parametrize(
    "own", ["file:///data/runs/1/checkpoints", "file:///dev/shm/1/checkpoints", "file:///w/$(RUN)"]
)
def test_the_runs_own_place_for_checkpoints_is_the_machines_whatever_a_pod_mounts(own):
    assert place_of_checkpoints(own, own=own) == own


def test_a_dollar_in_a_folders_name_is_no_reference():
    container = {"command": ["x", "/data/$(RUN)"], "args": ["$(RUN)"]}
    paths = Paths(mounts=(CLAIM,))
    assert environment.argv(container, env={"RUN": "r"}, paths=paths) == ["x", "/w/lr#1 $(RUN)$$/claims/c/r", "r"]
    assert environment.filled("/data", paths=paths, env={"RUN": "r"}) == CLAIM[1]


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


def test_a_source_that_is_null_is_none():
    """As an API server drops it."""
    named = {"fieldRef": None, "secretKeyRef": {"name": "s", "key": "k"}, "configMapKeyRef": None}
    container = {"env": [{"name": "A", "valueFrom": named}]}
    sources = {("Secret", "s"): {"k": b"v"}}
    env = environment.container_env(container, facts=FACTS, sources=sources, paths=PATHS, checkpoint_uri="file:///w")
    assert env == {"A": "v"}


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
