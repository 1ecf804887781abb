"""Which daemons a cluster consists of, by the names they have in its record. Pure but for the look at the record.

    name                  where
    hub, node-0 ...       PID 1 of each machine
    etcd ... coredns      the hub: the control plane
    kwok, prometheus ...  the hub, where options ask for them
    node-0-kubelet ...    a node; with options a driver of devices and an enforcer of policies too

`Cluster.missing` and `Faults.undo_all` ask here: a node is Ready and the API server answers also when the scheduler,
CoreDNS or a kube-proxy has died.
"""

from __future__ import annotations

from tools.testcluster import gangs
from tools.testcluster.layout import Options, node_name
from tools.testcluster.machine import Record

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns")
"""In the order in which they can be started."""
NODE_DAEMONS = ("containerd", "kubelet", "kube-proxy")


def hub_extras(options: Options) -> list[str]:
    """
    >>> hub_extras(Options(kwok_nodes=3))
    ['kwok']
    """
    kwok = ["kwok"] if options.kwok_nodes else []
    prometheus = ["prometheus-targets", "prometheus"] if options.prometheus else []
    schedulers = [program for name in options.gangs for program in gangs.ALL[name].programs]
    # JobSet first: Kueue waits ever longer for a kind that it does not find when it starts.
    queues = (["jobset"] if options.jobset else []) + (["kueue"] if options.kueue else [])
    return kwok + prometheus + schedulers + queues


def node_extras(options: Options) -> list[str]:
    driver = ["dradriver"] if options.dra_devices else []
    return driver + (["netpolicy"] if options.network_policies else [])


def expected(options: Options) -> list[str]:
    names = ["hub", *CONTROL_PLANE, *hub_extras(options)]
    for index in range(options.nodes):
        node = node_name(index)
        names += [node, *(f"{node}-{daemon}" for daemon in (*NODE_DAEMONS, *node_extras(options)))]
    return names


def missing(record: Record, options: Options) -> list[str]:
    """Those that do not run, whoever ended them, and those that stand still (SIGSTOP)."""
    found = {name: record.read(name) for name in expected(options)}
    return [name for name, process in found.items() if process is None or process.stopped]
