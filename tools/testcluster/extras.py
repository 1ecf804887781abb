"""What options ask for beyond a plain cluster: fake devices, fake nodes, enforced policies, metrics.

`Cluster` starts it all when the plain cluster runs; `Faults` starts again what has died. parts.py has the names.
"""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tools.testcluster import accelerators, gangs, jobset, kueue, kwok, parts, prometheus
from tools.testcluster.layout import PYTHON_ENVIRONMENT

if TYPE_CHECKING:
    from tools.testcluster.cluster import Cluster

TIMEOUT_S = 60.0


def start(cluster: Cluster, report: Callable[[str], None]) -> None:
    """Everything, and waits until it works."""
    options, addresses = cluster.options, cluster.addresses
    for index in range(options.nodes):
        start_on_node(cluster, index)
    if options.dra_devices:
        path, manifest = accelerators.device_class()
        cluster.api.apply(path, manifest)
        for node in cluster.nodes:
            cluster.wait(
                lambda node=node: accelerators.published_devices(cluster.api, node) == options.dra_devices,  # type: ignore[misc]
                what=f"the DRA driver of {node.name} to publish its devices",
                timeout_s=TIMEOUT_S,
            )
    start_in_hub(cluster, report)
    if options.kwok_nodes:
        kwok.make_nodes(cluster.api, options.kwok_nodes, resources=options.extended_resources)
        cluster.wait(
            lambda: kwok.ready_nodes(cluster.api) == options.kwok_nodes,
            what=f"{options.kwok_nodes} kwok nodes to be Ready",
            timeout_s=TIMEOUT_S,
        )
    if options.kueue:
        _wait_for_webhooks(cluster, "Kueue", kueue.WEBHOOK_PORT)
        kueue.install_webhooks(cluster.paths, addresses, cluster.api, jobset=options.jobset)
    if options.jobset:
        _wait_for_webhooks(cluster, "JobSet", jobset.WEBHOOK_PORT)
        jobset.install_webhooks(cluster.paths, addresses, cluster.api)
    if options.prometheus:
        cluster.wait(
            lambda: _answers(f"http://{addresses.hub}:{prometheus.PORT}/-/ready"),
            what="Prometheus to be ready",
            timeout_s=TIMEOUT_S,
        )


def start_in_hub(cluster: Cluster, report: Callable[[str], None]) -> None:
    """What does not run there yet."""
    for name in parts.hub_extras(cluster.options):
        if cluster.hub.record.read(name) is None:
            _start_in_hub(cluster, name, report)


def _start_in_hub(cluster: Cluster, name: str, report: Callable[[str], None]) -> None:
    paths, addresses = cluster.paths, cluster.addresses
    if name == "kwok":
        kwok.write_config(paths.config)
        cluster.hub.start(name, kwok.words(paths, addresses))
    elif name == "kueue":
        folder = kueue.prepare(paths, addresses, cluster.api, wait=cluster.wait, jobset=cluster.options.jobset)
        cluster.hub.start(name, kueue.words(folder, paths))
    elif name == "jobset":
        cluster.hub.start(name, jobset.words(jobset.prepare(paths, addresses, cluster.api, wait=cluster.wait), paths))
    elif (gang := gangs.of_program(name)) is not None:
        cluster.hub.start(name, gangs.prepare(gang, paths, addresses, cluster.api, wait=cluster.wait)[name])
    elif name == "prometheus-targets":
        words = [sys.executable, "-m", "tools.testcluster.prometheus", "--server", addresses.server]
        words += ["--pki", str(paths.pki), "--out", str(prometheus.targets_file(paths.config))]
        cluster.hub.start(name, words, env=PYTHON_ENVIRONMENT)
    else:
        folder = prometheus.programs(report=report)
        text = prometheus.config(paths, addresses, nodes=cluster.options.nodes)
        (paths.config / "prometheus.yaml").write_text(text, encoding="utf-8")
        cluster.hub.start(name, prometheus.words(folder, paths, addresses))


def restart_kueue(cluster: Cluster, more: Mapping[str, Any] | None = None) -> None:
    """With these fields over those of its Configuration, until it is started again: what it knows, it reads from the
    API server.

        restart_kueue(cluster, {"waitForPodsReady": {"timeout": "40s"}})
    """
    _restart_kueue(cluster, more, with_jobset=cluster.options.jobset)


def _restart_kueue(cluster: Cluster, more: Mapping[str, Any] | None, *, with_jobset: bool) -> None:
    cluster.hub.stop("kueue")
    folder = kueue.prepare(cluster.paths, cluster.addresses, cluster.api, wait=cluster.wait)
    kueue.configure(cluster.paths, more, jobset=with_jobset)
    cluster.hub.start("kueue", kueue.words(folder, cluster.paths))
    _wait_for_webhooks(cluster, "Kueue", kueue.WEBHOOK_PORT)


def add_kueue(cluster: Cluster, *, with_jobset: bool = False) -> None:
    """To a cluster that was made without."""
    paths, addresses, api = cluster.paths, cluster.addresses, cluster.api
    if with_jobset:
        _start_in_hub(cluster, "jobset", lambda _: None)
        _wait_for_webhooks(cluster, "JobSet", jobset.WEBHOOK_PORT)
    _restart_kueue(cluster, None, with_jobset=with_jobset)
    kueue.install_webhooks(paths, addresses, api, jobset=with_jobset)
    if with_jobset:
        jobset.install_webhooks(paths, addresses, api)


def start_on_node(cluster: Cluster, index: int) -> None:
    """What does not run there yet; the node's kubelet runs and the node is registered."""
    node, paths, options = cluster.nodes[index], cluster.paths, cluster.options
    accelerators.give_node(cluster.api, node.name, options.extended_resources)
    for part in parts.node_extras(options):
        name = f"{node.name}-{part}"
        if node.record.read(name) is not None:
            continue
        if part == "dradriver":
            kubeconfig = paths.pki / f"{node.name}.kubeconfig"
            node.start(name, accelerators.driver_words(node.name, kubeconfig, devices=options.dra_devices))
        else:
            words = [sys.executable, "-m", "tools.testcluster.netpolicy", "--server", cluster.addresses.server]
            words += ["--pki", str(paths.pki), "--dns-ip", cluster.addresses.hub]
            node.start(name, words, env=PYTHON_ENVIRONMENT)


def _wait_for_webhooks(cluster: Cluster, who: str, port: int) -> None:
    hub = cluster.addresses.hub
    cluster.wait(lambda: _listens(hub, port), what=f"{who} to listen", timeout_s=TIMEOUT_S)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
