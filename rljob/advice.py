"""What a right manifest may be sorry for on a cluster, in sentences. Called by `rljob validate`, which passes it.

Not what is wrong: that is refused, by rlinf_api.supported.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_api.job import PoolSpec, RLJobSpec


def of_job(spec: RLJobSpec) -> Iterator[str]:
    for pool in spec.pools:
        if missing := _not_asked_for(pool):
            given, none = pool.slots.resource, " and no ".join(missing)
            yield (
                f"spec.pools[{pool.name}]: its pods ask for {given} and for no {none}: "
                "they are the first to be evicted, and a quota may refuse them; name requests in resources of "
                f"spec.pools[{pool.name}].template.spec.containers[agent]"
            )


def _not_asked_for(pool: PoolSpec) -> list[str]:
    """What a pool of accelerators does not ask for; for others the operator asks. A limit alone is a request, too. What
    is no mapping asks for nothing: the API server refuses it."""
    from rlinf_operator.manifests import pods

    if not pool.slots.resource:
        return []
    found = pods.agent_field(pool, "resources")
    given = found if isinstance(found, dict) else {}
    parts = (given.get(part) for part in ("requests", "limits"))
    asked = {name for part in parts if isinstance(part, dict) for name in part}
    return [name for name in ("cpu", "memory") if name not in asked]
