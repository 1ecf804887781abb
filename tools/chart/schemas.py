"""Strict JSON schemas of Kubernetes' kinds, for kubeconform: a field that no kind has is an error, not ignored.

The source is Kubernetes' OpenAPI v3 description, which its Go module ships (api/openapi-spec/v3, the same that an API
server answers at /openapi/v3) and which the build of the test cluster has on disk anyway; nothing else is fetched.
Kinds of others' CRDs that the chart renders are in crds/ here, written by hand: only the fields that we use. Our own
kinds are those of tools/gen_crds.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import yaml

from tools import gen_crds
from tools.testcluster import binaries, commands

OTHERS: Final = Path(__file__).with_name("crds")
FILES: Final = (
    "api__v1",
    "apis__admissionregistration.k8s.io__v1",
    "apis__apiextensions.k8s.io__v1",
    "apis__apps__v1",
    "apis__networking.k8s.io__v1",
    "apis__policy__v1",
    "apis__rbac.authorization.k8s.io__v1",
)
LOCATION: Final = "{{.ResourceKind}}-{{.Group}}-{{.ResourceAPIVersion}}.json"
"""kubeconform's template of a schema's file name. It calls the core group by its version."""
_PREFIX: Final = "#/components/schemas/"
_KIND: Final = "x-kubernetes-group-version-kind"
_FREE: Final = "x-kubernetes-preserve-unknown-fields"

Schema = dict[str, Any]


def description() -> Path:
    """The folder with the OpenAPI description of the Kubernetes that the test cluster runs."""
    words = ["go", "mod", "download", "-json", "k8s.io/kubernetes"]
    found = json.loads(commands.run(words, cwd=binaries.GO_MODULE, timeout_s=600))
    return Path(found["Dir"]) / "api" / "openapi-spec" / "v3"


def write(folder: Path) -> int:
    """A file for every kind of FILES; how many. Fewer than that the chart needs would be kubeconform's complaint."""
    source, count = description(), 0
    for name in FILES:
        text = (source / f"{name}_openapi.json").read_text(encoding="utf-8")
        schemas: dict[str, Schema] = json.loads(text)["components"]["schemas"]
        for key, schema in schemas.items():
            for kind in schema.get(_KIND, ()):
                if len(schema[_KIND]) == 1:
                    (folder / file_name(**kind)).write_text(json.dumps(standalone(key, schemas)), encoding="utf-8")
                    count += 1
    for path in OTHERS.glob("*.json"):
        shutil.copy(path, folder / path.name)
    for text in gen_crds.documents().values():  # of our own kinds the chart renders some
        crd = yaml.safe_load(text)["spec"]
        for version in crd["versions"]:
            name = file_name(group=crd["group"], version=version["name"], kind=crd["names"]["kind"])
            schema = strict(version["schema"]["openAPIV3Schema"])
            (folder / name).write_text(json.dumps(schema), encoding="utf-8")
            count += 1
    return count


def file_name(*, group: str, version: str, kind: str) -> str:
    """
    >>> file_name(group="", version="v1", kind="Service")
    'service-v1-v1.json'
    """
    return f"{kind.lower()}-{group or version}-{version}.json"


def standalone(key: str, schemas: dict[str, Schema]) -> Schema:
    """One kind with the definitions that it reaches, and no others."""
    definitions: dict[str, Schema] = {}
    waiting = [key]
    while waiting:
        name = waiting.pop()
        if name not in definitions:
            definitions[name] = strict(schemas[name])
            waiting += references(definitions[name])
    return {"$ref": f"#/definitions/{key}", "definitions": definitions}


def strict(node: Any) -> Any:
    """No properties but the listed ones; no prose; local references.

    >>> strict({"type": "object", "properties": {"a": {"type": "string", "description": "..."}}})
    {'type': 'object', 'properties': {'a': {'type': 'string'}}, 'additionalProperties': False}
    """
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    found: Schema = {}
    for key, value in node.items():
        if key in ("description", "default", "format") or key.startswith("x-"):
            continue
        if key == "properties":  # names of fields: one may be called `default` or `format`
            found[key] = {name: strict(sub) for name, sub in value.items()}
        elif key == "$ref":
            found[key] = value.replace(_PREFIX, "#/definitions/")
        else:
            found[key] = strict(value)
    if "properties" in found and "additionalProperties" not in found and not node.get(_FREE):
        found["additionalProperties"] = False
    if node.get("format") == "int-or-string":
        found["type"] = ["integer", "string"]
    if len(found.get("allOf", ())) == 1 and len(found) == 1:
        found = dict(found["allOf"][0])
    return found


def references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in references(item)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"].removeprefix("#/definitions/")] if isinstance(node.get("$ref"), str) else []
    return own + [name for value in node.values() for name in references(value)]
