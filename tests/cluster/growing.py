"""A job of known costs: a second pod makes its steps half as long, until its work becomes another and one pod does.

A generator makes 16 units of 100 ms, on two slots or four; a trainer takes 5 ms for each. From DRIFT_STEP on a unit
takes the generator 5 ms: the trainer's 80 ms are the step then.
"""

from typing import Any, Final

from tests.cluster import worker_image

NAME: Final = "grows"
UNIT_MS, ITEMS, SLOTS_PER_POD = 100.0, 16, 2
STEPS: Final = 50_000
"""A change of the plan has to pay over the steps that are left, shrinking too: an hour of them, however late it is."""
DRIFT_STEP: Final = 200
"""Of the first plan's steps 160 s, of the second one's 80: until then the second pod is at work, also where one starts
in 40 s, what ten of its steps took is written, and the pod's successor is there."""


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


def generators(plan: dict[str, Any]) -> int:
    return sum(entry["count"] for entry in plan["spec"]["workers"] if entry["role"] == "gen")
