"""What of an RLJob stands around its spec: apiVersion, kind and the metadata that a person writes.

Called by supported.examine. Not for: what an API server adds to the metadata, or which characters a label may have: it
says that itself, and local mode has no use for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlinf_api import names, sentences
from rlinf_api.job import Problem

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MAX_NAMESPACE: Final = 63
_KNOWN: Final = ("apiVersion", "kind", "metadata", "spec", "status")


def check(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    for field, wanted in (("apiVersion", names.API_VERSION), ("kind", "RLJob")):
        if manifest.get(field) != wanted:
            yield Problem(
                field=field, message=f"got {sentences.shown(manifest.get(field))}, wanted {wanted!r}; write that"
            )
    for key in sorted(str(k) for k in manifest if k not in _KNOWN):
        hint = sentences.did_you_mean(key, _KNOWN) or " remove it"
        yield Problem(field=key or "''", message=f"is not a field of an RLJob;{hint}")
    metadata = manifest.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        message = f"got {sentences.kind_of(metadata)}, wanted a mapping; write name: below it"
        yield Problem(field="metadata", message=message)
    else:
        yield from _metadata(metadata or {})


def _metadata(metadata: Mapping[str, Any]) -> Iterator[Problem]:
    name, namespace = metadata.get("name"), metadata.get("namespace")
    if name is None or name == "":
        yield Problem(field="metadata.name", message="is missing; write a name")
    elif not isinstance(name, str):
        yield _no_text("metadata.name", name, otherwise="write a name")
    elif len(name) > names.MAX_JOB_NAME or not _JOB_NAME.fullmatch(name):
        yield Problem(
            field="metadata.name",
            message=f"got {sentences.shown(name)}, wanted at most {names.MAX_JOB_NAME} of a-z 0-9 '-', a letter first "
            "(pods are named <job>-<pool>-<ordinal>-a<attempt>); shorten or change it",
        )
    if namespace is not None and not isinstance(namespace, str):
        yield _no_text("metadata.namespace", namespace)
    elif namespace and (len(namespace) > _MAX_NAMESPACE or not _NAMESPACE.fullmatch(namespace)):
        message = f"got {sentences.shown(namespace)}, wanted at most {_MAX_NAMESPACE} of a-z 0-9 '-'; change it"
        yield Problem(field="metadata.namespace", message=message)
    for part in ("labels", "annotations"):
        yield from _texts(f"metadata.{part}", metadata.get(part), list_wanted=False)
    yield from _texts("metadata.finalizers", metadata.get("finalizers"), list_wanted=True)


def _texts(field: str, value: Any, *, list_wanted: bool) -> Iterator[Problem]:
    """A list or mapping of texts, or nothing."""
    if value is None:
        return
    if not isinstance(value, list if list_wanted else Mapping):
        wanted = "a list" if list_wanted else "a mapping"
        message = f"got {sentences.kind_of(value)}, wanted {wanted}; write one or remove it"
        yield Problem(field=field, message=message)
        return
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, entry in entries:
        if not isinstance(entry, str):
            yield _no_text(f"{field}[{key}]" if list_wanted else f"{field}.{key}", entry)


def _no_text(field: str, value: Any, *, otherwise: str = "write that") -> Problem:
    remedy = f'write it in quotes: "{sentences.shown(value)}"' if isinstance(value, int | float) else otherwise
    return Problem(field=field, message=f"got {sentences.shown(value)}, wanted text; {remedy}")
