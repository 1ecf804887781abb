"""A worker image for cluster tests, made in seconds: Debian's python, this repository's packages, what the driver
imports, and the actor without torch of tests/fakes, as a module of its own. Torch and the simulators come from the
machine's site-packages, which the pool's template mounts.

The images that users build are worker_images/; they have tests of their own.
"""

import compileall
import functools
import py_compile
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.testcluster import binaries, images
from tools.testcluster.cluster import REPOSITORY, Cluster

NAME = "localhost/rlinf-worker:test"
MOUNT = "/opt/site-packages"
OURS = ("rlinf_api", "rlinf_worker")
DRIVERS = (
    "annotated_types", "google", "grpc", "grpc_health", "msgspec", "prometheus_client", "pydantic", "pydantic_core",
    "typing_extensions.py", "typing_inspection",
)  # fmt: skip
LIGHT = REPOSITORY / "tests" / "fakes" / "light_actor.py"
WHERE = "./usr/lib/python3/dist-packages"


def load(cluster: Cluster, *, name: str = NAME) -> str:
    """Into every node; the image's name."""
    with layout(name) as made:
        cluster.load(made)
    return name


def _compiled(folder: Path) -> list[Path]:
    """Our packages with their bytecode, as the images of worker_images/ have them: a process of a fresh checkout would
    compile all of it at each start, seconds in a pod that is given little CPU."""
    made = []
    for name in OURS:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder / name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        made.append(folder / name)
    return made


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Goes with this process, which makes the layer once for all clusters and names."""
    return tempfile.TemporaryDirectory(prefix="rlinf-worker-image-")


@functools.cache
def _layer() -> Path:
    """What stands over Debian's python."""
    made = Path(_folder().name)
    site = Path(next(path for path in sys.path if path.endswith("site-packages")))
    with tarfile.open(made / "layer.tar", "w") as tar:
        link = tarfile.TarInfo("./usr/local/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
        tar.addfile(link)
        for source in [*_compiled(made / "ours"), *(site / name for name in DRIVERS), LIGHT]:
            tar.add(source, f"{WHERE}/{source.name}", filter=_readable)
    return made / "layer.tar"


@contextmanager
def layout(name: str = NAME) -> Iterator[images.Layout]:
    """Debian's layer is the same under every name and in every test: a node unpacks it once."""
    with tempfile.TemporaryDirectory(prefix="rlinf-worker-image-") as scratch:
        layer = Path(shutil.copy(_layer(), scratch))
        base = images.python_base(report=binaries.say)
        yield images.write_layout(Path(scratch) / "layout", name, layer=layer, base=base, command=["python3"])


def template(claim: str) -> dict[str, Any]:
    """A pool's template whose pods have the machine's site-packages."""
    return {
        "spec": {
            "containers": [
                {
                    "name": "agent",
                    "env": [{"name": "PYTHONPATH", "value": MOUNT}],
                    "volumeMounts": [{"name": "site-packages", "mountPath": MOUNT, "readOnly": True}],
                }
            ],
            "volumes": [{"name": "site-packages", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}],
        }
    }


def _readable(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Whatever this machine's umask was."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
    return info
