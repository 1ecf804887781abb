"""Faults on a cluster that is only told of: what is asked of its machines, and in which order."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.testcluster import cgroups, extras, faults, network
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import CommandFailed
from tools.testcluster.faults import Faults
from tools.testcluster.layout import Addresses, Options, Paths
from tools.testcluster.machine import Machine, Process

GIB = 1 << 30


class FakeNode(Machine):
    """A node with a disk of 4 GiB and a default route, or none."""

    def __init__(self, root: Path, *, up: bool = True, route: str = "default via 10.64.0.1\n") -> None:
        super().__init__("node-0", Paths(name="dev", root=root), programs=root, disk=root / "node-0.ext4")
        self.disk_bytes, self.filler_bytes = 4 * GIB, 0
        self.up, self.route = up, route
        self.did: list[str] = []

    @property
    def init(self) -> Process | None:
        return Process(name="node-0", pid=1, started_ticks=1) if self.up else None

    def boot(self, **_: Any) -> None:
        self.up = True
        self.did.append("boot")

    def kill(self) -> None:
        self.up = False
        self.did.append("kill")

    def run(self, argv: Sequence[str | Path], **_: Any) -> str:
        words = [str(word) for word in argv]
        if words[0] == "ip":
            return self.route
        if words[0] == "tc" and not self.route:
            raise CommandFailed('Cannot find device "eth0"')
        if words[:2] == ["stat", "--file-system"]:
            return f"{(self.disk_bytes - self.filler_bytes) // 4096}\n"
        if words[0] == "stat":
            return f"{self.filler_bytes}\n" if self.filler_bytes else ""
        if words[0] == "fallocate":
            self.filler_bytes = max(self.filler_bytes, int(words[2]))
        return ""


def cluster_of(node: FakeNode, did: list[str]) -> Any:
    return SimpleNamespace(
        node=lambda name: node,
        nodes=[node],
        hub=FakeNode(node.paths.root, up=False),
        paths=node.paths,
        boot_node=lambda index: node.boot(),
        start_containerd=lambda index: did.append("containerd"),
        start_kubelet=lambda index: did.append("kubelet"),
        route_services=lambda: None,
    )


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "pids", lambda group: set())
    monkeypatch.setattr(cgroups, "make", lambda group: None)
    monkeypatch.setattr(cgroups, "remove", lambda group, timeout_s: None)
    monkeypatch.setattr(extras, "start_on_node", lambda cluster, index: None)


@pytest.mark.parametrize(
    ("up", "route", "did"),
    [
        (True, "default via 10.64.0.1\n", []),
        (True, "", ["kill", "boot"]),
        (False, "", ["boot"]),
    ],
    ids=["well", "cut short", "crashed"],
)
def test_a_node_whose_boot_was_cut_short_is_booted_again(tmp_path: Path, up: bool, route: str, did: list[str]):
    node = FakeNode(tmp_path, up=up, route=route)
    (node.paths.processes).mkdir()
    fault = Faults(cluster_of(node, []))
    fault.heal_network()  # which undo_all() asks for first
    fault.revive("node-0")
    assert node.did == did


def test_a_boot_that_fails_leaves_no_half_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    node = FakeNode(tmp_path, up=False)
    (tmp_path / "node-0.ext4").touch()
    cluster: Any = SimpleNamespace(
        nodes=[node], hub=None, paths=node.paths, options=Options(nodes=1), addresses=Addresses(net=64)
    )

    def refuse(*_: object, **__: object) -> None:
        raise CommandFailed("ip: File exists")

    monkeypatch.setattr(network, "link_node", refuse)
    with pytest.raises(CommandFailed, match="File exists"):
        Cluster.boot_node(cluster, 0)
    assert node.did == ["boot", "kill"]


def test_a_disk_that_is_filled_again_is_full_again(tmp_path: Path):
    node = FakeNode(tmp_path)
    fault = Faults(cluster_of(node, []))
    fault.fill_disk("node-0")
    assert node.filler_bytes == 4 * GIB - (1 << 20)
    node.disk_bytes += GIB  # what the kubelet removed meanwhile
    fault.fill_disk("node-0")
    assert node.filler_bytes == 5 * GIB - (1 << 20)
    fault.fill_disk("node-0")
    assert node.filler_bytes == 5 * GIB - (1 << 20)
    assert faults._FILLER.startswith("/var/lib/")
