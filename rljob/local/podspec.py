"""What of a pod spec local mode carries out, what it may ignore and why, and what it refuses by name.

For: `pod_life.py`, before anything of a pod starts, and `rljob run`, over rendered manifests before anything of a job
does. Not for: whether the API server would take the pod; our manifests are tested against a real one.

Two tables are the whole truth: podvalues.FIELDS, fields that some module here reads, with what their values must be,
and IGNORED, each with the reason why a pod behaves the same without it. A field in neither is refused, so a new field
of the manifests cannot be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rljob.local import environment, podvalues
from rljob.local.objects import Manifest

_SAME_MACHINE = "there is one machine and nothing to choose from"
_NO_KERNEL_LIMIT = "processes run as the user who called rljob, without cgroups; memory and devices are shared"

IGNORED: Mapping[str, Mapping[str, str]] = {
    "pod": {
        "affinity": _SAME_MACHINE,
        "nodeSelector": _SAME_MACHINE,
        "tolerations": _SAME_MACHINE,
        "topologySpreadConstraints": _SAME_MACHINE,
        "schedulerName": _SAME_MACHINE,
        "schedulingGroup": "all pods of a job fit at once or the job is refused",
        "priority": "nothing is preempted",
        "priorityClassName": "nothing is preempted",
        "preemptionPolicy": "nothing is preempted",
        "nodeName": "set by this backend",
        "securityContext": _NO_KERNEL_LIMIT,
        "serviceAccountName": "there is no API server whose token a pod could use",
        "serviceAccount": "the old name of serviceAccountName",
        "enableServiceLinks": "services have names, not variables",
        "imagePullSecrets": "images are not pulled",
        "dnsPolicy": "names come from the hosts file",
        "overhead": _NO_KERNEL_LIMIT,
    },
    "container": {
        "image": "the machine's own installation is the image",
        "imagePullPolicy": "images are not pulled",
        "resources": _NO_KERNEL_LIMIT,
        "securityContext": _NO_KERNEL_LIMIT,
    },
    "volumeMount": {
        "readOnly": "no mount, only a folder; what the cluster makes read-only, a test on the cluster sees"
    },
}

VOLUME_KINDS = ("emptyDir", "secret", "configMap", "projected", "downwardAPI", "persistentVolumeClaim")

REMEDY: Mapping[str, str] = {
    "hostPath": "use a persistentVolumeClaim: its folder is claims/<name> in the work dir, and may be a link",
    "grpc": "use tcpSocket or exec",
    "resourceFieldRef": "write the number as a value",
    "livenessProbe": "leave it out: agents and driver watch their own processes",
    "startupProbe": "use readinessProbe",
    "restartPolicy": "move it under spec.containers, where it runs beside the others for as long as the job does",
    "lifecycle": "handle SIGTERM in the program",
    "shareProcessNamespace": "one container per pod, or none that looks at the others",
    "activeDeadlineSeconds": "set spec.activeDeadlineSeconds of the RLJob",
    "subPathExpr": "use subPath",
}

_FACTS = environment.PodFacts(pod={"metadata": {"name": "", "namespace": "", "uid": ""}, "spec": {}}, pod_ip="")


def refusals(pod: Manifest) -> list[str]:
    """One sentence per thing that local mode cannot carry out; empty: the pod may start.

    >>> refusals({"spec": {"hostNetwork": True, "containers": [{"name": "a", "command": ["x"]}]}})
    ['spec.hostNetwork is not carried out in local mode; leave it out, or run this job on a cluster']
    """
    return list(_pod(pod["spec"]))


def unmade(pod: Manifest, *, made: Mapping[tuple[str, str], Collection[str]]) -> Iterator[str]:
    """One sentence per Secret and ConfigMap that the pod would wait for for ever, where nobody makes any but `made`
    (kind and name, with its keys)."""
    for at, kind, reference in environment.references(pod["spec"], at="spec"):
        if reference.get("optional"):
            continue
        name = environment.source_name(reference)
        known = made.get((kind, name))
        if known is None:
            yield (
                f"{at} names {kind} {name!r}, which nobody makes in a run on this machine; "
                "write what it holds, say optional: true, or run this job on a cluster"
            )
            continue
        keys = [reference["key"]] if "key" in reference else [item["key"] for item in reference.get("items") or []]
        for key in (key for key in keys if key not in known):
            yield (
                f"{at} names key {key!r} of {kind} {name!r}, which has {', '.join(known)}; "
                "name one of these, or say optional: true"
            )


def _pod(spec: Manifest) -> Iterator[str]:
    yield from _fields(spec, "pod", at="spec")
    if spec.get("automountServiceAccountToken"):
        yield _sentence(
            "spec.automountServiceAccountToken=true", remedy="write false: there is no API server to talk to"
        )
    if not spec.get("containers"):
        yield "spec.containers is empty; write at least one"
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for i, volume in enumerate(spec.get("volumes") or []):
        yield from _volume(volume, at=f"spec.volumes[{i}] ({volume['name']})")
    for field in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(field) or []):
            at = f"spec.{field}[{i}] ({container['name']})"
            yield from _container(container, at=at, volumes=volumes)
            if field == "initContainers" and "readinessProbe" in container:
                yield _sentence(f"{at}.readinessProbe", remedy="an init container ends before anybody could use it")


def _container(container: Manifest, *, at: str, volumes: Mapping[str, Manifest]) -> Iterator[str]:
    yield from _fields(container, "container", at=at)
    if not container.get("command"):
        yield f"{at}.command is empty: an image's own entry point is not known here; write the command"
    for i, port in enumerate(container.get("ports") or []):
        yield from _fields(port, "port", at=f"{at}.ports[{i}]")
    for i, entry in enumerate(container.get("env") or []):
        yield from _env(entry, at=f"{at}.env[{i}] ({entry.get('name')})")
    for i, entry in enumerate(container.get("envFrom") or []):
        yield from _fields(entry, "envFrom", at=f"{at}.envFrom[{i}]")
        yield from _source(entry, ("secretRef", "configMapRef"), at=f"{at}.envFrom[{i}]")
    for i, mount in enumerate(container.get("volumeMounts") or []):
        yield from _fields(mount, "volumeMount", at=f"{at}.volumeMounts[{i}]")
        if mount["name"] not in volumes:
            yield f"{at}.volumeMounts[{i}] names volume {mount['name']!r}, but spec.volumes has {sorted(volumes)}"
    if "readinessProbe" in container:
        yield from _probe(container, at=f"{at}.readinessProbe")


def _probe(container: Manifest, *, at: str) -> Iterator[str]:
    probe = container["readinessProbe"]
    yield from _fields(probe, "readinessProbe", at=at)
    ways = [way for way in ("exec", "httpGet", "tcpSocket") if way in probe]
    if not ways:
        yield f"{at} names nothing to probe; write one of exec, httpGet, tcpSocket"
    for way in ways:
        yield from podvalues.problems(probe[way], way, at=f"{at}.{way}")
        if way == "exec" and not probe[way].get("command"):
            yield f"{at}.exec.command is empty; write the command"
        elif way != "exec":
            names = [port.get("name") for port in container.get("ports") or []]
            yield from podvalues.port_problem(probe[way].get("port"), names, at=f"{at}.{way}")
        for i, header in enumerate(probe[way].get("httpHeaders") or []):
            yield from podvalues.problems(header, "httpHeader", at=f"{at}.{way}.httpHeaders[{i}]")


def _env(entry: Manifest, *, at: str) -> Iterator[str]:
    yield from _fields(entry, "env", at=at)
    if not entry.get("name"):
        yield f"{at} has no name; write one"
    reference = entry.get("valueFrom") or {}
    yield from _fields(reference, "valueFrom", at=f"{at}.valueFrom")
    if "valueFrom" in entry:
        yield from _source(reference, tuple(podvalues.FIELDS["valueFrom"]), at=f"{at}.valueFrom")
    if (field_ref := reference.get("fieldRef")) is not None:
        yield from _field(field_ref, at=f"{at}.valueFrom")


def _source(node: Manifest, sources: tuple[str, ...], *, at: str) -> Iterator[str]:
    """What is wrong with the source of a variable or of several: there must be exactly one, as an API server has it.
    What is null is left out, as there."""
    named = [source for source in sources if isinstance(node.get(source), dict)]
    if not named:
        yield f"{at} names no source; write one of {', '.join(sources)}"
    elif len(named) > 1:
        yield f"{at} names {len(named)} sources, {' and '.join(named)}; write one of them"


def _field(field_ref: Manifest, *, at: str) -> Iterator[str]:
    if environment.field_value(field_ref["fieldPath"], _FACTS) is None:
        yield _sentence(f"{at}.fieldRef.fieldPath={field_ref['fieldPath']}")


def _volume(volume: Manifest, *, at: str) -> Iterator[str]:
    yield from podvalues.problems(volume, "volume", at=at)
    for kind, value in volume.items():
        if kind == "name":
            continue
        if kind not in VOLUME_KINDS:
            yield _sentence(f"{at}.{kind}", remedy=REMEDY.get(kind, f"use one of {', '.join(VOLUME_KINDS)}"))
        elif kind in ("emptyDir", "persistentVolumeClaim"):
            yield from _fields(value or {}, kind, at=f"{at}.{kind}")
        elif kind == "projected":
            yield from podvalues.problems(value, "source", at=f"{at}.projected")
            for i, source in enumerate(value.get("sources") or []):
                yield from _fields(source, "projectedSource", at=f"{at}.projected.sources[{i}]")
                for part in (part for part in podvalues.FIELDS["projectedSource"] if part in source):
                    yield from _files(source[part], at=f"{at}.projected.sources[{i}].{part}")
        else:
            yield from _files(value, at=f"{at}.{kind}")
    medium = (volume.get("emptyDir") or {}).get("medium", "")
    if medium not in ("", "Memory"):
        yield _sentence(f"{at}.emptyDir.medium={medium}", remedy="use Memory, or leave it out")


def _files(source: Manifest, *, at: str) -> Iterator[str]:
    """The files of a secret, a configMap or the downward API."""
    yield from podvalues.problems(source, "source", at=at)
    for i, item in enumerate(source.get("items") or []):
        yield from podvalues.problems(item, "item", at=f"{at}.items[{i}]")
        if "fieldRef" in item:
            yield from _field(item["fieldRef"], at=f"{at}.items[{i}]")
        if "resourceFieldRef" in item:
            yield _sentence(f"{at}.items[{i}].resourceFieldRef", remedy=REMEDY["resourceFieldRef"])


def _fields(node: Mapping[str, Any], kind: str, *, at: str) -> Iterator[str]:
    """Those that are not known, and values that are not what theirs must be."""
    known = {*podvalues.FIELDS[kind], *IGNORED.get(kind, {})}
    for field in node:
        if field not in known:
            yield _sentence(f"{at}.{field}", remedy=REMEDY.get(field, ""))
    yield from podvalues.problems(node, kind, at=at)


def _sentence(what: str, *, remedy: str = "") -> str:
    return f"{what} is not carried out in local mode; {remedy or 'leave it out, or run this job on a cluster'}"
