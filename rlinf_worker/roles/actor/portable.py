"""A learner's state as files that anybody can read: model.safetensors, optimizer.safetensors, config.json.

Called by the actor role inside a checkpoint's `actor/` folder; rank 0 writes, rank 0 reads and the learner spreads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_api.errors import UserError
from rlinf_worker.algorithms.policy_spec import PolicySpec
from rlinf_worker.roles import spaces


def write(
    folder: Path,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    spec: PolicySpec,
    extra: Mapping[str, Any],
) -> None:
    """`extra` is plain JSON. The optimizer's per-parameter tensors are stored as "<parameter>/<name>"."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in model.items()}, folder / "model.safetensors")
    tensors = {
        f"{parameter}/{name}": (value if isinstance(value, Tensor) else torch.tensor(value)).contiguous()
        for parameter, state in optimizer["state"].items()
        for name, value in state.items()
    }
    save_file(tensors, folder / "optimizer.safetensors")
    groups = [
        {k: v for k, v in g.items() if isinstance(v, int | float | bool | list | str)}
        for g in optimizer["param_groups"]
    ]
    config = {"network": describe(spec), "param_groups": groups, "extra": dict(extra)}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def read(
    folder: Path, *, spec: PolicySpec, optimizer: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """(model, optimizer, extra). `optimizer` is the running one's state dict: what no file holds is taken from it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = load_file(folder / "model.safetensors")
        tensors = load_file(folder / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"checkpoint {folder} cannot be read", got=f"{type(error).__name__}: {error}",
            next="remove that checkpoint's folder, so that an older one is taken",
        ) from error  # fmt: skip
    if config["network"] != describe(spec):
        raise UserError(
            f"checkpoint {folder} is of another network", got=json.dumps(config["network"]),
            wanted=json.dumps(describe(spec)), next="use another checkpoint uri, or the network it was made with",
        )  # fmt: skip
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parameter, _, name = key.rpartition("/")
        state.setdefault(parameter, {})[name] = tensor
    groups = [
        {**live, **stored} for live, stored in zip(optimizer["param_groups"], config["param_groups"], strict=True)
    ]
    return model, {"state": state, "param_groups": groups}, config["extra"]


def describe(spec: PolicySpec) -> dict[str, Any]:
    network = {"hidden_sizes": list(spec.hidden_sizes), "activation": spec.activation}
    return {**spaces.describe(spec.obs_shape, spec.actions), **network}
