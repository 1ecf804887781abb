"""Builds the cluster's programs from go/go.mod and keeps them outside the checkout.

The cache folder's name is a hash of everything that decides what the programs are: go.mod, go.sum, our own Go sources,
the toolchain's version, flags and tags. A folder is complete or absent: a build happens in a scratch folder and is
moved into place at its end, so one that was killed leaves nothing that could be taken for a program. One that a power
cut has torn counts as absent (seals.py).

Not for Debian's programs (runc, iptables ...): those are requirements.py. This file and what it imports need Python
alone, so that a build can run beside the making of .venv:

    python3 -m tools.testcluster.binaries core
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tools.testcluster import commands, requirements, seals
from tools.testcluster.errors import BuildFailed, ClusterError, MissingRequirement, NotBuilt

KUBERNETES = "v1.36.3"
HELM = "v3.22.0"
GO_MODULE = Path(__file__).with_name("go")
BUILDKIT_MODULE = Path(__file__).with_name("go-buildkit")
KUEUE_MODULE = Path(__file__).with_name("go-kueue")
JOBSET_MODULE = Path(__file__).with_name("go-jobset")
COSCHEDULING_MODULE = Path(__file__).with_name("go-coscheduling")
VOLCANO_MODULE = Path(__file__).with_name("go-volcano")
# Snapshotters that need a library or a device this cluster never has.
TAGS = "no_btrfs no_zfs no_devmapper"
BUILD_TIMEOUT_S = 3600.0
STAMP = ".toolchain"
"""End of the name of a file beside a folder of programs: which Go built them."""
USED = ".used"
"""And of one that is locked while somebody uses them."""
_VERSION = "k8s.io/component-base/version"
LDFLAGS = (
    # Without the version API discovery and `kubectl version` are wrong.
    f"-s -w -X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=36"
    f" -X {_VERSION}.gitTreeState=clean -X helm.sh/helm/v3/internal/version.version={HELM}"
)
_OWN = "rlinf.io/tools/testcluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSet:
    """What is built, and cached, together."""

    name: str
    module: Path
    programs: dict[str, str]
    """File name to Go package."""
    files: dict[str, str] = field(default_factory=dict)
    """What of its modules' sources the programs need at run time: name here to `module:path`, a folder or a file."""
    of_all: bool = True
    """Whether it is one of `all`, those that tests need."""


CORE = BuildSet(
    name="core",
    module=GO_MODULE,
    programs={
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
        "etcd": "go.etcd.io/etcd/server/v3",
        "containerd": "github.com/containerd/containerd/v2/cmd/containerd",
        "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "ctr": "github.com/containerd/containerd/v2/cmd/ctr",
        "helm": "helm.sh/helm/v3/cmd/helm",
        "kwok": "sigs.k8s.io/kwok/cmd/kwok",
        "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform",
        "coredns": f"{_OWN}/coredns",
        "pause": f"{_OWN}/pause",
        "dradriver": f"{_OWN}/dradriver",
    },
)
# Built for image tests only: buildkit's own requirements disagree with Kubernetes 0.36's.
BUILDKIT = BuildSet(
    name="buildkit",
    module=BUILDKIT_MODULE,
    programs={
        "buildkitd": "github.com/moby/buildkit/cmd/buildkitd",
        "buildctl": "github.com/moby/buildkit/cmd/buildctl",
    },
)
# For clusters `--with kueue` only: Kueue is made of Kubernetes 0.35's modules, and the core of 0.36's.
KUEUE = BuildSet(
    name="kueue",
    module=KUEUE_MODULE,
    programs={"kueue": f"{_OWN}/kueue/manager"},
    files={
        "crds": "sigs.k8s.io/kueue:config/components/crd/bases",
        "webhooks.yaml": "sigs.k8s.io/kueue:config/components/webhook/manifests.yaml",
    },
)
# For clusters `--with jobset` only, which are those of a benchmark. Its requirements are older than Kueue's: the stock
# program does not compile with Kueue's controller-runtime.
JOBSET = BuildSet(
    name="jobset",
    module=JOBSET_MODULE,
    programs={"jobset": "sigs.k8s.io/jobset"},
    files={
        "crds": "sigs.k8s.io/jobset:config/components/crd/bases",
        "webhooks.yaml": "sigs.k8s.io/jobset:config/components/webhook/manifests.yaml",
    },
    of_all=False,
)
# For clusters `--with coscheduling` and `--with volcano`, and so for `make test-gangs` alone: each is made of another
# version of Kubernetes.
COSCHEDULING = BuildSet(
    name="coscheduling",
    module=COSCHEDULING_MODULE,
    programs={"coscheduling": "sigs.k8s.io/scheduler-plugins/cmd/scheduler"},
    files={"crds": "sigs.k8s.io/scheduler-plugins:config/crd/bases"},
    of_all=False,
)
VOLCANO = BuildSet(
    name="volcano",
    module=VOLCANO_MODULE,
    programs={
        "volcano": "volcano.sh/volcano/cmd/scheduler",
        "volcano-controllers": "volcano.sh/volcano/cmd/controller-manager",
    },
    files={"crds": "volcano.sh/volcano:config/crd/volcano/bases"},
    of_all=False,
)
USED_FOR = {"buildkit": "build images", "kueue": "queue jobs"}
SETS = {made.name: made for made in (CORE, BUILDKIT, KUEUE, JOBSET, COSCHEDULING, VOLCANO)}


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rlinf-testcluster"


def fingerprint(build: BuildSet, *, toolchain: str) -> str:
    """A short hash of all that decides what the programs are."""
    digest = hashlib.sha256()
    made = (*build.programs.items(), *build.files.items())
    for word in (toolchain, TAGS, LDFLAGS, *sorted(f"{name}={package}" for name, package in made)):
        digest.update(word.encode() + b"\0")
    for path in sorted(build.module.rglob("*")):
        if path.name in ("go.mod", "go.sum") or path.suffix == ".go":
            digest.update(path.relative_to(build.module).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _go() -> str:
    go = shutil.which("go") or next((p for p in ("/usr/local/go/bin/go",) if os.access(p, os.X_OK)), None)
    if go is None:
        raise BuildFailed("the Go toolchain is not on PATH; install Go 1.26.8 or newer, then make testcluster-programs")
    return go


def folder(build: BuildSet) -> Path:
    """Where its programs are or belong. Go is needed to build them only: without it those of a Go that was there do."""
    try:
        go = _go()
    except BuildFailed:
        if (found := _built_by_another(build)) is None:
            raise
        return found
    toolchain = commands.run([go, "version"], cwd=build.module).strip()
    where = _folder(build, toolchain)
    stamp = where.with_suffix(STAMP)
    if where.is_dir() and not stamp.exists():
        scratch = stamp.with_name(f".{stamp.name}-{os.getpid()}")
        with contextlib.suppress(PermissionError):  # somebody else's cache does as it is
            scratch.write_text(toolchain, encoding="utf-8")
            scratch.replace(stamp)
    return where


def _folder(build: BuildSet, toolchain: str) -> Path:
    return cache_root() / f"{build.name}-{fingerprint(build, toolchain=toolchain)}"


def _built_by_another(build: BuildSet) -> Path | None:
    """Complete programs from these very sources; what built them stands beside them."""
    for stamp in sorted(cache_root().glob(f"{build.name}-*{STAMP}")):
        where = _folder(build, stamp.read_text(encoding="utf-8"))
        if where.with_suffix(STAMP) == stamp and where.is_dir():
            return where
    return None


def ready(build: BuildSet = CORE) -> Path:
    """The folder with the programs; NotBuilt when they are not in the cache."""
    where = folder(build)
    if not seals.is_whole(where):
        raise NotBuilt(
            f"the test cluster's programs ({build.name}) are not all in {where}; build them once (about 10 minutes on "
            f"two cores): `python -m tools.testcluster build {build.name}`"
        )
    return where


def build(what: BuildSet, *, report: Callable[[str], None], jobs: int | None = None) -> Path:
    """Builds what is not in the cache yet. Two builds at once: the second waits, then finds the first one's result."""
    where = folder(what)
    if seals.is_whole(where):
        return where
    where.parent.mkdir(parents=True, exist_ok=True)
    with _lock(where.with_suffix(".lock"), report):
        if seals.is_whole(where):
            return where
        remove_abandoned(".building-", held=where)
        scratch = where.with_name(f".building-{where.name}-{os.getpid()}")
        scratch.mkdir()
        try:
            _compile(what, scratch, report=report, jobs=jobs)
            shutil.rmtree(where, ignore_errors=True)  # torn, if it is there
            seals.move(scratch, where)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    remove_old(f"{what.name}-", keep=where)
    return folder(what)


def _compile(what: BuildSet, scratch: Path, *, report: Callable[[str], None], jobs: int | None) -> None:
    started = time.monotonic()
    jobs = jobs or os.cpu_count() or 1
    # The build is long and shares the machine with people and tests. Beside a busy machine a niceness of 19 gets 1 % of
    # it, and what waits for the programs waits for hours; 10 gets a tenth.
    go = ["nice", "-n", "10", _go()]
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    packages = sorted(set(what.programs.values()))
    report(f"{what.name}: fetching Go modules")
    commands.run([*go, "mod", "download"], cwd=what.module, env=env, timeout_s=BUILD_TIMEOUT_S)
    listed = commands.run(
        [*go, "list", "-tags", TAGS, "-deps", *packages], cwd=what.module, env=env, timeout_s=BUILD_TIMEOUT_S
    )
    total = len(listed.split())
    report(f"{what.name}: {len(packages)} programs from {total} packages, {jobs} at a time")
    argv = [*go, "build", "-v", "-p", str(jobs), "-trimpath", "-tags", TAGS, "-ldflags", LDFLAGS]
    said: list[str] = []
    with subprocess.Popen(
        # A build whose starter was killed should not go on for ten minutes.
        ["setpriv", "--pdeathsig", "TERM", *argv, "-o", f"{scratch}/", *packages],
        cwd=what.module,
        env={**env, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        overdue = threading.Timer(BUILD_TIMEOUT_S, process.terminate)
        overdue.start()
        try:
            assert process.stderr is not None
            next_report = started + 15
            for line in process.stderr:
                said.append(line.rstrip())
                if (now := time.monotonic()) >= next_report:
                    next_report = now + 15
                    report(f"{what.name}: {len(said)} packages of at most {total} compiled, {now - started:.0f} s")
            process.wait()
        finally:
            overdue.cancel()
            process.terminate()
    if process.returncode != 0:
        if time.monotonic() - started >= BUILD_TIMEOUT_S:
            raise BuildFailed(f"{what.name}: not built after {BUILD_TIMEOUT_S:g} s; try again with more cores")
        complaint = [line for line in said if line.startswith("#") or ":" in line][-12:]
        raise BuildFailed(f"{what.name}: `go build` ended with {process.returncode}:\n" + "\n".join(complaint))
    for name, package in what.programs.items():
        made = scratch / _go_file_name(package)
        if made.name != name:
            made.rename(scratch / name)
    for leftover in scratch.iterdir():
        if leftover.name not in what.programs:
            shutil.rmtree(leftover, ignore_errors=True)
    for name, source in what.files.items():
        module, _, path = source.partition(":")
        where = commands.run([*go, "list", "-m", "-f", "{{.Dir}}", module], cwd=what.module, env=env).strip()
        copy: Callable[[Path, Path], object] = shutil.copytree if (Path(where) / path).is_dir() else shutil.copyfile
        copy(Path(where) / path, scratch / name)
        (scratch / name).chmod(0o755)  # the module cache's folders are read-only
    report(f"{what.name}: built in {time.monotonic() - started:.0f} s")


def _go_file_name(package: str) -> str:
    """What `go build -o folder/` calls a package's program: the last element that is not a major version.

    >>> _go_file_name("go.etcd.io/etcd/server/v3")
    'server'
    """
    parts = package.split("/")
    return parts[-2] if parts[-1][0] == "v" and parts[-1][1:].isdigit() else parts[-1]


@contextmanager
def _lock(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another build of the same programs runs; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_abandoned(start: str, *, held: Path) -> None:
    """Scratch folders `.building-<name of what is made>-<whose>` of those who were killed.

    We hold the lock of `held`. Of the rest, of another branch for instance, the lock tells whether somebody is at work.
    """
    for left in cache_root().glob(f"{start}*"):
        made = held.with_name(left.name.removeprefix(start).rpartition("-")[0])
        if made == held:
            shutil.rmtree(left, ignore_errors=True)
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError), contextlib.ExitStack() as stack:
            if (lock := made.with_suffix(".lock")).exists():
                fcntl.flock(stack.enter_context(lock.open("r+")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def remove_old(prefix: str, *, keep: Path) -> None:
    """Keeps the newest other version too: switching between two branches should not cost a build each time."""
    others = sorted(
        (path for path in cache_root().glob(f"{prefix}*") if path.is_dir() and path != keep),
        key=lambda path: path.stat().st_mtime,
    )
    for path in others[:-1]:
        with contextlib.suppress(BlockingIOError), path.with_suffix(USED).open("a") as used:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a cluster that runs keeps its programs
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(STAMP).unlink(missing_ok=True)
            path.with_suffix(USED).unlink(missing_ok=True)


def use(where: Path) -> TextIO:
    """A file that keeps the programs in `where` as long as it is open, here or in a process that inherits it."""
    used = where.with_suffix(USED).open("a")
    fcntl.flock(used, fcntl.LOCK_SH)  # waits for a removal at most, which takes a moment
    if seals.is_whole(where):
        return used
    used.close()
    raise NotBuilt(f"the programs in {where} were just removed by a build of another version; try again")


def say(text: str) -> None:
    print(f"testcluster: {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the test cluster's programs into the cache.")
    parser.add_argument("set", nargs="?", default="core", choices=[*SETS, "all"])
    parser.add_argument("--jobs", type=int, default=None, help="packages compiled at a time (default: cores)")
    parser.add_argument(
        "--if-usable",
        action="store_true",
        help="build nothing, and say why, where cluster tests will be skipped; under CI=true that is an error",
    )
    arguments = parser.parse_args(words)
    try:
        if arguments.if_usable:
            requirements.check()
            # Here, as tests run without a proxy's variables; and without the packages the build would be for nothing.
            requirements.ensure(requirements.FOR_A_CLUSTER, report=say)
    except MissingRequirement as err:
        say(f"nothing is built, as cluster tests cannot run here: {err}")
        return 1 if must_be_whole() else 0
    for name in [made.name for made in SETS.values() if made.of_all] if arguments.set == "all" else [arguments.set]:
        try:
            print(build(SETS[name], report=say, jobs=arguments.jobs))
        except ClusterError as err:
            # Without core no cluster test can begin, which is better told at once than by each of them.
            if name == CORE.name or not arguments.if_usable or must_be_whole():
                say(str(err))
                return 1
            say(f"without {name} the tests that {USED_FOR[name]} fail: {err}")
    return 0


def must_be_whole() -> bool:
    """CI must not go green because its machine lacks something, and learns of it first."""
    return os.environ.get("CI") == "true"


if __name__ == "__main__":
    sys.exit(main())
