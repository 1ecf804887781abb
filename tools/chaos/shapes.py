"""Jobs that differ from the examples, for schedules of faults: several rollouts, gangs of two ranks, two gangs that end
steps together, an engine's pipeline with staleness. Each is one of a few seconds, paced so that a machine's speed does
not say how many of its steps meet a fault.

    drawn(random.Random(7), folder) -> Shape(name="ppo", manifest={...}, steps=120, roles=("env", "rollout", "actor"))

| shape | roles | what is looked at in the end |
|---|---|---|
| ppo | 2 env, 2 to 4 rollout, 2 ranks of an actor | units of each step |
| critic | 2 to 4 samplers, 2 ranks of an actor, 1 or 2 of a critic | the same, and the sums that both have learnt |
| pipeline | 2 to 4 rollout, 1 or 2 reward, 2 ranks of a trainer, staleness 0 to 2, weights | units of each step |
| turns | the same on 2 or 4 slots that all of them share in turns | units of each step |
| reasoning | flow grpo: 1 to 3 engines, 1 or 2 rewards, 1 or 2 ranks; or one of each, in turns | units of each step |

A shape has one pod, or two: the trainer's ranks in one, all others in the other; in turns one pool of one or two pods.
In every third shape each role has a warm spare.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from tests.fakes import critic_job, reasoning
from tools.chaos.job import EXAMPLE
from tools.running_job import RunningJob

STEPS: Final = 80
STEP_S: Final = 0.15  # about: 12 s of steps, and faults
FAKES: Final = "tests.fakes.critic_job"
ITEMS: Final = 12
GROUPS: Final = 6
IMPORT_S: Final = 5.0
"""What importing torch and transformers takes: seconds of a core for each worker, and all of them may start at once on
two."""
SLOTS: Final = {"cpu": "50m", "memory": "512Mi"}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    manifest: Json
    roles: tuple[str, ...]
    units: int
    """The units that each step trains on."""
    start_s: float = 0.0
    """How much longer its workers together take to start than those of other shapes."""

    def prepare(self, folder: Path) -> None:
        """Makes what the job reads there."""
        if self.name == "reasoning":
            reasoning.make_folder(folder)

    def problems(self, run: RunningJob) -> list[str]:
        """What is wrong with a job that has ended, beside what holds for all: what it has learnt."""
        if self.name != "critic":
            return []
        told = {line["step"]: (int(line["total"]), int(line["critic_total"])) for line in run.lines("metrics")}
        wanted = critic_job.learnt(upto=STEPS)
        differ = [
            f"step {step}: {told.get(step)}, wanted {wanted[step]}" for step in wanted if told.get(step) != wanted[step]
        ]
        return [f"actor and critic have learnt something else: {'; '.join(differ[:3])}"] if differ else []


def drawn(rng: random.Random, folder: Path) -> Shape:
    name = rng.choice(("ppo", "critic", "pipeline", "turns", "reasoning"))
    makers = {"ppo": _ppo, "critic": _critic, "pipeline": _pipeline, "turns": _turns}
    shape = makers[name](rng) if name in makers else _reasoning(rng, folder)
    for role in shape.manifest["spec"]["roles"] if rng.random() < 1 / 3 else ():
        role["spares"] = 1
    shape.manifest["spec"] |= {
        "seed": rng.randint(1, 99),
        "checkpoint": {"uri": f"file://{folder}/checkpoints", "everySteps": rng.choice((3, 10))},
        "failurePolicy": {"maxRestarts": 1_000},
    }
    return shape


def _ppo(rng: random.Random) -> Shape:
    spec = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["spec"]
    # 64 steps of an environment for each worker: STEP_S
    paced = {"env": "tests.integration.chaos_envs:Paced-v0", "envKwargs": {"go": "never"}}
    spec["flow"]["config"] |= {**paced, "numEnvs": 8, "slices": 4, "horizon": 16, "epochs": 1, "finalEpochs": 1}
    roles = [
        {"name": "env", "kind": "gymnasium", "workers": 2},
        {"name": "rollout", "kind": "torch", "workers": rng.randint(2, 4)},
        {"name": "actor", "kind": "tests.fakes.light_actor:Light", "workers": 2},
    ]
    return _shape("ppo", rng, flow=spec["flow"], roles=roles, trainers=("actor",), units=4)


def _critic(rng: random.Random) -> Shape:
    samplers = rng.randint(2, 4)
    pace = {"paceSeconds": round(STEP_S * samplers / critic_job.PROMPTS, 4)}
    roles = [
        {"name": "sampler", "kind": f"{FAKES}:Sampler", "workers": samplers, "config": pace},
        {"name": "critic", "kind": f"{FAKES}:Critic", "workers": rng.randint(1, 2)},
        {"name": "actor", "kind": f"{FAKES}:Actor", "workers": 2},
    ]
    flow = {"name": f"{FAKES}:flow", "config": {}}
    return _shape("critic", rng, flow=flow, roles=roles, trainers=("critic", "actor"), units=critic_job.PROMPTS)


def _pipeline(rng: random.Random) -> Shape:
    rollouts, rewards = rng.randint(2, 4), rng.randint(1, 2)
    per_item = 1e3 * STEP_S / ITEMS
    roles: list[Json] = [
        {"name": "rollout", "service": "concurrent", "lanes": 4, "time": {"perItemMs": per_item * rollouts}},
        {"name": "reward", "service": "serial", "time": {"perItemMs": per_item * rewards / 2}},
        {"name": "train", "service": "serial", "gang": True, "syncMs": 2, "ranks": [2],
         "time": {"perItemMs": per_item}},
    ]  # fmt: skip
    config = {
        "workload": "pipeline", "items": ITEMS,
        "edges": [
            {"from": "rollout", "to": "reward"}, {"from": "reward", "to": "train"},
            {"from": "train", "to": "rollout", "weights": True, "syncMs": 5},
        ],
    }  # fmt: skip
    flow = {"name": "synthetic", "maxStaleness": rng.randint(0, 2), "config": config}
    counts = {"rollout": rollouts, "reward": rewards, "train": 2}
    made = [
        {"name": role["name"], "kind": "synthetic", "workers": counts[role["name"]], "config": role} for role in roles
    ]
    return _shape("pipeline", rng, flow=flow, roles=made, trainers=("train",), units=ITEMS)


def _turns(rng: random.Random) -> Shape:
    """Slots change hands some times in a step, as far as a step of STEP_S allows."""
    shape = _pipeline(rng)
    spec, pods = shape.manifest["spec"], rng.randint(1, 2)
    for role in spec["roles"]:
        role["workers"] = {"min": 1, "max": 4}
        role["config"]["time"]["perItemMs"] *= 0.3
        role["config"] |= {"loadMs": 3.0, "offloadMs": 2.0, "ranks": [2, 4] if role["name"] == "train" else []}
    spec["placement"]["mode"] = "Collocated"
    spec["pools"] = [{"name": "p0", "roles": [*shape.roles], "pods": pods, "slots": {"perPod": 2, **SLOTS}}]
    shape.manifest["metadata"]["name"] = "turns"
    return replace(shape, name="turns")


def _reasoning(rng: random.Random, folder: Path) -> Shape:
    """A language model of some thousand numbers, whose loss is as slow as STEP_S says."""
    spec = reasoning.job(folder)["spec"]
    config = {key: value for key, value in spec["flow"]["config"].items() if key != "evaluation"}
    config |= {"promptsPerStep": GROUPS, "samplesPerPrompt": 4, "loss": {"kind": "tests.fakes.reasoning:paced"}}
    counts = {"rollout": rng.randint(1, 3), "reward": rng.randint(1, 2), "actor": rng.randint(1, 2)}
    in_turns = rng.random() < 1 / 3
    for role in spec["roles"]:
        role["workers"] = 1 if in_turns else counts[role["name"]]
        role["config"]["memory"] = {"resident": 100, "peak": 400, "offloaded": 300}
    flow = {"name": "grpo", "config": config, "maxStaleness": rng.randint(0, 2)}
    shape = _shape("reasoning", rng, flow=flow, roles=spec["roles"], trainers=("actor",), units=GROUPS)
    made = shape.manifest["spec"]
    made |= {"model": spec["model"], "data": {"train": spec["data"]["train"]}}
    if in_turns:
        made["placement"]["mode"] = "Collocated"
        slots = {**SLOTS, "perPod": 1, "memory": "2Gi"}
        made["pools"] = [{"name": "p0", "roles": [*counts], "pods": 1, "slots": slots}]
    workers = sum(role["workers"] for role in spec["roles"])
    return replace(shape, start_s=IMPORT_S * workers)


def _shape(
    name: str, rng: random.Random, *, flow: Json, roles: list[Json], trainers: tuple[str, ...], units: int
) -> Shape:
    workers: Mapping[str, int] = {role["name"]: role["workers"] for role in roles}
    parts = [tuple(workers)]
    if rng.random() < 0.5:
        parts = [tuple(role for role in workers if role not in trainers), trainers]
    pools = [
        {"name": f"p{number}", "roles": [*part], "pods": 1, "slots": {"perPod": sum(workers[r] for r in part), **SLOTS}}
        for number, part in enumerate(parts)
    ]
    spec = {
        "flow": {**flow, "steps": STEPS}, "roles": roles, "pools": pools,
        "placement": {"mode": "Disaggregated", "profileSteps": 0},
    }  # fmt: skip
    manifest = {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": spec}
    return Shape(name=name, manifest=manifest, roles=tuple(workers), units=units)
