"""`python -m tools.chart check | snapshots`: the chart linted, validated and compared for every case of values.

Exit status 0, or 1 with a line for everything that is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tools.chart import rendering, schemas
from tools.testcluster import binaries, commands
from tools.testcluster.errors import ClusterError, CommandFailed


def check() -> list[str]:
    """Everything that is wrong."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="chart-check-") as scratch:
        folder = Path(scratch)
        (folder / "schemas").mkdir()
        schemas.write(folder / "schemas")
        for case, values in rendering.cases().items():
            try:
                rendering.helm(
                    "lint", "--strict", "--quiet", "--kube-version", rendering.KUBERNETES, "--values", str(values),
                    str(rendering.CHART),
                )  # fmt: skip
                text = rendering.render(values)
                (folder / f"{case}.yaml").write_text(text, encoding="utf-8")
                conform(folder / f"{case}.yaml", schema_folder=folder / "schemas")
            except CommandFailed as error:
                wrong.append(f"{case}: {error}")
                continue
            file = rendering.snapshot_file(case)
            if not file.exists() or file.read_text(encoding="utf-8") != rendering.snapshot(text):
                name = file.relative_to(rendering.ROOT)
                wrong.append(f"{case}: {name} is not what the chart renders; run `make chart-snapshots`, read the diff")
            else:
                print(f"chart-check: {case}: {len(rendering.manifests(text))} objects, lint, schemas, snapshot")
    strange = {path.stem for path in rendering.SNAPSHOTS.glob("*.yaml")} - rendering.cases().keys()
    return wrong + [f"{name}: a snapshot without a case" for name in sorted(strange)]


def conform(file: Path, *, schema_folder: Path) -> None:
    """CommandFailed with kubeconform's complaints, of which a kind that it has no schema for is one."""
    location = f"{schema_folder}/{schemas.LOCATION}"
    commands.run([binaries.ready() / "kubeconform", "-strict", "-summary", "-schema-location", location, file])


def write_snapshots() -> None:
    rendering.SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for path in rendering.SNAPSHOTS.glob("*.yaml"):
        if path.stem not in rendering.cases():
            path.unlink()
    for case, values in rendering.cases().items():
        rendering.snapshot_file(case).write_text(rendering.snapshot(rendering.render(values)), encoding="utf-8")


def main(words: list[str]) -> int:
    try:
        if words == ["snapshots"]:
            write_snapshots()
            return 0
        if words != ["check"]:
            print(__doc__, file=sys.stderr)
            return 2
        wrong = check()
    except ClusterError as error:
        wrong = [str(error)]
    for line in wrong:
        print(f"chart-check: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
