"""What a cluster looks like on paper: its options, its addresses, its folders. Pure; nothing here touches the machine.

Every cluster has a /16 of its own, `10.NET.0.0/16`, where NET (64..127) is the number that was free when it came up:

    10.NET.0.0/24      nodes: the hub (API server, etcd, DNS) is .1, node-0 is .10, node-1 is .11 ...
    10.NET.1.0/30      the link to the machine: .1 is the machine, .2 the hub
    10.NET.16.0/20     Services; the DNS Service is 10.NET.16.10
    10.NET.128.0/17    pods, a /24 per node
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.testcluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON_ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
"""The environment of daemons that are modules of this package."""
FIRST_NET, LAST_NET = 64, 127
MAX_NODES = 100
MAX_KWOK_NODES = 5000
"""What Kubernetes itself is made for."""
MAX_DRA_DEVICES = 128
"""As many as one ResourceSlice holds."""
MAX_DISK_GIB = 4096
"""A sparse file: ext4 on the machine's side holds one of 16 TiB at most."""
MAX_GRACE_S = 3600
_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")
# Inside a node these folders are the node's own, so a state folder under them would be hidden from its processes.
_HIDDEN_IN_NODES = (Path("/run"), Path("/var/run"), Path("/var/lib"), Path("/var/log"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a cluster is made; the command line and the fixture build one."""

    nodes: int = 2
    gang_scheduling: bool = False
    """Turns on the alpha scheduling.k8s.io/v1alpha2 with Workload and PodGroup."""
    feature_gates: tuple[str, ...] = ()
    """`Name=true` or `Name=false`, given to every component."""
    runtime_config: tuple[str, ...] = ()
    """`group/version=true`, given to the API server."""
    node_monitor_grace_period_s: int = 10
    """How long a silent node counts as Ready: 10 keeps fault tests quick, production has 50."""
    node_disk_gib: int = 16
    """Size of a node's own file system; the file behind it is sparse."""
    extended_resources: tuple[str, ...] = ()
    """`name=count` on every node, for example `nvidia.com/gpu=4`."""
    dra_devices: int = 0
    """Fake devices per node, published by a DRA driver; 0 starts none."""
    kwok_nodes: int = 0
    network_policies: bool = False
    """Enforces NetworkPolicy by the test-only translator."""
    prometheus: bool = False
    kueue: bool = False
    jobset: bool = False
    """JobSet too, whose jobs Kueue admits."""
    gangs: tuple[str, ...] = ()
    """Schedulers of gangs beside the cluster's own: coscheduling, volcano."""
    audit: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ClusterError(f"a test cluster has 1 to {MAX_NODES} real nodes, not {self.nodes}; use kwok for more")
        for what, number, least, most in (
            ("GiB of a node's disk", self.node_disk_gib, 1, MAX_DISK_GIB),
            ("fake devices per node", self.dra_devices, 0, MAX_DRA_DEVICES),
            ("kwok nodes", self.kwok_nodes, 0, MAX_KWOK_NODES),
            ("seconds that a silent node counts as Ready", self.node_monitor_grace_period_s, 1, MAX_GRACE_S),
        ):
            if not least <= number <= most:
                raise ClusterError(f"a test cluster has {least} to {most} {what}, not {number}")
        if self.jobset and not self.kueue:
            raise ClusterError("JobSet runs beside Kueue only, and Kueue was not asked for; add it: --with kueue")
        for pair in self.extended_resources:
            name, _, count = pair.partition("=")
            if "/" not in name or not count.isdigit():
                raise ClusterError(f"extended resource {pair!r} is not of the form vendor.example/name=COUNT")
        # Components differ in what else they take for true: a gate must not be on in one and off in another.
        for kind, form, pairs in (
            ("feature gate", "Name", self.feature_gates),
            ("runtime config", "group/version", self.runtime_config),
        ):
            for pair in pairs:
                if not re.fullmatch(r"[\w./-]+=(true|false)", pair):
                    raise ClusterError(f"{kind} {pair!r} is not of the form {form}=true or {form}=false")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Options:
        """Tuples come back from JSON as lists.

        >>> Options.from_json({"nodes": 3, "feature_gates": ["A=true"]}).feature_gates
        ('A=true',)
        """
        known: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    net: int

    @property
    def whole(self) -> str:
        return f"10.{self.net}.0.0/16"

    @property
    def hub(self) -> str:
        return f"10.{self.net}.0.1"

    @property
    def machine_link(self) -> str:
        return f"10.{self.net}.1.1"

    @property
    def hub_link(self) -> str:
        return f"10.{self.net}.1.2"

    @property
    def services(self) -> str:
        return f"10.{self.net}.16.0/20"

    @property
    def api_service(self) -> str:
        return f"10.{self.net}.16.1"

    @property
    def dns_service(self) -> str:
        return f"10.{self.net}.16.10"

    @property
    def pods(self) -> str:
        return f"10.{self.net}.128.0/17"

    @property
    def server(self) -> str:
        return f"https://{self.hub}:6443"

    @property
    def machine_device(self) -> str:
        """Name of the machine's end of the link; at most 15 characters."""
        return f"rtc-net{self.net}"

    def node(self, index: int) -> str:
        return f"10.{self.net}.0.{10 + index}"

    def node_pods(self, index: int) -> str:
        return f"10.{self.net}.{128 + index}.0/24"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the files of one cluster lie: `<state root>/<name>/`."""

    name: str
    root: Path

    @classmethod
    def of(cls, name: str) -> Paths:
        if not is_name(name):
            raise ClusterError(f"cluster name {name!r}: wanted up to 24 of a-z, 0-9 and '-', a letter first")
        base = os.environ.get("RLINF_TESTCLUSTER_STATE") or os.path.join(
            os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "rlinf-testcluster"
        )
        root = Path(base).resolve() / name
        for hidden in _HIDDEN_IN_NODES:
            if root.is_relative_to(hidden):
                raise ClusterError(
                    f"the state folder {root} lies under {hidden}, which every node replaces by its own; "
                    "set RLINF_TESTCLUSTER_STATE to a folder elsewhere"
                )
        return cls(name=name, root=root)

    @property
    def record(self) -> Path:
        return self.root / "cluster.json"

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def disks(self) -> Path:
        return self.root / "disks"

    @property
    def etcd(self) -> Path:
        return self.root / "etcd"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def cgroup(self) -> str:
        """Name of the cluster's folder in every cgroup hierarchy."""
        return f"rlinf-tc-{self.name}"


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def node_name(index: int) -> str:
    return f"node-{index}"


def node_index(name: str) -> int:
    """
    >>> node_index("node-1")
    1
    """
    prefix, _, digits = name.rpartition("-")
    if prefix != "node" or not digits.isdigit():
        raise ClusterError(f"{name!r} is not a real node of a test cluster; wanted node-0, node-1, ...")
    return int(digits)
