"""Takes a cluster down when its owner, a test run most often, has ended, however that ended.

Cluster.up(owner_pid=...) ──> start(): folder `keepers` of the state folder, a process of its own
                                 └──> `testcluster reap` = follow(): waits for the owner's end, then take_down()
Cluster.down ──> dismiss(): the reaper ends with its cluster
Cluster.up of any name ──> sweep(): clusters whose owner and reaper have both ended, by a reboot for instance
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

from tools.testcluster import state
from tools.testcluster.errors import ClusterError, StartFailed
from tools.testcluster.layout import REPOSITORY, Paths, is_name
from tools.testcluster.machine import Process, Record, orphans_go_to_init
from tools.testcluster.waiting import until

OWNER, REAPER = "owner", "reaper"
START_TIMEOUT_S = 20.0
LOOK_EVERY_S = 60.0
PATIENCE_S = 300.0
"""How long it tries: on a machine that is busy enough one attempt to end all processes may not be enough."""
AGAIN_AFTER_S = 5.0


def keepers(paths: Paths) -> Record:
    """Who looks after the cluster: its owner, and its reaper. Not among its daemons, as it goes on without them."""
    return Record(paths.root / "keepers")


def start(paths: Paths, owner_pid: int) -> None:
    record = keepers(paths)
    owner = Process.of_pid(OWNER, owner_pid)
    record.write(owner)
    pid_file = record.folder / ".pid"
    try:
        with orphans_go_to_init():
            subprocess.run(
                # The shell tells its pid and becomes the reaper.
                ["setsid", "--fork", "sh", "-c", 'echo "$$" >"$0"; exec "$@"', str(pid_file)]
                + [sys.executable, "-m", "tools.testcluster", "reap", "--name", paths.name]
                + ["--owner-pid", str(owner.pid), "--owner-started", str(owner.started_ticks)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=REPOSITORY,
                timeout=START_TIMEOUT_S,
                check=True,
            )
    except (subprocess.SubprocessError, OSError) as err:
        raise StartFailed(f"the reaper of {paths.name} could not be started: {err}") from err
    until(
        lambda: pid_file.exists() and pid_file.read_bytes().endswith(b"\n"),
        what=f"the reaper of {paths.name} to start",
        timeout_s=START_TIMEOUT_S,
        every_s=0.003,
    )
    record.write(Process.of_pid(REAPER, int(pid_file.read_bytes())))
    pid_file.unlink()


def follow(paths: Paths, owner: Process, *, down: Callable[[str], object]) -> bool:
    """Waits until the owner has ended and takes the cluster down; False when there is nothing to take down any more."""
    try:
        handle = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        handle = None
    if handle is not None and owner.alive:
        while not select.select([handle], [], [], LOOK_EVERY_S)[0]:
            if not _concerns_us(paths):
                return False
    if not _concerns_us(paths):
        return False
    take_down(paths, down=down)
    return True


def _concerns_us(paths: Paths) -> bool:
    """Not any more when the state folder was lost and `up` has made another cluster of that name, or nobody has."""
    reaper = keepers(paths).read(REAPER)
    return reaper is not None and reaper.pid == os.getpid()


def take_down(
    paths: Paths, *, down: Callable[[str], object], patience_s: float = PATIENCE_S, every_s: float = AGAIN_AFTER_S
) -> None:
    """Tries again while it fails; each failure is in `.failed-NAME/reaper.log` of the state root."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            down(paths.name)
            return
        except (ClusterError, OSError) as err:
            _log(paths, f"{paths.name} could not be taken down: {err}")
            if time.monotonic() >= deadline:
                raise
            time.sleep(every_s)


def _log(paths: Paths, text: str) -> None:
    """For people; a full disk, or a folder that another prunes, must not end the reaper."""
    with contextlib.suppress(OSError), (state.failures(paths) / "reaper.log").open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def dismiss(reaper: Process | None) -> None:
    """Ends the reaper of a cluster that is gone, if it is not the one that asks."""
    if reaper is not None and reaper.pid != os.getpid():
        reaper.end()


def is_orphan(paths: Paths) -> bool:
    """Its owner has ended, and it runs only until its reaper has its turn."""
    record = keepers(paths)
    return (record.folder / OWNER).is_file() and record.read(OWNER) is None


def fate(paths: Paths) -> str:
    """For people: "it stays until `down`", or "it ends with process 4711"."""
    owner = keepers(paths).read(OWNER)
    return "it stays until `down`" if owner is None else f"it ends with process {owner.pid}"


def sweep(report: Callable[[str], None], *, clear: Callable[[Paths], object]) -> None:
    """Takes down what nobody looks after any more. `clear` is called with the cluster's lock held."""
    for paths in map(Paths.of, filter(is_name, state.names())):
        if not _abandoned(paths):
            continue
        try:
            with state.locked(paths, report=report):
                if _abandoned(paths):  # still: whom we waited for may have made it anew
                    report(f"{paths.name} was left by a process that is gone; taking it down")
                    clear(paths)
        except (ClusterError, OSError) as err:  # it is not what the caller wants to start
            report(f"{paths.name} could not be taken down: {err}")
    state.remove_abandoned()


def _abandoned(paths: Paths) -> bool:
    """An owner was recorded, and neither it nor the reaper lives. What runs is not another's of the same name."""
    record = keepers(paths)
    return (record.folder / OWNER).is_file() and not record.running() and state.elsewhere(paths) is None
