"""A test cluster's life: up, attach, down. What a test or a person holds in hand.

    with Cluster.up("dev", Options(nodes=2), report=say) as cluster:
        cluster.kubectl("get", "nodes")
    # leaving the block takes it down

`up` on a cluster that runs and is well returns it; on anything else that bears the name (a half-made one, one whose
processes were killed, one whose state folder was lost in a power cut) it removes the remains and starts from nothing.
Order and waits of `up`:

    hub ──> etcd ──> API server ready ──> controller-manager, scheduler, CoreDNS, rights ──> nodes Ready ──> DNS answers
     └────> node: disk, network, containerd, images ────────────────────────────> kubelet, kube-proxy ──┘
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tools.testcluster import (
    binaries,
    cgroups,
    commands,
    configs,
    dns,
    extras,
    images,
    network,
    nodes,
    parts,
    pki,
    reaper,
    requirements,
    state,
)
from tools.testcluster.api import Api
from tools.testcluster.errors import ClusterError, NoSuchCluster, Overdue, StartFailed
from tools.testcluster.faults import Faults
from tools.testcluster.layout import PYTHON_ENVIRONMENT as PYTHON_ENVIRONMENT
from tools.testcluster.layout import REPOSITORY as REPOSITORY
from tools.testcluster.layout import Addresses, Options, Paths, is_name, node_name
from tools.testcluster.machine import Machine, Process
from tools.testcluster.waiting import until

API_READY_TIMEOUT_S = 60.0
NODES_READY_TIMEOUT_S = 60.0
CONTAINERD_TIMEOUT_S = 30.0
CRI_TIMEOUT_S = 5.0  # of one call of many
CRI_VERSION = "/runtime.v1.RuntimeService/Version"
DNS_TIMEOUT_S = 30.0
WELL_TIMEOUT_S = 10.0

Report = Callable[[str], None]


class Cluster:
    """One running cluster. Made by `up` and `attach`, not by hand."""

    def __init__(self, paths: Paths, *, options: Options, addresses: Addresses, programs: Path) -> None:
        self.paths = paths
        self.options = options
        self.addresses = addresses
        self.programs = programs
        self.hub = Machine("hub", paths, programs=programs)
        self.nodes = [
            Machine(
                node_name(index),
                paths,
                programs=programs,
                inside=self.hub,
                disk=paths.disks / f"{node_name(index)}.ext4",
            )
            for index in range(options.nodes)
        ]
        self.api = Api(
            addresses.server, ca=paths.pki / "ca.crt", certificate=paths.pki / "admin.crt", key=paths.pki / "admin.key"
        )

    @property
    def name(self) -> str:
        return self.paths.name

    @property
    def faults(self) -> Faults:
        return Faults(self)

    @property
    def kubeconfig(self) -> Path:
        """An administrator's; the certificates are in the file, so it can be copied anywhere on this machine."""
        return self.paths.kubeconfig

    # ---- making and ending

    @classmethod
    def up(cls, name: str, options: Options | None = None, *, report: Report, owner_pid: int | None = None) -> Cluster:
        """A running cluster of that name. With `owner_pid` it is taken down when that process ends, however it ends.

        One that was up already goes on as it was: its first owner's, or nobody's.
        """
        options = options or Options()
        requirements.check_root()
        paths = Paths.of(name)
        reaper.sweep(report, clear=_clear)
        requirements.check(loops=max(0, options.nodes - len(state.loop_devices(paths))))  # some may be its own
        requirements.ensure(requirements.FOR_A_CLUSTER, report=report)
        programs = binaries.ready()
        with state.locked(paths, report=report):
            running = _running(paths, programs)
            if running is not None:
                if running.options != options:
                    raise ClusterError(
                        f"cluster {name!r} runs with {running.options}, but {options} is asked for; take it down first "
                        "or choose another name"
                    )
                report(f"{name} is up already; {reaper.fate(paths)}")
                return running
            state.check_not_elsewhere(paths)
            _clear(paths)
            state.check_disk(paths)
            images.small_images(programs)
            try:
                return _make(paths, options=options, programs=programs, report=report, owner_pid=owner_pid)
            except BaseException as err:
                try:
                    if isinstance(err, ClusterError):
                        state.keep_logs(paths, report)
                finally:
                    _clear(paths)
                if isinstance(err, OSError) and err.errno == errno.ENOSPC:
                    raise ClusterError(
                        f"the disk that holds {paths.root} is full; free some space and try again"
                    ) from err
                raise

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """The running cluster of that name, from another process than the one that made it."""
        requirements.check_root()
        paths = Paths.of(name)
        found = _read(paths)
        if found is None:
            raise NoSuchCluster(
                f"no test cluster {name!r} runs; start it with `python -m tools.testcluster up --name {name}`"
            )
        return found

    @staticmethod
    def down(name: str) -> bool:
        """Removes every trace of the cluster; False when there was none."""
        requirements.check_root()
        paths = Paths.of(name)
        with state.locked(paths, report=binaries.say):
            return _clear(paths)

    @staticmethod
    def running() -> list[str]:
        """Names of clusters that `attach` would find."""
        return [name for name in state.names() if is_name(name) and _read(Paths.of(name)) is not None]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        Cluster.down(self.name)

    # ---- using

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 60.0, check: bool = True) -> str:
        """Standard output of kubectl with an administrator's rights."""
        argv = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig), *words]
        return commands.run(argv, stdin=stdin, timeout_s=timeout_s, check=check, env=self.client_environment())

    def helm(self, *words: str, timeout_s: float = 120.0) -> str:
        argv = [str(self.programs / "helm"), "--kubeconfig", str(self.kubeconfig), *words]
        return commands.run(argv, timeout_s=timeout_s, env=self.client_environment())

    def client_environment(self) -> dict[str, str]:
        """For programs that find the cluster by KUBECONFIG and kubectl or helm on PATH."""
        home = str(self.paths.root / "home")
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self.programs}:{os.environ.get('PATH', '')}",
            "HOME": home,
        }

    def api_client(self) -> Any:
        """The official client (`kubernetes.client.ApiClient`) with an administrator's rights; close it after use."""
        from kubernetes import config  # noqa: PLC0415  (imports for a second, and `up` does not need it)

        return config.new_client_from_config(str(self.kubeconfig))

    def node(self, name: str) -> Machine:
        for machine in self.nodes:
            if machine.name == name:
                return machine
        raise ClusterError(f"cluster {self.name!r} has no node {name!r}; it has {[node.name for node in self.nodes]}")

    def load(self, *which: images.Layout | Path) -> None:
        """Imports images into every node that is up."""
        images.import_everywhere(which, [node for node in self.nodes if node.init is not None])

    def load_python_base(self, *, report: Report = binaries.say) -> str:
        """Makes `localhost/python:3.11` available on every node; its name."""
        layout = images.python_base(report=report)
        self.load(layout)
        return layout.name

    def site_packages_volume(self, namespace: str, *, name: str, folder: Path | None = None) -> str:
        """A read-only claim in `namespace` over the site-packages of this Python; the claim's name.

        Pods mount it and set PYTHONPATH to the mount: with a base image that has the same minor version of Python they
        import torch without an image of 5 GB, and still pass Pod Security *restricted*. The folder is mounted and not
        the environment, whose interpreter may lie where a pod's user may not read.
        """
        source = folder or Path(next(path for path in sys.path if path.endswith("site-packages")))
        volume = f"{namespace}-{name}"
        spec: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        path = f"/api/v1/persistentvolumes/{volume}"
        self.api.apply(
            path,
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {
                    **spec,
                    "capacity": {"storage": "1Gi"},
                    "hostPath": {"path": str(source.resolve()), "type": "Directory"},
                    "claimRef": {"namespace": namespace, "name": name},
                    "persistentVolumeReclaimPolicy": "Retain",
                },
            },
        )
        # A claim that the controller sees before its volume is looked at again 15 s later.
        seen = ("Available", "Bound")
        until(lambda: self.api.get(path)["status"]["phase"] in seen, what=f"volume {volume}", timeout_s=30)
        self.api.apply(
            f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}",
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": namespace},
                "spec": {**spec, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
            },
        )
        return name

    def well(self) -> bool:
        """All its daemons run, the API server answers and every real node is Ready."""
        return self.missing() == [] and self.api.healthy() and self.not_ready() == []

    def not_ready(self) -> list[str]:
        """Real nodes that are absent or not Ready."""
        return nodes.not_ready(self.api, [node.name for node in self.nodes])

    def missing(self) -> list[str]:
        """Daemons that should run and do not, or stand still: `["kube-scheduler"]`."""
        return parts.missing(self.hub.record, self.options)

    def wait(self, probe: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """But not on after a component has ended: then its log says more than a time-out."""

        def look() -> bool:
            if probe():
                return True
            for name in self.hub.record.ended():
                tail = self.hub.log_tail(name)
                raise StartFailed(f"{name} ended while waiting for {what}; its log ends:\n{tail}")
            return False

        try:
            until(look, what=what, timeout_s=timeout_s, every_s=0.1)
        except Overdue as err:
            raise StartFailed(f"{err}; not Ready: {self.not_ready()}; logs are in {self.paths.logs}") from err

    def wait_nodes_ready(self, *, timeout_s: float = NODES_READY_TIMEOUT_S) -> None:
        self.wait(lambda: self.not_ready() == [], what="all nodes to be Ready", timeout_s=timeout_s)

    def memory_bytes(self) -> int:
        """Resident anonymous memory of the control plane and of every node's own daemons; pods are left out."""
        groups = [self.hub.cgroup, *(node.cgroup for node in self.nodes)]
        return sum(cgroups.memory_bytes(group) for group in groups)

    def route_services(self) -> None:
        """Leads the machine and the hub to ClusterIPs through the first node that is up."""
        for index, node in enumerate(self.nodes):
            if node.init is not None:
                network.route_services(self.hub, self.addresses, through=index)
                return

    # ---- starting parts; Faults uses these to bring them back

    def wait_api_ready(self) -> None:
        self.wait(self.api.healthy, what="the API server to be ready", timeout_s=API_READY_TIMEOUT_S)

    def start_part(self, part: str) -> Process:
        """A process of the control plane, by the name it has in `ps`."""
        words: dict[str, list[str]] = {
            "etcd": configs.etcd(self.paths),
            "kube-apiserver": configs.apiserver(self.paths, self.addresses, self.options),
            "kube-controller-manager": configs.controller_manager(self.paths, self.options),
            "kube-scheduler": configs.scheduler(self.paths, self.options),
            "coredns": configs.coredns(self.paths),
        }
        return self.hub.start(part, words[part])

    def boot_node(self, index: int) -> None:
        """Machine, disk, network, containerd; not yet the kubelet."""
        node = self.nodes[index]
        assert node.disk is not None
        if not node.disk.exists():
            nodes.make_disk(node.disk, gib=self.options.node_disk_gib)
        # A machine that comes back has no cgroups; with old ones the kubelet waits three seconds for each container.
        pods = f"{self.paths.cgroup}/{node.name}"
        cgroups.remove(pods, timeout_s=state.DOWN_TIMEOUT_S)
        cgroups.make(pods)
        node.boot()
        try:
            network.link_node(self.hub, node, self.addresses, index=index, nodes=self.options.nodes)
            self.start_containerd(index)
        except BaseException:
            node.kill()  # half of a node would look like one that is up
            raise

    def start_containerd(self, index: int) -> None:
        node = self.nodes[index]
        config = self.paths.config / node.name / "containerd.toml"
        process = node.start(f"{node.name}-containerd", ["containerd", "--config", str(config)])
        socket = Path(f"/proc/{node.pid}/root{configs.CONTAINERD_SOCKET}")

        def answers() -> bool:
            if not process.alive:
                raise StartFailed(f"{process.name} ended at once; its log ends:\n{node.log_tail(process.name)}")
            return socket.exists() and _serves_pods(socket)

        until(answers, what=f"containerd of {node.name}", timeout_s=CONTAINERD_TIMEOUT_S)

    def start_kubelet(self, index: int) -> None:
        """And kube-proxy: whichever of them does not run."""
        node = self.nodes[index]
        words = {
            f"{node.name}-kubelet": configs.kubelet(self.paths, self.addresses, index=index),
            f"{node.name}-kube-proxy": configs.kube_proxy(self.paths, self.addresses, self.options, index=index),
        }
        for name, argv in words.items():
            if node.record.read(name) is None:
                node.start(name, argv)


def _serves_pods(socket: Path) -> bool:
    """Whether it answers as a kubelet asks first, which ends where it does not. A socket may be there of
    a containerd that was killed, and one that lists its plugins may not have recovered its containers yet."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        ask = channel.unary_unary(CRI_VERSION, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=CRI_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def _make(paths: Paths, *, options: Options, programs: Path, report: Report, owner_pid: int | None) -> Cluster:
    started = time.monotonic()
    for folder in (paths.root, paths.processes, paths.logs, paths.disks, paths.config, paths.root / "home"):
        folder.mkdir(parents=True, exist_ok=True)
    paths.root.chmod(0o700)
    if owner_pid is not None:
        reaper.start(paths, owner_pid)
    hub = Machine("hub", paths, programs=programs)
    with binaries.use(programs) as used:
        hub.boot(holding=[used])
    addresses = network.link_hub(hub, report=report)
    pki.write(paths.pki, addresses, nodes=options.nodes)
    configs.write(paths, addresses, options)
    pki.write_kubeconfig(paths, addresses)
    cluster = Cluster(paths, options=options, addresses=addresses, programs=programs)
    cluster.start_part("etcd")
    cluster.start_part("kube-apiserver")
    small = images.small_images(programs)
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:

        def prepare(index: int) -> None:
            cluster.boot_node(index)
            for layout in small:
                images.import_layout(layout, cluster.nodes[index])

        prepared: list[Future[None]] = [pool.submit(prepare, index) for index in range(options.nodes)]
        try:
            cluster.wait_api_ready()
            report(f"{paths.name}: API server ready after {time.monotonic() - started:.1f} s")
            for part in ("kube-controller-manager", "kube-scheduler", "coredns"):
                cluster.start_part(part)
            for path, manifest in configs.rights() + configs.dns_service(addresses):
                cluster.api.apply(path, manifest)
        finally:
            for done in prepared:
                done.exception()
    for done in prepared:
        done.result()
    for index in range(options.nodes):
        cluster.start_kubelet(index)
    cluster.route_services()
    cluster.wait_nodes_ready()
    report(f"{paths.name}: {options.nodes} nodes Ready after {time.monotonic() - started:.1f} s")
    until(
        lambda: (
            dns.resolve("kubernetes.default.svc.cluster.local", server=addresses.dns_service) == [addresses.api_service]
        ),
        what="the cluster's DNS to answer",
        timeout_s=DNS_TIMEOUT_S,
    )
    extras.start(cluster, report)
    paths.record.write_text(
        json.dumps({"options": options.to_json(), "net": addresses.net, "programs": str(programs)}), encoding="utf-8"
    )
    report(f"{paths.name} is up after {time.monotonic() - started:.1f} s; export KUBECONFIG={paths.kubeconfig}")
    return cluster


def _running(paths: Paths, programs: Path) -> Cluster | None:
    found = _read(paths)
    if found is None or found.programs != programs or reaper.is_orphan(paths) or found.missing():
        return None
    try:  # on busy cores one look may find it slow, and who takes it for dead takes it down
        return until(lambda: found if found.well() else None, what=f"{found.name} to be well", timeout_s=WELL_TIMEOUT_S)
    except Overdue:
        return None


def _read(paths: Paths) -> Cluster | None:
    """The cluster that the state folder describes if its hub runs; a torn or absent record is no cluster."""
    try:
        fields = json.loads(paths.record.read_bytes())
        options = Options.from_json(fields["options"])
        addresses = Addresses(net=int(fields["net"]))
        cluster = Cluster(paths, options=options, addresses=addresses, programs=Path(fields["programs"]))
    except (OSError, ValueError, KeyError, TypeError, ClusterError):
        return None
    return cluster if cluster.hub.init is not None else None


def _clear(paths: Paths) -> bool:
    watching = reaper.keepers(paths).read(reaper.REAPER)
    found = state.clear(paths)
    reaper.dismiss(watching)
    return found
