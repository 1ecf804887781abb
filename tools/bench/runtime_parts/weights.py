"""What `make bench-runtime` measures of weights: 200 MB in 100 tensors from one actor, against gloo's broadcast.

    .venv/bin/python -m tools.bench.runtime_parts.weights

A run is two processes that publish VERSIONS times; the first ones, which fault memory in, do not count. What is timed
is `publish`: copying, hashing, moving, checking at the other end and its word that it has the version. Gloo's broadcast
only moves.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.bench.harness import Reference, Row
from tools.bench.runtime_parts import raw_gloo
from tools.bench.runtime_parts.weights_field import Field

MB: Final = 200
TENSORS: Final = 100
WARM: Final = 4  # as many arenas as there are, and one
VERSIONS: Final = 9


def publish_s(*, receivers: int, pods: str) -> float:
    with tempfile.TemporaryDirectory(prefix="rlinf-w-") as folder, Field(Path(folder)) as field:
        field.start("actor/0")
        for n in range(receivers):
            field.start(f"rollout/{n}", pod=pods[n % len(pods)])
            field.route("actor/0", f"rollout/{n}")
        field.ask("actor/0", do="publish", number=1, mb=MB, tensors=TENSORS, times=WARM)
        for n in range(receivers):
            field.ask(f"rollout/{n}", do="pull", number=WARM)
        took = field.ask("actor/0", do="publish", number=100, mb=MB, tensors=TENSORS, times=VERSIONS)
        return float(statistics.median(took["seconds"]))


def one_pod() -> float:
    return publish_s(receivers=1, pods="a")


def one_pod_of_four() -> float:
    return publish_s(receivers=3, pods="a")


def between_pods() -> float:
    return publish_s(receivers=1, pods="b")


def gloo() -> Mapping[str, float]:
    seconds = raw_gloo.broadcast_s(mb=MB, tensors=TENSORS, warm=WARM, times=VERSIONS)
    return {"weights_one_pod": seconds, "weights_one_pod_3": seconds, "weights_between_pods": seconds}


def rows() -> list[Row]:
    def reference(name: str) -> Reference:
        return Reference(name="torch 2.13 gloo broadcast, 2 processes", measure=lambda: gloo()[name])

    return [
        Row(
            name="weights_one_pod", unit="s", better="lower", bar_ratio=0.45, subject=one_pod,
            reference=reference("weights_one_pod"),
        ),
        Row(
            name="weights_one_pod_3", unit="s", better="lower", subject=one_pod_of_four,
            reference=reference("weights_one_pod_3"),
        ),
        Row(
            name="weights_between_pods", unit="s", better="lower", bar_ratio=1.0, subject=between_pods,
            reference=reference("weights_between_pods"),
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    for what, measure in (("one pod", one_pod), ("one pod, 3", one_pod_of_four), ("between pods", between_pods)):
        print(f"{what}: {measure():.4f} s; gloo {gloo()['weights_one_pod']:.4f} s")
