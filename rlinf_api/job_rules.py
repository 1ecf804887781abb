"""What the models of an RLJob cannot say alone: references between fields, quantities, that the minimum fits the pools;
and what stands around the spec: apiVersion, kind, metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from pydantic import JsonValue

from rlinf_api import failure_rules, names, quantities, sentences
from rlinf_api.job import (
    RESOURCE_PATTERN,
    PlacementMode,
    PlacementSpec,
    Problem,
    Range,
    RLJobSpec,
    SlotsSpec,
    TopologySpec,
    as_range,
)

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MAX_NAMESPACE: Final = 63
OBJECT_STORES: Final = ("s3://", "gs://")
_IN_A_BUCKET = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/(?!\.{1,2}(/|$))[\w.=+,:{}-]+)*/?", re.ASCII)
_KNOWN: Final = ("apiVersion", "kind", "metadata", "spec", "status")


def check_uri(field: str, uri: str) -> Iterator[Problem]:
    """Other schemes are answered by `supported`: they are right, and come later."""
    if uri.startswith(OBJECT_STORES):
        if "@" in uri:  # and not shown: what stands before it may be a secret
            remedy = "write s3://bucket/prefix, and the key into a Secret that the pools' templates name"
            yield Problem(field=field, message=f"has an '@', before which credentials might stand; {remedy}")
        elif not _IN_A_BUCKET.fullmatch(uri):
            wanted = "a bucket and a prefix of letters, digits and any of _.=+,:- between single slashes"
            yield Problem(field=field, message=f"got {uri!r}, wanted {wanted}; write s3://bucket/prefix")
        return
    relative, is_file = "://" not in uri and not uri.startswith("/"), uri.startswith("file://")
    not_local = is_file and not uri.startswith(("file:///", "file://localhost/"))
    left_out = next((character for character in uri if character in "#?"), "") if is_file else ""
    if any(ord(character) < 32 for character in (unquote(uri) if is_file else uri)):
        yield Problem(field=field, message=f"got {uri!r}, which has a character that no path has; remove it")
    elif left_out:
        remedy = f"write {left_out!r} as {quote(left_out)}, or the path alone"
        yield Problem(field=field, message=f"got {uri!r}, which as a uri ends at its {left_out!r}; {remedy}")
    elif uri and (relative or not_local):
        yield Problem(field=field, message=f"got {uri!r}, wanted an absolute path; write file:///path or /path")


def check(spec: RLJobSpec) -> Iterator[Problem]:
    role_names = [r.name for r in spec.roles]
    for kind, listed in (("roles", role_names), ("pools", [p.name for p in spec.pools])):
        for name in sorted({n for n in listed if listed.count(n) > 1}):
            yield Problem(field=f"spec.{kind}", message=f"name {name!r} is used twice; rename one")
    for pool in spec.pools:
        if pool.name == names.COMPONENT_DRIVER:
            message = f"got {pool.name!r}, which in a queue is the name of the driver's own pod; rename it"
            yield Problem(field=f"spec.pools[{pool.name}].name", message=message)
        for name in pool.roles:
            if name not in role_names:
                yield Problem(
                    field=f"spec.pools[{pool.name}].roles",
                    message=f"names role {name!r}, which spec.roles does not have ({', '.join(role_names)}); "
                    "add the role or remove the name",
                )
        for name in sorted({n for n in pool.roles if pool.roles.count(n) > 1}):
            yield Problem(field=f"spec.pools[{pool.name}].roles", message=f"names role {name!r} twice; remove one")
        yield from _check_range(f"spec.pools[{pool.name}].pods", pool.pods)
        yield from _check_slots(f"spec.pools[{pool.name}].slots", pool.slots)
        yield from _check_topology(f"spec.pools[{pool.name}].topology", pool.topology)
        yield from check_template(f"spec.pools[{pool.name}].template", pool.template)
        yield from check_image(f"spec.pools[{pool.name}]", pool.image, template=pool.template)
    for field, template in (("spec.template", spec.template), ("spec.driver.template", spec.driver.template)):
        yield from check_shared_template(field, template)
    yield from check_driver_template(spec.driver.template)
    yield from check_uri("spec.checkpoint.uri", spec.checkpoint.uri)
    for role in spec.roles:
        yield from _check_range(f"spec.roles[{role.name}].workers", role.workers)
        homes = [p for p in spec.pools if role.name in p.roles]
        if not homes:
            yield Problem(
                field=f"spec.roles[{role.name}]",
                message=f"no pool may run role {role.name!r}; "
                f"add it to spec.pools[*].roles of one of {', '.join(p.name for p in spec.pools)}",
            )
            continue
        if all(role.slots_per_worker > p.slots.per_pod for p in homes):
            widest = max(homes, key=lambda p: p.slots.per_pod)
            yield Problem(
                field=f"spec.roles[{role.name}].slotsPerWorker",
                message=f"a worker takes {role.slots_per_worker} slots of one pod, but the widest pool {widest.name!r} "
                f"has {widest.slots.per_pod} per pod; "
                f"lower slotsPerWorker or raise spec.pools[{widest.name}].slots.perPod",
            )
        else:
            need = as_range(role.workers).min
            room = sum(as_range(p.pods).max * (p.slots.per_pod // role.slots_per_worker) for p in homes)
            if need > room:
                yield Problem(
                    field=f"spec.roles[{role.name}].workers",
                    message=f"needs at least {need} workers of {role.slots_per_worker} slots, "
                    f"but its pools hold {room}; lower workers or raise spec.pools[{homes[0].name}].pods",
                )
    yield from _check_topology("spec.placement.topology", spec.placement.topology)
    yield from _check_pin(spec.placement)
    yield from _check_spares(spec)
    yield from failure_rules.check(spec)


def _check_topology(field: str, topology: TopologySpec | None) -> Iterator[Problem]:
    said = topology.model_dump(exclude_none=True) if topology is not None else {}
    if topology is not None and len(said) != 1:
        got = " and ".join(said) or "nothing"
        message = f"got {got}, wanted one of required, preferred and spread; write for example "
        yield Problem(field=field, message=message + "{required: example.com/rack}")


def _check_pin(placement: PlacementSpec) -> Iterator[Problem]:
    is_pinned = placement.mode is PlacementMode.PINNED
    if is_pinned and not placement.pin:
        message = "mode is Pinned but pin is empty; write the name of an RLPlan of this job"
        yield Problem(field="spec.placement.pin", message=message)
    if placement.pin and not is_pinned:
        message = f"got {placement.pin!r}, but mode is {placement.mode}, which looks at no pin; write mode: Pinned or "
        yield Problem(field="spec.placement.pin", message=message + "remove pin")


def _check_spares(spec: RLJobSpec) -> Iterator[Problem]:
    """A number that could never be of use is a mistake, and costs memory."""
    for role in spec.roles:
        homes = [p for p in spec.pools if role.name in p.roles]
        if not role.spares or not homes:
            continue
        field = f"spec.roles[{role.name}].spares"
        most = max(min(p.slots.per_pod // role.slots_per_worker, as_range(role.workers).max) for p in homes)
        if role.spares > most:
            message = f"got {role.spares}, but a pod runs at most {most} workers of this role, and a spare takes the "
            yield Problem(field=field, message=message + f"place of one in its own pod; write {most} or less")
        elif spec.failure_policy.max_restarts == 0:
            message = f"got {role.spares}, but spec.failurePolicy.maxRestarts is 0, so the first lost worker fails the "
            yield Problem(field=field, message=message + "job; raise maxRestarts or remove spares")


def _check_slots(field: str, slots: SlotsSpec) -> Iterator[Problem]:
    if slots.resource and not re.fullmatch(RESOURCE_PATTERN, slots.resource, re.ASCII):
        message = f"got {slots.resource!r}, wanted an extended resource; write domain/name, such as nvidia.com/gpu"
        yield Problem(field=f"{field}.resource", message=message)
    if slots.host_memory and not slots.resource:
        message = f"got {slots.host_memory!r}, but without an accelerator the host's memory is memory; write that, or "
        yield Problem(field=f"{field}.hostMemory", message=message + "name the resource")
    amounts = (
        ("cpu", slots.cpu, "1m", 1000),
        ("memory", slots.memory, "1", 1),
        ("hostMemory", slots.host_memory, "1", 1),
    )
    for name, text, least, whole in amounts:
        most = quantities.MOST // whole  # Kubernetes counts cores in thousandths
        if text and not quantities.is_within(text, least=quantities.parse(least), most=most // slots.per_pod):
            count = "the 1 slot" if slots.per_pod == 1 else f"the {slots.per_pod} slots"
            yield Problem(
                field=f"{field}.{name}",
                message=f"got {text!r}, wanted a quantity of at least {least} and at most {most} for {count} of a pod; "
                f"write for example {'1 or 500m' if name == 'cpu' else '2Gi'}",
            )


def check_image(field: str, image: str, *, template: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """`field`: of the pool."""
    other = container_in(template, names.CONTAINER_AGENT).get("image")
    if image and other and other != image:
        message = f"got {image!r}, but container agent of the pool's template has {sentences.shown(other)}; "
        yield Problem(field=f"{field}.image", message=message + "remove one")


def check_shared_template(field: str, template: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """The problems of a template that holds for the driver, too."""
    yield from check_template(field, template)
    if _pod_spec(template).get("hostNetwork"):
        message = "got true, which would take the driver out of the job's NetworkPolicy; write it into a pool's "
        yield Problem(field=f"{field}.spec.hostNetwork", message=message + "template")


def check_driver_template(template: Mapping[str, JsonValue]) -> Iterator[Problem]:
    if container_in(template, names.CONTAINER_AGENT):
        message = f"names container {names.CONTAINER_AGENT!r}, which a driver's pod has not; write "
        yield Problem(field="spec.driver.template", message=message + names.CONTAINER_DRIVER)


def _pod_spec(template: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    spec = template.get("spec")
    return spec if isinstance(spec, Mapping) else {}


def container_in(template: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    """The template's container of this name; empty where there is none.

    >>> container_in({"spec": {"containers": [{"name": "agent", "image": "a:1"}]}}, "agent")["image"]
    'a:1'
    """
    listed = _pod_spec(template).get("containers")
    found = (c for c in listed if isinstance(c, Mapping)) if isinstance(listed, list) else iter(())
    return next((container for container in found if container.get("name") == name), {})


def check_template(field: str, template: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Only the shape that the operator merges by; whether the rest is a pod, the API server says."""
    for name, value in template.items():
        if name not in ("metadata", "spec"):
            yield Problem(field=f"{field}.{name}", message="is not a field of a pod template; write metadata or spec")
        elif not isinstance(value, dict):
            message = f"got {sentences.kind_of(value)}, wanted a mapping; write one or remove it"
            yield Problem(field=f"{field}.{name}", message=message)
    spec = template.get("spec")
    for name in ("containers", "initContainers", "volumes"):
        entries = spec.get(name, []) if isinstance(spec, dict) else []
        if not isinstance(entries, list) or not all(isinstance(e, dict) and e.get("name") for e in entries):
            yield Problem(
                field=f"{field}.spec.{name}",
                message="wanted a list of entries that each have a name; write name: agent",
            )


def _check_range(field: str, value: int | Range) -> Iterator[Problem]:
    bounds = as_range(value)
    if bounds.min > bounds.max:
        yield Problem(field=field, message=f"min {bounds.min} is above max {bounds.max}; swap them")


def check_kind(manifest: Mapping[str, Any], kind: str) -> Iterator[Problem]:
    for field, wanted in (("apiVersion", names.API_VERSION), ("kind", kind)):
        if manifest.get(field) != wanted:
            yield Problem(
                field=field, message=f"got {sentences.shown(manifest.get(field))}, wanted {wanted!r}; write that"
            )
    for key in sorted(str(k) for k in manifest if k not in _KNOWN):
        hint = sentences.did_you_mean(key, _KNOWN) or " remove it"
        yield Problem(field=key or "''", message=f"is not a field of an {kind};{hint}")


def check_envelope(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """What stands around the spec. Not what an API server adds to the metadata, nor which characters a label may
    have: it says that itself, and local mode has no use for it."""
    yield from check_kind(manifest, "RLJob")
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
