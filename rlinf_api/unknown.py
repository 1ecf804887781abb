"""What parts of different versions tell each other: fields that the reader has no name for, and how to send few.

CRDs are upgraded before operators, and operators before the images of drivers that somebody has pinned. The API server
gives every stored object the new fields' defaults at once, so an operator leaves out what it has no field for: a job
that runs must not be left alone for that. Not for a job that is to begin: there an unknown field is an error. Whoever
sends to a driver leaves out what is at its default, so that an unknown field there is one that somebody asked for. That
needs defaults to stay as they are within a version of the API, as Kubernetes wants it of them anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rlinf_api import sentences


def pruned(value: Mapping[str, Any], model: type[BaseModel], path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(what the model has a field for, the paths of the rest).

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


def _known(value: Any, model: type[BaseModel] | None, path: str, found: list[str]) -> Any:
    """`value`: of the model, a list of such, or what is looked at no further."""
    if model is not None and isinstance(value, Mapping):
        models = _models(model)
        found.extend(f"{path}.{name}" for name in value if name not in models)
        return {k: _known(v, models[k], f"{path}.{k}", found) for k, v in value.items() if k in models}
    if model is not None and isinstance(value, list):
        return [_known(v, model, f"{path}[{_name(v, n)}]", found) for n, v in enumerate(value)]
    return value


def _name(entry: Any, position: int) -> str:
    return str(entry.get("name", position)) if isinstance(entry, Mapping) else str(position)


@functools.cache
def _models(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Its fields, with the model that is inside each."""
    return {f.alias or name: sentences.model_in(f.annotation) for name, f in model.model_fields.items()}
