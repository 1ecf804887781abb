"""Container images without a registry or an engine: written as OCI layouts, built by BuildKit, imported into nodes.

    localhost/pause:1     holds a pod's namespaces; every cluster has it
    localhost/box:1       busybox, 2 MB: shell, wget, httpd, nslookup, nc; every cluster has it
    localhost/python:3.11 Debian with python3 (debootstrap); `testcluster images` or `Cluster.load_python_base()`

Nothing can be pulled, so pods say `imagePullPolicy: IfNotPresent` or `Never` (a tag other than `latest` is enough).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tools.testcluster import binaries, cgroups, commands, configs, requirements, seals
from tools.testcluster.errors import BuildFailed, ClusterError, CommandFailed, MissingRequirement
from tools.testcluster.machine import Machine
from tools.testcluster.waiting import until

BOX_IMAGE = "localhost/box:1"
PYTHON_IMAGE = "localhost/python:3.11"
BUSYBOX = Path("/bin/busybox")
DEBIAN_SUITE = "bookworm"
DEBIAN_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libnuma1")
"""libnuma1: vLLM for CPUs loads it, and no wheel brings it."""
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
IMPORT_TIMEOUT_S = 300.0
DEBOOTSTRAP_TIMEOUT_S = 900.0
BUILD_TIMEOUT_S = 1800.0
CGROUP_TIMEOUT_S = 5.0
"""The kernel frees a group a moment after its last process; the next `up` of any cluster removes what is left."""
MAX_LAYERS = "30GB"
"""What BuildKit may keep of earlier builds. 30 GB: the image with vLLM takes two thirds of it while it is built."""
_LAYOUT_VERSION = 3
"""Part of the cache's name: raise it when what is written below changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An image as an OCI layout: a folder with `index.json` and blobs."""

    name: str
    folder: Path

    @property
    def digest(self) -> str:
        index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        return str(index["manifests"][0]["digest"])

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Descriptors of its layers, the lowest first."""
        manifest = json.loads(self.blob(self.digest).read_text(encoding="utf-8"))
        return list(manifest["layers"])

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def write_layout(
    folder: Path,
    name: str,
    *,
    layer: Path,
    base: Layout | None = None,
    entrypoint: Sequence[str] = (),
    command: Sequence[str] = (),
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
) -> Layout:
    """One layer (an uncompressed tar file, which is moved), a config, a manifest, an index that names the image. The
    layers of `base` are copied below it; they are uncompressed, too."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers: list[dict[str, Any]] = []
    if base is not None:
        layers += base.layers
        for below in layers:
            shutil.copy(base.blob(below["digest"]), blobs)
    digest = _sha256(layer)
    kind = "application/vnd.oci.image.layer.v1.tar"
    layers.append({"mediaType": kind, "digest": f"sha256:{digest}", "size": layer.stat().st_size})
    shutil.move(layer, blobs / digest)

    def blob(kind: str, value: object) -> dict[str, object]:
        data = json.dumps(value, sort_keys=True).encode()
        its_digest = hashlib.sha256(data).hexdigest()
        (blobs / its_digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{its_digest}", "size": len(data)}

    config = blob(
        "application/vnd.oci.image.config.v1+json",
        {
            "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Cmd": list(command), "Env": [f"PATH={path}"]},
            "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in layers]},
        },
    )
    manifest_kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = blob(manifest_kind, {"schemaVersion": 2, "mediaType": manifest_kind, "config": config, "layers": layers})
    tag = name.rpartition(":")[2]
    manifest["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}), encoding="utf-8")
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="utf-8")
    return Layout(name=name, folder=folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _layer(out: Path, *, programs: dict[str, Path], links: dict[str, str]) -> None:
    with tarfile.open(out, "w") as tar:
        folders = {"bin", "etc", "proc", "sys", "dev"} | {str(Path(name).parent) for name in programs}
        for name, mode in [(name, 0o755) for name in sorted(folders)] + [("tmp", 0o1777)]:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
        passwd = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(passwd)
        tar.addfile(info, io.BytesIO(passwd))
        for name, source in programs.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = source.stat().st_size, 0o755
            with source.open("rb") as file:
                tar.addfile(info, file)
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)


def _cached(kind: str, version: str, make: Callable[[Path], None]) -> Path:
    """A folder in the cache that is complete or absent: `make` fills a scratch folder that is then moved there.

    Of each kind the version that is wanted and the one that was last wanted before it are kept.
    """
    where = binaries.cache_root() / f"{kind}-{version}"
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with where.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not seals.is_whole(where):
                binaries.remove_abandoned(".making-", held=where)
                with tempfile.TemporaryDirectory(prefix=f".making-{where.name}-", dir=where.parent) as scratch:
                    full = Path(scratch) / "full"
                    full.mkdir()
                    make(full)
                    shutil.rmtree(where, ignore_errors=True)  # torn, if it is there
                    seals.move(full, where)
                binaries.remove_old(f"{kind}-", keep=where)
            os.utime(where)
    except OSError as err:
        if err.errno == errno.ENOSPC:
            raise ClusterError(f"the disk that holds {where.parent} is full; free some space and try again") from err
        raise
    return where


def small_images(programs: Path) -> list[Layout]:
    """pause and box, from the cache or made in a moment."""
    busybox = BUSYBOX.read_bytes()
    if b"ld-linux" in busybox[:8192]:
        raise MissingRequirement(
            f"{BUSYBOX} needs shared libraries and cannot be alone in an image; apt-get install busybox-static"
        )
    version = hashlib.sha256(busybox + (programs / "pause").read_bytes() + bytes([_LAYOUT_VERSION])).hexdigest()[:12]

    def make(folder: Path) -> None:
        layer = folder / "layer.tar"
        _layer(layer, programs={"bin/pause": programs / "pause"}, links={})
        write_layout(folder / "pause", configs.PAUSE_IMAGE, layer=layer, entrypoint=["/bin/pause"])
        applets = commands.run([BUSYBOX, "--list"]).split()
        links = {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
        _layer(layer, programs={"bin/busybox": BUSYBOX}, links=links)
        write_layout(folder / "box", BOX_IMAGE, layer=layer, command=["/bin/sh"], path="/bin")

    folder = _cached("small-images", version, make)
    return [
        Layout(name=configs.PAUSE_IMAGE, folder=folder / "pause"),
        Layout(name=BOX_IMAGE, folder=folder / "box"),
    ]


def python_base(*, report: Callable[[str], None]) -> Layout:
    """Debian with python3 and the machine's own certificate authorities; debootstrap makes it once."""
    bundle = hashlib.sha256(CA_BUNDLE.read_bytes()).hexdigest()[:8] if CA_BUNDLE.exists() else "none"
    wanted = hashlib.sha256("\0".join((DEBIAN_SUITE, *DEBIAN_PACKAGES, str(_LAYOUT_VERSION))).encode()).hexdigest()[:8]

    def make(folder: Path) -> None:
        requirements.ensure(requirements.FOR_BASE_IMAGES, report=report)
        report(f"debootstrap {DEBIAN_SUITE} with {', '.join(DEBIAN_PACKAGES)} (a minute or two, once)")
        root = folder.parent / "root"
        include = f"--include={','.join(DEBIAN_PACKAGES)}"
        commands.run(
            ["debootstrap", "--variant=minbase", include, DEBIAN_SUITE, str(root), *_debian_mirror()],
            timeout_s=DEBOOTSTRAP_TIMEOUT_S,
        )
        if CA_BUNDLE.exists():
            # Behind a proxy with its own authority pip in a build would fail with a certificate error.
            shutil.copyfile(CA_BUNDLE, root / CA_BUNDLE.relative_to("/"))
        for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
            shutil.rmtree(root / waste, ignore_errors=True)
            (root / waste).mkdir(parents=True)
        layer = folder.parent / "layer.tar"
        commands.run(["tar", "--numeric-owner", "-C", root, "-cf", layer, "."], timeout_s=300)
        write_layout(folder / "layout", PYTHON_IMAGE, layer=layer, command=["python3"])

    return Layout(name=PYTHON_IMAGE, folder=_cached("python-base", f"{wanted}-{bundle}", make) / "layout")


def _debian_mirror() -> list[str]:
    """The mirror that this machine's own apt uses, if it can be read; else debootstrap's default."""
    for line in commands.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], check=False
    ).split():
        if line.startswith("http") and "security" not in line:
            return [line]
    return []


def import_layout(layout: Layout, node: Machine) -> None:
    """Into one node's containerd. A layout that it has already costs a moment."""
    _pipe_into(
        node, ["tar", "-C", str(layout.folder), "-cf", "-", "index.json", "oci-layout", "blobs"], what=layout.name
    )


def import_archive(archive: Path, node: Machine) -> None:
    """A tar file as BuildKit or `docker save` writes it."""
    _pipe_into(node, ["cat", str(archive)], what=str(archive))


def _pipe_into(node: Machine, source: list[str], *, what: str) -> None:
    reader = subprocess.Popen(source, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    ctr = ["ctr", "--namespace", "k8s.io", "images", "import", "--digests", "-"]
    target = [*node.entering(), *commands.bounded(ctr, timeout_s=IMPORT_TIMEOUT_S)]
    try:
        writer = subprocess.run(
            target,
            stdin=reader.stdout,
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S + 2 * commands.END_S,
            check=False,
            env=node.environment(),
        )
    except subprocess.TimeoutExpired as err:
        raise BuildFailed(f"image {what} was not imported into {node.name} in {IMPORT_TIMEOUT_S:g} s") from err
    finally:
        if reader.stdout is not None:
            reader.stdout.close()
        reader.terminate() if reader.poll() is None else None
        reader.wait(timeout=10)
    if writer.returncode != 0:
        raise BuildFailed(f"image {what} could not be imported into {node.name}: {writer.stderr.strip()[-600:]}")


def import_everywhere(layouts: Sequence[Layout | Path], nodes: Sequence[Machine]) -> None:
    """Every image into every node, nodes side by side."""

    def into(node: Machine) -> None:
        for image in layouts:
            if isinstance(image, Layout):
                import_layout(image, node)
            else:
                import_archive(image, node)

    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        for done in [pool.submit(into, node) for node in nodes]:
            done.result()


class BuildKit:
    """A BuildKit daemon of one's own, for the time of a `with`: `buildkit.build(context, name=..., out=...)`.

    It is no part of a cluster and uses the machine's network, as pip in a Dockerfile wants the package registry. Its
    cache of layers stays in the cache folder, so the second build of an image is quick.
    """

    def __init__(self, *, report: Callable[[str], None]) -> None:
        self._report = report
        self._programs = binaries.ready(binaries.BUILDKIT)
        self._scratch = tempfile.TemporaryDirectory(prefix="rlinf-buildkit-")
        self.group = f"{cgroups.FOR_BUILDS}{os.getpid()}"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._lock: TextIO | None = None
        self._used: TextIO | None = None

    @property
    def _socket(self) -> str:
        return f"unix://{self._scratch.name}/buildkitd.sock"

    def __enter__(self) -> BuildKit:
        requirements.check(loops=0)
        requirements.ensure({"runc": "runc"}, report=self._report)
        scratch = Path(self._scratch.name)
        root = binaries.cache_root() / "buildkit-layers"
        self._lock = self._turn(root)
        self._used = binaries.use(self._programs)
        (scratch / "buildkitd.toml").write_text(
            f'root = "{root}"\ninsecure-entitlements = ["network.host"]\n'
            f'[grpc]\n  address = ["{self._socket}"]\n'
            '[worker.oci]\n  enabled = true\n  snapshotter = "overlayfs"\n  networkMode = "host"\n'
            f'  defaultCgroupParent = "{self.group}"\n'
            f'  gc = true\n  maxUsedSpace = "{MAX_LAYERS}"\n'
            "[worker.containerd]\n  enabled = false\n",
            encoding="utf-8",
        )
        with (scratch / "buildkitd.log").open("wb") as log:
            # In a mount and pid namespace of its own, which end with this process: what it mounted and started goes
            # with it, however that ends.
            self._daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
                + ["--mount-proc"]
                + [str(self._programs / "buildkitd"), "--config", str(scratch / "buildkitd.toml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            until(self._answers, what="BuildKit to answer", timeout_s=30)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _turn(self, root: Path) -> TextIO:
        """The layers belong to one daemon at a time: a second build waits for the first."""
        root.parent.mkdir(parents=True, exist_ok=True)
        lock = root.with_suffix(".lock").open("w")

        def taken() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        try:
            if not taken():
                self._report("another image is being built; waiting for it")
                until(taken, what="another image build to end", timeout_s=BUILD_TIMEOUT_S, every_s=0.5)
        except BaseException:
            lock.close()
            raise
        return lock

    def _answers(self) -> bool:
        assert self._daemon is not None
        if self._daemon.poll() is not None:
            raise BuildFailed(f"BuildKit ended with {self._daemon.returncode}:\n{self._log_tail()}")
        words = [str(self._programs / "buildctl"), "--addr", self._socket, "debug", "workers"]
        return "linux" in commands.says(words, timeout_s=10)

    def _log_tail(self) -> str:
        return (Path(self._scratch.name) / "buildkitd.log").read_text(errors="replace")[-1500:]

    def build(
        self,
        context: Path,
        *,
        name: str,
        out: Path,
        dockerfile: str = "Dockerfile",
        bases: dict[str, Layout] | None = None,
        arguments: dict[str, str] | None = None,
    ) -> Path:
        """Writes an image archive for `import_archive`.

        `bases` swaps what a Dockerfile's FROM would pull: `{"python:3.11-slim": python_base(...)}`.
        """
        words = [
            *(str(self._programs / "buildctl"), "--addr", self._socket, "build", "--progress", "plain"),
            *("--frontend", "dockerfile.v0", "--local", f"context={context}", "--local", f"dockerfile={context}"),
            *("--opt", f"filename={dockerfile}", "--allow", "network.host", "--opt", "force-network-mode=host"),
            *("--output", f"type=docker,name={name},dest={out}"),
        ]
        for number, (image, layout) in enumerate((bases or {}).items()):
            words += ["--oci-layout", f"base{number}={layout.folder}"]
            words += ["--opt", f"context:{image}=oci-layout://base{number}@{layout.digest}"]
        for key, value in (arguments or {}).items():
            words += ["--opt", f"build-arg:{key}={value}"]
        self._report(f"building {name} from {context}/{dockerfile}")
        try:
            commands.run(words, timeout_s=BUILD_TIMEOUT_S)
        except CommandFailed as err:
            raise BuildFailed(f"{name} could not be built: {err}") from err
        return out

    def __exit__(self, *_: object) -> None:
        if self._daemon is not None and self._daemon.poll() is None:
            # To its group, of which it is the leader: `unshare` takes no SIGTERM, and buildkitd should end in order.
            os.killpg(self._daemon.pid, signal.SIGTERM)
            try:
                self._daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait(timeout=10)
        cgroups.remove_empty(self.group, timeout_s=CGROUP_TIMEOUT_S)
        for held in (self._used, self._lock):
            if held is not None:
                held.close()
        self._scratch.cleanup()
