"""`make images`: builds the Dockerfiles with BuildKit into build/images/NAME.tar, and says their size and time.

    python -m tools.chart.images                    the control plane's and every image of worker_images/ but the large
    python -m tools.chart.images control actor-fsdp these only

Images are named rlinf-operator:VERSION, rlinf-worker-FOLDER:VERSION, and base rlinf-worker:VERSION, which is the
operator's default for drivers, as that of actor-fsdp is for pools that name none. What a Dockerfile's FROM would
pull is swapped for the Debian of tools/testcluster, which needs no registry; where there is one, `docker build .` does
the same.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlinf_api import __version__
from tools.testcluster import images
from tools.testcluster.binaries import say
from tools.testcluster.errors import ClusterError
from tools.testcluster.images import BuildKit

ROOT: Final = Path(__file__).resolve().parents[2]
OUT: Final = ROOT / "build" / "images"
CONTROL: Final = "control"
BASE: Final = "base"
LARGE: Final = frozenset({"actor-fsdp", "rollout-vllm"})
"""With torch: 5 GB and more each, so only by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    folder: str
    """The folder of the Dockerfile, below the repository."""
    name: str

    @property
    def dockerfile(self) -> Path:
        return ROOT / self.folder / "Dockerfile"

    def bases(self) -> list[str]:
        """What its FROM lines name once the defaults of ARGs are filled in, without the names of its own stages."""
        text = self.dockerfile.read_text(encoding="utf-8")
        defaults = dict(re.findall(r"^ARG\s+(\w+)=(\S+)", text, re.MULTILINE))
        stages = set(re.findall(r"^FROM\s+.*\s+AS\s+(\S+)", text, re.MULTILINE | re.IGNORECASE))
        found = re.findall(r"^FROM\s+(\S+)", text, re.MULTILINE | re.IGNORECASE)
        filled = [re.sub(r"\$\{?(\w+)\}?", lambda match: defaults.get(match[1], match[0]), name) for name in found]
        return [name for name in dict.fromkeys(filled) if name not in stages]


def catalogue() -> dict[str, Image]:
    found = {CONTROL: Image(folder=".", name=f"rlinf-operator:{__version__}")}
    for path in sorted((ROOT / "worker_images").glob("*/Dockerfile")):
        folder = path.parent.name
        name = "rlinf-worker" if folder == BASE else f"rlinf-worker-{folder}"
        found[folder] = Image(folder=f"worker_images/{folder}", name=f"{name}:{__version__}")
    return found


def build(names: list[str]) -> dict[str, Path]:
    """Archives by name, for `Cluster.load`. ClusterError says what could not be built."""
    known = catalogue()
    wanted = names or [name for name in known if name not in LARGE]
    if strange := sorted(set(wanted) - known.keys()):
        raise ClusterError(f"no image {strange[0]!r}; there are {', '.join(known)}")
    OUT.mkdir(parents=True, exist_ok=True)
    base = images.python_base(report=say)
    done: dict[str, Path] = {}
    with BuildKit(report=say) as buildkit:
        for name in wanted:
            image, out = known[name], OUT / f"{name}.tar"
            started = time.monotonic()
            buildkit.build(
                ROOT, name=image.name, out=out, dockerfile=f"{image.folder}/Dockerfile",
                bases={wants: base for wants in image.bases() if wants.startswith("python:")},
            )  # fmt: skip
            say(f"{image.name}: {megabytes(out)} in {time.monotonic() - started:.0f} s, {out.relative_to(ROOT)}")
            done[name] = out
    return done


def megabytes(archive: Path) -> str:
    """As it lies in a registry (layers as the archive holds them), layer by layer.

    `64 MB (27 + 37)`: the first is the base.
    """
    with tarfile.open(archive) as tar:
        file = tar.extractfile("manifest.json")
        assert file is not None
        layers = json.load(file)[0]["Layers"]
        sizes = [tar.getmember(layer).size for layer in layers]
    return f"{sum(sizes) / 1e6:.0f} MB ({' + '.join(f'{size / 1e6:.0f}' for size in sizes)})"


def main(words: list[str]) -> int:
    try:
        build(words)
    except ClusterError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
