"""A job of known costs: a second pod makes its steps half as long, until its work becomes another and one pod does.

A generator makes 16 units of 100 ms, on two slots or four; a trainer takes 5 ms for each. From DRIFT_STEP on a unit
takes the generator 5 ms: the trainer's 80 ms are the step then.
"""

import json
from typing import Any, Final

from rlinf_api import names
from tests.cluster import worker_image
from tests.cluster.paced import Paced

NAME: Final = "grows"
UNIT_MS, ITEMS, SLOTS_PER_POD = 100.0, 16, 2
STEPS: Final = 50_000
"""A change of the plan has to pay over the steps that are left, shrinking too: an hour of them, however late it is."""
DRIFT_STEP: Final = 200
"""Of the first plan's steps 160 s, of the second one's 80: until then the second pod is at work, also where one starts
in 40 s, what ten of its steps took is written, and the pod's successor is there."""


ABSENT_S: Final = 20.0


def ideal_s(pods: int) -> float:
    """A step before the drift, where nothing is lost anywhere."""
    return UNIT_MS * ITEMS / (pods * SLOTS_PER_POD) / 1e3


def manifest(claim: str) -> dict[str, Any]:
    slots = {"cpu": "200m", "memory": "300Mi"}
    template = worker_image.template(claim)
    generator = {"name": "gen", "service": "serial", "time": {"perItemMs": UNIT_MS}}
    trainer = {"name": "train", "gang": True, "ranks": [1], "service": "serial", "time": {"perItemMs": 5.0}}
    config = {
        "items": ITEMS,
        "edges": [{"from": "gen", "to": "train"}, {"from": "train", "to": "gen", "weights": True}],
        "channels": {"gen-train": {"microBatch": 4, "depth": 4}},
        "drift": {"step": DRIFT_STEP, "role": "gen", "factor": 0.05},
    }
    pools: list[dict[str, Any]] = [
        {"name": "gen", "pods": {"min": 1, "max": 2}, "slots": slots | {"perPod": SLOTS_PER_POD}},
        {"name": "train", "pods": 1, "slots": slots | {"perPod": 1}},
    ]
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": NAME},
        "spec": {
            "seed": 1,
            "flow": {"name": "synthetic", "steps": STEPS, "config": config},
            "roles": [
                {"name": "gen", "kind": "synthetic", "workers": {"min": 1, "max": 4}, "config": generator},
                {"name": "train", "kind": "synthetic", "config": trainer},
            ],
            "pools": [pool | {"roles": [pool["name"]], "template": template} for pool in pools],
        },
    }


def beside_a_gang(paced: Paced) -> dict[str, Any]:
    """The same without a drift, in one pool with a gang of two, of whose pods a node has one at most. Its driver does
    without an absent pod after ABSENT_S."""
    others = {"matchLabels": {names.LABEL_COMPONENT: names.COMPONENT_WORKER}}
    apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": others}]
    job = paced.job(checkpoint={"uri": paced.checkpoints, "everySteps": 5})
    (pool,) = job["spec"]["pools"]
    own = manifest("")["spec"]
    del own["flow"]["config"]["drift"]
    generator, trainer = own["roles"]
    trainer |= {"workers": 2, "config": trainer["config"] | {"ranks": [2]}}
    pool |= {"name": "main", "roles": ["gen", "train"], "pods": {"min": 1, "max": 2}}
    pool["slots"] |= {"perPod": 3, "memory": "300Mi"}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    pool["template"]["spec"]["affinity"] = {"podAntiAffinity": rule}
    settings = {"name": "RLINF_SETTINGS", "value": json.dumps({"absent_pod_s": ABSENT_S})}
    driver = {"template": {"spec": {"containers": [{"name": "driver", "env": [settings]}]}}}
    job["metadata"]["name"] = NAME
    job["spec"] |= {"flow": own["flow"], "roles": [generator, trainer], "driver": driver}
    return job


def generators(plan: dict[str, Any]) -> int:
    return sum(entry["count"] for entry in plan["spec"]["workers"] if entry["role"] == "gen")
