"""What the machine must have: root, Linux with a few abilities, some Debian packages (installed when missing).

`check()` is asked before anything is started, `check_root()` before what is there is used or removed. The `cluster`
fixture turns MissingRequirement into a skip, or under CI=true into a failure. Programs that we build ourselves are
binaries.py.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.testcluster import cgroups, commands
from tools.testcluster.errors import CommandFailed, MissingRequirement

# What must be there, and the Debian package that brings it.
FOR_A_CLUSTER: Mapping[str, str] = {
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mkfs.ext4": "e2fsprogs",
    "sysctl": "procps",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
}
FOR_BASE_IMAGES: Mapping[str, str] = {"debootstrap": "debootstrap"}
APT_TIMEOUT_S = 600.0
FILESYSTEMS = Path("/proc/filesystems")
DEV, MOUNTS, SYS_BLOCK = Path("/dev"), Path("/proc/self/mounts"), Path("/sys/block")
LOOP_CONTROL = DEV / "loop-control"
BRIDGE_SETTINGS = Path("/proc/sys/net/bridge")
"""There once the kernel shows iptables what a bridge passes (br_netfilter)."""


def check_root() -> None:
    """All that a cluster asks that is there already: what would free a loop device must not want one."""
    if sys.platform != "linux":
        raise MissingRequirement(f"a test cluster needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise MissingRequirement(f"a test cluster needs root, and this is user {os.geteuid()}; run it with sudo")


def check(*, loops: int = 1) -> None:
    """MissingRequirement with one sentence when this machine cannot run a test cluster of `loops` nodes."""
    check_root()
    if not (_knows_overlay() or (_loads_module("overlay") and _knows_overlay())):
        raise MissingRequirement("a test cluster needs overlayfs, which this kernel neither has nor can load")
    try:
        commands.run(["unshare", "--mount", "--net", "--pid", "--uts", "--fork", "true"], timeout_s=10)
    except CommandFailed as err:
        raise MissingRequirement(f"a test cluster needs mount, network and pid namespaces: {err}") from err
    # Without it pods of one node talk past its iptables: no policy holds, no Service leads back to them.
    if not (BRIDGE_SETTINGS.exists() or (_loads_module("br_netfilter") and BRIDGE_SETTINGS.exists())):
        raise MissingRequirement("a test cluster needs br_netfilter, which this kernel neither has nor can load")
    cgroups.check()
    if loops:
        _check_loops(loops)


def _knows_overlay() -> bool:
    return "overlay" in FILESYSTEMS.read_text(encoding="ascii").split()


def _loads_module(name: str) -> bool:
    """Debian has overlay, loop and br_netfilter as modules, which nobody may have wanted yet."""
    try:
        commands.run(["modprobe", name], timeout_s=20)
    except CommandFailed:  # no modprobe, as in a container, or no such module
        return False
    return True


def _check_loops(wanted: int) -> None:
    """A node's disk is a file behind a loop device."""
    try:
        if not LOOP_CONTROL.exists():
            _loads_module("loop")
        device = commands.run(["losetup", "--find"], timeout_s=10).strip()
    except CommandFailed as err:
        raise MissingRequirement(f"a test cluster needs loop devices: {err}") from err
    if not Path(device).exists():
        raise MissingRequirement(
            f"a test cluster needs loop devices, and {device} is not there; give a container the machine's /dev"
        )
    # The kernel makes as many as are wanted, but in a /dev of its own alone.
    if not any(line.split()[1:3] == [str(DEV), "devtmpfs"] for line in MOUNTS.read_text().splitlines()):
        free = [path for path in DEV.glob("loop[0-9]*") if not (SYS_BLOCK / path.name / "loop").exists()]
        if len(free) < wanted:
            raise MissingRequirement(
                f"a test cluster needs a loop device for each of {wanted} nodes, and {len(free)} of those in {DEV} are "
                "free; give a container the machine's /dev, or take other clusters down"
            )


def missing(wanted: Mapping[str, str]) -> list[str]:
    """Debian packages to install, in alphabetical order."""
    # Debian keeps root's programs where a plain user's PATH does not look.
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return sorted({package for program, package in wanted.items() if not shutil.which(program, path=path)})


def ensure(wanted: Mapping[str, str], *, report: Callable[[str], None]) -> None:
    """Installs the Debian packages that are missing; MissingRequirement names those that cannot be had."""
    packages = missing(wanted)
    if not packages:
        return
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise MissingRequirement(f"these Debian packages are missing and there is no apt-get to install them: {names}")
    report(f"installing Debian packages: {names}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    try:
        commands.run(install, env=env, timeout_s=APT_TIMEOUT_S)
    except CommandFailed:
        # Most often the package lists are older than the mirror.
        try:
            commands.run(["apt-get", "update"], env=env, timeout_s=APT_TIMEOUT_S)
            commands.run(install, env=env, timeout_s=APT_TIMEOUT_S)
        except CommandFailed as err:
            raise MissingRequirement(
                f"these Debian packages are missing and could not be installed: {names}. {err}"
            ) from err
    if still := missing(wanted):
        raise MissingRequirement(f"apt-get installed {names}, but their programs are not there: {' '.join(still)}")
