"""A job whose true costs are known, as its driver would report it: plans in, profiles out, no process and no clock.
What a step takes is the simulator's word for the true problem, with noise. For: closing the loop of replan/decide.py
many times, in tests/unit/rlinf_scheduler and `make prove PART=steady`.

    world = World.of_entry(entries()["drawn-00"], steps=60, seed=1)
    world.run()
    [plan.reason.code for plan in world.plans]      # Initial, Probe, Profiled

What is not as in the runtime: a plan comes into force with the step behind the report that brought it about, a change
costs nothing, and every batch is as large as it may be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, RLPlanSpec
from rlinf_api.profile import Batch, ChannelProfile, MemoryProfile, Move, Number, Profile, RoleProfile, forget
from rlinf_scheduler.planner import spec as plan_spec
from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.initial import initial
from rlinf_scheduler.planner.problem import Cost, InLanes, InRounds, PlanProblem, RoleCosts
from rlinf_scheduler.planner.simulate import simulate
from rlinf_scheduler.replan.decide import NextPlan, Stay, decide
from rlinf_scheduler.replan.known import Case, Known, PlanRecord
from tools import workloads
from tools.prove import problems

MIB: Final = 1 << 20
KEY: Final = "sha256:" + "0" * 64
BLOCK: Final = 5  # driver/profile.py's, as is when a report begins and ends
DEPARTS: Final = 0.10
BEGAN: Final = 1.8e9  # seconds since 1970
Slow = Callable[[RLPlanSpec], float]


@dataclass
class World:
    """`noise`: standard deviation of a step's time over its mean. `tail`: share of steps that take twice as long.
    `slow`: a factor that no simulator knows of, by plan.
    `shift`: (step, role, factor) from which on the role's time per unit is another."""

    job: RLJobSpec
    truth: PlanProblem
    seed: int = 1
    noise: float = 0.02
    tail: float = 0.0
    slow: Slow = lambda plan: 1.0
    shift: tuple[int, str, float] | None = None
    failing: Callable[[RLPlanSpec], bool] = lambda plan: False
    homeless: Callable[[RLPlanSpec], bool] = lambda plan: False
    """Plans of which a pod finds no node."""
    interval: int = 40  # steps between the reports of a job in which nothing happens
    plans: list[RLPlanSpec] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    no_node_at: dict[int, float] = field(default_factory=dict)
    profiles: list[Profile] = field(default_factory=list)
    decisions: list[tuple[int, Stay | NextPlan]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    considered: int = 0
    settled: int = 0
    judged_by: tuple[Profile, ...] = ()
    most: int = 100
    """Reports that the scheduler keeps."""
    heard: list[Profile] = field(default_factory=list)
    again_at: float = 0.0

    @classmethod
    def of_entry(
        cls,
        entry: Mapping[str, Any],
        *,
        steps: int,
        seed: int = 1,
        mode: str = "Auto",
        items: int | None = None,
        pods: int = 1,
        spec: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> World:
        manifest = workloads.job(entry, mode=mode, steps=steps, items=items)
        truth = problems.of_entry(
            entry, items=items, lag_ms=0.0, hand_over_ms=problems.HAND_OVER_MS, turn_ms=problems.TURN_MS
        )
        manifest["spec"] |= spec or {}
        if pods != 1:  # of each pool at most so many times those that it has at least
            for pool in manifest["spec"]["pools"]:
                pool["pods"] = {"min": pool["pods"], "max": pods * pool["pods"]}
            truth = replace(truth, pools=tuple(replace(pool, slots=pods * pool.slots) for pool in truth.pools))
        drift = entry.get("drift")
        shift = (drift["step"], drift["role"], drift["factor"]) if drift else None
        return cls(RLJobSpec.model_validate(manifest["spec"]), truth, seed=seed, **{"shift": shift, **more})

    # --- running ------------------------------------------------------------------------------------------------------
    def begin(self) -> RLPlanSpec:
        plan = initial(self.job, job=self.ref)
        assert isinstance(plan, RLPlanSpec), plan
        self.plans.append(plan)
        return plan

    def run(self, steps: int | None = None) -> None:
        """To the end of the job, or so many steps."""
        plan = self.plans[-1] if self.plans else self.begin()
        rng = random.Random(f"world {self.seed}")
        under, last = 0, self.profiles[-1].last_step if self.profiles else 0
        report: list[float] = []
        block: list[float] = []
        usual = 0.0
        until = min(self.job.flow.steps, last + steps) if steps else self.job.flow.steps
        for step in range(last + 1, until + 1):
            truth = self.truth_at(step)
            mean = simulate(truth, plan_spec.read(truth, plan, self.job)).period_ms / 1e3 * self.slow(plan)
            mean *= 2.0 if self.tail and rng.random() < self.tail else 1.0
            self.seconds.append(max(0.1 * mean, mean * rng.gauss(1.0, self.noise)))
            block.append(self.seconds[-1])
            under += 1
            single = under <= self.job.placement.profile_steps
            is_over = single or step == until or len(report) + len(block) >= (self.interval if usual else BLOCK)
            if len(block) < BLOCK and not is_over:
                continue
            of_block = sum(block) / len(block)
            departs = bool(usual) and abs(of_block - usual) > DEPARTS * usual
            others = [n for n, took in enumerate(block) if abs(took - usual) > DEPARTS * usual]
            if departs and others[0] > 0:  # it begins with the first that does
                report, block = report + block[: others[0]], block[others[0] :]
                if not is_over:
                    continue
                self._report(plan, truth, report, last=step - len(block))
                report = []
            else:
                if departs and report:
                    self._report(plan, truth, report, last=step - len(block))
                    report = []
                report, block = report + block, []
                if not (is_over or departs):
                    continue
                usual = 0.0 if single else of_block
                self._report(plan, truth, report, last=step)
                report = []
            if (other := self._decided(step)) is not None:
                plan, under, usual, block = other, 0, 0.0, []

    def _decided(self, step: int) -> RLPlanSpec | None:
        now = BEGAN + sum(self.seconds)
        records = tuple(
            PlanRecord(spec=p, failed=p.revision in self.failed, no_node_at=self.no_node_at.get(p.revision, 0.0))
            for p in self.plans
        )
        case = Case(
            job=self.job, plans=records, profiles=tuple(self.heard), considered=self.considered, settled=self.settled,
            judged_by=self.judged_by, now=now, again=0 < self.again_at <= now,
        )  # fmt: skip
        decision = decide(case)
        self.decisions.append((step, decision))
        if isinstance(decision, Stay):
            if decision.considered:
                self.considered, self.settled = decision.considered, self.profiles[-1].revision
                self.judged_by = Known(case).newest
                self.again_at = decision.again_at
            elif decision.again_at:
                self.again_at = self.again_at or decision.again_at
            return None
        self.again_at = 0.0
        self.plans.append(decision.plan)
        if self.homeless(decision.plan):
            self.no_node_at[decision.plan.revision] = now
            self.failed.add(decision.plan.revision)
            return None
        if self.failing(decision.plan):
            self.failed.add(decision.plan.revision)
            return None
        return decision.plan

    def truth_at(self, step: int) -> PlanProblem:
        if self.shift is None or step < self.shift[0]:
            return self.truth
        _, name, factor = self.shift
        return replace(
            self.truth, roles=tuple(_times(role, factor) if role.name == name else role for role in self.truth.roles)
        )

    @property
    def ref(self) -> JobRef:
        return JobRef(name="job", uid="u")

    @property
    def codes(self) -> list[str]:
        return [str(plan.reason.code) for plan in self.plans]

    # --- what its driver would say ------------------------------------------------------------------------------------
    def _report(self, plan: RLPlanSpec, truth: PlanProblem, seconds: list[float], *, last: int) -> None:
        self.profiles.append(self.profile(plan, truth, seconds, last=last))
        self.heard.append(self.profiles[-1])
        forget(self.heard, most=self.most)

    def profile(self, plan: RLPlanSpec, truth: PlanProblem, seconds: list[float], *, last: int) -> Profile:
        count = len(seconds)
        mean = sum(seconds) / count
        spread = (sum((s - mean) ** 2 for s in seconds) / (count - 1)) ** 0.5 if count > 1 else 0.0
        candidate = plan_spec.read(truth, plan, self.job)
        return Profile(
            key=KEY,
            job=plan.job,
            revision=plan.revision,
            first_step=last - count + 1,
            last_step=last,
            steps=count,
            step_seconds=Number(value=mean, spread=spread, count=count),
            roles=[part for role in truth.roles for part in _parts(truth, candidate, role, steps=count)],
            channels=list(_channels(truth, count)),
        )


def _times(role: RoleCosts, factor: float) -> RoleCosts:
    return replace(
        role,
        options=tuple(
            replace(o, per_item_ms=Cost(o.per_item_ms.value * factor, by=o.per_item_ms.by)) for o in role.options
        ),
    )


def _parts(truth: PlanProblem, candidate: Candidate, role: RoleCosts, *, steps: int) -> list[RoleProfile]:
    found = []
    everybody = candidate.workers(role.name)
    for at, pool in enumerate(truth.pools):
        workers = sum(t.workers[at] for region in candidate.regions for t in region.turns if t.role == role.name)
        if workers:
            speed = pool.speed * role.slots_per_worker**role.scaling
            found.append(_part(truth, candidate, role, pool.name, workers, everybody, speed=speed, steps=steps))
    return found


def _part(
    truth: PlanProblem,
    candidate: Candidate,
    role: RoleCosts,
    pool: str,
    workers: int,
    everybody: int,
    *,
    speed: float,
    steps: int,
) -> RoleProfile:
    choice = candidate.choices[role.name]
    unit_s = 1e-3 * role.options[choice.option].per_item_ms.value / speed
    batch_s = 1e-3 * role.per_batch_ms.value / speed
    share = -(-truth.units[role.name] // everybody)
    seconds: dict[str, Number] = {}
    if cycle := truth.cycle_of.get(role.name):
        fronts = candidate.workers(cycle.front)
        size = max(1, -(-truth.units[role.name] // fronts) // candidate.choices[cycle.front].stages)
        passages = cycle.round_trips * truth.units[role.name] / size * workers / everybody
        batches = [_batch(size, batch_s + unit_s * size, passages * steps)]
    elif isinstance(role.service, InLanes):
        lane_s, mean = role.service.lanes * unit_s, sum(role.sizes) / len(role.sizes)
        vary = (sum((size - mean) ** 2 for size in role.sizes) / len(role.sizes)) ** 0.5
        batches = [
            Batch(size=0.0, seconds=Number(value=batch_s, count=workers * steps)),
            Batch(
                size=1.0,
                units=1.0,
                seconds=Number(value=lane_s * mean, spread=lane_s * vary, count=share * workers * steps),
            ),
        ]
    else:
        batch = min(choice.micro_batch, share)
        whole, rest = divmod(share, batch)
        batches = [_batch(batch, batch_s + unit_s * batch, whole * workers * steps)]
        batches += [_batch(rest, batch_s + unit_s * rest, workers * steps)] if rest else []
        if isinstance(role.service, InRounds) and everybody > 1:
            exchange = 1e-3 * role.service.sync_ms.value * (everybody - 1) / everybody * (whole + bool(rest))
            seconds["comm"] = Number(value=exchange, count=workers * steps)
    moves = [
        Move(what="load", seconds=Number(value=1e-3 * role.load_ms.value / speed, count=workers)),
        Move(what="offload", seconds=Number(value=1e-3 * role.offload_ms.value / speed, count=workers)),
        Move(what="start", seconds=Number(value=0.5, count=workers)),
    ]
    if truth.weights is not None and truth.weights.producer == role.name:
        moves.append(Move(what="publish", seconds=Number(value=1e-3 * truth.weights.sync_ms.value, count=steps)))
    worked = sum(b.seconds.value * b.seconds.count for b in batches) / workers / steps
    return RoleProfile(
        name=role.name,
        pool=pool,
        workers=workers,
        slots_per_worker=role.slots_per_worker,
        seconds={"compute": Number(value=worked, count=workers * steps), **seconds},
        batches=sorted(batches, key=lambda b: b.size),
        moves=moves,
        memory=MemoryProfile(
            resident=int(role.resident_mib * MIB),
            peak=int(max(role.options[choice.option].peak_mib, role.resident_mib) * MIB),
            offloaded=int(role.offloaded_mib * MIB),
        ),
    )


def _batch(units: float, seconds: float, count: float) -> Batch:
    spread = 0.05 * seconds / max(1.0, units) ** 0.5
    return Batch(size=units, units=units, seconds=Number(value=seconds, spread=spread, count=max(1, round(count))))


def _channels(truth: PlanProblem, steps: int) -> list[ChannelProfile]:
    def channel(name: str, mode: Any, producer: str, consumer: str, units: float) -> ChannelProfile:
        return ChannelProfile(
            name=name, mode=mode, producer=producer, consumer=consumer, units=Number(value=units, count=steps),
            bytes=Number(value=256.0 * units, count=steps),
        )  # fmt: skip

    found = [channel(e.channel, "Queue", e.producer, e.consumer, truth.units[e.consumer]) for e in truth.edges]
    found += [channel(truth.role(name).tickets, "Queue", "", name, truth.units[name]) for name in truth.first]
    if truth.weights is not None:
        found.append(channel("weights", "Weights", truth.weights.producer, truth.weights.consumer, 1))
    for cycle in truth.cycles:
        name, trips = f"cycle-{cycle.front}-{cycle.back}", cycle.round_trips * truth.units[cycle.front]
        found.append(channel(name, "Cycle", cycle.front, cycle.back, trips))
        found.append(channel(name, "Cycle", cycle.back, cycle.front, trips))
    return found
