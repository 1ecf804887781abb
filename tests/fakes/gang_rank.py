"""One rank of a gang of learners over gloo, as a process: `python -m tests.fakes.gang_rank FOLDER RANK WORLD`.

Reads FOLDER/counts.json (samples per step and rank). Writes what it published after each step to FOLDER/out-R.npz and,
on rank 0, the portable checkpoint FOLDER/saved; at last it restores FOLDER/other, which the test has made. Where that
takes too long, FOLDER/stack-R says where the rank stood.
"""

import datetime
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlinf_worker.algorithms.policy_spec import Actions, PolicySpec
from rlinf_worker.flows.ppo import check_config
from rlinf_worker.roles.actor import portable
from rlinf_worker.roles.actor.batch import Samples, collect
from rlinf_worker.roles.actor.learner import Learner, LearnerConfig

WITHIN_S = 120.0
"""The ranks' processes, from start to end: 7 s on an idle machine, and whoever waits for them kills them then."""
SPEC = PolicySpec(obs_shape=(3,), actions=Actions("discrete", 4), hidden_sizes=(8,))


def config(**fields: Any) -> LearnerConfig:
    checked = check_config({"env": "x", "epochs": 2, "minibatches": 1, "learningRate": 0.01, **fields})
    return LearnerConfig.of(checked, steps=10, seed=5)


def samples_of(count: int, *, seed: int, learner: Learner) -> Samples:
    """Random samples, or as a rank without segments collects them."""
    if count == 0:
        return collect([], learner.values, gamma=0.9, gae_lambda=0.9)
    draw = np.random.default_rng(seed)
    obs = draw.normal(size=(count, 3)).astype(np.float32)
    value = learner.values(obs)
    advantage = draw.normal(size=count).astype(np.float32)
    return Samples(
        obs=obs,
        action=draw.integers(0, 4, count),
        logprob=np.full(count, -1.4, np.float32),
        value=value,
        advantage=advantage,
        returns=advantage + value,
        episode_returns=np.array([float(seed)], np.float32),
    )


def restore(learner: Learner, folder: Path, *, rank: int) -> None:
    _, live = learner.state()
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    if rank == 0:
        model, optimizer, _ = portable.read(folder, spec=SPEC, optimizer=live)
    learner.restore(model, optimizer)


def whole(learner: Learner) -> dict[str, np.ndarray[Any, Any]]:
    """What rollouts need, whole, as copies. Every rank calls it: it gathers."""
    parameters = dict(learner.model.named_parameters())
    found = {}
    for name in learner.model.spec.policy_parameters():
        tensor = parameters[name].detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = full.to("cpu", torch.float32, copy=True).numpy()
    return found


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.dump_traceback_later(0.4 * WITHIN_S, repeat=True, file=stack)
    timeout = datetime.timedelta(seconds=WITHIN_S + 20)  # of each collective: on a busy machine the other may be late
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    learner = Learner(SPEC, config(), mesh=init_device_mesh("cpu", (world,)))
    out: dict[str, Any] = {}
    for name, tensor in whole(learner).items():
        out[f"0/{name}"] = tensor
    numbers = []
    for step, counts in enumerate(json.loads((folder / "counts.json").read_text()), start=1):
        samples = samples_of(counts[rank], seed=100 * step + rank, learner=learner)
        numbers.append(learner.update(samples, step=step))
        for name, tensor in whole(learner).items():
            out[f"{step}/{name}"] = tensor
    model, optimizer = learner.state()
    if rank == 0:
        portable.write(folder / "saved", model=model, optimizer=optimizer, spec=SPEC, extra={})
        (folder / "numbers.json").write_text(json.dumps(numbers))
    restore(learner, folder / "other", rank=rank)
    for name, tensor in whole(learner).items():
        out[f"restored/{name}"] = tensor
    np.savez(folder / f"out-{rank}.npz", **out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    # As a worker ends (rlinf_worker.__main__): torch's threads are at times not joined as the interpreter takes itself
    # down, which aborts a process that is through with all.
    os._exit(0)
