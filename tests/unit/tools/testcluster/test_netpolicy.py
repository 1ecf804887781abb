"""NetworkPolicy to iptables: who is isolated, and what may pass."""

import ipaddress
from typing import Any

import pytest

from tools.testcluster import commands
from tools.testcluster.api import Api, ApiError
from tools.testcluster.errors import CommandFailed
from tools.testcluster.netpolicy import Allowed, Enforcer, Isolation, Pod, pods_of, render, selects, translate

WEB = Pod(namespace="a", name="web", ip="10.64.128.2", labels=(("app", "web"),), ports=(("http", "TCP", 8080),))
DB = Pod(namespace="a", name="db", ip="10.64.128.3", labels=(("app", "db"),), ports=(("http", "TCP", 5432),))
OTHER = Pod(namespace="b", name="other", ip="10.64.129.2", labels=(("app", "web"),))
NAMESPACES = {"a": {"team": "red"}, "b": {"team": "blue"}}


def policy(namespace: str = "a", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": namespace}, "spec": {"podSelector": {}, **spec}}


def isolations(*policies: dict[str, Any]) -> dict[tuple[str, str], tuple[Allowed, ...]]:
    found = translate(policies, [WEB, DB, OTHER], namespaces=NAMESPACES)
    return {(item.ip, "in" if item.ingress else "out"): item.allowed for item in found}


def test_without_policies_nobody_is_isolated():
    assert isolations() == {}


def test_default_deny_isolates_every_pod_of_its_namespace_and_no_other():
    assert isolations(policy(policyTypes=["Ingress", "Egress"])) == {
        (WEB.ip, "in"): (),
        (WEB.ip, "out"): (),
        (DB.ip, "in"): (),
        (DB.ip, "out"): (),
    }


def test_a_policy_without_types_is_about_ingress_and_with_egress_rules_about_both():
    assert {direction for _, direction in isolations(policy())} == {"in"}
    assert {direction for _, direction in isolations(policy(egress=[]))} == {"in", "out"}


def test_a_pod_selector_alone_means_the_policys_own_namespace():
    got = isolations(policy(podSelector={"matchLabels": {"app": "db"}}, ingress=[{"from": [{"podSelector": {}}]}]))
    assert got == {(DB.ip, "in"): (Allowed(peer=f"{WEB.ip}/32"), Allowed(peer=f"{DB.ip}/32"))}


def test_namespace_and_pod_selector_together_must_both_hold():
    peer = {"namespaceSelector": {"matchLabels": {"team": "blue"}}, "podSelector": {"matchLabels": {"app": "web"}}}
    got = isolations(policy(podSelector={"matchLabels": {"app": "db"}}, ingress=[{"from": [peer]}]))
    assert got[DB.ip, "in"] == (Allowed(peer=f"{OTHER.ip}/32"),)


def test_two_policies_add_up():
    web = {"podSelector": {"matchLabels": {"app": "web"}}}
    db = {"podSelector": {"matchLabels": {"app": "db"}}}
    got = isolations(policy(ingress=[{"from": [web]}]), policy(ingress=[{"from": [db]}]))
    assert set(got[WEB.ip, "in"]) == {Allowed(peer=f"{WEB.ip}/32"), Allowed(peer=f"{DB.ip}/32")}


def test_a_rule_without_peers_allows_anybody_to_its_ports():
    got = isolations(policy(ingress=[{"ports": [{"port": 80}, {"port": 90, "endPort": 95, "protocol": "UDP"}]}]))
    assert got[WEB.ip, "in"] == (
        Allowed(peer="0.0.0.0/0", protocol="tcp", ports="80"),
        Allowed(peer="0.0.0.0/0", protocol="udp", ports="90:95"),
    )


def test_a_ports_name_is_looked_up_at_the_receiver():
    everybody: list[dict[str, Any]] = [{"podSelector": {}}]
    inward = isolations(policy(ingress=[{"from": everybody, "ports": [{"port": "http"}]}]))
    assert {rule.ports for rule in inward[DB.ip, "in"]} == {"5432"}
    outward = isolations(policy(policyTypes=["Egress"], egress=[{"to": everybody, "ports": [{"port": "http"}]}]))
    assert {(rule.peer, rule.ports) for rule in outward[DB.ip, "out"]} == {
        (f"{WEB.ip}/32", "8080"),
        (f"{DB.ip}/32", "5432"),
    }


def test_a_ports_name_without_a_receiver_is_every_pods_that_has_it():
    """And in a block of addresses every one's that lies in it."""
    http = {"ports": [{"port": "http"}]}
    anybody = isolations(policy(policyTypes=["Egress"], egress=[http]))
    assert {(rule.peer, rule.ports) for rule in anybody[DB.ip, "out"]} == {
        (f"{WEB.ip}/32", "8080"),
        (f"{DB.ip}/32", "5432"),
    }
    block = {"ipBlock": {"cidr": "10.64.128.0/24", "except": [f"{DB.ip}/32"]}}
    some = isolations(policy(policyTypes=["Egress"], egress=[{"to": [block], **http}]))
    assert some[DB.ip, "out"] == (Allowed(peer=f"{WEB.ip}/32", protocol="tcp", ports="8080"),)


def test_dns_has_the_names_of_its_ports():
    dns = pods_of([], dns_ip="10.64.0.1")
    to = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}]
    ports = [{"port": "dns", "protocol": "UDP"}, {"port": "dns-tcp"}]
    rule = policy(policyTypes=["Egress"], egress=[{"to": to, "ports": ports}])
    (found,) = translate([rule], [WEB, *dns], namespaces=NAMESPACES)
    assert found.allowed == (
        Allowed(peer="10.64.0.1/32", protocol="udp", ports="53"),
        Allowed(peer="10.64.0.1/32", protocol="tcp", ports="53"),
    )


def test_the_ports_of_a_sidecar_are_its_pods():
    def container(name: str, **more: str) -> dict[str, Any]:
        return {"name": name, "ports": [{"name": name, "containerPort": 80}, {"containerPort": 81}], **more}

    item = {
        "metadata": {"name": "web", "namespace": "a"},
        "spec": {
            "initContainers": [container("first"), container("beside", restartPolicy="Always")],
            "containers": [container("main")],
        },
        "status": {"podIP": WEB.ip, "phase": "Running"},
    }
    assert pods_of([item], dns_ip="10.64.0.1")[-1].ports == (("main", "TCP", 80), ("beside", "TCP", 80))


def test_a_block_leaves_out_its_exceptions():
    block = {"ipBlock": {"cidr": "10.0.0.0/30", "except": ["10.0.0.1/32"]}}
    got = isolations(policy(ingress=[{"from": [block]}]))
    assert {rule.peer for rule in got[WEB.ip, "in"]} == {"10.0.0.0/32", "10.0.0.2/31"}


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ({"key": "app", "operator": "In", "values": ["web"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["web"]}, False),
        ({"key": "x", "operator": "NotIn", "values": ["web"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "app", "operator": "DoesNotExist"}, False),
    ],
)
def test_label_expressions(expression: dict[str, Any], holds: bool):
    assert selects({"matchExpressions": [expression]}, {"app": "web"}) is holds


def test_only_pods_with_an_address_of_their_own_count_and_dns_counts_as_one():
    def manifest(name: str, **status: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "namespace": "a"}, "spec": {"containers": []}, "status": status}

    running = manifest("runs", podIP="10.64.128.9", phase="Running")
    on_node = manifest("on-node", podIP="10.64.0.10", phase="Running")
    on_node["spec"]["hostNetwork"] = True
    done = manifest("done", podIP="10.64.128.8", phase="Succeeded")
    names = [pod.name for pod in pods_of([running, on_node, done, manifest("new")], dns_ip="10.64.0.1")]
    assert names == ["coredns", "runs"]


def test_rendered_rules_answer_open_connections_first_and_drop_last():
    allowed = (Allowed(peer="10.64.128.3/32", protocol="tcp", ports="80"),)
    text = render([Isolation(ip="10.64.128.2", ingress=True, allowed=allowed)], old_chains=["TC-IN-10.64.128.7"])
    assert text.splitlines() == [
        "*filter",
        ":TC-POLICY - [0:0]",
        ":TC-IN-10.64.128.2 - [0:0]",
        ":TC-IN-10.64.128.7 - [0:0]",
        "-A TC-POLICY -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN",
        "-A TC-POLICY -d 10.64.128.2/32 -j TC-IN-10.64.128.2",
        "-A TC-IN-10.64.128.2 -s 10.64.128.3/32 -p tcp --dport 80 -j RETURN",
        "-A TC-IN-10.64.128.2 -j DROP",
        "-X TC-IN-10.64.128.7",
        "COMMIT",
    ]


class FakeApi(Api):
    def __init__(self, *policies: dict[str, Any]) -> None:
        self.policies = list(policies)
        self.fault: Exception | None = None

    def get(self, path: str) -> Any:
        if self.fault:
            raise self.fault
        if path.endswith("networkpolicies"):
            return {"items": self.policies}
        metadata = {"name": "web", "namespace": "a"}
        web = {"metadata": metadata, "spec": {"containers": []}, "status": {"podIP": WEB.ip, "phase": "Running"}}
        return {"items": [web] if path.endswith("pods") else [{"metadata": {"name": "a"}}]}


class FakeIptables:
    """Keeps the names of chains; fails as often as told."""

    def __init__(self) -> None:
        self.chains: list[str] = []
        self.restored: list[str] = []
        self.asked: list[list[str]] = []
        self.failures = 0
        self.looks = 0

    def run(self, words: list[str], *, stdin: str = "", **_: object) -> str:
        if words[0] == "iptables":
            self.asked.append(words[3:])
        if words[0] == "iptables-save":
            self.looks += 1
            return "".join(f":{chain} - [0:0]\n" for chain in self.chains)
        if words[0] == "iptables-restore":
            if self.failures:
                self.failures -= 1
                raise CommandFailed("Another app is currently holding the xtables lock")
            self.restored.append(stdin)
        return ""


@pytest.fixture
def iptables(monkeypatch: pytest.MonkeyPatch) -> FakeIptables:
    fake = FakeIptables()
    monkeypatch.setattr(commands, "run", fake.run)
    return fake


def test_rules_that_iptables_refused_are_tried_again(iptables: FakeIptables):
    enforcer = Enforcer(FakeApi(policy()), dns_ip="10.64.0.1")
    iptables.failures = 1
    assert "xtables lock" in enforcer.attempt()
    iptables.chains = ["TC-POLICY", "TC-IN-10.64.128.99"]  # whatever the failure left there is looked up again
    assert enforcer.attempt() == "rules replaced"
    assert "-X TC-IN-10.64.128.99" in iptables.restored[-1]
    assert enforcer.attempt() == ""


@pytest.mark.parametrize(
    "fault", [ApiError("GET: it did not answer", status=0), ipaddress.AddressValueError("no CIDR"), KeyError("key")]
)
def test_what_goes_wrong_in_one_look_is_told_and_the_next_one_is_taken(iptables: FakeIptables, fault: Exception):
    api = FakeApi(policy())
    enforcer = Enforcer(api, dns_ip="10.64.0.1")
    api.fault = fault
    assert type(fault).__name__ in enforcer.attempt()
    api.fault = None
    assert enforcer.attempt() == "rules replaced"
    assert len(iptables.restored) == 1


def test_rules_of_an_enforcer_that_died_go_when_there_are_no_policies_any_more(iptables: FakeIptables):
    iptables.chains = ["TC-POLICY", "TC-IN-10.64.128.2"]
    enforcer = Enforcer(FakeApi(), dns_ip="10.64.0.1")
    assert enforcer.attempt() == "rules replaced"
    assert "-X TC-IN-10.64.128.2" in iptables.restored[-1]
    assert "-j DROP" not in iptables.restored[-1]
    iptables.chains = ["TC-POLICY"]
    assert enforcer.attempt() == ""
    assert iptables.looks == 1, "only the first look does not know what there is"


def test_a_chain_that_was_made_and_not_hooked_in_is_hooked_in(iptables: FakeIptables):
    iptables.chains = ["TC-POLICY"]
    Enforcer(FakeApi(policy()), dns_ip="10.64.0.1").attempt()
    assert iptables.asked == [["-I", "FORWARD", "-j", "TC-POLICY"]]
