"""What `spec.roles[].spares` may be: a rule over roles, pools and the failure policy.

Called by supported.examine. Not for: keeping spares (rlinf_worker/driver/spares.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlinf_api.job import Problem, RLJobSpec, as_range


def check(spec: RLJobSpec) -> Iterator[Problem]:
    """A number that could never be of use is a mistake, and costs memory."""
    for role in spec.roles:
        homes = [p for p in spec.pools if role.name in p.roles]
        if not role.spares or not homes:
            continue
        field = f"spec.roles[{role.name}].spares"
        most = max(min(p.slots.per_pod // role.slots_per_worker, as_range(role.workers).max) for p in homes)
        if role.spares > most:
            message = f"got {role.spares}, but a pod runs at most {most} workers of this role, and a spare takes the "
            yield Problem(field=field, message=message + f"place of one in its own pod; write {most} or less")
        elif spec.failure_policy.max_restarts == 0:
            message = f"got {role.spares}, but spec.failurePolicy.maxRestarts is 0, so the first lost worker fails the "
            yield Problem(field=field, message=message + "job; raise maxRestarts or remove spares")
