"""Pods for tests of local mode: a store with a kubelet over it, pods by a few words, waits with a name.

cluster = await stack.enter_async_context(LocalCluster(tmp_path))
await cluster.run("a", "echo hi"); pod = await cluster.until("a", phase="Succeeded")
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlinf_api.store import NotFound
from rljob.local.kubelet import LocalKubelet
from rljob.local.objects import Manifest
from rljob.local.store import MemoryStore

TIMEOUT_S = 25.0


def pod(name: str, *command: str, **spec: Any) -> Manifest:
    """`pod("a", "echo hi")` runs a shell line, more words a command; keywords go to the spec."""
    argv = ["sh", "-c", command[0]] if len(command) == 1 else list(command)
    container = {"name": "main", "image": "any", "command": argv} | spec.pop("container", {})
    labels, annotations = spec.pop("labels", {}), spec.pop("annotations", {})
    defaults = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 5}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": defaults | spec,
    }


def secret(name: str, **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded(data)}


def encoded(data: Mapping[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}


def config_map(name: str, **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def main_status(pod: Manifest) -> Manifest:
    """The first container's; empty before the kubelet has seen the pod."""
    statuses: list[Manifest] = pod["status"].get("containerStatuses") or [{"state": {}, "ready": False}]
    return statuses[0]


def terminated(pod: Manifest) -> Manifest:
    state: Manifest = main_status(pod)["state"]["terminated"]
    return state


def condition(pod: Manifest, kind: str) -> Manifest:
    found: Manifest = next((c for c in pod["status"].get("conditions", []) if c["type"] == kind), {})
    return found


class LocalCluster:
    def __init__(self, work_dir: Path) -> None:
        self.store, self.work_dir = MemoryStore(), work_dir
        self.kubelet = LocalKubelet(self.store, work_dir)

    async def __aenter__(self) -> Self:
        await self.kubelet.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kubelet.__aexit__(kind, error, trace)

    async def run(self, name: str, *command: str, **spec: Any) -> Manifest:
        return await self.store.create(pod(name, *command, **spec))

    async def until(self, name: str, holds: Callable[[Manifest], object] | None = None, *, phase: str = "") -> Manifest:
        """The first state of the pod for which `holds` is true, or that is in the phase."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            seen = await self.store.get("Pod", name)
            if (not phase or seen["status"].get("phase") == phase) and (holds is None or holds(seen)):
                return seen
            assert time.monotonic() < deadline, f"pod {name} is not {phase or 'as awaited'}: {seen['status']}"
            await asyncio.sleep(0.01)

    async def until_gone(self, name: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                seen = await self.store.get("Pod", name)
            except NotFound:
                return
            assert time.monotonic() < deadline, f"pod {name} is still there: {seen['status']}"
            await asyncio.sleep(0.01)

    async def until_true(self, holds: Callable[[], object], *, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            if holds():
                return
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
            await asyncio.sleep(0.01)

    def log(self, name: str, container: str = "main") -> str:
        path = self.work_dir / "logs" / name / f"{container}.log"
        return path.read_text() if path.exists() else ""

    async def until_log(self, name: str, text: str) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while text not in (log := self.log(name)):
            assert time.monotonic() < deadline, f"pod {name} never printed {text!r}: {log[-500:]!r}"
            await asyncio.sleep(0.01)
        return log
