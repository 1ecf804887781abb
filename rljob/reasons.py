"""What became of the plans of a run, and what other capacity would bring: read from its work dir, also when it is over,
or from the cluster's objects.

    rljob plan explain WORKDIR [NAME]          why this plan, what it promised, what it kept, why others lost
    rljob plan history math -n team            every plan, a line each
    rljob plan what-if WORKDIR --pods gpu=3    what the planner would do with other pools, by what was measured
    rljob plan what-if WORKDIR --slots gpu=8 --memory 80    with other slots: 8 in each pod of gpu, of 80 GiB each
    rljob plan what-if rljob.yaml --profile WORKDIR/profiles.jsonl    the same of a job that has not begun

Not for: changing anything (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from rlinf_api import names, sentences
from rlinf_api.errors import UserError
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import RLPlanSpec
from rlinf_api.profile import Profile, key_of, read_lines
from rlinf_api.slots import MAX_SLOTS
from rlinf_scheduler.planner import search, spec, words
from rlinf_scheduler.planner.candidate import Candidate
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.problem import PlanProblem, Pool
from rlinf_scheduler.planner.simulate import simulate
from rlinf_scheduler.planner.what_if import what_if_more
from rlinf_scheduler.replan.fit import Fit, Unfit, fit
from rljob import manifest
from rljob.plan import Where

PROFILE: Final = "profile.json"
Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPools:
    """What is asked instead of the pools that there are. `pods`: of a pool; `slots`: of each pod of a pool, where name
    "" is every pool; `memory_gib`: of each slot, 0: as it is."""

    pods: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    memory_gib: float = 0.0

    def of(self, problem: PlanProblem) -> PlanProblem:
        known = {pool.name for pool in problem.pools}
        if unknown := sorted({*self.pods, *self.slots} - known - {""}):
            raise UserError(f"the job has no pool {unknown[0]!r}", wanted=f"one of {', '.join(sorted(known))}")
        pools = map(self._of_pool, problem.pools)
        return replace(problem, pools=tuple(pool for pool in pools if pool.slots))

    def _of_pool(self, pool: Pool) -> Pool:
        pods = self.pods.get(pool.name, pool.most_pods)
        per_pod = self.slots.get(pool.name, self.slots.get("", pool.slots_per_pod))
        memory_mib = self.memory_gib * 1024 or pool.memory_mib
        return replace(pool, slots=min(MAX_SLOTS, pods * per_pod), slots_per_pod=per_pod, memory_mib=memory_mib)


def explain(where: Where, name: str) -> str:
    """`name`: empty for the plan in force, or the last one that was."""
    job, plans = _objects(where)
    current = str(((job.get("status") or {}).get("plan") or {}).get("current", ""))
    return "\n".join(_explained(_plan(plans, name or current)))


def history(where: Where) -> str:
    job, plans = _objects(where)
    current = ((job.get("status") or {}).get("plan") or {}).get("current")
    return (
        "\n".join(_line(name, plan, is_current=name == current) for name, plan in plans.items()) or "no plan is there"
    )


def what_if(where: Where, instead: OtherPools, *, more: bool) -> str:
    """`more`: what one slot more, or a tenth more memory, would bring."""
    job, plans = _objects(where)
    fitted, in_force = _fitted(where, job, plans)
    current = spec.read(fitted.problem, in_force, RLJobSpec.model_validate(job["spec"]))
    return "\n".join(_weighed(fitted, current, instead, more=more))


def what_if_it_began(
    file: Path, profile: Path, instead: OtherPools, *, runtimes: Sequence[Path] = (), more: bool
) -> str:
    """What the planner says of a manifest, by what an earlier job with its key has measured. It needs neither cluster
    nor run. `runtimes`: files of the RLRuntime that it names, where it is not beside it."""
    given = manifest.given(file, beside=runtimes)
    checked = manifest.check(manifest.resolved(given.the_job(), given.runtimes))
    if checked.spec is None or checked.problems:
        raise UserError(f"{file} is no job that could begin", got="; ".join(map(str, checked.problems)))
    fitted = fit(checked.spec, of_key(profile, checked.spec), plan=None)
    if isinstance(fitted, Unfit):
        raise UserError("the planner cannot plan by what was measured", got=str(fitted))
    return "\n".join(_weighed(fitted, None, instead, more=more))


def _weighed(fitted: Fit, current: Candidate | None, instead: OtherPools, *, more: bool) -> Iterator[str]:
    now = 0.0
    if current is not None:
        prediction = simulate(fitted.problem, current)
        now = prediction.period_ms
        yield f"{_ms(now)}  now, as simulated: {words.explain(fitted.problem, current, prediction)}"
    problem = instead.of(fitted.problem)
    found = search.plan(problem, start=(current,) if current is not None and instead == OtherPools() else ())
    if isinstance(found, Infeasible):
        yield "no plan then: " + "; ".join(map(str, found.reasons))
        return
    best = found.best.prediction.period_ms
    saved = f", {1 - best / now:+.0%} of time saved" if now else ""
    yield f"{_ms(best)}  best then{saved}: {found.explanation}"
    for other in found.runners_up[:4]:
        described = words.describe(problem, other.candidate)
        yield f"{_ms(other.prediction.period_ms)}  {described}: {other.lost_because}"
    if fitted.assumed:
        yield f"assumed, as nobody has measured it: {', '.join(fitted.assumed)}"
    if more:
        yield from map(str, what_if_more(problem, found))


def numbers_of(option: str, said: Sequence[str], *, may_be_bare: bool = False) -> dict[str, int]:
    """`may_be_bare`: a number alone is that of every pool.

    >>> numbers_of("--pods", ["gpu=3", "cpu=1"])
    {'gpu': 3, 'cpu': 1}
    >>> numbers_of("--slots", ["8", "cpu=2"], may_be_bare=True)
    {'': 8, 'cpu': 2}
    """
    found = {}
    for text in said:
        pool, equals, count = text.rpartition("=")
        if not count.isdecimal() or not (pool if equals else may_be_bare):
            bare = ", or N for every pool" if may_be_bare else ""
            raise UserError(
                f"{option} names a pool and how many", got=sentences.shown(text), wanted=f"POOL=N, as gpu=3{bare}"
            )
        found[pool] = int(count)
    return found


def _ms(value: float) -> str:
    return f"{value / 1e3:9.3f} s"


# --- one plan ---------------------------------------------------------------------------------------------------------
def _line(name: str, plan: Manifest, *, is_current: bool) -> str:
    of, reason = plan["spec"], plan["spec"]["reason"]
    promised = (of.get("predicted") or {}).get("periodSeconds")
    kept = (plan.get("status") or {}).get("measured") or {}
    true = [c["type"] for c in (plan.get("status") or {}).get("conditions", ()) if c["status"] == "True"]
    said = f"{'*' if is_current else ' '} {name}  {reason['code']}  {' '.join(true) or '-'}"
    said += f"  promised {promised:.4g} s" if promised else ""
    said += f"  took {kept['periodSeconds']:.4g} s ({kept['steps']} steps)" if kept else ""
    return f"{said}\n    {reason.get('message', '')}"


def _explained(plan: Manifest) -> Iterator[str]:
    of, reason = plan["spec"], plan["spec"]["reason"]
    yield f"{plan['metadata']['name']}, because of {reason['code']}: {reason.get('message', '')}"
    based_on = (of.get("basedOn") or {}).get("revision")
    if based_on:
        yield f"after revision {based_on}"
    yield "workers: " + ", ".join(f"{w['count']} {w['role']} on {w['slots']}" for w in of["workers"])
    for lease in of.get("leaseSets") or ():
        yield f"in turns on {lease['slots']}: {' | '.join(turn['role'] for turn in lease['turns'])}"
    if predicted := of.get("predicted"):
        parts = ", ".join(f"{name} {s:.4g} s" for name, s in predicted["parts"].items() if s)
        idle = predicted["idleShare"]
        yield f"promised {predicted['periodSeconds']:.4g} s a step ({parts}), slots idle {idle:.0%}"
    if measured := (plan.get("status") or {}).get("measured"):
        ratio = f", {measured['ratioToPrediction']:.2f} of it" if measured.get("ratioToPrediction") else ""
        yield f"took {measured['periodSeconds']:.4g} s a step over {measured['steps']} steps{ratio}"
    if stays := (plan["metadata"].get("annotations") or {}).get(names.ANNOTATION_STAYS):
        yield f"stays, {stays}"
    for other in of.get("alternatives") or ():
        yield f"instead, {other['periodSeconds']:.4g} s: {other['summary']} ({other['lostBecause']})"


def measured(where: Where) -> tuple[Profile, ...]:
    """The profiles of a work dir, of one of its files, or of a job of the cluster: one at least."""
    if not isinstance(where, Path):
        from rljob import cluster

        return cluster.measured(*where)
    path = where
    lines = path / names.PROFILES_FILE if path.is_dir() else path
    if path.is_dir() and not lines.exists():
        lines = path / PROFILE  # no report has reached the scheduler
    try:
        text = lines.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else "no text"
        raise UserError(
            f"nothing was measured in {path} yet", got=f"{lines.name}: {got}", wanted="two steps at least"
        ) from error
    profiles = read_lines(text)
    if not profiles:
        raise UserError(
            f"nothing was measured in {path} yet", got=f"{lines.name} is empty", wanted="two steps at least"
        )
    return profiles


def of_key(file: Path, job: RLJobSpec) -> tuple[Profile, ...]:
    """What an earlier job has measured, with the key of this one."""
    profiles, wanted = measured(file), key_of(job)
    if other := next((profile for profile in profiles if profile.key != wanted), None):
        raise UserError(
            f"profile {file} is of another job", got=f"{other.job.name}, key {other.key}",
            wanted=f"key {wanted}: the same flow, model, data, and the same roles and slots apart from their counts",
            next="leave --profile out: the job measures by itself",
        )  # fmt: skip
    return profiles


# --- what a work dir holds --------------------------------------------------------------------------------------------
def _objects(where: Where) -> tuple[Manifest, dict[str, Manifest]]:
    """The RLJob, and its plans by name, in their order."""
    if isinstance(where, Path):
        return objects_of(where)
    from rljob import cluster

    found = cluster.objects(*where)
    return found.job, {**found.plans}


def objects_of(work_dir: Path) -> tuple[Manifest, dict[str, Manifest]]:
    """The job of a run and its plans by name, also of a run that is over."""
    folder = work_dir / "objects"
    jobs = [_read(path) for path in sorted(folder.glob("rljob-*.yaml"))]
    if len(jobs) != 1:
        raise UserError(
            f"{work_dir} is no work dir of a run", got=f"{len(jobs)} RLJobs in objects/", wanted="one",
            next="give the folder that `rljob run` named",
        )  # fmt: skip
    plans = [_read(path) for path in folder.glob("rlplan-*.yaml")]
    plans.sort(key=lambda plan: int(plan["spec"]["revision"]))
    return jobs[0], {str(plan["metadata"]["name"]): plan for plan in plans}


def _read(path: Path) -> Manifest:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read", got=str(error)) from error
    if not isinstance(found, dict) or "spec" not in found:
        raise UserError(f"{path} is no object", got=sentences.shown(found))
    return found


def _plan(plans: Mapping[str, Manifest], name: str) -> Manifest:
    if name not in plans:
        some = f"one of {', '.join(list(plans)[-8:])}" if plans else ""
        raise UserError(f"this job has no plan {sentences.shown(name)}", wanted=some)
    return plans[name]


def _fitted(where: Where, job: Manifest, plans: Mapping[str, Manifest]) -> tuple[Fit, RLPlanSpec]:
    """By what was measured, and the plan that the newest report is of."""
    profiles = measured(where)
    revision = profiles[-1].revision
    of = next((p for p in plans.values() if p["spec"]["revision"] == revision), None)
    if of is None:
        of_whom = job["metadata"]["name"]
        raise UserError(f"what was measured of {of_whom} is of plan revision {revision}, which is not there any more")
    plan = RLPlanSpec.model_validate(of["spec"])
    fitted = fit(RLJobSpec.model_validate(job["spec"]), profiles, plan=plan)
    if isinstance(fitted, Unfit):
        raise UserError("the planner cannot plan by what was measured", got=str(fitted))
    return fitted, plan
