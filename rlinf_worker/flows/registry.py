"""Flows by name: the registered ones and the user's own `module:function`. Imports a flow only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_api.job import Problem, RLJobSpec
from rlinf_worker.flows.protocol import FlowFunction
from rlinf_worker.roles import loading
from rlinf_worker.roles import registry as roles

FLOWS: Final[dict[str, str]] = {
    "ppo": "rlinf_worker.flows.ppo:ppo",
    "grpo": "rlinf_worker.flows.grpo:grpo",
    "synthetic": "rlinf_worker.flows.synthetic:synthetic",
}
REMEDY: Final = "install what it needs in the driver's image"


def _locate(name: str) -> tuple[Any, str]:
    target = FLOWS.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise UserError(
            f"flow {name!r} is not known", wanted=f"one of {', '.join(FLOWS)} or module:function",
            next="correct spec.flow.name",
        )  # fmt: skip
    return loading.module(module_name, what=f"flow {name!r}", next=REMEDY, ours=name in FLOWS), attribute


def load(name: str) -> FlowFunction:
    module, attribute = _locate(name)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(
            f"flow {name!r}: module {module.__name__} has no function {attribute!r}", next="correct spec.flow.name"
        )
    return function  # type: ignore[no-any-return]


def check_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The flow's config with defaults, by the `check_config` of the flow's module where it has one."""
    module, _ = _locate(name)
    check = getattr(module, "check_config", None)
    if check is None:
        return dict(config)
    if name in FLOWS:
        return dict(check(config))
    return loading.call(lambda: dict(check(config)), what=f"check_config of flow {name!r} raised", next=REMEDY)


def check_job(spec: RLJobSpec) -> Iterator[Problem]:
    """A sentence per problem: the flow's config, each role's by the schema of its kind, and what only both together
    say, by the `check_job` of the flow's module where it has one."""
    module, _ = _locate(spec.flow.name)
    found = list(_problems(partial(check_config, spec.flow.name, spec.flow.config), "spec.flow.config"))
    found += check_roles(spec)
    yield from found
    check = getattr(module, "check_job", None)
    if check is None or found:
        return
    if spec.flow.name in FLOWS:
        yield from check(spec)
    else:
        what = f"check_job of flow {spec.flow.name!r} raised"
        yield from loading.call(lambda: list(check(spec)), what=what, next=REMEDY)


def check_roles(spec: RLJobSpec) -> Iterator[Problem]:
    """Problems of each role's config, by the schema of its kind; also where the flow is the user's and not imported."""
    for role in spec.roles:
        field = f"spec.roles[{role.name}].config"
        yield from _problems(
            partial(roles.check_config, role.kind, role.config, field=field, flow=spec.flow.name), field
        )


def _problems(check: Callable[[], object], field: str) -> Iterator[Problem]:
    """An error's sentences, each with the field that it begins with."""
    try:
        check()
    except UserError as error:
        for sentence in str(error).split("; spec."):
            where, colon, message = (sentence if sentence.startswith("spec.") else f"spec.{sentence}").partition(": ")
            if colon and " " not in where:
                yield Problem(field=where, message=message)
            else:
                yield Problem(field=field, message=sentence)
