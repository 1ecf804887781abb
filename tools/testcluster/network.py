"""Wires a cluster: a link from the machine to the hub, a bridge in the hub, a link and routes for every node.

The machine gets one device (`rtc-netN`) and one route to the cluster's /16; both vanish with the hub. No iptables rule
and no port of the machine is touched. Called by `Cluster`.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable

from tools.testcluster import commands, locks
from tools.testcluster.errors import ClusterError
from tools.testcluster.layout import FIRST_NET, LAST_NET, Addresses
from tools.testcluster.machine import Machine

BRIDGE = "br0"


def free_net(taken: list[str]) -> int:
    """The lowest NET whose /16 meets none of the `taken` destinations (as `ip route` writes them).

    >>> free_net(["default", "10.64.0.0/16", "10.65.3.0/24", "192.0.2.7"])
    66
    """
    networks = [ipaddress.ip_network(text, strict=False) for text in taken if text != "default"]
    # 0.0.0.0/1 and its other half are how a VPN says "default".
    v4 = [network for network in networks if isinstance(network, ipaddress.IPv4Network) and network.prefixlen > 1]
    in_the_way: list[str] = []
    for net in range(FIRST_NET, LAST_NET + 1):
        wanted = ipaddress.ip_network(Addresses(net=net).whole)
        meeting = [network for network in v4 if network.overlaps(wanted)]
        if not meeting:
            return net
        in_the_way += [str(network) for network in meeting if network.prefixlen < wanted.prefixlen]
    whole = f"every subnet from 10.{FIRST_NET}.0.0/16 to 10.{LAST_NET}.0.0/16 is taken on this machine"
    if in_the_way:  # no test cluster's, whose route is a /16
        routes = ", ".join(dict.fromkeys(in_the_way))
        raise ClusterError(
            f"{whole}, by the routes to {routes} that it has; end the VPN or network that they belong to"
        )
    raise ClusterError(
        f"{whole} (`ip route` lists them); take a test cluster down: `python -m tools.testcluster list` names them"
    )


def link_hub(hub: Machine, *, report: Callable[[str], None]) -> Addresses:
    """Chooses the cluster's subnet and connects the hub with the machine."""
    # Two clusters that come up at once must not choose the same one.
    with locks.held(locks.SUBNET, what="another cluster's choice of a subnet", report=report):
        routes = json.loads(commands.run(["ip", "-4", "-json", "route", "show", "table", "all"]) or "[]")
        addresses = Addresses(net=free_net([route["dst"] for route in routes if route.get("type") != "broadcast"]))
        device = addresses.machine_device
        commands.run(
            ["ip", "link", "add", "name", device, "type", "veth", "peer", "name", "up0", "netns", str(hub.pid)]
        )
        commands.run(
            ["ip", "-batch", "-"],
            stdin=f"link set {device} alias {hub.paths.cgroup}\n"
            f"addr add {addresses.machine_link}/30 dev {device}\nlink set {device} up\n"
            f"route add {addresses.whole} via {addresses.hub_link} dev {device} onlink\n",
        )
    hub.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"])
    # What two nodes say to each other over the bridge is no business of the hub's iptables, which Faults.cut uses.
    hub.run(["sysctl", "-q", "-e", "-w", "net.bridge.bridge-nf-call-iptables=0"])
    hub.run(
        ["ip", "-batch", "-"],
        stdin=f"addr add {addresses.hub_link}/30 dev up0\nlink set up0 up\n"
        f"link add {BRIDGE} type bridge\naddr add {addresses.hub}/24 dev {BRIDGE}\nlink set {BRIDGE} up\n"
        f"route add default via {addresses.machine_link}\n",
    )
    return addresses


def link_node(hub: Machine, node: Machine, addresses: Addresses, *, index: int, nodes: int) -> None:
    """Connects a node with the hub's bridge; the hub and all nodes know which pods are behind it."""
    device = f"n{index}"
    commands.run(
        ["ip", "link", "add", "name", "eth0", "netns", str(node.pid)]
        + ["type", "veth", "peer", "name", device, "netns", str(hub.pid)]
    )
    hub.run(
        ["ip", "-batch", "-"],
        stdin=f"link set {device} master {BRIDGE}\nlink set {device} up\n"
        f"route replace {addresses.node_pods(index)} via {addresses.node(index)}\n",
    )
    others = [other for other in range(nodes) if other != index]
    node.run(["sysctl", "-q", "-w", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0"])
    node.run(
        ["ip", "-batch", "-"],
        stdin=f"addr add {addresses.node(index)}/24 dev eth0\nlink set eth0 up\n"
        f"route add default via {addresses.hub}\n"
        + "".join(f"route add {addresses.node_pods(other)} via {addresses.node(other)}\n" for other in others),
    )


def is_linked(node: Machine) -> bool:
    """`link_node` came to its end, of which the default route is a part."""
    return "default" in node.run(["ip", "-4", "route", "show", "default"])


def route_services(hub: Machine, addresses: Addresses, *, through: int) -> None:
    """Lets the machine and the hub reach ClusterIPs: a node's kube-proxy translates them."""
    hub.run(["ip", "route", "replace", addresses.services, "via", addresses.node(through)])


def forget(owner: str) -> None:
    """Takes the machine's end of a hub's link away at once; the kernel would do it a moment after the hub's end.

    It is found by its alias, so this works without the state folder.
    """
    links = json.loads(commands.run(["ip", "-json", "link", "show", "type", "veth"]) or "[]")
    for link in links:
        if link.get("ifalias") == owner:
            commands.run(["ip", "link", "del", link["ifname"]], check=False)
