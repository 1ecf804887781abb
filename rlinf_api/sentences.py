"""pydantic's errors as one sentence each: which field (as the manifest spells it), got, wanted, what to write.

For manifests, and for the roles' own config schemas.

>>> from rlinf_api.job import FlowSpec
>>> from pydantic import ValidationError
>>> try:
...     FlowSpec.model_validate({"name": "ppo", "setps": 3})
... except ValidationError as error:
...     print(problems(error, FlowSpec, value={"name": "ppo", "setps": 3}, prefix="spec.flow")[0])
spec.flow.setps: is not a field; did you mean 'steps'? Known here: config, maxStaleness, name, steps
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from rlinf_api.errors import InvalidManifest
from rlinf_api.job import Problem

M = TypeVar("M", bound=BaseModel)
MAX_SHOWN: Final = 80  # characters of a value in a message
_TYPES: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_CONTAINERS: Final = ("a list", "a mapping")
_UNION_TAGS: Final = {"int", "constrained-int", "Range"}


def problems(error: ValidationError, model: type[BaseModel], *, value: Any, prefix: str) -> list[Problem]:
    """One Problem per wrong field, in the manifest's order; a union's several errors about one value become one."""
    found: dict[str, Problem] = {}
    for entry in error.errors(include_url=False, include_context=True):
        loc = _without_union_tags(entry["loc"], value)
        if loc is None:
            continue
        field = path(prefix, loc, value)
        is_alternative = len(loc) < len(entry["loc"]) and entry["loc"][-1] in _UNION_TAGS
        message = (
            f"got {shown(entry['input'])}, wanted a whole number from 1 to 100000 or {{min: a, max: b}}; "
            "write for example 4"
            if is_alternative
            else _sentence(entry, _model_at(model, loc[:-1]), loc)
        )
        found.setdefault(field, Problem(field=field, message=message))
    return list(found.values())


def checked(model: type[M], config: Mapping[str, Any], *, prefix: str) -> M:
    """The config as its model; InvalidManifest with a sentence per problem, each beginning with its field."""
    try:
        return model.model_validate(dict(config))
    except ValidationError as error:
        said = problems(error, model, value=dict(config), prefix=prefix)
        raise InvalidManifest("; ".join(map(str, said))) from error


def path(prefix: str, loc: Sequence[int | str], value: Any) -> str:
    """`spec.pools[gpu].slots`: entries of list maps by their name where they have one, by position otherwise."""
    text = prefix
    for part in loc:
        child = _child(value, part)
        if isinstance(part, int):
            name = child.get("name") if isinstance(child, Mapping) else None
            text += f"[{name if isinstance(name, str) and name else part}]"
        else:
            text += f".{part}"
        value = child
    return text


def shown(value: Any) -> str:
    """A value in a message: quoted text, cut where it is long. Of a list or mapping its kind alone: in it may be a
    pod's environment, and messages are read by more people than manifests (conditions, events, logs)."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if value and isinstance(value, Mapping | list):
        return kind_of(value)
    rendered = repr(value)
    return rendered if len(rendered) <= MAX_SHOWN else rendered[: MAX_SHOWN - 3] + "..."


def kind_of(value: Any) -> str:
    """Where a list or mapping was wanted, and what stands there may be one, written as text.

    >>> kind_of({"TOKEN": "x"}), kind_of("TOKEN=x"), kind_of(3)
    ('a mapping', 'text', '3')
    """
    if isinstance(value, str) and value:
        return "text"
    return "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else shown(value)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """ " did you mean 'gymnasium'?" or nothing."""
    close = difflib.get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.6)
    match = next((k for k in known if close and k.lower() == close[0]), None)
    return f" did you mean {match!r}?" if match else ""


def _sentence(entry: Mapping[str, Any], owner: type[BaseModel] | None, loc: Sequence[int | str]) -> str:
    kind, got, context = entry["type"], shown(entry.get("input")), entry.get("ctx", {})
    if kind == "extra_forbidden":
        known = sorted(f.alias or n for n, f in owner.model_fields.items()) if owner else []
        hint = did_you_mean(str(loc[-1]), known) or " remove it."
        return f"is not a field;{hint} Known here: {', '.join(known) or 'nothing'}"
    if kind == "missing":
        return "is missing; write it"
    if kind in ("enum", "literal_error"):
        allowed = str(context.get("expected", ""))
        names = [part.strip("' ") for part in allowed.replace(" or ", ", ").split(",")]
        return f"got {got}, wanted {allowed};{did_you_mean(str(entry.get('input')), names) or ' write one of these'}"
    if kind in _TYPES:
        quote = (
            f'; write it in quotes: "{entry["input"]}"' if kind == "string_type" and _is_number(entry["input"]) else ""
        )
        got = kind_of(entry.get("input")) if _TYPES[kind] in _CONTAINERS else got
        return f"got {got}, wanted {_TYPES[kind]}{quote or '; write that'}"
    bounds = {
        "greater_than_equal": ("ge", "at least {}"), "less_than_equal": ("le", "at most {}"),
        "string_too_long": ("max_length", "at most {} characters"),
        "string_too_short": ("min_length", "at least {} characters"),
        "too_long": ("max_length", "at most {} entries"), "too_short": ("min_length", "at least {} entries"),
        "string_pattern_mismatch": ("pattern", "text that matches {}"),
    }  # fmt: skip
    if kind in bounds:
        key, wanted = bounds[kind]
        if kind in ("too_long", "too_short") and entry.get("input"):
            got = str(context.get("actual_length", len(entry["input"])))
        return f"got {got}, wanted {wanted.format(context.get(key))}; change it"
    if kind == "value_error":
        return str(context.get("error", entry["msg"]))  # a validator of ours: a sentence already
    return f"got {got}: {entry['msg']}; change it"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_union_tags(loc: tuple[int | str, ...], value: Any) -> tuple[int | str, ...] | None:
    """Leaves out the names of union members, which stand in no manifest; None: the member that nobody meant."""
    kept: list[int | str] = []
    for part in loc:
        if part in _UNION_TAGS and part not in (value if isinstance(value, Mapping) else ()):
            if isinstance(value, Mapping) != (part == "Range"):
                return tuple(kept) if not isinstance(value, Mapping) else None
            continue
        kept.append(part)
        value = _child(value, part)
    return tuple(kept)


def _child(value: Any, part: int | str) -> Any:
    if isinstance(part, int):
        return value[part] if isinstance(value, Sequence) and not isinstance(value, str) and part < len(value) else None
    return value.get(part) if isinstance(value, Mapping) else None


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    here: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int) or here is None:
            continue
        field = next((f for n, f in here.model_fields.items() if part in (f.alias, n)), None)
        here = model_in(field.annotation) if field else None
    return here


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The one model inside Annotated, list, Optional or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Annotated, list, typing.Union, types.UnionType):
        return next((m for m in map(model_in, typing.get_args(annotation)) if m), None)
    return None
