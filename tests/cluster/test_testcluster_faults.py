"""Every fault does what it says, as Kubernetes sees it, and can be mended."""

import math
import subprocess
import time
from functools import partial
from typing import Any

import pytest

from tests.cluster.pods import WEB, create, phase, pod, wait_ready
from tools.testcluster import cgroups, parts, shaping
from tools.testcluster.__main__ import main
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import ClusterError, MissingRequirement
from tools.testcluster.faults import Faults
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

NODE = "node-1"
HEARTBEAT = "while true; do date +%s >/tmp/beat; sleep 0.2; done"


def ready(cluster: Cluster, node: str) -> str:
    conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return str(next(condition["status"] for condition in conditions if condition["type"] == "Ready"))


def wait_unknown(cluster: Cluster, node: str) -> float:
    started = time.monotonic()
    until(lambda: ready(cluster, node) == "Unknown", what=f"{node} to be Unknown", timeout_s=60, every_s=0.2)
    return time.monotonic() - started


def alive(cluster: Cluster, node: str) -> list[int]:
    """Processes of a node's pods, as the machine sees them."""
    return sorted(cgroups.pids(f"{cluster.paths.cgroup}/{node}"))


def test_a_node_out_of_contact_keeps_its_containers_running(cluster: Cluster, faults: Faults, namespace: str):
    create(cluster, namespace, pod("lives-on", HEARTBEAT, node=NODE))
    wait_ready(cluster, namespace, "lives-on")
    before = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/lives-on")["metadata"]["uid"]
    faults.lose_contact(NODE)
    took_s = wait_unknown(cluster, NODE)
    print(f"Unknown after {took_s:.1f} s")
    assert alive(cluster, NODE), "the containers died with the kubelet"
    faults.revive(NODE)
    cluster.wait_nodes_ready()
    wait_ready(cluster, namespace, "lives-on")  # so the kubelet has reported it again, as it found it
    after = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/lives-on")
    assert after["metadata"]["uid"] == before
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_crashed_node_takes_its_pods_with_it_and_comes_back(cluster: Cluster, faults: Faults, namespace: str):
    create(
        cluster,
        namespace,
        pod("again", HEARTBEAT, node=NODE, restartPolicy="Always"),
        pod("once", HEARTBEAT, node=NODE, restartPolicy="Never"),
    )
    wait_ready(cluster, namespace, "again", "once")
    faults.crash(NODE)
    assert alive(cluster, NODE) == []
    wait_unknown(cluster, NODE)
    faults.revive(NODE)
    cluster.wait_nodes_ready()

    def status(name: str) -> dict[str, Any]:
        return dict(cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["status"])

    until(
        lambda: status("again")["containerStatuses"][0]["restartCount"] == 1,
        what="the pod to be started again",
        timeout_s=60,
    )
    until(lambda: status("once")["phase"] == "Failed", what="the other pod to fail", timeout_s=60)
    ended = status("once")["containerStatuses"][0]["state"]["terminated"]
    # Loss of infrastructure, not an error of the program: this is how Kubernetes tells it.
    assert (ended["exitCode"], ended["reason"]) == (255, "Unknown")


def fetch(cluster: Cluster, namespace: str, source: str, ip: str) -> bool:
    words = ["exec", source, "--", "timeout", "1", "wget", "-qO-", f"http://{ip}:8080"]
    return "I am" in cluster.kubectl("-n", namespace, *words, check=False)


def test_a_cut_between_nodes_stops_their_pods_and_heals(cluster: Cluster, faults: Faults, namespace: str):
    create(cluster, namespace, pod("a", WEB, node="node-0"), pod("b", WEB, node="node-1"))
    wait_ready(cluster, namespace, "a", "b")
    ip = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/b")["status"]["podIP"]
    until(lambda: fetch(cluster, namespace, "a", ip), what="b to answer a", timeout_s=30)
    faults.cut("node-0", "node-1")
    assert not fetch(cluster, namespace, "a", ip)
    until(cluster.well, what="both nodes to reach the API server as before", timeout_s=20)
    faults.heal_network()
    until(lambda: fetch(cluster, namespace, "a", ip), what="b to answer a again", timeout_s=30)


def test_a_node_cut_from_the_hub_is_lost_with_its_kubelet_alive(cluster: Cluster, faults: Faults):
    faults.cut(NODE, "hub")
    wait_unknown(cluster, NODE)
    assert cluster.node(NODE).record.read(f"{NODE}-kubelet") is not None
    faults.heal_network()
    cluster.wait_nodes_ready()


def test_a_slow_link_carries_no_more_than_its_rate(cluster: Cluster, faults: Faults, namespace: str):
    big = "dd if=/dev/zero of=/tmp/big bs=1k count=512 2>/dev/null; exec httpd -f -p 8080 -h /tmp"
    create(cluster, namespace, pod("a", node="node-0"), pod("b", big, node="node-1"))
    wait_ready(cluster, namespace, "a", "b")
    ip = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/b")["status"]["podIP"]

    # By the machine's clock inside the pod: kubectl itself takes seconds on a busy one.
    script = (
        f"read a _ </proc/uptime; wget -qO /dev/null http://{ip}:8080/big || exit; read b _ </proc/uptime; echo $a $b"
    )
    inside = partial(cluster.kubectl, "-n", namespace, "exec", "a", "--", "sh", "-c", script, check=False)

    def fetch_s() -> float:
        """Infinite where nobody answers, as at first, when the server does not listen yet."""
        read = [float(word) for word in inside().split()]
        return read[1] - read[0] if read else math.inf

    until(lambda: fetch_s() < 1.5, what="a quick download", timeout_s=30)
    faults.slow("node-0", "node-1", rate_kbit=200)
    faults.slow("node-0", "node-1", rate_kbit=2000)  # said anew: 200 would take 21 s
    slow_s = fetch_s()
    faults.heal_network()
    assert 1.8 < slow_s < 15, "512 KiB at 2 Mbit/s take 2.1 s"
    until(lambda: fetch_s() < 1.5, what="a quick download again", timeout_s=30)


def rates(cluster: Cluster, node: str) -> set[str]:
    said = cluster.node(node).run(["tc", "class", "show", "dev", "eth0"])
    return {line.split()[2] + " " + line.partition(" rate ")[2].split()[0] for line in said.splitlines()}


def test_each_pair_of_nodes_has_a_rate_of_its_own(cluster: Cluster, faults: Faults):
    faults.slow("node-0", "node-1", rate_kbit=2000)
    third = partial(shaping.limit, cluster.node("node-0"), ["192.0.2.0/24"], number=2, delay_ms=0)
    third(rate_kbit=700)
    assert rates(cluster, "node-0") == {"1:10 10Gbit", "1:101 2Mbit", "1:102 700Kbit"}
    faults.slow("node-1", "node-0", rate_kbit=500)
    third(rate_kbit=800)
    assert rates(cluster, "node-0") == {"1:10 10Gbit", "1:101 500Kbit", "1:102 800Kbit"}
    faults.heal_network()
    assert rates(cluster, "node-0") == set()


def kernel_has_netem() -> bool:
    """Asked of a network namespace that ends with the question."""
    words = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0


def test_a_delay_is_one_or_is_refused_in_one_sentence(cluster: Cluster, faults: Faults):
    if not kernel_has_netem():
        with pytest.raises(MissingRequirement, match=r"a delay of 20 ms needs .* \(CONFIG_NET_SCH_NETEM\)"):
            faults.slow("node-0", "node-1", delay_ms=20)
        return

    def round_trip_ms() -> float:
        """The least of five."""
        said = cluster.node("node-0").run(["busybox", "ping", "-c", "5", "-i", "0.2", cluster.addresses.node(1)])
        return float(said.rpartition(" = ")[2].split("/")[0])  # round-trip min/avg/max = 0.1/0.2/0.3 ms

    assert round_trip_ms() < 5
    faults.slow("node-0", "node-1", rate_kbit=10_000, delay_ms=20)
    assert 40 <= round_trip_ms() < 100
    faults.slow("node-0", "node-1", rate_kbit=10_000)
    assert round_trip_ms() < 5


@pytest.mark.parametrize("part", ["apiserver", "etcd"])
def test_a_paused_control_plane_does_not_answer_until_resumed(cluster: Cluster, faults: Faults, part: str):
    faults.pause(part)
    # A single object is read from etcd; a list may come from the API server's cache.
    with pytest.raises(ApiError):
        cluster.api.request("GET", "/api/v1/namespaces/default", timeout_s=1.0)
    faults.resume(part)
    cluster.wait_api_ready()
    assert cluster.api.get("/api/v1/namespaces/default")["metadata"]["name"] == "default"


@pytest.mark.parametrize("part", ["apiserver", "etcd"])
def test_a_restarted_part_keeps_what_the_cluster_knew(cluster: Cluster, faults: Faults, namespace: str, part: str):
    create(cluster, namespace, pod("stays"))
    wait_ready(cluster, namespace, "stays")
    faults.restart(part)
    assert phase(cluster, namespace, "stays") == "Running"


def test_a_part_that_does_not_exist_is_named(faults: Faults):
    with pytest.raises(ClusterError, match="wanted one of etcd, apiserver"):
        faults.pause("kubelet")


def test_a_full_disk_is_disk_pressure_on_that_node_only(cluster: Cluster, faults: Faults):
    def pressure(node: str) -> str:
        conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
        return str(next(condition["status"] for condition in conditions if condition["type"] == "DiskPressure"))

    faults.fill_disk(NODE)
    until(lambda: pressure(NODE) == "True", what=f"DiskPressure of {NODE}", timeout_s=60, every_s=0.2)
    assert pressure("node-0") == "False"
    faults.free_disk(NODE)
    until(lambda: pressure(NODE) == "False", what=f"{NODE} to be well again", timeout_s=60, every_s=0.2)


def kill(cluster: Cluster, *names: str) -> None:
    """By their pids, as somebody else would: the record still has them."""
    for name in names:
        process = cluster.hub.record.read(name)
        assert process is not None, f"{name} does not run"
        process.end()


def test_all_is_mended_that_was_broken_without_the_verbs(cluster: Cluster, faults: Faults, namespace: str):
    killed = [*parts.CONTROL_PLANE, "node-0-kube-proxy", f"{NODE}-containerd", f"{NODE}-kubelet"]
    kill(cluster, *killed)
    assert set(cluster.missing()) == set(killed)
    faults.undo_all()
    assert cluster.missing() == []
    create(cluster, namespace, pod("p", node=NODE))
    wait_ready(cluster, namespace, "p")


def test_commands_break_a_cluster_and_mend_it(cluster: Cluster, faults: Faults, capsys: pytest.CaptureFixture[str]):
    def command(*words: str) -> str:
        assert main([*words, "--name", cluster.name]) == 0
        return capsys.readouterr().out

    assert command("up", "--resource", "nvidia.com/gpu=4") == f"{cluster.kubeconfig}\n", "it is up already"
    assert main(["list"]) == 0
    assert cluster.name in capsys.readouterr().out.splitlines()
    lines = command("env")
    script = f"{lines}kubectl get nodes --no-headers"
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["node-0", "Ready"], ["node-1", "Ready"]]
    command("fault", "crash", NODE)
    assert alive(cluster, NODE) == []
    command("fault", "stop", "scheduler")
    assert {"kube-scheduler", NODE} <= set(cluster.missing())
    command("fault", "undo-all")
    assert cluster.missing() == []
