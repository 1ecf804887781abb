"""`rljob plan -n NAMESPACE JOB`: what is said before any API server answers; how it answers: tests/cluster."""

import pytest
import yaml

from rlinf_api.errors import UserError
from rljob import cluster, plan, reasons

TEAM = cluster.Cluster(namespace="team")


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path, monkeypatch):
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", f"{path}:/else")
    with pytest.raises(UserError) as refused:
        reasons.history(("math", TEAM))
    assert str(refused.value) == (
        f"no API server to talk to: got no such file, wanted a kubeconfig at {path}; set KUBECONFIG, or name a "
        "--context of it"
    )


def test_a_context_that_it_does_not_have_is_named(tmp_path, monkeypatch):
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "contexts": [], "clusters": [], "users": []}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(UserError, match=r"no API server to talk to: got .*; set KUBECONFIG, or name a --context of it"):
        plan.pin(("math", cluster.Cluster(namespace="team", context="prod")), "math-p2", timeout_s=1)
