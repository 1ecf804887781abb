"""Accelerators without hardware: counted resources on nodes, and devices of a DRA driver. `Cluster` calls this.

nvidia.com/gpu=4     the scheduler counts them, containers get nothing
dra_devices=2        go/dradriver publishes a ResourceSlice; a container that gets a device sees FAKE_GPU_<n> in its
                     environment and the device as the file /dev/fake-gpu-<n>, shared by all that share the device
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.testcluster.api import Api
from tools.testcluster.machine import Machine

DRIVER = "gpu.test.rlinf.io"
DEVICE_CLASS = "fake-gpu"


def status_patch(resources: tuple[str, ...]) -> list[dict[str, Any]]:
    """
    >>> status_patch(("nvidia.com/gpu=4",))[0]
    {'op': 'add', 'path': '/status/capacity/nvidia.com~1gpu', 'value': '4'}
    """
    patch = []
    for pair in resources:
        name, _, count = pair.partition("=")
        # The kubelet copies capacity to allocatable, but only at its next status update, seconds later.
        for field in ("capacity", "allocatable"):
            patch.append({"op": "add", "path": f"/status/{field}/{name.replace('/', '~1')}", "value": count})
    return patch


def give_node(api: Api, node: str, resources: tuple[str, ...]) -> None:
    """Sets extended resources of a registered node."""
    if resources:
        api.request(
            "PATCH", f"/api/v1/nodes/{node}/status", body=status_patch(resources), kind="application/json-patch+json"
        )


def driver_words(node: str, kubeconfig: Path, *, devices: int) -> list[str]:
    # The node's own identity: what NodeRestriction allows a real driver.
    return ["dradriver", "--node", node, "--kubeconfig", str(kubeconfig), "--devices", str(devices)]


def device_class() -> tuple[str, dict[str, Any]]:
    return (
        f"/apis/resource.k8s.io/v1/deviceclasses/{DEVICE_CLASS}",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": DEVICE_CLASS},
            "spec": {"selectors": [{"cel": {"expression": f"device.driver == {json.dumps(DRIVER)}"}}]},
        },
    )


def published_devices(api: Api, node: Machine) -> int:
    slices = api.get("/apis/resource.k8s.io/v1/resourceslices")["items"]
    return sum(len(item["spec"]["devices"]) for item in slices if item["spec"].get("nodeName") == node.name)
