"""Breaks a running cluster on demand, and mends it. One class with verbs; `cluster.faults` and `testcluster fault ...`.

| verb | what really happens | undone by |
|---|---|---|
| lose_contact(node) | SIGKILL to kubelet and containerd; the containers live on | revive(node) |
| crash(node) | its PID 1 is killed, and the kernel ends all in it at once, pods too; its disk stays | revive(node) |
| cut(a, b) | packets between two machines are dropped, in both directions, open connections too | heal_network() |
| slow(a, b) | a rate limit (htb), and a delay where the kernel has netem | heal_network() |
| pause(part) | SIGSTOP to etcd, the API server, ...: connections open, nobody answers | resume(part) |
| restart(part) | SIGKILL, and started again | - |
| stop(part) | SIGKILL | restart(part) |
| fill_disk(node) | a file on the node's own disk takes what is free | free_disk(node) |

`a` and `b` are node names or "hub" (API server, etcd, DNS). `undo_all()` mends everything and waits until the cluster
is well again. Faults of the API itself (410, 429, cut watches) are apiproxy.py.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tools.testcluster import binaries, cgroups, extras, network, parts, shaping
from tools.testcluster.errors import ClusterError
from tools.testcluster.layout import node_index
from tools.testcluster.machine import Machine, Process
from tools.testcluster.waiting import until

if TYPE_CHECKING:
    from tools.testcluster.cluster import Cluster

HUB = "hub"
PARTS = {
    "etcd": "etcd",
    "apiserver": "kube-apiserver",
    "controller-manager": "kube-controller-manager",
    "scheduler": "kube-scheduler",
    "coredns": "coredns",
}
DIES_TIMEOUT_S = 15.0
WELL_TIMEOUT_S = 60.0
_CHAIN = "TESTCLUSTER-CUT"
_FILLER = "/var/lib/filler"


class Faults:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    # ---- nodes

    def lose_contact(self, node: str) -> None:
        machine = self.cluster.node(node)
        for part in ("kubelet", "containerd"):
            machine.stop(f"{node}-{part}")

    def crash(self, node: str) -> None:
        machine = self.cluster.node(node)
        machine.kill()
        groups = (machine.cgroup, f"{self.cluster.paths.cgroup}/{node}")
        until(
            lambda: not any(cgroups.pids(group) for group in groups),
            what=f"all processes of {node} to end",
            timeout_s=DIES_TIMEOUT_S,
        )
        self.cluster.route_services()

    def revive(self, node: str) -> None:
        """Starts what is missing of a node. Returns at once; `cluster.wait_nodes_ready()` waits for Ready."""
        index, machine = node_index(node), self.cluster.node(node)
        if machine.init is not None and not network.is_linked(machine):
            self.crash(node)  # whoever booted it was killed half-way
        if machine.init is None:
            self.cluster.boot_node(index)
        elif machine.record.read(f"{node}-containerd") is None:
            self.cluster.start_containerd(index)
        self.cluster.start_kubelet(index)
        extras.start_on_node(self.cluster, index)
        self.cluster.route_services()

    # ---- network

    def cut(self, a: str, b: str) -> None:
        for here, there in ((a, b), (b, a)):
            machine = self._machine(here)
            _ensure_chain(machine)
            for source in self._ranges(there):
                machine.run(["iptables", "-w", "5", "-t", "raw", "-A", _CHAIN, "-s", source, "-j", "DROP"])

    def slow(self, a: str, b: str, *, rate_kbit: int = 1000, delay_ms: int = 0) -> None:
        """Between two nodes and their pods, each direction for itself; replaces what was said of the two before."""
        machines = {name: self._node(name) for name in (a, b)}
        for here, there in ((a, b), (b, a)):
            machine, number = machines[here], node_index(there)
            shaping.limit(machine, self._ranges(there), number=number, rate_kbit=rate_kbit, delay_ms=delay_ms)

    def heal_network(self) -> None:
        """Undoes every cut and slow."""
        for machine in [self.cluster.hub, *self.cluster.nodes]:
            if machine.init is None:
                continue
            if _has_chain(machine):
                machine.run(["iptables", "-w", "5", "-t", "raw", "-F", _CHAIN])
            if machine is not self.cluster.hub and network.is_linked(machine):  # or revive() boots it again
                shaping.lift(machine)

    def _machine(self, name: str) -> Machine:
        return self.cluster.hub if name == HUB else self.cluster.node(name)

    def _node(self, name: str) -> Machine:
        if name == HUB:
            raise ClusterError("slow() works between two nodes; delay the API server with an ApiProxy instead")
        return self.cluster.node(name)

    def _ranges(self, name: str) -> list[str]:
        """Every address that packets of a machine and its pods come from."""
        addresses = self.cluster.addresses
        if name == HUB:
            return [f"{addresses.hub}/32"]
        index = node_index(name)
        return [f"{addresses.node(index)}/32", addresses.node_pods(index)]

    # ---- control plane

    def pause(self, part: str) -> None:
        process = self._send(part, signal.SIGSTOP)
        until(lambda: process.stopped, what=f"{part} to stand still", timeout_s=DIES_TIMEOUT_S, every_s=0.01)

    def resume(self, part: str) -> None:
        self._send(part, signal.SIGCONT)

    def restart(self, part: str) -> None:
        """Ends it with SIGKILL and starts it again. Waits for the API server to be ready, if that or etcd it was."""
        self.cluster.hub.stop(_process_name(part))
        self.cluster.start_part(_process_name(part))
        if part in ("etcd", "apiserver"):
            self.cluster.wait_api_ready()

    def stop(self, part: str) -> None:
        """Ends it; `restart` brings it back."""
        self.cluster.hub.stop(_process_name(part))

    def _send(self, part: str, number: signal.Signals) -> Process:
        process = self.cluster.hub.record.read(_process_name(part))
        if process is None or not process.send(number):
            raise ClusterError(f"{part} of cluster {self.cluster.name!r} does not run; restart it first")
        return process

    # ---- disk

    def fill_disk(self, node: str, *, leave_bytes: int = 0) -> None:
        """Takes what is free on the node's own disk; writes fail there, and the kubelet reports DiskPressure."""
        machine = self.cluster.node(node)
        free = int(machine.run(["stat", "--file-system", "--format", "%a", "/var/lib"])) * 4096
        # A filler that is there is made longer; one of what is free now would be shorter than it is.
        filler = int(machine.run(["stat", "--format", "%s", _FILLER], check=False) or 0)
        machine.run(["fallocate", "-l", str(max(4096, filler + free - leave_bytes - (1 << 20))), _FILLER])

    def free_disk(self, node: str) -> None:
        self.cluster.node(node).run(["rm", "-f", _FILLER])

    # ---- all

    def undo_all(self, *, timeout_s: float = WELL_TIMEOUT_S) -> None:
        """Mends whatever is broken, by these verbs or otherwise, and waits until all nodes are Ready."""
        record = self.cluster.hub.record
        for process in record.running():
            process.send(signal.SIGCONT)
        for name in record.ended():  # or the waits below would end because of it
            record.forget(name)
        self.heal_network()
        for part in parts.CONTROL_PLANE:
            if part not in ("etcd", "kube-apiserver"):
                self.cluster.wait_api_ready()
            if record.read(part) is None:
                self.cluster.start_part(part)
        extras.start_in_hub(self.cluster, binaries.say)
        for node in self.cluster.nodes:
            self.revive(node.name)
            self.free_disk(node.name)
        self.cluster.wait_nodes_ready(timeout_s=timeout_s)


def _process_name(part: str) -> str:
    if part not in PARTS:
        raise ClusterError(f"{part!r} is no part of the control plane; wanted one of {', '.join(PARTS)}")
    return PARTS[part]


def _has_chain(machine: Machine) -> bool:
    return f":{_CHAIN} " in machine.run(["iptables-save", "-t", "raw"])


def _ensure_chain(machine: Machine) -> None:
    if not _has_chain(machine):
        for rule in (["-N", _CHAIN], ["-I", "PREROUTING", "-j", _CHAIN]):
            machine.run(["iptables", "-w", "5", "-t", "raw", *rule])
