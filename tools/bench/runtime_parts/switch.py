"""The pause of a job whose plan is changed by hand: in place, and with a worker that was prepared beside it.

From the step boundary at which the new plan comes into force until a unit moves under it, as the driver's event
`plan-switched` says. The job is CartPole; make learn-plans asks whether it learns as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

from tools.bench.foundation_parts import learn_plans
from tools.bench.harness import BenchError, Row

STEPS: Final = 70


def pauses() -> Mapping[str, float]:
    """The worst of each kind in one run: a person waits for the longest."""
    found = learn_plans.learn(seed=1, steps=STEPS, changed=True).pauses_s
    beside = [
        i for i, change in enumerate(learn_plans.CHANGES) if len(change["pools"]) and change["pools"][0]["pods"] == 2
    ]
    count = len(learn_plans.CHANGES)
    by_kind: dict[str, list[float]] = {"plan_pause_in_place": [], "plan_pause_beside": []}
    for number, pause in enumerate(found):
        kind = "plan_pause_beside" if number % count in beside else "plan_pause_in_place"
        by_kind[kind].append(pause)
    if not all(by_kind.values()):
        raise BenchError(f"{len(found)} changes of plan came into force in {STEPS} steps; wanted {count}")
    return {**{kind: max(seconds) for kind, seconds in by_kind.items()}, "plan_pause_median": statistics.median(found)}


def rows() -> list[Row]:
    return [
        Row(name="plan_pause_in_place", unit="s", better="lower", bar=0.5, subject=pauses),
        Row(name="plan_pause_beside", unit="s", better="lower", bar=2.0, subject=pauses),
        Row(name="plan_pause_median", unit="s", better="lower", subject=pauses),
    ]
