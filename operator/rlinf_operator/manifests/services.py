"""The job's headless Service: a name for its driver from the moment it has an address, ready or not. Pure."""

from __future__ import annotations

from rlinf_api import names
from rlinf_operator.manifests.metadata import JobMeta, Manifest, labels, metadata


def headless(job: JobMeta) -> Manifest:
    """publishNotReadyAddresses: agents look for the driver while nobody is ready yet. Nobody looks for a worker pod by
    name, and each of them would have the cluster write the job's endpoints anew (docs/adr/0018)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, names.service_name(job.name), label=labels(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: job.uid, names.LABEL_COMPONENT: names.COMPONENT_DRIVER},
            "ports": [{"name": "grpc", "port": names.PORT_DRIVER_GRPC, "protocol": "TCP"}],
        },
    }
