"""Writes rljob/pod_fields.json from the Python client's models; `--check` only compares.

The client's models are made from the OpenAPI description that Kubernetes publishes with each release, so they say which
fields a pod template has in the version that the constraints pin. As a file they cost `rljob validate` a millisecond;
importing them takes two seconds.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

import kubernetes
from kubernetes.aio.client import models

FILE: Final = Path(__file__).resolve().parent.parent / "rljob" / "pod_fields.json"
ROOT: Final = "V1PodTemplateSpec"
_MODEL: Final = re.compile(r"\b(?:Core)?V\d\w+")
_SIMPLE: Final = {
    "str": "text",
    "int": "number",
    "float": "number",
    "bool": "bool",
    "datetime": "text",
    "object": "any",
}


def fields() -> dict[str, dict[str, str]]:
    """The kind of each field, by model that a pod template reaches, as in `{"env": "[V1EnvVar]", "image": "text"}`."""
    found: dict[str, dict[str, str]] = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        model: Any = getattr(models, name)
        found[name] = {model.attribute_map[field]: _kind(said) for field, said in model.openapi_types.items()}
        waiting += [part for said in model.openapi_types.values() for part in _MODEL.findall(said)]
    return dict(sorted(found.items()))


def _kind(said: str) -> str:
    """
    >>> _kind("List[V1Container]"), _kind("Dict[str, str]"), _kind("int")
    ('[V1Container]', '{text}', 'number')
    """
    if inner := re.fullmatch(r"[Ll]ist\[(.+)\]", said):
        return f"[{_kind(inner[1])}]"
    if inner := re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", said):
        return f"{{{_kind(inner[1])}}}"
    if _MODEL.fullmatch(said):
        return said
    return _SIMPLE[said]


def document() -> str:
    """The client's major version is the minor one of the Kubernetes that it was made for."""
    version = f"1.{kubernetes.__version__.partition('.')[0]}"
    return json.dumps({"version": version, "models": fields()}, indent=0, sort_keys=True) + "\n"


def main() -> int:
    text = document()
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in sys.argv:
        print(f"gen_pod_fields: {FILE.name} is not what the client says; run `make generate`", file=sys.stderr)
        return 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
