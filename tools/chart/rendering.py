"""Renders the chart: a case is a values file in cases/, whose first line says what it stands for.

Programs come from the test cluster's cache (tools/testcluster/binaries.py). Called by __main__ and by tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from tools.testcluster import binaries, commands

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "helm" / "rlinf-operator"
CASES: Final = Path(__file__).with_name("cases")
SNAPSHOTS: Final = ROOT / "tests" / "shipped" / "snapshots"
RELEASE: Final = "rlinf-operator"
NAMESPACE: Final = "rlinf-system"
# helm built from its Go module would say 1.20 when it is not asked with a cluster.
KUBERNETES: Final = binaries.KUBERNETES.removeprefix("v")

Manifest = dict[str, Any]


def cases() -> dict[str, Path]:
    return {path.stem: path for path in sorted(CASES.glob("*.yaml"))}


def helm(*words: str) -> str:
    return commands.run([binaries.ready() / "helm", *words])


def render(values: Path, *more: str) -> str:
    """What `helm install` would send, as YAML documents."""
    words = ("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES)
    return helm(*words, "--values", str(values), *more)


def snapshot(rendered: str) -> str:
    """Without the CRDs: gen_chart_crds.py holds those to crds/, and a diff of a snapshot should be read by a person."""
    parts = rendered.removeprefix("---\n").split("\n---\n")
    kept = [part.strip("\n") for part in parts if "\nkind: CustomResourceDefinition\n" not in part]
    return "---\n" + "\n---\n".join(kept) + "\n"


def manifests(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def snapshot_file(case: str) -> Path:
    return SNAPSHOTS / f"{case}.yaml"
