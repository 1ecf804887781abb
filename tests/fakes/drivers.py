"""Drivers of tests: what the operator told them, and what they say, by hand. Implements clients.driver.Drivers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rlinf_api.plan import RLPlanSpec
from rlinf_api.report import DriverReport, DriverState, Goal
from rlinf_operator.manifests.metadata import JobKey, Target


class FakeDrivers:
    """`told` holds every instruction; `say(key, ...)` is a report of the driver that is followed."""

    def __init__(self, on_change: Callable[[JobKey], None] = lambda key: None, *, obedient: bool = True) -> None:
        self.on_change, self.obedient = on_change, obedient
        self.followed: dict[JobKey, Target] = {}
        self.reports: dict[JobKey, DriverReport] = {}
        self.told: list[tuple[str, int]] = []
        self.drained: list[JobKey] = []
        self.adjusted: list[Goal] = []
        self.refusal = ""
        self.closed = False

    def follow(self, key: JobKey, target: Target) -> None:
        if self.followed.get(key) != target:
            self.followed[key] = target
            self.say(key, state=DriverState.WAITING, plan_revision=0)

    def forget(self, key: JobKey) -> None:
        self.followed.pop(key, None)
        self.reports.pop(key, None)

    def heard(self, key: JobKey) -> tuple[int, DriverReport | None, float] | None:
        target = self.followed.get(key)
        return (target.attempt, self.reports.get(key), 0.0) if target else None

    def silent(self, *, for_s: float) -> tuple[int, int]:
        return 0, len(self.followed)

    async def apply_plan(self, target: Target, plan: RLPlanSpec, *, step: str, switches: int = 0, uid: str = "") -> str:
        self.told.append((step, plan.revision))
        if not self.refusal and step == "Commit" and self.obedient:
            key = next(k for k, t in self.followed.items() if t == target)
            self.say(key, state=DriverState.RUNNING, plan_revision=plan.revision)
        return self.refusal

    async def adjust(self, target: Target, goal: Goal) -> str:
        self.adjusted.append(goal)
        if not self.refusal:
            key = next(k for k, t in self.followed.items() if t == target)
            self.reports[key] = dataclasses.replace(self.reports[key], goal=goal)
        return self.refusal

    def drain(self, key: JobKey, target: Target, *, deadline_s: float) -> None:
        self.drained.append(key)
        if self.obedient:
            self.say(key, state=DriverState.DRAINED, plan_revision=1, checkpoint_uri="/c", checkpoint_step=3)

    async def close(self) -> None:
        self.closed = True

    def say(self, key: JobKey, **fields: object) -> None:
        target = self.followed[key]
        known = {"job_uid": target.job_uid, "driver_attempt": target.attempt, "steps": 100}
        self.reports[key] = DriverReport(**(known | fields))  # type: ignore[arg-type]
        self.on_change(key)
