"""The environment, command and arguments of a container: sources, field references, $(VAR), translated paths.

For: `containers.py`, before each life. Pure: what it needs of Secrets and ConfigMaps was read before (`Sources`).
Not for: refusing what local mode has not (podspec.py does, before anything starts).

There is no mount namespace, so a path that lies in a volume is rewritten to the volume's folder: where a value of
`env`, `command` or `args` equals a mountPath or starts with it, also after file://. Rewriting comes before $(VAR): a
value is rewritten once, and `--dir=$(RLINF_RUN_DIR)/x` works, although it does not start with a path. A `$` in a
folder's own name is no reference.

Checkpoints are to outlast their pod, so a place for them below one of the operator's own scratch mounts is the
machine's; and the place in the work dir, which no manifest names, is the machine's whatever a pod mounts.
"""

from __future__ import annotations

import base64
import fnmatch
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from rlinf_api import names
from rlinf_api.store import NotFound
from rljob.local.objects import Manifest, meta
from rljob.local.status import CREATE_CONTAINER_CONFIG_ERROR, HOST_IP, NODE_NAME, NotYet
from rljob.local.store import MemoryStore

# A pod sees these of the machine's environment only, as it would see its image's: a job must not depend on the shell it
# was started from. Proxies, caches and devices are properties of the machine, and who it is to an object store.
INHERITED = (
    "PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_*", "NVIDIA_*",
    "HF_*", "AWS_*", "GOOGLE_*", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy",
    "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    names.ENV_SETTINGS,  # of all pods whose template is silent; a cluster's drivers have operator.driverTemplate
)  # fmt: skip
INTERPRETERS = ("python", "python3")
FILE_SCHEMES = ("file://", "file://localhost")
SCRATCH_MOUNTS: Final = (names.MOUNT_RUN, names.MOUNT_SHM, names.MOUNT_TMP, names.MOUNT_CACHE)
"""Every pod has its own, and they go with it."""

REFERENCES: Final[Mapping[str, str]] = {
    "secretKeyRef": "Secret", "secretRef": "Secret", "secret": "Secret",
    "configMapKeyRef": "ConfigMap", "configMapRef": "ConfigMap", "configMap": "ConfigMap",
}  # fmt: skip
"""Field of a pod spec to the kind of what it names."""

_KEYED_FIELD = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


Sources: TypeAlias = Mapping[tuple[str, str], Mapping[str, bytes]]
"""(kind, name) to decoded contents, of the Secrets and ConfigMaps that a pod names and that exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What field references can ask for; known before the first container starts."""

    pod: Manifest
    pod_ip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """(mountPath, folder or file) of one container.

    >>> Paths(mounts=(("/run/rlinf", "/tmp/rlj/1/run"),)).translate("/run/rlinf/agent.sock")
    '/tmp/rlj/1/run/agent.sock'
    """

    mounts: tuple[tuple[str, str], ...]

    def translate(self, text: str, *, escaped: bool = False) -> str:
        """`escaped`: references in the text are filled in next, so a folder's own `$` is doubled."""
        scheme = next((scheme for scheme in FILE_SCHEMES if text.startswith(f"{scheme}/")), "")
        path = text.removeprefix(scheme)
        for mount_path, folder in sorted(self.mounts, key=lambda mount: -len(mount[0])):
            inside = mount_path.rstrip("/")
            if path == mount_path or path.startswith(f"{inside}/"):
                found = quote(os.fsencode(folder)) if scheme else folder
                return scheme + (found.replace("$", "$$") if escaped else found) + path[len(inside) :]
        return text

    def lasting(self) -> Paths:
        return Paths(mounts=tuple(mount for mount in self.mounts if mount[0] not in SCRATCH_MOUNTS))


def sources_named(pod: Manifest) -> set[tuple[str, str]]:
    """Every (kind, name) of Secret and ConfigMap in env, envFrom and volumes."""
    return {(kind, source_name(reference)) for _, kind, reference in references(pod["spec"], at="spec")}


def references(node: Any, *, at: str) -> Iterator[tuple[str, str, Manifest]]:
    """(place, Secret or ConfigMap, reference) of each in a part of a pod.

    >>> list(references({"envFrom": [{"secretRef": {"name": "s"}}]}, at="spec"))
    [('spec.envFrom[0]', 'Secret', {'name': 's'})]
    """
    if isinstance(node, list):
        for i, item in enumerate(node):
            name = item.get("name") if isinstance(item, dict) else None
            yield from references(item, at=f"{at}[{i}] ({name})" if name else f"{at}[{i}]")
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in REFERENCES and isinstance(value, dict):
                yield at, REFERENCES[key], value
            else:
                yield from references(value, at=at if key == "valueFrom" else f"{at}.{key}")


def source_name(reference: Manifest) -> str:
    return str(reference.get("secretName") or reference.get("name", ""))


async def read_sources(store: MemoryStore, pod: Manifest) -> Sources:
    found: dict[tuple[str, str], Mapping[str, bytes]] = {}
    for kind, name in sorted(sources_named(pod)):
        try:
            found[kind, name] = contents(await store.get(kind, name, namespace=meta(pod)["namespace"]))
        except NotFound:
            continue  # whoever needs it says so, by its own name and reason
    return found


def contents(obj: Manifest) -> dict[str, bytes]:
    if obj["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()}
    plain = {key: value.encode() for key, value in (obj.get("data") or {}).items()}
    return plain | {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}


def field_value(path: str, facts: PodFacts) -> str | None:
    """None: local mode has no such field; podspec.py refused it."""
    metadata = meta(facts.pod)
    if match := _KEYED_FIELD.match(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    plain = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "metadata.labels": _as_lines(metadata.get("labels") or {}),
        "metadata.annotations": _as_lines(metadata.get("annotations") or {}),
        "spec.nodeName": NODE_NAME,
        "spec.serviceAccountName": facts.pod["spec"].get("serviceAccountName", "default"),
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
        "status.hostIP": HOST_IP,
        "status.hostIPs": HOST_IP,
    }
    return plain.get(path)


def _as_lines(pairs: Mapping[str, str]) -> str:
    return "\n".join(f'{key}="{value}"' for key, value in sorted(pairs.items()))


def expand(text: str, env: Mapping[str, str]) -> str:
    """As Kubernetes: an unknown name stays as written, `$$` is a dollar sign.

    >>> expand("$(A)/x $(B) $$(A) $A", {"A": "1"})
    '1/x $(B) $(A) $A'
    """

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def filled(text: str, *, paths: Paths, env: Mapping[str, str]) -> str:
    """A text of the pod spec as its process gets it: paths rewritten, then references filled in."""
    return expand(paths.translate(text, escaped=True), env)


def inherited() -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in INHERITED)
    }
    folder = os.path.dirname(sys.executable)
    env["PATH"] = os.pathsep.join([folder, env.get("PATH", os.defpath)])  # so that a script's `python` is ours, too
    return env


def container_env(
    container: Manifest, *, facts: PodFacts, sources: Sources, paths: Paths, checkpoint_uri: str
) -> dict[str, str]:
    """What the pod spec says, without what the machine and the backend add; `checkpoint_uri` is the run's own place for
    checkpoints. Raises NotYet for a missing source."""
    env: dict[str, str] = {}
    for entry in container.get("envFrom") or []:
        for _, kind, reference in references(entry, at=""):
            for key, value in (_source(sources, kind, reference) or {}).items():
                env[entry.get("prefix", "") + key] = paths.translate(value.decode())
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            looked_up = _value_from(entry["valueFrom"], facts=facts, sources=sources)
            if looked_up is not None:
                env[entry["name"]] = paths.translate(looked_up)
        elif entry["name"] == names.ENV_CHECKPOINT_URI:
            uri = str(entry.get("value", ""))
            env[entry["name"]] = uri if uri == checkpoint_uri else filled(uri, paths=paths.lasting(), env=env)
        else:
            env[entry["name"]] = filled(str(entry.get("value", "")), paths=paths, env=env)
    return env


def _value_from(reference: Manifest, *, facts: PodFacts, sources: Sources) -> str | None:
    if (field_ref := reference.get("fieldRef")) is not None:
        return field_value(field_ref["fieldPath"], facts)
    [(_, kind, key_ref)] = references(reference, at="")
    data = _source(sources, kind, key_ref)
    if data is None:
        return None
    if key_ref["key"] not in data:
        if key_ref.get("optional"):
            return None
        raise _config_error(f"couldn't find key {key_ref['key']} in {kind} {key_ref['name']}")
    return data[key_ref["key"]].decode()


def _source(sources: Sources, kind: str, reference: Manifest) -> Mapping[str, bytes] | None:
    data = sources.get((kind, reference["name"]))
    if data is None and not reference.get("optional"):
        raise _config_error(f'{kind.lower()} "{reference["name"]}" not found')
    return data


def _config_error(what: str) -> NotYet:
    return NotYet(what, waiting_reason=CREATE_CONTAINER_CONFIG_ERROR, event_reason="Failed")


def argv(container: Manifest, *, env: Mapping[str, str], paths: Paths) -> list[str]:
    """command and args as a list; `python` is the interpreter that runs us, as the image's is in a cluster."""
    words = [filled(str(w), paths=paths, env=env) for w in [*container["command"], *(container.get("args") or [])]]
    return [sys.executable if words[0] in INTERPRETERS else words[0], *words[1:]]
