"""Settings of the local backend, each with its reason. One test pins the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    work_dir: Path
    "logs/<pod>/<container>.log and claims/<claim>/ lie here"
    working_dir: Path = field(default_factory=Path.cwd)
    "of a container without its own: where rljob was called, so that `module:function` is found as it is there"
    node_name: str = "local"
    "spec.nodeName of every pod"
    log_limit_bytes: int = 64 << 20
    "per container, both halves; a pod that prints in a loop must not fill the disk before anybody looks"
    retry_s: float = 0.5
    "pause before a missing Secret, ConfigMap or address is looked for again"
    env: Mapping[str, str] = field(default_factory=dict)
    "set in every container, below what the pod says: the runner's RLINF_OUTPUT_DIR"
    checkpoint_uri: str = ""
    "of a job that names no place for checkpoints: the work dir's own, never a pod's; empty: the pods are not a job's"
    stop_timeout_s: float = 15.0
    "at the end of the backend a pod gets its own grace period, but no more than this"
