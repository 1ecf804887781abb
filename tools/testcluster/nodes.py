"""The real nodes of a cluster, as the API server sees them, and their disks. `Cluster` calls this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.testcluster import commands
from tools.testcluster.api import Api, ApiError

# Without the fake ones: there may be thousands of them, and `kwok-*` comes before `node-*` in a list that has an end.
REAL_NODES = "/api/v1/nodes?labelSelector=type%21%3Dkwok"


def not_ready(api: Api, names: Sequence[str]) -> list[str]:
    """Those of `names` that are absent or not Ready."""
    try:
        items = api.get(REAL_NODES)["items"]
    except ApiError:
        return list(names)
    ready = {
        item["metadata"]["name"]
        for item in items
        for condition in item["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }
    return [name for name in names if name not in ready]


def make_disk(path: Path, *, gib: int) -> None:
    with path.open("wb") as file:
        file.truncate(gib << 30)
    # No journal: the disk lives as long as the cluster, and a killed node does not lose what the kernel still holds.
    commands.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", path])
