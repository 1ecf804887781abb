"""The cluster's folders in the machine's cgroup hierarchies: made at `up`, listed to find processes, removed at `down`.

Every process of a cluster, its pods included, lives below the folder `rlinf-tc-<name>`. The kernel keeps that list, so
it is right even when the state folder was lost: `down` ends exactly the pids that it finds there.

    rlinf-tc-NAME/hub             API server, etcd, ...
    rlinf-tc-NAME/node-0-system   containerd, kubelet, kube-proxy of node-0
    rlinf-tc-NAME/node-0          its pods (the kubelet's cgroupRoot)

Both cgroup versions are written for; only v1 was available to run on (docs/testcluster.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tools.testcluster.errors import ClusterError, MissingRequirement, Overdue

_ROOT = Path("/sys/fs/cgroup")
FOR_BUILDS = "rlinf-buildkit-"
"""Begin of the name of the group in which a process builds images; its pid follows. No cluster's group begins so."""


def hierarchies() -> list[Path]:
    """Mount points of every cgroup hierarchy: one per controller with v1, one in all with v2.

    Beside v1 there may be an empty v2 hierarchy, too: nothing is made there by us, but runc does, so it is cleaned.
    """
    found: list[Path] = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] in ("cgroup", "cgroup2"):
            found.append(Path(fields[4]))
    if not found:
        raise MissingRequirement("no cgroup hierarchy is mounted under /sys/fs/cgroup, so no kubelet can run here")
    return found


def is_v2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _ours() -> list[Path]:
    """Hierarchies in which we make folders."""
    return [top for top in hierarchies() if is_v2() or not (top / "cgroup.controllers").exists()]


def check() -> None:
    """MissingRequirement where no cgroup can be made, as in most containers."""
    for top in _ours():
        probe = top / f"rlinf-tc-.probe-{os.getpid()}"
        try:
            probe.mkdir(exist_ok=True)
            probe.rmdir()
            if is_v2():  # a container's own top may hold processes, and then gives nothing on to what is made in it
                _give_on(top)
        except OSError as err:
            raise MissingRequirement(
                f"a test cluster needs to make cgroups, and {top} refuses: {err.strerror}; run it outside of a "
                "container, or in one that has the machine's cgroups to write"
            ) from err


def make(group: str) -> None:
    """Makes `group`, for example `rlinf-tc-dev/hub`, in every hierarchy, able to hold processes."""
    for top in _ours():
        here = top
        for part in group.split("/"):
            parent, here = here, here / part
            here.mkdir(exist_ok=True)
            if (here / "cpuset.cpus").exists() and not is_v2():
                # A new cpuset is empty and refuses every process until it has both.
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (here / file).write_text((parent / file).read_text(encoding="ascii"), encoding="ascii")
            if is_v2():
                _give_on(parent)


def _give_on(folder: Path) -> None:
    """With v2: what is made in it may use every controller that it has."""
    have = (folder / "cgroup.controllers").read_text(encoding="ascii").split()
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in have), encoding="ascii")


def folders(group: str) -> list[Path]:
    """The group's folder in every hierarchy that has it."""
    return [top / group for top in hierarchies() if (top / group).is_dir()]


def pids(group: str) -> set[int]:
    """Every process below `group`, in this process's pid namespace."""
    return _pids(group) - {0}


def inhabited(group: str) -> bool:
    """A process lives below `group`, be it in a pid namespace that this process does not see into."""
    return bool(_pids(group))


def _pids(group: str) -> set[int]:
    """0 stands for those of other pid namespaces."""
    found: set[int] = set()
    for folder in folders(group):
        for where, _, files in os.walk(folder):
            if "cgroup.procs" in files:
                try:
                    text = (Path(where) / "cgroup.procs").read_text(encoding="ascii")
                except (FileNotFoundError, OSError):  # the folder went away, or its last process did, while we looked
                    continue
                found.update(int(word) for word in text.split())
    return found


def kill(group: str, *, timeout_s: float) -> int:
    """Ends every process below `group` by its pid and waits until none is left; how many there were at first."""
    first = len(pids(group))
    deadline = time.monotonic() + timeout_s
    while left := pids(group):
        if time.monotonic() >= deadline:
            raise Overdue(f"{len(left)} processes below cgroup {group} did not end in {timeout_s:g} s: {sorted(left)}")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    return first


def remove(group: str, *, timeout_s: float) -> None:
    """Removes the group's folders, deepest first. The kernel frees them a moment after their last process."""
    deadline = time.monotonic() + timeout_s
    while remaining := folders(group):
        for folder in remaining:
            for where, _, _ in os.walk(folder, topdown=False):
                try:
                    os.rmdir(where)
                except FileNotFoundError:
                    continue
                except OSError as err:
                    if time.monotonic() >= deadline:
                        raise ClusterError(f"cgroup folder {where} could not be removed: {err.strerror}") from err
                    break
        time.sleep(0.02)


def remove_empty(group: str, *, timeout_s: float) -> None:
    """Removes the group's folders, unless a process lives there. No error where they are not freed in time."""
    deadline = time.monotonic() + timeout_s
    while (remaining := folders(group)) and not inhabited(group):
        for folder in remaining:
            for where, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(where)
        if time.monotonic() >= deadline:
            return
        time.sleep(0.02)


def remove_abandoned() -> None:
    """Groups of image builds whose process was killed: they are named after it."""
    for group in {path.name for top in hierarchies() for path in top.glob(f"{FOR_BUILDS}*")}:
        if not Path(f"/proc/{group.removeprefix(FOR_BUILDS)}").exists():
            remove_empty(group, timeout_s=0)


def memory_bytes(group: str) -> int:
    """Resident anonymous memory of everything below `group`; page cache is not counted."""
    if is_v2():
        return _stat_field(_ROOT / group / "memory.stat", "anon")
    return _stat_field(_ROOT / "memory" / group / "memory.stat", "total_rss")


def _stat_field(path: Path, field: str) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == field:
            return int(value)
    raise ClusterError(f"{path} has no field {field!r}")
