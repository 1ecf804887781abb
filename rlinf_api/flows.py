"""Which flows and kinds this version has, and what a job that names a flow need not write: its roles, and in a job of
one pool which of them run there (docs/adr/0045). Pure; below job.py, whose model fills them in for who reads a spec.

Not for: whether a kind may play a role, and what a refusal says (supported.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FLOWS: Final[dict[str, tuple[str, ...]]] = {
    "ppo": ("env", "rollout", "actor"),
    "grpo": ("rollout", "reward", "actor"),
    "synthetic": (),
}
"""Registered flows and the names of the roles each of them uses; none: the flow's config names them."""

KINDS: Final[dict[str, str]] = {
    "gymnasium": "env",
    "torch": "rollout",
    "transformers": "rollout",
    "vllm": "rollout",
    "rule": "reward",
    "fsdp": "actor",
    "synthetic": "",
}
"""Registered kinds and the role of a flow that each of them can play; empty: any role of flow synthetic."""

FLOW_OF_KIND: Final[dict[str, str]] = {
    "gymnasium": "ppo",
    "torch": "ppo",
    "transformers": "grpo",
    "vllm": "grpo",
    "rule": "grpo",
}
"""The registered flow that alone has roles of a kind; others are in several."""


def fits(kind: str, flow: str) -> bool:
    return flow not in FLOWS or FLOW_OF_KIND.get(kind, flow) == flow


def kind_of(role: str, flow: str) -> str:
    """The first registered kind that plays a role of this flow.

    >>> [kind_of("rollout", flow) for flow in ("ppo", "grpo")]
    ['torch', 'transformers']
    """
    if flow == "synthetic":
        return flow
    return next((kind for kind, plays in KINDS.items() if plays == role and fits(kind, flow)), "module:Class")


def roles_of(flow: str) -> dict[str, str]:
    """By default: name to kind; empty where the flow, or its config, is the user's own.

    >>> roles_of("ppo")
    {'env': 'gymnasium', 'rollout': 'torch', 'actor': 'fsdp'}
    """
    return {role: kind_of(role, flow) for role in FLOWS.get(flow, ())}


WITH_ROLES: Final = tuple(flow for flow in FLOWS if roles_of(flow))
"""Flows whose jobs need write no roles."""


def filled(spec: Any) -> Any:
    """A spec as it was written, with what it left out. What is no spec is given back.

    >>> filled({"flow": {"name": "ppo"}, "pools": [{"name": "cpu"}]})["pools"]
    [{'name': 'cpu', 'roles': ['env', 'rollout', 'actor']}]
    """
    if not isinstance(spec, Mapping):
        return spec
    found = dict(spec)
    if _is_left_out(found):
        flow = found.get("flow")
        name = flow.get("name") if isinstance(flow, Mapping) else getattr(flow, "name", None)
        if roles := roles_of(name) if isinstance(name, str) else {}:
            found["roles"] = [{"name": role, "kind": kind} for role, kind in roles.items()]
    pools, roles_ = found.get("pools"), found.get("roles")
    if isinstance(pools, list) and len(pools) == 1 and isinstance(roles_, list):
        names = [role.get("name") if isinstance(role, Mapping) else getattr(role, "name", None) for role in roles_]
        if isinstance(pools[0], Mapping) and _is_left_out(pools[0]) and all(isinstance(n, str) for n in names):
            found["pools"] = [{**pools[0], "roles": names}]
    return found


def _is_left_out(entry: Mapping[str, Any]) -> bool:
    """Null is no default: somebody wrote it."""
    return "roles" not in entry or entry["roles"] == []
