"""Flows by name: the registered ones and the user's own `module:function`. Imports a flow only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_worker.flows.protocol import FlowFunction

FLOWS: Final[dict[str, str]] = {
    "ppo": "rlinf_worker.flows.ppo:ppo",
}


def _locate(name: str) -> tuple[Any, str]:
    target = FLOWS.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise UserError(
            f"flow {name!r} is not known", wanted=f"one of {', '.join(FLOWS)} or module:function",
            next="correct spec.flow.name",
        )  # fmt: skip
    try:
        return importlib.import_module(module_name), attribute
    except ImportError as error:
        raise UserError(
            f"flow {name!r} cannot be imported", got=str(error), next="install its module in the driver's image"
        ) from error


def load(name: str) -> FlowFunction:
    module, attribute = _locate(name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"flow {name!r}: module {module.__name__} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def check_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The flow's config with defaults, by the `check_config` of the flow's module where it has one."""
    module, _ = _locate(name)
    check = getattr(module, "check_config", None)
    return dict(check(config)) if check is not None else dict(config)
