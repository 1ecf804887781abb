"""`rljob export WORKDIR --step N`: a checkpoint of a language model as a folder that transformers and vLLM load.

Reads the weights alone of what the actor's ranks wrote, however many there were, into one process. Not for: the last
checkpoint's own folder, which the actor writes (roles/actor/text.py).
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from rlinf_api.errors import UserError
from rlinf_api.job import RLJobSpec
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoints
from rlinf_worker.roles import models
from rlinf_worker.roles.shards import Shards
from rljob.local.containers import checkpoint_uri
from rljob.reasons import objects_of

FLOW: Final = "grpo"
ACTOR: Final = "actor"


def export(work_dir: Path, *, step: int | None, into: Path | None) -> tuple[PolicyVersion, Path]:
    """`step`: None for the newest. `into`: None for `WORKDIR/export/b0-40`. Raises UserError."""
    job, _ = objects_of(work_dir)
    spec = RLJobSpec.model_validate(job["spec"])
    if spec.flow.name != FLOW or spec.model is None:
        raise UserError(
            f"{work_dir} has no language model", got=f"flow {spec.flow.name!r}", wanted=f"a run of flow {FLOW!r}",
            next="its checkpoints are as its trainer wrote them",
        )  # fmt: skip
    store = Checkpoints(spec.checkpoint.uri or checkpoint_uri(work_dir), role=ACTOR)
    version = chosen(store.versions(), step=step, work_dir=work_dir)
    folder = into if into is not None else work_dir / "export" / str(version)
    if folder.exists():
        raise UserError(f"{folder} is there already", got="a file or folder", next="remove it, or name another place")
    model: Any = models.language_model(spec.model.path, dtype=torch.float32)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what we want: one process
        Shards(None).read(store.of(str(version)), into={"model": tensors})
    made = folder.with_name(f".{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)  # of one that was broken off
        models.save_folder(
            made, tensors, shape=model.config, generation=model.generation_config, tokens=spec.model.path
        )
        made.rename(folder)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise UserError(
            f"{folder} cannot be written", got=str(error), next="make room, or name another place"
        ) from error
    return version, folder


def chosen(there: list[PolicyVersion], *, step: int | None, work_dir: Path) -> PolicyVersion:
    """The checkpoint of a step, or the newest. Where several branches have the step, it is the one that the job went on
    with: the highest branch's."""
    found = [version for version in there if step is None or version.number == step]
    if not found:
        steps = ", ".join(str(number) for number in sorted({version.number for version in there}))
        raise UserError(
            f"{work_dir} has no checkpoint" + (f" of step {step}" if step is not None else ""),
            got=f"those of steps {steps}" if there else "none at all", wanted="one that has a COMMIT",
            next="choose one of them" if there else "write one: spec.checkpoint.everySteps",
        )  # fmt: skip
    return max(found)
