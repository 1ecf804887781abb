"""What parts of different versions tell each other: fields that the reader has no name for, and how to send few.

CRDs are upgraded before operators, and operators before the images of drivers that somebody has pinned. The API server
gives every stored object the new fields' defaults at once, so an operator leaves out what it has no field for: a job
that runs must not be left alone for that. Not for a job that is to begin: there an unknown field is an error. Whoever
sends to a driver leaves out what is at its default, so that an unknown field there is one that somebody asked for. That
needs defaults to stay as they are within a version of the API, as Kubernetes wants it of them anyway.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel

from rlinf_api.job import RLJobSpec


def without(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the manifest without them, their paths); the very manifest where there are none.

    >>> without({"spec": {"flow": {"name": "ppo", "speed": 2}}})
    ({'spec': {'flow': {'name': 'ppo'}}}, ('spec.flow.speed',))
    """
    found: list[str] = []
    spec = _known(manifest.get("spec"), RLJobSpec, "spec", found)
    return ({**manifest, "spec": spec} if found else dict(manifest)), tuple(found)


def pruned(value: Mapping[str, Any], model: type[BaseModel], path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same of any model's object.

    >>> from rlinf_api.job import FlowSpec
    >>> pruned({"name": "ppo", "speed": 2}, FlowSpec, "spec.flow")
    ({'name': 'ppo'}, ('spec.flow.speed',))
    """
    found: list[str] = []
    return _known(value, model, path, found), tuple(found)


def compact(model: BaseModel) -> dict[str, Any]:
    """As it stands in a manifest, without what is at its default.

    >>> from rlinf_api.job import FlowSpec
    >>> compact(FlowSpec(name="ppo", steps=3))
    {'name': 'ppo', 'steps': 3}
    """
    return model.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)


def told(fields: Sequence[str]) -> str:
    """For the message of a condition; empty where there is nothing to say."""
    if not fields:
        return ""
    return f"the job goes on without {', '.join(fields)}, which this operator does not know; upgrade the operator"


def _known(value: Any, kind: Any, path: str, found: list[str]) -> Any:
    model, entry = _model_of(kind), _entry_of(kind)
    if model is not None and isinstance(value, Mapping):
        kinds = _fields(model)
        found.extend(f"{path}.{name}" for name in value if name not in kinds)
        return {k: _known(v, kinds[k], f"{path}.{k}", found) for k, v in value.items() if k in kinds}
    if entry is not None and isinstance(value, list):
        return [_known(v, entry, f"{path}[{_name(v, n)}]", found) for n, v in enumerate(value)]
    return value


def _name(entry: Any, position: int) -> str:
    return str(entry.get("name", position)) if isinstance(entry, Mapping) else str(position)


@functools.cache
def _fields(model: type[BaseModel]) -> dict[str, Any]:
    hints = typing.get_type_hints(model)
    return {field.alias or name: hints[name] for name, field in model.model_fields.items()}


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or what it is itself."""
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


@functools.cache
def _model_of(kind: Any) -> type[BaseModel] | None:
    return next((m for m in _members(kind) if isinstance(m, type) and issubclass(m, BaseModel)), None)


@functools.cache
def _entry_of(kind: Any) -> Any:
    return next((typing.get_args(m)[0] for m in _members(kind) if typing.get_origin(m) is list), None)
