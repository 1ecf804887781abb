"""What a platform team writes once for many jobs: the RLRuntime, of the whole cluster, which an RLJob names in one line
(`spec.runtime: gpu`). Its models, what is wrong with one, and a job's spec as it is with it (`over`). Pure.

Who reads it: the operator, before a job begins (docs/runtimes.md); `rljob validate` and `rljob run`, from a file. From
then on everybody works on the spec that `over` makes, in which no runtime is named any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from rlinf_api import job_rules, names, sentences, storable, unknown
from rlinf_api.conditions import Reason
from rlinf_api.job import RESOURCE_PATTERN, MaybeQuantity, Model, Name, Problem, Template, by
from rlinf_api.templates import overlay, with_image, without

KIND: Final = "RLRuntime"
MAX_BYTES: Final = 32 * 1024
"""The most bytes of a spec as JSON. A job keeps a copy in its status, which the operator writes again and again: ten
times what the templates of a job of GPUs have, and a fiftieth of what etcd takes."""
_OF_AN_ACCELERATOR: Final = frozenset({"resource", "hostMemory"})
_RESOURCE: Final = rf"^$|{RESOURCE_PATTERN}"


class RuntimeSlots(Model):
    """Like a pool's; what is not there is left to the job, and then to the defaults of an RLJob."""

    per_pod: Annotated[int, Field(ge=1, le=64)] | None = None
    """Slots of one pod."""
    resource: Annotated[str, Field(max_length=253, pattern=_RESOURCE)] = ""
    """Extended resource of an accelerator slot, e.g. nvidia.com/gpu. Not for a pool whose job says CPU alone."""
    cpu: MaybeQuantity = ""
    """CPU of one slot. Without a resource beside it not for a pool whose job writes one."""
    memory: MaybeQuantity = ""
    """Memory of one slot, by which plans go: the accelerator's own, or without one the host's."""
    host_memory: MaybeQuantity | None = None
    """Memory of the host beside the accelerator of one slot."""


class RuntimePool(Model):
    image: Annotated[str, Field(max_length=1024)] = ""
    """Image of the pool's pods."""
    slots: RuntimeSlots = RuntimeSlots()
    template: Template = {}
    """PodTemplateSpec over the runtime's spec.template, and under all that the job says."""


class NamedRuntimePool(RuntimePool):
    name: Name


class RuntimeDriver(Model):
    template: Template = {}
    """PodTemplateSpec over the runtime's spec.template, for drivers."""


class RLRuntimeSpec(Model):
    queue: Annotated[str, Field(max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] = ""
    """Kueue's LocalQueue in a job's namespace, for jobs without the label kueue.x-k8s.io/queue-name. Empty: none."""
    template: Template = {}
    """PodTemplateSpec of all pods, under the job's spec.template: pull secrets, tolerations, a node selector."""
    driver: RuntimeDriver = RuntimeDriver()
    """Likewise of the driver, under all that the job says of it."""
    pool_defaults: RuntimePool = RuntimePool()
    """What every pool has that the job does not say otherwise."""
    pools: Annotated[list[NamedRuntimePool], Field(max_length=16, json_schema_extra=by("name"))] = []
    """The same for pools of a certain name, over poolDefaults. A job need not have them."""

    def of_pool(self, name: str) -> tuple[RuntimePool, ...]:
        """The more general first."""
        return (self.pool_defaults, *(pool for pool in self.pools if pool.name == name))


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFound:
    """What stands under a name. Without `spec` it cannot be used, and `message` says why and what to do."""

    name: str
    generation: int = 0
    spec: RLRuntimeSpec | None = None
    reason: Reason = Reason.ACCEPTED
    message: str = ""


def named_by(job: Mapping[str, Any]) -> str:
    """The runtime that an RLJob names; empty: none, or what is no name, which whoever examines the spec says."""
    spec = job.get("spec")
    named = spec.get("runtime") if isinstance(spec, Mapping) else None
    return named if isinstance(named, str) else ""


def read(manifest: Mapping[str, Any]) -> RuntimeFound:
    """An RLRuntime as the API server has it, or a person wrote it."""
    meta = manifest.get("metadata")
    meta = meta if isinstance(meta, Mapping) else {}
    name = str(meta.get("name") or "")
    spec, problems = examine(manifest)
    if problems:
        message = f"{KIND} {name!r} is wrong: {'; '.join(map(str, problems))}"
        return RuntimeFound(name=name, reason=Reason.RUNTIME_INVALID, message=message)
    return RuntimeFound(name=name, generation=int(meta.get("generation") or 0), spec=spec)


def missing(name: str) -> RuntimeFound:
    message = f"spec.runtime names {KIND} {name!r}, which is not there; make it, or correct the name"
    return RuntimeFound(name=name, reason=Reason.RUNTIME_NOT_FOUND, message=message)


def refused(name: str, why: str) -> RuntimeFound:
    message = f"spec.runtime names {KIND} {name!r}, which the operator may not read ({why}); give it that right "
    message += "(value rbac.kindsOfTheCluster of the chart)"
    return RuntimeFound(name=name, reason=Reason.RUNTIME_REFUSED, message=message)


def examine(manifest: Mapping[str, Any]) -> tuple[RLRuntimeSpec | None, list[Problem]]:
    """As `supported.examine` for an RLJob."""
    found = list(job_rules.check_kind(manifest, KIND))
    raw = manifest.get("spec", {})
    if not isinstance(raw, Mapping):
        message = f"got {sentences.kind_of(raw)}, wanted a mapping; write one"
        return None, [*found, Problem(field="spec", message=message)]
    try:
        text = storable.dumps(raw)
    except (TypeError, ValueError) as error:
        said = storable.problems(raw, "spec") or [Problem(field="spec", message=f"is no JSON: {error}; correct it")]
        return None, [*found, *said]
    if len(text.encode()) > MAX_BYTES:
        message = f"has {len(text.encode())} bytes as JSON, wanted at most {MAX_BYTES}, as each job keeps a copy"
        return None, [*found, Problem(field="spec", message=f"{message}; move what is long into a ConfigMap")]
    try:
        spec = RLRuntimeSpec.model_validate_json(text, strict=True)
    except ValidationError as error:
        return None, [*found, *sentences.problems(error, RLRuntimeSpec, value=raw, prefix="spec")]
    return spec, [*found, *_check(spec)]


def _check(spec: RLRuntimeSpec) -> Iterator[Problem]:
    """What the models cannot say."""
    for field, template in (("spec.template", spec.template), ("spec.driver.template", spec.driver.template)):
        yield from job_rules.check_shared_template(field, template)
    yield from job_rules.check_driver_template(spec.driver.template)
    listed = [pool.name for pool in spec.pools]
    for name in sorted({n for n in listed if listed.count(n) > 1}):
        yield Problem(field="spec.pools", message=f"name {name!r} is used twice; rename one")
    where = (("spec.poolDefaults", spec.pool_defaults), *((f"spec.pools[{p.name}]", p) for p in spec.pools))
    for field, pool in where:
        yield from job_rules.check_template(f"{field}.template", pool.template)
        yield from job_rules.check_image(field, pool.image, template=pool.template)


# --- a job with it ----------------------------------------------------------------------------------------------------


def of_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """An RLJob of a cluster with the runtime that it began with, which its status keeps: for whoever reads its spec."""
    kept = (job.get("status") or {}).get("runtime") or {}
    return with_runtime(job, kept_spec(kept.get("spec") or {})) if named_by(job) == kept.get("name") else dict(job)


def kept_spec(raw: Mapping[str, Any]) -> RLRuntimeSpec:
    """The runtime's spec that a job's status keeps. It was right when it was written; fields of a newer operator are
    left out."""
    known, _ = unknown.pruned(raw, RLRuntimeSpec, "spec")
    return RLRuntimeSpec.model_validate(known)


def with_runtime(job: Mapping[str, Any], runtime: RLRuntimeSpec) -> dict[str, Any]:
    """The RLJob as if it had written all of that itself; its own words win."""
    made = {**job, "spec": over(job["spec"], runtime)}
    meta = job.get("metadata") or {}
    labels = meta.get("labels") or {}
    if runtime.queue and names.LABEL_QUEUE not in labels:
        made["metadata"] = {**meta, "labels": {**labels, names.LABEL_QUEUE: runtime.queue}}
    return made


def over(spec: Mapping[str, Any], runtime: RLRuntimeSpec) -> dict[str, Any]:
    """A job's spec, as it is written, over its runtime. Each layer is over the one before it:

        of all pods     runtime.template < job.template
        of a driver     ... < runtime.driver < job.template < job.driver
        of a pool       ... < runtime.poolDefaults < runtime.pools[name] < job.template < job.pools[name]

    so that nothing of the runtime is over anything of the job. What is no mapping where one should be is left as it
    is, for whoever examines the spec.

    >>> gpu = RLRuntimeSpec(pool_defaults=RuntimePool(slots=RuntimeSlots(resource="nvidia.com/gpu", per_pod=8)))
    >>> over({"runtime": "gpu", "pools": [{"name": "a"}, {"name": "b", "slots": {"perPod": 2}}]}, gpu)["pools"]
    [{'name': 'a', 'slots': {'perPod': 8, 'resource': 'nvidia.com/gpu'}}, \
{'name': 'b', 'slots': {'perPod': 2, 'resource': 'nvidia.com/gpu'}}]
    """
    made = {key: value for key, value in spec.items() if key != "runtime"}
    own, driver, pools = spec.get("template", {}), spec.get("driver", {}), spec.get("pools", [])
    if not isinstance(own, Mapping) or not isinstance(driver, Mapping) or not isinstance(pools, list):
        return made
    if runtime.template:
        made["template"] = overlay(runtime.template, own)
    of_driver = driver.get("template", {})
    if runtime.driver.template and isinstance(of_driver, Mapping):
        layers = (runtime.driver.template, without(own, names.CONTAINER_AGENT), of_driver)
        made["driver"] = {**driver, "template": _laid(*layers)}
    made["pools"] = [_pool(p, runtime, without(own, names.CONTAINER_DRIVER)) for p in pools]
    return made


def _pool(pool: Any, runtime: RLRuntimeSpec, of_all: Mapping[str, Any]) -> Any:
    if not isinstance(pool, Mapping):
        return pool
    template, slots, image = pool.get("template", {}), pool.get("slots", {}), pool.get("image", "")
    if not isinstance(template, Mapping) or not isinstance(slots, Mapping) or not isinstance(image, str):
        return pool
    made = dict(pool)
    layers = [layer for p in runtime.of_pool(str(pool.get("name"))) for layer in (_image(p.image), p.template) if layer]
    if layers:
        made["template"] = _laid(*layers, of_all, _image(image), template)
    if merged := _slots(runtime.of_pool(str(pool.get("name"))), slots):
        made["slots"] = merged
    return made


def _image(image: str) -> dict[str, Any]:
    return with_image(names.CONTAINER_AGENT, image)


def _slots(defaults: tuple[RuntimePool, ...], own: Mapping[str, Any]) -> dict[str, Any]:
    """Field by field; but a layer that names one kind of slot, by `cpu` alone a share of CPU, by `resource` one with an
    accelerator, takes over nothing that is of the other kind alone."""
    merged: dict[str, Any] = {}
    for layer in (*(unknown.compact(pool.slots) for pool in defaults), own):
        said = {key: value for key, value in layer.items() if value != ""}
        if "cpu" in said and not said.keys() & _OF_AN_ACCELERATOR:
            merged = {key: value for key, value in merged.items() if key not in _OF_AN_ACCELERATOR}
        elif "resource" in said and "resource" not in merged:
            merged.pop("cpu", None)
        merged |= said
    return merged


def _laid(*layers: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in layers:
        found = overlay(found, layer)
    return found
