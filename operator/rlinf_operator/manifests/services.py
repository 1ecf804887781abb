"""The job's headless Service: names for its pods from the moment they have an address, ready or not. Pure."""

from __future__ import annotations

from rlinf_api import names
from rlinf_operator.manifests.metadata import JobMeta, Manifest, labels, metadata


def headless(job: JobMeta) -> Manifest:
    """publishNotReadyAddresses: agents look for the driver while nobody is ready yet."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, names.service_name(job.name), label=labels(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: job.uid},
            "ports": [{"name": "grpc", "port": names.PORT_DRIVER_GRPC, "protocol": "TCP"}],
        },
    }
