"""The fact `spaces`: what an env role tells the others about observations and actions, so that they build the network.

>>> policy_spec({"obs_shape": [4], "actions": {"kind": "discrete", "size": 2}}, {"hidden_sizes": [8]}).obs_size
4
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_worker.algorithms.policy_spec import Actions, PolicySpec

FACT: Final = "spaces"


def describe(obs_shape: tuple[int, ...], actions: Actions) -> dict[str, Any]:
    return {"obs_shape": list(obs_shape), "actions": {"kind": actions.kind, "size": actions.size}}


def policy_spec(spaces: Mapping[str, Any], config: Mapping[str, Any]) -> PolicySpec:
    """The network of this flow's config over these spaces."""
    actions = spaces["actions"]
    if actions["kind"] not in ("discrete", "continuous"):
        raise UserError("action space is of no known kind", got=repr(actions["kind"]), wanted="discrete or continuous")
    return PolicySpec(
        obs_shape=tuple(spaces["obs_shape"]),
        actions=Actions(actions["kind"], actions["size"]),
        hidden_sizes=tuple(config.get("hidden_sizes", (64, 64))),
        activation=config.get("activation", "tanh"),
    )
