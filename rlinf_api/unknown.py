"""Leaves out of an RLJob's spec what this version has no field for. For an operator that meets a job of a newer CRD.

CRDs are upgraded before operators, and the API server gives every stored job the new fields' defaults at once: a job
that runs must not be left alone for that. Not for a job that is to begin: there an unknown field is an error.
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
