"""Writes what follows from the chart's values.yaml and the operator's settings; `--check` only compares.

docs/install.md                     the table of values, between two marks: a line for every value of values.yaml
helm/.../values.schema.json         operator.settings: a property for every field that may be set there; runtimes: what
                                    an RLRuntime may say
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Final

from rlinf_api.runtimes import RLRuntimeSpec
from rlinf_operator.process import BOUNDS, CHECKPOINT_URI, PULL_POLICIES, QUANTITIES, ProcessSettings
from rlinf_operator.settings import OperatorSettings
from tools import gen_crds

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "helm" / "rlinf-operator"
DOCS: Final = ROOT / "docs" / "install.md"
BEGIN: Final = "<!-- values: written by `make generate` from values.yaml -->\n"
END: Final = "<!-- /values -->\n"
BY_CHART: Final = frozenset(
    {"namespace", "identity", "watch_namespaces", "watch_namespace_selector", "kubeconfig", "context", "http_host",
     "http_port", "log_level", "scheduler_address", "driver_image", "worker_image", "network_policy",
     "network_policy_callers", "network_policy_scrapers", "pod_fixed_ids", "driver_template", "gang_scheduler",
     "gang_scheduler_pods"}
)  # fmt: skip
"""Settings that the templates set, from other values or because a pod needs them so."""
_TEXTS: Final[dict[str, dict[str, Any]]] = {
    "image_pull_policy": {"enum": list(PULL_POLICIES)},
    "default_checkpoint_uri": {"pattern": CHECKPOINT_URI},
}
_TYPES: Final = {int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    path: str
    default: str
    text: str


def values(text: str) -> list[Value]:
    """Every leaf with its default as written and the comment right above it. ValueError names one without a comment.

    >>> values("a:\\n  # Seconds. 3: enough.\\n  b: 3\\n")
    [Value(path='a.b', default='3', text='Seconds. 3: enough.')]
    """
    found: list[Value] = []
    lines = text.splitlines()
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if not line.strip():
            comment = []
            continue
        if line.lstrip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
            continue
        match = re.match(r"^( *)([A-Za-z]\w*):(?: (.*))?$", line)
        if match is None:
            raise ValueError(f"values.yaml line {number}: {line!r} is no `key: value`; write one value to a line")
        indent, key, default = len(match[1]), match[2], match[3] or ""
        parents = [(depth, name) for depth, name in parents if depth < indent]
        path = ".".join([*(name for _, name in parents), key])
        if not default and not comment:
            parents.append((indent, key))
            continue
        if not comment:
            raise ValueError(f"values.yaml line {number}: {path} has no comment above it that says unit and reason")
        if not default:  # a block that one comment describes, such as resources
            block = []
            while number < len(lines) and lines[number].startswith(" " * (indent + 1)):
                block.append(lines[number].strip())
                number += 1
            default = "{" + ", ".join(block) + "}"
        found.append(Value(path=path, default=default, text=" ".join(comment)))
        comment = []
    return found


def table(found: list[Value]) -> str:
    rows = ["| value | default | what it is |", "|---|---|---|"]
    rows += [f"| `{v.path}` | `{v.default}` | {v.text.replace('|', chr(92) + '|')} |" for v in found]
    return "\n".join(rows) + "\n"


def between_marks(text: str, new: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/install.md has no place for the table: wanted the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}{new}{END}{after}"


def settings_schema() -> dict[str, Any]:
    properties = {}
    for kind in (ProcessSettings, OperatorSettings):
        said = field_strings(kind)
        for field in fields(kind):
            if field.name not in BY_CHART:
                properties[field.name] = _property(field, said.get(field.name, ""))
    return {"type": "object", "additionalProperties": False, "properties": dict(sorted(properties.items()))}


def runtime_schema() -> dict[str, Any]:
    """The spec of an RLRuntime, so that a misspelt field fails `helm install` with its name; or null."""
    found = _strict(gen_crds.schema_of(RLRuntimeSpec))
    return {**found, "type": ["object", "null"]}


def _strict(node: Any) -> Any:
    """
    >>> _strict({"type": "object", "properties": {"a": {"type": "string", "default": "", "x-kubernetes-b": 1}}})
    {'type': 'object', 'properties': {'a': {'type': 'string'}}, 'additionalProperties': False}
    """
    if not isinstance(node, dict):
        return node
    found = {key: value for key, value in node.items() if key != "default" and not key.startswith("x-")}
    if "properties" in found:
        found["properties"] = {name: _strict(sub) for name, sub in found["properties"].items()}
        found["additionalProperties"] = False
    if "items" in found:
        found["items"] = _strict(found["items"])
    return found


def _property(field: Field[Any], said: str) -> dict[str, Any]:
    bounds = dict(zip(("minimum", "maximum"), BOUNDS[field.name], strict=True)) if field.name in BOUNDS else {}
    description = f"Default {json.dumps(field.default)}. {said}".strip()
    if field.name in QUANTITIES:
        return {"$ref": "#/$defs/quantity", "description": description}
    return {"type": _TYPES[type(field.default)], **bounds, **_TEXTS.get(field.name, {}), "description": description}


def field_strings(kind: type) -> dict[str, str]:
    """The string under each field, which Python itself throws away."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def documents() -> dict[Path, str]:
    schema_file = CHART / "values.schema.json"
    schema = json.loads(schema_file.read_text(encoding="utf-8"))
    schema["properties"]["operator"]["properties"]["settings"] = settings_schema()
    schema["properties"]["runtimes"]["additionalProperties"] = runtime_schema()
    rows = table(values((CHART / "values.yaml").read_text(encoding="utf-8")))
    return {
        schema_file: json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        DOCS: between_marks(DOCS.read_text(encoding="utf-8"), rows),
    }


def main() -> int:
    try:
        wanted = documents()
    except ValueError as error:
        print(f"gen_chart_values: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in sys.argv:
            print(f"gen_chart_values: {path.relative_to(ROOT)} is stale; run `make generate`", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
