"""A job's PodDisruptionBudget, where its driver is not to be evicted. Pure.

The API server refuses evictions of the driver's pod (429) while it is healthy; whoever drains its node asks again. Not
for worker pods: a drained one costs its job what any loss does, and a budget over gangs would hold every drain up.
"""

from __future__ import annotations

from rlinf_api import names
from rlinf_operator.manifests.metadata import JobMeta, Manifest, labels, metadata


def budget(job: JobMeta) -> Manifest:
    """minAvailable, as maxUnavailable asks a pod's owner for its scale, which an RLJob has not. A driver that is not
    ready serves nobody, and may be evicted (AlwaysAllow)."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, names.disruption_budget_name(job.name), label=labels(job)),
        "spec": {
            "minAvailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {names.LABEL_JOB_UID: job.uid, names.LABEL_COMPONENT: names.COMPONENT_DRIVER},
            },
        },
    }
