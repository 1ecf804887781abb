"""Enforces NetworkPolicy in a test cluster: policies and pods in, iptables rules out, in every node.

The bridge CNI does not enforce policies; this does, for tests only. `translate` is pure. `main` runs as a daemon in
every node, reads the API server twice a second and replaces the node's chains when the rules have changed.

Covered: ingress and egress, podSelector, namespaceSelector, ipBlock with except, ports with ranges and names, default
deny. Every node holds every rule: the source's node enforces egress, the destination's ingress. CoreDNS, which is a
process of the hub here, counts as a pod of kube-system labelled k8s-app=kube-dns. As with a real one, answers to
allowed connections pass, and so do the kubelet's probes. A change acts within about a second, and not on connections
that are open.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.testcluster import commands
from tools.testcluster.api import Api
from tools.testcluster.errors import ClusterError

MAIN_CHAIN = "TC-POLICY"
POLL_S = 0.5
REPLACED = "rules replaced"
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What a policy sees of a pod."""

    namespace: str
    name: str
    ip: str
    labels: tuple[tuple[str, str], ...] = ()
    ports: tuple[tuple[str, str, int], ...] = ()
    """Named container ports: name, protocol, number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """One kind of packet that may pass: from or to `peer`, to `ports` (`80` or `80:90`) of `protocol`, or to any."""

    peer: str
    protocol: str | None = None
    ports: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """A pod that policies isolate in one direction, and what they allow all the same."""

    ip: str
    ingress: bool
    allowed: tuple[Allowed, ...]


def pods_of(manifests: Iterable[Manifest], *, dns_ip: str) -> list[Pod]:
    found = [
        Pod(
            namespace="kube-system",
            name="coredns",
            ip=dns_ip,
            labels=(("k8s-app", "kube-dns"),),
            ports=(("dns", "UDP", 53), ("dns-tcp", "TCP", 53)),
        ),
    ]
    for item in manifests:
        status, spec = item.get("status", {}), item["spec"]
        if status.get("podIP") and not spec.get("hostNetwork") and status.get("phase") in ("Pending", "Running"):
            # An init container that goes on is a sidecar, and its ports are the pod's like any other's.
            sidecars = [one for one in spec.get("initContainers", []) if one.get("restartPolicy") == "Always"]
            ports = [port for container in [*spec["containers"], *sidecars] for port in container.get("ports", [])]
            found.append(
                Pod(
                    namespace=item["metadata"]["namespace"],
                    name=item["metadata"]["name"],
                    ip=status["podIP"],
                    labels=tuple(sorted(item["metadata"].get("labels", {}).items())),
                    ports=tuple(
                        (port["name"], port.get("protocol", "TCP"), port["containerPort"])
                        for port in ports
                        if "name" in port
                    ),
                )
            )
    return found


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """A Kubernetes label selector; the empty one selects all."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for wanted in selector.get("matchExpressions") or []:
        key, operator, values = wanted["key"], wanted["operator"], wanted.get("values") or []
        holds = {
            "In": key in labels and labels[key] in values,
            "NotIn": key not in labels or labels[key] not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[operator]
        if not holds:
            return False
    return True


def translate(
    policies: Iterable[Manifest], pods: Sequence[Pod], *, namespaces: dict[str, dict[str, str]]
) -> list[Isolation]:
    """Who is isolated, and what may pass all the same. `namespaces` maps names to labels."""
    every = list(policies)
    found = []
    for pod in pods:
        for ingress in (True, False):
            mine = [policy for policy in every if _applies(policy, pod, ingress=ingress)]
            if mine:
                allowed = [rule for policy in mine for rule in _allows(policy, pod, pods, namespaces, ingress=ingress)]
                found.append(Isolation(ip=pod.ip, ingress=ingress, allowed=tuple(dict.fromkeys(allowed))))
    return found


def _applies(policy: Manifest, pod: Pod, *, ingress: bool) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or (["Ingress", "Egress"] if "egress" in spec else ["Ingress"])
    return (
        ("Ingress" if ingress else "Egress") in types
        and policy["metadata"]["namespace"] == pod.namespace
        and selects(spec.get("podSelector") or {}, dict(pod.labels))
    )


def _allows(
    policy: Manifest, pod: Pod, pods: Sequence[Pod], namespaces: dict[str, dict[str, str]], *, ingress: bool
) -> list[Allowed]:
    found = []
    for rule in policy["spec"].get("ingress" if ingress else "egress") or []:
        peers = rule.get("from" if ingress else "to")
        ports = rule.get("ports")
        for address, target in _peers(peers, policy["metadata"]["namespace"], pods, namespaces):
            if not ports:
                found.append(Allowed(peer=address))
            for port in ports or []:
                # A port's name is looked up where the packet goes: at each pod that a block of addresses holds.
                owners = [(address, pod if ingress else target)]
                if isinstance(port.get("port"), str) and not ingress and target is None:
                    block = ipaddress.ip_network(address)
                    owners = [(f"{one.ip}/32", one) for one in pods if ipaddress.ip_address(one.ip) in block]
                for peer, owner in owners:
                    for number in _numbers(port, owner):
                        protocol = port.get("protocol", "TCP").lower()
                        found.append(Allowed(peer=peer, protocol=protocol, ports=number or None))
    return found


def _peers(
    peers: list[Manifest] | None, home: str, pods: Sequence[Pod], namespaces: dict[str, dict[str, str]]
) -> list[tuple[str, Pod | None]]:
    """Addresses, each with its pod if it is one. No peers at all means anybody."""
    if not peers:
        return [("0.0.0.0/0", None)]
    found: list[tuple[str, Pod | None]] = []
    for peer in peers:
        if "ipBlock" in peer:
            found += [(block, None) for block in _blocks(peer["ipBlock"])]
            continue
        for pod in pods:
            if "namespaceSelector" in peer:
                labels = {"kubernetes.io/metadata.name": pod.namespace} | namespaces.get(pod.namespace, {})
                if not selects(peer["namespaceSelector"] or {}, labels):
                    continue
            elif pod.namespace != home:
                continue
            if selects(peer.get("podSelector") or {}, dict(pod.labels)):
                found.append((f"{pod.ip}/32", pod))
    return found


def _blocks(block: Manifest) -> list[str]:
    """The CIDR without its exceptions, as CIDRs; IPv6 has no place in these clusters.

    >>> _blocks({"cidr": "10.0.0.0/30", "except": ["10.0.0.0/31"]})
    ['10.0.0.2/31']
    """
    left = [ipaddress.ip_network(block["cidr"])]  # without bits of a host, which the API server refuses
    for text in block.get("except") or []:
        hole = ipaddress.ip_network(text)
        pieces = []
        for network in left:
            if isinstance(network, ipaddress.IPv4Network) and isinstance(hole, ipaddress.IPv4Network):
                if hole.subnet_of(network):
                    pieces += list(network.address_exclude(hole))
                elif not hole.overlaps(network):
                    pieces.append(network)
        left = list(pieces)
    return [str(network) for network in left if network.version == 4]


def _numbers(port: Manifest, owner: Pod | None) -> list[str]:
    """iptables' notation of a policy's port; an empty string is any, and no entry at all is a name nobody has."""
    wanted = port.get("port")
    if wanted is None:
        return [""]
    if isinstance(wanted, str):
        names = owner.ports if owner else ()
        return [str(number) for name, kind, number in names if name == wanted and kind == port.get("protocol", "TCP")]
    return [f"{wanted}:{port['endPort']}" if "endPort" in port else str(wanted)]


def render(isolations: Sequence[Isolation], *, old_chains: Iterable[str] = ()) -> str:
    """Text for `iptables-restore --noflush`: replaces everything of ours in one step."""
    chains = {chain_name(isolation): isolation for isolation in isolations}
    lines = ["*filter", f":{MAIN_CHAIN} - [0:0]"]
    lines += [f":{chain} - [0:0]" for chain in sorted({*chains, *old_chains})]
    lines.append(f"-A {MAIN_CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN")
    for chain, isolation in chains.items():
        lines.append(f"-A {MAIN_CHAIN} {'-d' if isolation.ingress else '-s'} {isolation.ip}/32 -j {chain}")
        for rule in isolation.allowed:
            words = ["-A", chain, "-s" if isolation.ingress else "-d", rule.peer]
            if rule.protocol:
                words += ["-p", rule.protocol]
            if rule.ports:
                words += ["--dport", rule.ports]
            lines.append(" ".join([*words, "-j", "RETURN"]))
        lines.append(f"-A {chain} -j DROP")
    lines += [f"-X {chain}" for chain in sorted(set(old_chains) - set(chains))]
    return "\n".join([*lines, "COMMIT"]) + "\n"


def chain_name(isolation: Isolation) -> str:
    """At most 28 characters, which is iptables' limit.

    >>> chain_name(Isolation(ip="10.64.128.2", ingress=True, allowed=()))
    'TC-IN-10.64.128.2'
    """
    name = f"TC-{'IN' if isolation.ingress else 'OUT'}-{isolation.ip}"
    return name if len(name) <= 28 else f"TC-{hashlib.sha256(name.encode()).hexdigest()[:20]}"


class Enforcer:
    """Keeps this node's rules at what the API server says."""

    def __init__(self, api: Api, *, dns_ip: str) -> None:
        self._api = api
        self._dns_ip = dns_ip
        self._applied: str | None = None
        self._chains: set[str] | None = None
        """The chains of this node, where they are known: one that ran here before may have left some."""

    def attempt(self) -> str:
        """One step; what there is to tell of it, or nothing. The rules stay as they are when it fails."""
        try:
            return REPLACED if self.step() else ""
        except (ClusterError, ValueError, KeyError) as err:
            # An enforcer that ends leaves every later policy without effect, and nobody is told. The API server may be
            # down on purpose; kube-proxy holds iptables' lock for seconds on busy cores.
            self._applied = self._chains = None  # nobody knows what of it was done
            return f"{type(err).__name__}: {err}; the rules of before hold"

    def step(self) -> bool:
        """True when rules were replaced."""
        policies = self._api.get("/apis/networking.k8s.io/v1/networkpolicies")["items"]
        if self._chains is None:
            self._chains = _hook()
        if not policies and not self._chains:
            return False  # nothing to enforce: do not load the API server with lists of pods
        pods = pods_of(self._api.get("/api/v1/pods")["items"], dns_ip=self._dns_ip)
        items = self._api.get("/api/v1/namespaces")["items"]
        namespaces = {item["metadata"]["name"]: item["metadata"].get("labels", {}) for item in items}
        isolations = translate(policies, pods, namespaces=namespaces)
        if (wanted := render(isolations)) == self._applied:
            return False
        commands.run(["iptables-restore", "--noflush", "-w", "5"], stdin=render(isolations, old_chains=self._chains))
        self._chains = {chain_name(isolation) for isolation in isolations}
        self._applied = wanted
        return True


def _hook() -> set[str]:
    """Leads forwarded packets through our rules, if nobody has yet; the chains that are there."""
    saved = commands.run(["iptables-save", "-t", "filter"])
    if f":{MAIN_CHAIN} " not in saved:
        commands.run(["iptables", "-w", "5", "-N", MAIN_CHAIN])
    if f"-A FORWARD -j {MAIN_CHAIN}" not in saved:
        commands.run(["iptables", "-w", "5", "-I", "FORWARD", "-j", MAIN_CHAIN])
    return {line[1:].split()[0] for line in saved.splitlines() if line.startswith(":TC-")} - {MAIN_CHAIN}


def main() -> None:
    parser = argparse.ArgumentParser(description="Enforces NetworkPolicy in one node of a test cluster.")
    parser.add_argument("--server", required=True)
    parser.add_argument("--pki", type=Path, required=True)
    parser.add_argument("--dns-ip", required=True)
    arguments = parser.parse_args()
    pki = arguments.pki
    api = Api(arguments.server, ca=pki / "ca.crt", certificate=pki / "admin.crt", key=pki / "admin.key")
    enforcer = Enforcer(api, dns_ip=arguments.dns_ip)
    told = ""
    while True:
        said = enforcer.attempt()
        if said and (said != told or said == REPLACED):  # the same fault twice a second would fill the disk
            print(said, flush=True)
        told = said
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
