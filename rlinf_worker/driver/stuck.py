"""Why a step can never end under the plan in force, for which another plan waits. Pure: the job's facts, read.

A plan comes into force at the end of a step. Where that end cannot come the plan would wait for ever, and so would the
job: it is the one that does without whom the step lacks. Called by switch.py; what is given up then, gang.py says.

    why(job, waited_s=300.0, usual_s=60.0)
    "pod sim-1 has been absent for more than 120 s, and worker env/2 is in it"
    "worker rollout/0 was lost 3 times behind step 7: exit code 137"
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from rlinf_api.names import WorkerId
from rlinf_worker.driver.job import Job

LOSSES: Final = 3
"""That one worker has, with no step between: the scheduler takes a plan back after two, so the way back is prepared by
then, and twice may be an accident."""
STEPS: Final = 2.0
"""How often its usual time a step gets without a worker that is absent, as it may have done its part of it before. A
gang's step gets none: without a rank there is no gang, and what is open is made again in any case."""


def why(job: Job, *, waited_s: float, usual_s: float, still: Container[WorkerId] = ()) -> str:
    """Empty: it may end. `waited_s`: for its end, since the step before or since the plan was ready, if that was later.
    `usual_s`: a step's time; 0: none has ended yet. `still`: whom the plan that waits has in the same places, with no
    pod less: it would wait for them as well."""
    members, now = job.members, job.clock()
    here = [record for wid, record in members.workers.items() if wid not in members.away]
    for record in here:
        behind, count = record.losses
        if count >= LOSSES and behind == job.ledger.version:
            return f"worker {record.placed.id} was lost {count} times behind step {behind.number}: {record.why}"
    for record in (record for record in here if record.placed.id not in still):
        pod = members.pods.get(record.placed.pod)
        since = pod.absent_since if pod is not None else None
        patience_s = 0.0 if record.placed.role in job.topology.gang_roles else STEPS * usual_s
        if since is not None and now - since > job.settings.limits.absent_pod_s and waited_s >= patience_s:
            where = "-".join(map(str, record.placed.pod))
            limit_s = job.settings.limits.absent_pod_s
            return f"pod {where} has been absent for more than {limit_s:g} s, and worker {record.placed.id} is in it"
    return ""
