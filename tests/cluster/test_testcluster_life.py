"""A cluster comes up from whatever an earlier one left, and goes without a trace. Each test has a cluster of its own,
beside the one of the whole run."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.bars import by_load
from tests.cluster.pods import create, make_namespace, pod, wait_ready
from tools.testcluster import binaries, cgroups, commands, locks, reaper, state
from tools.testcluster.cluster import REPOSITORY, Cluster
from tools.testcluster.errors import ClusterError, NoSuchCluster
from tools.testcluster.layout import Options, Paths
from tools.testcluster.machine import Process
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

UP_BAR_S = 25.0
DOWN_BAR_S = 8.0
MEMORY_BAR_BYTES = int(1.2 * 2**30)
ONE_NODE = Options(nodes=1)


@dataclass(frozen=True)
class Traces:
    """What a cluster could leave: things that bear its name, and things of the machine that it must not touch.

    Other clusters may come and go meanwhile, so what is theirs by name is not looked at.
    """

    processes: frozenset[str]
    namespaces: frozenset[str]
    cgroups: frozenset[str]
    links: frozenset[str]
    loops: frozenset[str]
    mounts: frozenset[str]
    iptables: tuple[str, ...]
    folders: frozenset[str]
    state: frozenset[str]


def traces(name: str) -> Traces:
    group = f"rlinf-tc-{name}"
    processes, namespaces = set(), set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            environment = (folder / "environ").read_bytes().decode(errors="replace")
            where = (folder / "cgroup").read_text()
            named = {f"{kind}:{os.readlink(folder / 'ns' / kind)}" for kind in ("mnt", "net", "pid", "uts")}
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended meanwhile, or the machine's own
            continue
        if f"/{group}/" in where or f"--name {name}" in words or f"RLINF_TESTCLUSTER={name}\0" in environment:
            processes.add(f"{folder.name} {words[:80]}")
            namespaces |= named
    saved = commands.run(["iptables-save"], check=False) + commands.run(["iptables-legacy-save"], check=False)
    folders = {
        str(path)
        for top in ("/run", "/run/netns", "/var/lib", "/var/log", "/opt", "/etc/cni", "/etc/cdi", "/usr/libexec")
        if Path(top).is_dir()
        for path in Path(top).iterdir()
    }
    links = json.loads(commands.run(["ip", "-json", "link"]))
    backing = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return Traces(
        processes=frozenset(processes),
        namespaces=frozenset(namespaces),
        cgroups=frozenset(
            str(path) for found in cgroups.folders(group) for path in [found, *found.rglob("*")] if path.is_dir()
        ),
        links=frozenset(link["ifname"] for link in links if link.get("ifalias") == group),
        loops=frozenset(path for path in backing if path.startswith(f"{Paths.of(name).root}/")),
        mounts=frozenset(line.split(" ", 4)[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        # Chains too, without the count of packets that their policy met.
        iptables=tuple(line.partition(" [")[0] for line in saved.splitlines() if not line.startswith("#")),
        folders=frozenset(folders),
        state=frozenset(
            path.name for top in (state.root(), locks.FOLDER) for path in top.iterdir() if name in path.name
        ),
    )


@pytest.fixture
def name(cluster: Cluster) -> Iterator[str]:
    """Of a cluster to make; `cluster`, which runs beside it, must not be disturbed."""
    made = f"life-{uuid.uuid4().hex[:6]}"
    yield made
    Cluster.down(made)
    until(cluster.well, what="the cluster beside it to be well", timeout_s=20)


def up(name: str, options: Options = ONE_NODE) -> Cluster:
    return Cluster.up(name, options, report=binaries.say, owner_pid=os.getpid())


def runs_pods(cluster: Cluster) -> None:
    make_namespace(cluster, "t")
    create(cluster, "t", pod("p"))
    wait_ready(cluster, "t", "p")


def test_down_leaves_no_trace_of_a_cluster_that_ran_pods(name: str):
    before = traces(name)
    started = time.monotonic()
    made = up(name, Options(nodes=2))
    up_s = time.monotonic() - started
    runs_pods(made)
    made.faults.cut("node-0", "node-1")
    during = traces(name)
    # The count sees what there is to see.
    assert len(during.processes) > 15
    assert len(during.namespaces) >= 4 * 3, "four kinds for the hub and each node, and those of the pod"
    assert len(during.loops) == 2
    assert during.cgroups
    assert during.links
    assert during.iptables == before.iptables, "a running cluster touches no iptables rule of the machine"
    assert during.mounts == before.mounts
    started = time.monotonic()
    assert Cluster.down(name)
    down_s = time.monotonic() - started
    print(f"up {up_s:.1f} s, down {down_s:.1f} s")
    assert traces(name) == before
    assert not Paths.of(name).root.exists()
    assert up_s <= by_load(UP_BAR_S)
    assert down_s <= by_load(DOWN_BAR_S)


def test_up_again_returns_the_cluster_that_runs(name: str):
    nobodys = Paths.of(f"left-{uuid.uuid4().hex[:6]}")
    reaper.keepers(nobodys).write(Process(name=reaper.OWNER, pid=2**22 - 1, started_ticks=1))
    first = up(name)
    assert not nobodys.root.exists(), "what a killed run and its killed reaper left goes with the next start"
    assert name in Cluster.running()
    again = up(name)
    assert again.addresses == first.addresses
    assert again.hub.init == first.hub.init
    with pytest.raises(ClusterError, match="take it down first"):
        up(name, Options(nodes=2))


def test_up_works_after_every_process_was_killed(name: str):
    first = up(name)
    runs_pods(first)
    killed = first.hub.init
    cgroups.kill(first.paths.cgroup, timeout_s=10)
    second = up(name)
    assert second.hub.init != killed
    runs_pods(second)


def test_up_works_after_a_component_was_killed_that_readyz_does_not_know(name: str):
    first = up(name)
    killed = first.hub.record.read("kube-scheduler")
    assert killed is not None
    killed.end()
    assert first.api.healthy(), "nodes are Ready and the API server answers all the same"
    assert first.missing() == ["kube-scheduler"]
    second = up(name)
    assert second.missing() == []
    runs_pods(second)


@pytest.mark.parametrize("damage", ["torn", "removed"])
def test_up_works_after_a_power_cut_of_the_state_folder(name: str, damage: str):
    first = up(name)
    files = [path for path in first.paths.root.rglob("*") if path.is_file() and path.suffix != ".ext4"]
    if damage == "removed":
        shutil.rmtree(first.paths.root)
    for number, path in enumerate(files if damage == "torn" else []):
        path.write_bytes(b"" if number % 2 else b"\0\xff\xfe rubbish")
    second = up(name)
    runs_pods(second)


def test_two_clusters_run_side_by_side(name: str, cluster: Cluster):
    other = up(name)
    assert other.addresses.net != cluster.addresses.net
    runs_pods(other)
    assert len(cluster.api.get("/api/v1/nodes")["items"]) == 2
    assert len(other.api.get("/api/v1/nodes")["items"]) == 1


def test_a_cluster_ends_with_its_owner_however_that_ends(name: str):
    before = traces(name)
    program = (
        "import os, sys, time\n"
        "from tools.testcluster.cluster import Cluster\n"
        "from tools.testcluster.layout import Options\n"
        f"Cluster.up({name!r}, Options(nodes=1), report=print, owner_pid=os.getpid())\n"
        "print('made', flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        until(lambda: owner.stdout is not None and "made" in owner.stdout.readline(), what="the cluster", timeout_s=150)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
        if owner.stdout is not None:
            owner.stdout.close()
    until(lambda: traces(name) == before, what="every trace of the cluster to go", timeout_s=60, every_s=0.3)


def test_attaching_to_nothing_says_how_to_start_it():
    with pytest.raises(NoSuchCluster, match=r"tools\.testcluster up --name nobody"):
        Cluster.attach("nobody")
    assert Cluster.down("nobody") is False


def test_a_full_disk_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(ClusterError, match=r"needs 3 GiB of disk under .* and 0\.0 GiB are free"):
        up("full")


def test_control_plane_and_two_nodes_fit_the_memory_bar():
    """Of a new cluster: an API server that has served hundreds of tests keeps what it took for them."""
    with Cluster.up(f"memory-{os.getpid()}", Options(), report=binaries.say, owner_pid=os.getpid()) as made:
        resident = 0
        for pid in {pid for group in (made.hub.cgroup, *(n.cgroup for n in made.nodes)) for pid in cgroups.pids(group)}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/statm") as statm:
                resident += int(statm.read().split()[1]) * 4096  # a short command of the kubelet's may be over by now
        print(f"resident: {resident / 2**20:.0f} MiB, of it anonymous {made.memory_bytes() / 2**20:.0f} MiB")
    # Shared pages are counted once per process here, so the true figure is lower.
    assert resident <= MEMORY_BAR_BYTES
