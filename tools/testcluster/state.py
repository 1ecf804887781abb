"""The state root: a folder per cluster, and what failures left there; how all of a cluster is removed.

    NAME/            of a cluster that is up, comes up or was killed; gone after `down`
    .removing-NAME-* while it is removed
    .failed-NAME/    logs of a start that failed, and of a reaper that did; the newest KEPT_FAILURES of all names

Locks are the machine's: locks.py. `Cluster` and reaper.py call this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tools.testcluster import cgroups, locks, network
from tools.testcluster.errors import ClusterError, MissingRequirement
from tools.testcluster.layout import Paths, is_name
from tools.testcluster.waiting import until

DOWN_TIMEOUT_S = 20.0
LEAST_FREE_BYTES = 3 << 30
"""Images, etcd and logs of two nodes with room to spare."""
ABANDONED_AFTER_S = 3600.0
"""A removal takes seconds; one in progress must not be disturbed."""
KEPT_FAILURES = 3
"""A few MB each; test runs have names of their own, so nobody would ever write over theirs."""


def root() -> Path:
    return Paths.of("any").root.parent


def locked(paths: Paths, *, report: Callable[[str], None]) -> AbstractContextManager[None]:
    """One `up` or `down` of a name at a time, on the whole machine."""
    return locks.held(paths.name, what=f"another `up` or `down` of {paths.name}", report=report)


def names() -> list[str]:
    """Names that a folder or a cgroup bears, of clusters that run or not."""
    top = root()
    named = {path.name for path in top.iterdir() if path.is_dir()} if top.is_dir() else set()
    prefix = Paths.of("any").cgroup.removesuffix("any")
    with contextlib.suppress(MissingRequirement):  # no cgroups, no clusters in them
        for hierarchy in cgroups.hierarchies():
            named |= {path.name.removeprefix(prefix) for path in hierarchy.glob(f"{prefix}*")}
    return sorted(name for name in named if not name.startswith("."))


def is_elsewhere(name: str) -> bool:
    """It runs without a folder here: cgroups are the machine's, and another may have another state root."""
    return is_name(name) and not Paths.of(name).root.exists() and cgroups.inhabited(Paths.of(name).cgroup)


def elsewhere(paths: Paths) -> str | None:
    """Where the state folder of a cluster that bears the name and runs is, when it is not ours."""
    for pid in sorted(cgroups.pids(f"{paths.cgroup}/hub")):
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
        environment = dict(word.partition("=")[::2] for word in words)
        if environment.get("RLINF_TESTCLUSTER") != paths.name or "PID_FILE" not in environment:
            continue  # only the hub's PID 1 has both: machine.py
        root = Path(environment["PID_FILE"]).parent.parent
        # As the hub sees it. A cluster whose folder was lost is nobody's any more.
        if root != paths.root and Path(f"/proc/{pid}/root{root}").is_dir():
            return str(root)
    if is_elsewhere(paths.name) and not cgroups.pids(paths.cgroup):
        return "a place that only another container sees"
    return None


def check_not_elsewhere(paths: Paths) -> None:
    """What bears the name is cleared before a start, and a cluster in use would go with it."""
    if where := elsewhere(paths):
        raise ClusterError(
            f"a cluster {paths.name!r} runs on this machine already, with its state in {where}, not {paths.root}; "
            "choose another name, or take that one down with RLINF_TESTCLUSTER_STATE set to the folder above its own"
        )


def check_disk(paths: Paths) -> None:
    paths.root.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.root.parent).free
    if free < LEAST_FREE_BYTES:
        raise ClusterError(
            f"a test cluster needs {LEAST_FREE_BYTES / 2**30:.0f} GiB of disk under {paths.root.parent}, and "
            f"{free / 2**30:.1f} GiB are free; free some or set RLINF_TESTCLUSTER_STATE to another disk"
        )


def failures(paths: Paths) -> Path:
    """The folder for what failed of a cluster of that name; those that nobody will ask for any more go."""
    kept = paths.root.with_name(f".failed-{paths.name}")
    kept.mkdir(parents=True, exist_ok=True)
    os.utime(kept)
    by_age = sorted(kept.parent.glob(".failed-*"), key=_changed_at)
    for old in by_age[:-KEPT_FAILURES]:
        shutil.rmtree(old, ignore_errors=True)
    return kept


def _changed_at(path: Path) -> float:
    """What another prunes meanwhile is as old as can be."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def keep_logs(paths: Paths, report: Callable[[str], None]) -> None:
    """The logs of a start that failed outlive the state folder; on a full disk as many as it takes."""
    if not paths.logs.is_dir():
        return
    try:
        kept = failures(paths)
        shutil.rmtree(kept)
        shutil.copytree(paths.logs, kept)
    except OSError as err:
        why = err.args[0][0][2] if isinstance(err, shutil.Error) else err  # of many files the first
        report(f"the logs of the start that failed could not all be kept: {why}")
        return
    report(f"logs of the start that failed: {kept}")


def clear(paths: Paths) -> bool:
    """Ends and removes all that bears the cluster's name. Needs no state folder: the kernel's cgroups list the pids."""
    found = paths.root.exists() or bool(cgroups.folders(paths.cgroup))
    cgroups.kill(paths.cgroup, timeout_s=DOWN_TIMEOUT_S)
    network.forget(paths.cgroup)
    cgroups.remove(paths.cgroup, timeout_s=DOWN_TIMEOUT_S)
    until(lambda: not loop_devices(paths), what=f"the disks of {paths.name} to be released", timeout_s=DOWN_TIMEOUT_S)
    if paths.root.exists():
        # Moved first: a removal that is cut short must not look like a cluster's folder.
        doomed = paths.root.with_name(f".removing-{paths.name}-{uuid.uuid4().hex[:8]}")
        paths.root.replace(doomed)
        shutil.rmtree(doomed)
    for left in paths.root.parent.glob(f".removing-{paths.name}-{'[0-9a-f]' * 8}"):  # `dev-2` is no part of `dev`
        shutil.rmtree(left, ignore_errors=True)
    return found


def remove_abandoned() -> None:
    """What those left who were killed while they made or removed a cluster, whose name may never come again."""
    locks.remove_abandoned()
    with contextlib.suppress(MissingRequirement):
        cgroups.remove_abandoned()
    for left in root().glob(".removing-*"):
        with contextlib.suppress(FileNotFoundError):  # its own remover was quicker
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)


def loop_devices(paths: Paths) -> list[str]:
    """Loop devices whose file is one of the cluster's disks; the kernel lets them go with the node's namespace."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            file = backing.read_text(encoding="utf-8").strip()
        except OSError:  # released while we looked
            continue
        if file.startswith(f"{paths.disks}/"):
            found.append(backing.parent.parent.name)
    return found
