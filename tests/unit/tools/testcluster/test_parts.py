"""The small pure parts: packets, patches, stages, rules, layouts, records."""

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tools.testcluster import (
    accelerators,
    configs,
    dns,
    gangs,
    images,
    jobset,
    kueue,
    kwok,
    parts,
    prometheus,
    shaping,
)
from tools.testcluster.apiproxy import Answer, Drop, Rule, choose, status_body
from tools.testcluster.commands import run, says
from tools.testcluster.errors import ClusterError, CommandFailed, Overdue
from tools.testcluster.layout import Addresses, Options, Paths
from tools.testcluster.machine import Process, Record
from tools.testcluster.waiting import until

PATHS = Paths(name="x", root=Path("/state/x"))
ADDRESSES = Addresses(net=64)


def test_a_dns_answer_is_read_past_compressed_names():
    question = dns.query("a.example", number=7)[12:]
    header = bytes.fromhex("0007 8180 0001 0001 0000 0000".replace(" ", ""))
    answer = bytes.fromhex("c00c 0001 0001 00000005 0004 0a400001".replace(" ", ""))
    assert dns.addresses(header + question + answer, number=7) == ["10.64.0.1"]
    assert dns.addresses(header + question + answer, number=8) == []


def test_capacity_and_allocatable_are_set_together():
    paths = [step["path"] for step in accelerators.status_patch(("nvidia.com/gpu=4",))]
    assert paths == ["/status/capacity/nvidia.com~1gpu", "/status/allocatable/nvidia.com~1gpu"]


def test_a_crd_of_kueues_has_one_version_so_that_no_webhook_converts_it():
    listed = [{"name": "v1beta1", "storage": False}, {"name": "v1beta2", "storage": True}]
    made = kueue.crd({"kind": "CustomResourceDefinition", "spec": {"group": "kueue.x-k8s.io", "versions": listed}})
    assert made["spec"] == {"group": "kueue.x-k8s.io", "versions": [listed[1]]}
    other = {"spec": {"versions": [{"name": "v1alpha1"}]}}
    assert kueue.crd(other) == other


def test_a_test_may_ask_kueue_for_more_than_its_configuration_has():
    usual = yaml.safe_load(kueue.configuration())
    asked = yaml.safe_load(kueue.configuration({"waitForPodsReady": {"timeout": "40s"}}))
    assert asked == {**usual, "waitForPodsReady": {"timeout": "40s"}}
    assert "waitForPodsReady" not in usual


def hook(group: str, plural: str) -> dict[str, object]:
    service = {"name": "webhook-service", "namespace": "system", "path": f"/{plural}"}
    rule = {"apiGroups": [group], "resources": [plural]}
    return {"name": plural, "clientConfig": {"service": service}, "rules": [rule]}


def test_kueues_webhooks_of_its_own_kinds_are_called_in_the_hub():
    found = {"metadata": {"name": "validating"}, "webhooks": [hook("", "pods"), hook("kueue.x-k8s.io", "workloads")]}
    made = kueue.webhooks(found, ADDRESSES, ca="Y2E=")
    assert made["metadata"] == {"name": "kueue-validating"}
    (kept,) = made["webhooks"]
    assert kept["clientConfig"] == {"url": "https://10.64.0.1:9443/workloads", "caBundle": "Y2E="}


def test_kueue_admits_jobsets_and_has_a_say_in_them_only_beside_jobset():
    found = {"metadata": {"name": "mutating"}, "webhooks": [hook("jobset.x-k8s.io", "jobsets")]}
    assert kueue.webhooks(found, ADDRESSES, ca="Y2E=")["webhooks"] == []
    assert len(kueue.webhooks(found, ADDRESSES, ca="Y2E=", jobset=True)["webhooks"]) == 1
    frameworks = [
        yaml.safe_load(kueue.configuration(jobset=beside))["integrations"]["frameworks"] for beside in (False, True)
    ]
    assert frameworks == [["pod"], ["jobset.x-k8s.io/jobset"]]


def test_jobsets_webhooks_are_called_in_the_hub_and_of_pods_for_its_own_only():
    found = {"metadata": {"name": "mutating"}, "webhooks": [hook("jobset.x-k8s.io", "jobsets"), hook("", "pods")]}
    made = jobset.webhooks(found, ADDRESSES, ca="Y2E=")
    assert made["metadata"] == {"name": "jobset-mutating"}
    of_jobsets, of_pods = made["webhooks"]
    assert of_jobsets["clientConfig"] == {"url": "https://10.64.0.1:9445/jobsets", "caBundle": "Y2E="}
    assert "objectSelector" not in of_jobsets
    (asked,) = of_pods["objectSelector"]["matchExpressions"]
    assert asked == {"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}


def test_jobset_serves_its_webhooks_with_the_certificates_that_were_made_for_it():
    made = yaml.safe_load(jobset.configuration(PATHS))
    assert made["webhook"] == {"port": jobset.WEBHOOK_PORT, "certDir": "/state/x/config/jobset-webhooks"}
    assert made["internalCertManagement"] == {"enable": False}
    words = jobset.words(Path("/programs"), PATHS)
    assert words[0] == "/programs/jobset"
    assert "--config=/state/x/config/jobset.yaml" in words


def test_no_two_programs_of_the_hub_listen_on_one_port():
    ports = [kueue.WEBHOOK_PORT, kueue.HEALTH_PORT, jobset.WEBHOOK_PORT, jobset.HEALTH_PORT]
    assert len(set(ports)) == len(ports)


def test_jobset_is_refused_without_the_queue_that_admits_its_jobs():
    with pytest.raises(ClusterError, match=r"JobSet runs beside Kueue only, .*--with kueue"):
        Options(jobset=True)


def test_kwok_stages_are_stages():
    names = [stage["metadata"]["name"] for stage in yaml.safe_load_all(kwok.stages())]
    assert names == ["node-ready", "pod-run", "pod-delete"]


def test_prometheus_scrapes_running_pods_that_ask():
    asks = {"prometheus.io/scrape": "true", "prometheus.io/port": "9000", "prometheus.io/path": "/m"}
    metadata = {"namespace": "n", "name": "p", "annotations": asks}
    status = {"podIP": "10.64.128.2", "phase": "Running"}
    found = prometheus.targets([{"metadata": metadata, "status": status}, {"metadata": {"name": "q"}}])
    assert found == [
        {"targets": ["10.64.128.2:9000"], "labels": {"namespace": "n", "pod": "p", "__metrics_path__": "/m"}}
    ]


def test_gang_scheduling_reaches_all_who_must_know():
    options = Options(gang_scheduling=True)
    gates = "--feature-gates=GenericWorkload=true,GangScheduling=true"
    assert gates in configs.apiserver(PATHS, ADDRESSES, options)
    assert gates in configs.controller_manager(PATHS, options)
    assert gates in configs.scheduler(PATHS, options)
    assert "--runtime-config=scheduling.k8s.io/v1alpha2=true" in configs.apiserver(PATHS, ADDRESSES, options)
    assert not any("feature-gates" in word for word in configs.scheduler(PATHS, Options()))


def test_a_feature_gate_reaches_every_component():
    options = Options(gang_scheduling=True, feature_gates=("A=true", "B=false"))
    for words in (
        configs.apiserver(PATHS, ADDRESSES, options),
        configs.controller_manager(PATHS, options),
        configs.scheduler(PATHS, options),
    ):
        assert "--feature-gates=GenericWorkload=true,GangScheduling=true,A=true,B=false" in words
    assert "--feature-gates=A=true,B=false" in configs.kube_proxy(PATHS, ADDRESSES, options, index=0)
    made = yaml.safe_load(configs.kubelet_config(PATHS, ADDRESSES, options, index=0))
    assert made["featureGates"] == {"A": True, "B": False}
    assert not any("feature-gates" in word for word in configs.kube_proxy(PATHS, ADDRESSES, Options(), index=0))


def test_kwok_nodes_lengthen_the_grace_period():
    assert "--node-monitor-grace-period=10s" in configs.controller_manager(PATHS, Options())
    assert "--node-monitor-grace-period=40s" in configs.controller_manager(PATHS, Options(kwok_nodes=1))


def test_each_node_has_its_own_cgroup_root_and_subnet():
    made = [yaml.safe_load(configs.kubelet_config(PATHS, ADDRESSES, Options(), index=index)) for index in (0, 1)]
    assert [config["cgroupRoot"] for config in made] == ["/rlinf-tc-x/node-0", "/rlinf-tc-x/node-1"]
    subnets = [json.loads(configs.cni(ADDRESSES, index=index))["plugins"][0]["ipam"]["ranges"] for index in (0, 1)]
    assert subnets[0] != subnets[1]


def test_a_layout_names_and_measures_its_blobs(tmp_path: Path):
    layer = tmp_path / "layer.tar"
    layer.write_bytes(b"layer")
    layout = images.write_layout(tmp_path / "out", "localhost/x:1", layer=layer, command=["/bin/sh"])
    index = json.loads((layout.folder / "index.json").read_text())
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == "localhost/x:1"
    for blob in (layout.folder / "blobs" / "sha256").iterdir():
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    manifest = json.loads((layout.folder / "blobs" / "sha256" / layout.digest.removeprefix("sha256:")).read_text())
    assert manifest["layers"][0]["size"] == 5


def test_a_layout_over_another_has_its_layers_below_its_own(tmp_path: Path):
    made: images.Layout | None = None
    for number, text in enumerate((b"base", b"own")):
        layer = tmp_path / f"layer-{number}.tar"
        layer.write_bytes(text)
        made = images.write_layout(tmp_path / str(number), f"localhost/x:{number}", layer=layer, base=made)
    assert made is not None
    assert [made.blob(layer["digest"]).read_bytes() for layer in made.layers] == [b"base", b"own"]
    (config,) = [json.loads(blob.read_text()) for blob in made.blob("").iterdir() if b'"rootfs"' in blob.read_bytes()]
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in made.layers]


def test_the_first_rule_that_fits_acts_as_often_as_it_says():
    once = Rule(path="/api/.*", method="get", do=Drop(), times=1)
    watches = Rule(watch=True, do=Answer(status=410))
    rules = [once, watches]
    assert choose(rules, method="GET", path="/api/v1/pods", watch=True) == Drop()
    assert choose(rules, method="GET", path="/api/v1/pods", watch=True) == Answer(status=410)
    assert choose(rules, method="GET", path="/api/v1/pods", watch=False) is None
    assert (once.used, watches.used) == (1, 1)


def test_a_refusal_looks_like_the_api_servers():
    body = status_body(Answer(status=429, retry_after_s=3))
    assert (body["reason"], body["code"], body["details"]) == ("TooManyRequests", 429, {"retryAfterSeconds": 3})


def test_a_process_is_known_by_its_start_and_not_by_its_pid_alone():
    child = subprocess.Popen(["sleep", "60"])
    try:
        process = Process.of_pid("sleeper", child.pid)
        assert process.alive
        stranger = Process(name="sleeper", pid=child.pid, started_ticks=process.started_ticks - 1)
        assert not stranger.alive
        assert stranger.send(signal.SIGKILL) is False
        assert process.end() is True
        assert process.end() is False
    finally:
        child.kill()
        child.wait(timeout=10)


@pytest.mark.parametrize("text", ["", "rubbish", "12", "\0\0\0"])
def test_a_torn_record_reads_as_not_running(tmp_path: Path, text: str):
    (tmp_path / "etcd").write_text(text)
    assert Record(tmp_path).read("etcd") is None
    assert Record(tmp_path / "absent").read("etcd") is None


def test_a_record_tells_what_ended_by_itself(tmp_path: Path):
    record = Record(tmp_path)
    record.write(Process.of_pid("me", os.getpid()))
    record.write(Process(name="gone", pid=2**22 - 1, started_ticks=1))
    assert record.ended() == ["gone"]
    record.forget("gone")
    assert record.ended() == []


EVERYTHING = Options(
    nodes=1, dra_devices=1, kwok_nodes=1, network_policies=True, prometheus=True, kueue=True, jobset=True,
    gangs=tuple(gangs.ALL),
)  # fmt: skip


def test_every_daemon_of_the_options_is_missed_when_it_has_died_or_stands_still(tmp_path: Path):
    record = Record(tmp_path)
    everything = parts.expected(EVERYTHING)
    assert set(parts.expected(Options(nodes=1))) < set(everything)
    for name in everything:
        record.write(Process.of_pid(name, os.getpid()))
    assert parts.missing(record, EVERYTHING) == []
    for name in everything:
        record.write(Process(name=name, pid=os.getpid(), started_ticks=1))  # ended by itself
        assert parts.missing(record, EVERYTHING) == [name]
        record.forget(name)  # ended on purpose
        assert parts.missing(record, EVERYTHING) == [name]
        record.write(Process.of_pid(name, os.getpid()))
    child = subprocess.Popen(["sleep", "60"])
    try:
        record.write(process := Process.of_pid("kube-scheduler", child.pid))
        process.send(signal.SIGSTOP)
        until(lambda: parts.missing(record, EVERYTHING) == ["kube-scheduler"], what="it to stand still", timeout_s=10)
    finally:
        child.kill()
        child.wait(timeout=10)


def test_a_pair_that_is_slowed_again_loses_what_was_said_of_it_and_no_other_pair_does():
    first = shaping.commands("", ["10.64.0.11/32"], number=1, rate_kbit=500, delay_ms=20)
    assert first[0] == "qdisc add dev eth0 root handle 1: htb default 10"
    assert "qdisc add dev eth0 parent 1:101 netem delay 20ms limit 10000" in first
    there = "class htb 1:101 root prio 0 rate 500Kbit\nclass htb 1:10 root prio 0 rate 10Gbit\n"
    again = shaping.commands(there, ["10.64.0.11/32"], number=1, rate_kbit=900, delay_ms=0)
    assert [line.split()[:2] for line in again] == [
        *(["filter", "del"], ["class", "del"], ["class", "add"], ["filter", "add"]),
    ]
    other = shaping.commands(there, ["10.64.0.12/32", "10.64.130.0/24"], number=2, rate_kbit=900, delay_ms=0)
    assert [line.split()[:2] for line in other] == [["class", "add"], ["filter", "add"], ["filter", "add"]]
    assert all("1:102" in line for line in other)


def test_a_wait_that_ends_names_what_it_waited_for():
    with pytest.raises(Overdue, match=r"waited 0 s for a miracle"):
        until(lambda: None, what="a miracle", timeout_s=0)


def test_a_command_that_fails_or_hangs_or_is_absent_is_quoted():
    with pytest.raises(CommandFailed, match="ended with 3: no luck"):
        run(["sh", "-c", "echo no luck; exit 3"])
    with pytest.raises(CommandFailed, match=r"not done after 0\.1 s"):
        run(["sleep", "60"], timeout_s=0.1)
    with pytest.raises(CommandFailed, match="no-such-program is not there"):
        run(["no-such-program"])


@pytest.mark.parametrize("words", [["sh", "-c", "exit 3"], ["sleep", "60"], ["no-such-program"]])
def test_a_probe_that_fails_or_is_slow_once_ends_no_wait(words: list[str]):
    assert says(words, timeout_s=0.1) == ""
    assert says(["echo", "ready"], timeout_s=20) == "ready\n"
