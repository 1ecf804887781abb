"""The misbehaving proxy: rules act on the requests they name and on no other, and RBAC holds through it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.cluster.pods import pod
from tools.testcluster.apiproxy import Answer, ApiProxy, CutWatch, Delay, Drop, DropAfter, Mute, Rule
from tools.testcluster.cluster import REPOSITORY, Cluster
from tools.testcluster.errors import CommandFailed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster) as made:
        yield made


def kubectl(proxy: ApiProxy, *words: str) -> str:
    return proxy.cluster.kubectl("--kubeconfig", str(proxy.kubeconfig), *words, check=False)


def test_without_a_rule_everything_passes(proxy: ApiProxy, namespace: str):
    assert "node-1" in kubectl(proxy, "get", "nodes")
    assert proxy.requests > 0


def test_the_official_client_sees_the_answer_that_a_rule_gives(proxy: ApiProxy, namespace: str):
    from kubernetes import client, config

    rule = proxy.add(Rule(path=f"/api/v1/namespaces/{namespace}/pods", do=Answer(status=410), times=1))
    with config.new_client_from_config(str(proxy.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)
        with pytest.raises(client.ApiException) as refused:
            core.list_namespaced_pod(namespace)
        assert refused.value.status == 410
        assert json.loads(refused.value.body or "")["reason"] == "Expired"
        assert core.list_namespaced_pod(namespace).items == []
    assert rule.used == 1


def test_429_says_when_to_come_back(proxy: ApiProxy, namespace: str):
    from kubernetes import client, config

    proxy.add(Rule(method="POST", do=Answer(status=429, retry_after_s=7)))
    with config.new_client_from_config(str(proxy.kubeconfig)) as connection:
        connection.configuration.retries = False
        with pytest.raises(client.ApiException) as refused:
            client.CoreV1Api(connection).create_namespaced_pod(namespace, cast("client.V1Pod", pod("p")))
    assert refused.value.headers is not None
    assert refused.value.headers["Retry-After"] == "7"


def test_a_delayed_request_takes_that_long(proxy: ApiProxy, namespace: str):
    proxy.add(Rule(path=f"/api/v1/namespaces/{namespace}", do=Delay(delay_s=0.7)))
    started = time.monotonic()
    kubectl(proxy, "get", "namespace", namespace)
    assert time.monotonic() - started >= 0.7


def test_a_dropped_request_never_reached_the_api_server_and_a_dropped_answer_did(proxy: ApiProxy, namespace: str):
    from kubernetes import client, config
    from urllib3.exceptions import HTTPError

    with config.new_client_from_config(str(proxy.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)
        for action, name, exists in ((Drop(), "lost", False), (DropAfter(), "done", True)):
            proxy.clear()
            proxy.add(Rule(method="POST", do=action, times=1))
            with pytest.raises(HTTPError):
                core.create_namespaced_pod(namespace, cast("client.V1Pod", pod(name)))
            names = [item.metadata for item in core.list_namespaced_pod(namespace).items]
            assert any(found is not None and found.name == name for found in names) is exists


@pytest.mark.parametrize("gone", [False, True])
def test_a_watch_is_cut_and_other_requests_are_not(proxy: ApiProxy, namespace: str, gone: bool):
    from kubernetes import client, config, watch
    from urllib3.exceptions import HTTPError

    rule = proxy.add(Rule(watch=True, do=CutWatch(after_s=2.0, gone=gone), times=1))
    # There before the watch, which begins with it: the watch lasts two seconds, and a busy API server may take as long.
    proxy.cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods", body=pod("seen"))
    seen: list[str] = []

    def follow(core: client.CoreV1Api) -> None:
        stream = watch.Watch().stream(core.list_namespaced_pod, namespace, resource_version="0", timeout_seconds=40)
        for event in stream:
            seen.append(event["object"].metadata.name)

    with config.new_client_from_config(str(proxy.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)
        started = time.monotonic()
        with pytest.raises(client.ApiException if gone else HTTPError) as cut:
            follow(core)
        took_s = time.monotonic() - started
        assert len(core.list_namespaced_pod(namespace).items) == 1
    assert seen[0] == "seen"
    assert 1.9 < took_s < 20, "it was not the rule that ended it"
    assert rule.used == 1
    if gone:
        assert getattr(cut.value, "status", None) == 410


def test_a_mute_watch_stands_and_says_nothing(proxy: ApiProxy, namespace: str):
    from kubernetes import client, config, watch

    rule = proxy.add(Rule(watch=True, do=Mute(), times=1))
    proxy.cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods", body=pod("unseen"))
    with config.new_client_from_config(str(proxy.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)

        def first_event(timeout_s: int) -> str:
            stream = watch.Watch().stream(
                core.list_namespaced_pod, namespace, resource_version="0", timeout_seconds=timeout_s
            )
            return next((event["object"].metadata.name for event in stream), "")

        started = time.monotonic()
        assert first_event(3) == ""
        assert time.monotonic() - started >= 2.9, "the server ended it, not the proxy"
        assert rule.used == 1
        assert first_event(30) == "unseen"


def test_a_callers_rights_hold_through_the_proxy(proxy: ApiProxy, cluster: Cluster, namespace: str):
    cluster.kubectl("-n", namespace, "create", "serviceaccount", "nobody")
    token = cluster.kubectl("-n", namespace, "create", "token", "nobody").strip()
    words = ["--kubeconfig", "/dev/null", "--server", proxy.server]
    words += ["--certificate-authority", str(cluster.paths.pki / "ca.crt")]
    by_token = [*words, "--token", token]
    assert cluster.kubectl(*by_token, "auth", "can-i", "list", "pods", check=False).strip() == "no"
    pki = cluster.paths.pki
    as_node = [*words, "--client-certificate", str(pki / "node-0.crt"), "--client-key", str(pki / "node-0.key")]
    assert "system:node:node-0" in cluster.kubectl(*as_node, "auth", "whoami")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_misbehaves_until_interrupted_and_leaves_no_kubeconfig(
    cluster: Cluster, namespace: str, number: signal.Signals
):
    words = [sys.executable, "-m", "tools.testcluster", "proxy", "--name", cluster.name]
    words += ["--path", f"/api/v1/namespaces/{namespace}/.*", "--answer", "410"]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            kubeconfig = Path(process.stdout.readline().strip())
            asked = cluster.kubectl("--kubeconfig", str(kubeconfig), "get", "--raw", "/api/v1/nodes/node-0")
            assert json.loads(asked)["metadata"]["name"] == "node-0"
            with pytest.raises(CommandFailed, match=r"410|Expired|rule of the test"):
                cluster.kubectl("--kubeconfig", str(kubeconfig), "get", "--raw", f"/api/v1/namespaces/{namespace}/pods")
            process.send_signal(number)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
    assert kubeconfig.name.startswith("proxy-")
    assert not kubeconfig.exists()
