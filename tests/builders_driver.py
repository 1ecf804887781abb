"""A small ppo job for tests of the driver: spec, plan and a Driver whose clock the test turns.

job = make_job(envs=2, slices=4, steps=3)
job.spec, job.plan, job.placement
driver = job.driver(clock, attempt=1)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf_api.job import RLJobSpec
from rlinf_api.placement import Placement, resolve
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver import job as driver_job
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.main import flow_settings
from rlinf_worker.driver.output import Output
from rlinf_worker.driver.settings import DriverSettings

JOB_UID = "5f2c"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Job:
    spec: RLJobSpec
    plan: RLPlanSpec

    @property
    def placement(self) -> Placement:
        return resolve(self.plan, self.spec)

    def driver(self, clock: Callable[[], float], **facts: Any) -> Driver:
        return Driver(self.known(clock, **facts))

    def known(
        self,
        clock: Callable[[], float],
        *,
        attempt: int = 1,
        checkpoint_uri: str = "",
        settings: DriverSettings | None = None,
        output: str = "",
        first_of_life: bool = False,
    ) -> driver_job.Job:
        return driver_job.Job(
            self.spec,
            flow_settings=flow_settings(self.spec),
            uid=JOB_UID,
            attempt=attempt,
            checkpoint_uri=checkpoint_uri,
            output=Output(output),
            clock=clock,
            settings=settings or DriverSettings(),
            first_of_life=first_of_life,
        )


def make_job(
    *,
    envs: int = 2,
    actors: int = 1,
    rollouts: int = 1,
    slices: int = 4,
    steps: int = 3,
    staleness: int = 0,
    micro_batch: int = 2,
    depth: int = 2,
    capacity: int = 1024,
    every_steps: int = 20,
    max_restarts: int = 20,
    order: str = "arrival",
    revision: int = 1,
    pods: int = 1,
    elastic: bool = False,
    flow: str = "ppo",
    critics: int = 0,
    gpu_pods: int = 1,
) -> Job:
    """`pods`: of pool sim, between which the env workers are divided; rollout and actors are in pool gpu. `elastic`:
    the spec is the same for up to 4 envs per pod, 2 pods and 3 actors; envs fill pod after pod, 2 at a time. `flow`: an
    own one is given the number of slices. `critics`: ranks of a second gang, on slots of its own. `gpu_pods`: between
    which the actors are divided, one to each."""
    per_pod = 4 if elastic else -(-envs // pods)
    gpu_slots = 4 + critics if elastic else actors + rollouts + critics
    ppo: dict[str, Any] = {"env": "CartPole-v1", "numEnvs": 2 * slices}
    config = {"slices": slices, "order": order} | (ppo if flow == "ppo" else {})
    spec = RLJobSpec.model_validate(
        {
            "flow": {"name": flow, "steps": steps, "maxStaleness": staleness, "config": config},
            "roles": [
                {"name": "env", "kind": "gymnasium", "workers": {"min": 1, "max": 8} if elastic else envs},
                {"name": "rollout", "kind": "torch", "workers": rollouts},
                {"name": "actor", "kind": "fsdp", "workers": {"min": 1, "max": 3} if elastic else actors},
                *([{"name": "critic", "kind": "fsdp", "workers": critics}] if critics else []),
            ],
            "pools": [
                {
                    "name": "sim",
                    "roles": ["env"],
                    "pods": {"min": 1, "max": 2} if elastic else pods,
                    "slots": {"perPod": per_pod},
                },
                {
                    "name": "gpu",
                    "roles": ["rollout", "actor", *(["critic"] if critics else [])],
                    "pods": gpu_pods,
                    "slots": {"perPod": gpu_slots},
                },
            ],
            "checkpoint": {"everySteps": every_steps},
            "failurePolicy": {"maxRestarts": max_restarts},
        }
    )
    share = (2 if pods > 1 else 4) if elastic else per_pod
    slots = [f"sim/{n // share}/{n % share}" for n in range(envs)]
    policies = [f"gpu/0/{(3 if elastic else actors) + n}" for n in range(rollouts)]
    ranks = [f"gpu/{n % gpu_pods}/{n}" for n in range(actors)]
    judges = ",".join(f"gpu/0/{gpu_slots - critics + n}" for n in range(critics))
    plan = RLPlanSpec.model_validate(
        {
            "job": {"name": "j", "uid": JOB_UID},
            "revision": revision,
            "pools": [{"name": "sim", "pods": pods}, {"name": "gpu", "pods": gpu_pods}],
            "workers": [
                {"role": "env", "count": envs, "slots": ",".join(slots)},
                {
                    "role": "rollout",
                    "count": rollouts,
                    "slots": ",".join(policies),
                },
                {"role": "actor", "count": actors, "slots": ",".join(ranks)},
                *([{"role": "critic", "count": critics, "slots": judges}] if critics else []),
            ],
            "channels": [
                {"name": "trajectories", "microBatch": micro_batch, "depth": depth, "capacity": {"units": capacity}}
            ],
            "reason": {"code": "Initial"},
        }
    )
    return Job(spec, plan)
