"""The job on the network: a headless Service, so that its driver has a name from the moment it has an address, ready or
not; and its NetworkPolicy, who may open a connection to its pods. Pure.

| from | to | why |
|---|---|---|
| pods of the same job | every port | a gang's collectives listen where the kernel puts them |
| the operator (settings.network_policy_callers) | the driver's gRPC port | plans, drains, reports |
| scrapers (settings.network_policy_scrapers) | the metrics port | Prometheus |

The kubelet's probes come from the pod's own node, which no policy keeps out. Policies add up: a sidecar of a template
that serves something itself wants a policy of its user's beside this one.

No egress rules: a job fetches models and data, mounts network disks and talks to experiment trackers, at addresses that
only its user knows, and a list that is too short breaks jobs in ways that look like a broken network. What must not get
out is a matter of the namespace's own policies, which add up with this one.
"""

from __future__ import annotations

from typing import Any

from rlinf_api import names
from rlinf_api.job import PoolSpec, RLJobSpec
from rlinf_operator.manifests.metadata import JobMeta, Manifest, digest, labels, metadata
from rlinf_operator.settings import OperatorSettings, Peers


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


def policy(job: JobMeta, spec: RLJobSpec, *, settings: OperatorSettings) -> Manifest | None:
    """None where there is to be none. The annotation tells its content where only metadata is watched."""
    if not settings.network_policy or obstacle(spec):
        return None
    own: Manifest = {"podSelector": {"matchLabels": {names.LABEL_JOB_UID: job.uid}}}
    rules = {
        **own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [own]},
            _opened(names.PORT_DRIVER_GRPC, settings.network_policy_callers),
            _opened(names.PORT_METRICS, settings.network_policy_scrapers),
        ],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(
            job,
            names.network_policy_name(job.name),
            label=labels(job),
            annotations={names.ANNOTATION_INPUTS: digest(rules)},
        ),
        "spec": rules,
    }


def obstacle(spec: RLJobSpec) -> str:
    """Why this job can have none; empty where it can."""
    host = [pool.name for pool in spec.pools if _on_host(pool)]
    if not host:
        return ""
    return (
        f"pool {', '.join(map(repr, host))} has hostNetwork in its template: a NetworkPolicy does not apply to such "
        "pods and would keep them from the job's other pods, so the job has none; mTLS alone guards its ports"
    )


def _on_host(pool: PoolSpec) -> bool:
    spec = pool.template.get("spec")
    return isinstance(spec, dict) and spec.get("hostNetwork") is True


def _opened(port: int, peers: Peers) -> dict[str, Any]:
    """Without `from` it is open to anybody."""
    opened: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": port}]}
    return {"from": peers.listed(), **opened} if peers.listed() else opened
