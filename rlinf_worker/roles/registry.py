"""Kinds of roles and the classes that run them; a class is imported only in the worker that runs it.

Called by runtime.worker. A kind is a name of the table, or `module:Class` of the user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, cast

from rlinf_api.errors import UserError
from rlinf_worker.roles import loading
from rlinf_worker.roles.protocol import Role

KINDS: Final = {
    "gymnasium": "rlinf_worker.roles.env.role:GymnasiumRole",
    "torch": "rlinf_worker.roles.rollout.role:TorchPolicyRole",
    "transformers": "rlinf_worker.roles.rollout.language:TransformersRole",
    "vllm": "rlinf_worker.roles.rollout.vllm_role:VllmRole",
    "rule": "rlinf_worker.roles.reward.role:RuleRole",
    "fsdp": "rlinf_worker.roles.actor.role:FsdpRole",
    "synthetic": "rlinf_worker.roles.synthetic.role:SyntheticRole",
}
SCHEMAS: Final = {
    "gymnasium": "rlinf_api.job:Model",  # no field: the flow's config names the environment
    "torch": "rlinf_worker.roles.rollout.schema:TorchConfig",
    "transformers": "rlinf_worker.roles.rollout.schema:TransformersConfig",
    "vllm": "rlinf_worker.roles.rollout.schema:VllmConfig",
    "rule": "rlinf_worker.roles.reward.schema:RuleConfig",
    "fsdp": "rlinf_worker.roles.actor.schema:FsdpConfig",
    "synthetic": "rlinf_worker.roles.synthetic.schema:SyntheticConfig",
}
OF_FLOW: Final = {("grpo", "fsdp"): "rlinf_worker.roles.actor.schema:TextFsdpConfig"}
"""The model of each kind's config, and where a flow has another one. Imported where a job is checked; in the worker
that runs the role only where it imports seconds of libraries beside it."""


def check_config(kind: str, config: Mapping[str, Any], *, field: str, flow: str = "") -> None:
    """Raises InvalidManifest, a sentence per problem; an own kind's config is its own to check, where it runs."""
    place = OF_FLOW.get((flow, kind), SCHEMAS.get(kind))
    if place is not None:
        from rlinf_api.sentences import checked  # pydantic: as above

        module_name, _, model = place.partition(":")
        checked(getattr(importlib.import_module(module_name), model), config, prefix=field)


def make(kind: str) -> Role:
    """The role of this worker. Raises UserError that says which kinds there are, or what the import lacked."""
    place = KINDS.get(kind, kind)
    module_name, colon, class_name = place.partition(":")
    if not colon or not module_name or not class_name:
        raise UserError(
            f"there is no role of kind {kind!r}", got=repr(kind),
            wanted=f"one of {', '.join(KINDS)}, or module:Class", next="write spec.roles[].kind so",
        )  # fmt: skip
    remedy = "install what it needs in this pool's image, or put its folder on PYTHONPATH"
    module = loading.module(module_name, what=f"role kind {kind!r}", next=remedy, ours=kind in KINDS)
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not callable(getattr(found, "run", None)):
        raise UserError(
            f"role kind {kind!r} is no role", got=f"{module_name}.{class_name} is {type(found).__name__}",
            wanted="a class with `async def run(self, ctx)`", next="see rlinf_worker/roles/protocol.py",
        )  # fmt: skip
    if kind in KINDS:
        return cast(Role, found())
    return loading.call(lambda: cast(Role, found()), what=f"role kind {kind!r} cannot be made", next=remedy)
