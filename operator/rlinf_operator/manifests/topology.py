"""Where a job's worker pods are, seen from each other: spec.pools[*].topology, else spec.placement.topology. Pure.

Pools without a topology of their own are one group, as roles that exchange data are in several; a pool with one is a
group by itself. Called for each worker pod (pods.py), and for what a queue is asked (asking.py).

| the job says | each pod of the group has | a queue is asked |
|---|---|---|
| required: KEY | pod affinity to the group, required | topologyRequest.required, of each pool by itself |
| preferred: KEY | the same, preferred | topologyRequest.preferred |
| spread: KEY | a topology spread constraint, which yields where there is no room | nothing |

What the template says of affinity stays beside it.
"""

from __future__ import annotations

from typing import Any, Final

from rlinf_api import names
from rlinf_api.job import RLJobSpec, TopologySpec
from rlinf_operator.manifests.metadata import JobMeta, Manifest

WEIGHT: Final = 100  # the most that Kubernetes has: a template's own wishes may be weaker, and are not out-voted


def of(spec: RLJobSpec, pool: str) -> tuple[TopologySpec, tuple[str, ...]] | None:
    """What holds for the pool's pods, and the pools of their group."""
    if (own := spec.pool(pool).topology) is not None:
        return own, (pool,)
    if (shared := spec.placement.topology) is not None:
        return shared, tuple(p.name for p in spec.pools if p.topology is None)
    return None


def asked(spec: RLJobSpec, pool: str) -> dict[str, str]:
    """What a queue that knows topologies is asked for, for the pods of one pool.

    {"required": "example.com/rack"}
    """
    found = of(spec, pool)
    said = found[0].model_dump(include={"required", "preferred"}, exclude_none=True) if found is not None else {}
    return {kind: str(key) for kind, key in said.items()}


def placed(pod: Manifest, job: JobMeta, spec: RLJobSpec, *, pool: str) -> Manifest:
    """The pod with what its topology adds to the template's lists."""
    if (found := of(spec, pool)) is None:
        return pod
    said, group = found
    selector: Manifest = {
        "matchLabels": {names.LABEL_JOB_UID: job.uid},
        "matchExpressions": [{"key": names.LABEL_POOL, "operator": "In", "values": sorted(group)}],
    }
    if said.spread is not None:
        constraint = {
            "maxSkew": 1, "topologyKey": said.spread, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": selector,
        }  # fmt: skip
        return _with(pod, ("spec", "topologySpreadConstraints"), constraint)
    near = ("spec", "affinity", "podAffinity")
    term = {"topologyKey": said.required or said.preferred, "labelSelector": selector}
    if said.required is not None:
        return _with(pod, (*near, "requiredDuringSchedulingIgnoredDuringExecution"), term)
    wish = {"weight": WEIGHT, "podAffinityTerm": term}
    return _with(pod, (*near, "preferredDuringSchedulingIgnoredDuringExecution"), wish)


def _with(tree: Manifest, path: tuple[str, ...], entry: Any) -> Manifest:
    """`entry` at the end of the list at `path`. What is no list or mapping there is left to the API server to refuse.

    >>> _with({"spec": {"a": 1}}, ("spec", "b"), 2)
    {'spec': {'a': 1, 'b': [2]}}
    """
    first, *rest = path
    below = tree.get(first)
    if rest:
        below = {} if below is None else below
        return {**tree, first: _with(below, tuple(rest), entry)} if isinstance(below, dict) else tree
    return {**tree, first: [*(below or []), entry]} if below is None or isinstance(below, list) else tree
