"""What a driver pod and a worker pod look like: the pod contract of `rlinf_api/names.py`, rendered. Pure.

Called by `decide` when a pod has to be made, never to compare with one that runs: an operator upgrade restarts nobody.
`rljob/local` executes the very same manifests as processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from rlinf_api import names, quantities, templates
from rlinf_api.job import PoolSpec, RLJobSpec, SlotsSpec
from rlinf_api.job_rules import container_in
from rlinf_operator import gangs
from rlinf_operator.manifests import template, topology
from rlinf_operator.manifests.metadata import JobMeta, Manifest, inputs, labels, metadata
from rlinf_operator.settings import OperatorSettings

MIN_SHM_BYTES: Final = 64 << 20
PYTHON: Final = "python"

_FIELD_OF: Final = {
    names.ENV_NAMESPACE: "metadata.namespace",
    names.ENV_POD_NAME: "metadata.name",
    names.ENV_POD_UID: "metadata.uid",
    names.ENV_POD_IP: "status.podIP",
    names.ENV_NODE_NAME: "spec.nodeName",
}
_USERS_FIELDS: Final = ("image", "imagePullPolicy")  # the agent's container: the operator only has a default
_ADMINISTRATORS_FIELDS: Final = ("resources",)  # the driver's container: what the settings say is a default
_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_IDS: Final = ("runAsUser", "runAsGroup", "fsGroup")
_SHM: Final = "rlinf-shm"
_DEFAULTS: Final = frozenset({
    *(f"spec.securityContext.{field}" for field in _IDS),
    *(f"spec.tolerations[{taint}].tolerationSeconds" for taint in _TAINTS),
    f"spec.volumes[{_SHM}].emptyDir.sizeLimit",
    "spec.schedulerName",
})  # fmt: skip
"""Fields of every pod of which the operator only has a default."""
_DRIVER_VARIABLES: Final = frozenset({names.ENV_LIFE, names.ENV_FIRST_OF_LIFE, names.ENV_SCHEDULER_ADDRESS})
_WORKER_VARIABLES: Final = frozenset(
    {
        names.ENV_POOL,
        names.ENV_ORDINAL,
        names.ENV_SLOTS,
        names.ENV_SLOT_RESOURCE,
        names.ENV_GRACE,
        names.ENV_DRIVER_ADDRESS,
        names.ENV_SHM_DIR,
        names.ENV_CACHE_DIR,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    manifest: Manifest
    conflicts: tuple[str, ...] = ()
    """What the pool's template wanted and the operator owns: sentences for an event."""


def driver(
    job: JobMeta, spec: RLJobSpec, *, attempt: int, life: int, settings: OperatorSettings, first_of_life: bool = False
) -> Rendered:
    """`first_of_life`: no pod of this life is there; to be left out where that is not sure."""
    values = _values(job, spec, attempt=attempt, life=life, settings=settings) | {
        names.ENV_FIRST_OF_LIFE: "1" if first_of_life else "",
    }
    image = (_own_image(spec) if ":" in spec.flow.name else "") or settings.driver_image
    container = _container(names.CONTAINER_DRIVER, image=image, settings=settings) | {
        "env": _environment(values, without=_WORKER_VARIABLES) + _runtime_environment(),
        "ports": [
            {"name": "grpc", "containerPort": names.PORT_DRIVER_GRPC},
            {"name": "metrics", "containerPort": names.PORT_METRICS},
        ],
        "resources": {
            "requests": {"cpu": settings.driver_cpu, "memory": settings.driver_memory},
            "limits": {"memory": settings.driver_memory},
        },
    }
    volumes, container["volumeMounts"] = _volumes(job, "driver", shm_bytes=MIN_SHM_BYTES, settings=settings)
    administrators, jobs = settings.driver_template.parsed(), driver_template(spec)
    wanted = templates.overlay(administrators, jobs)
    grace_s = _grace_s(wanted, otherwise=settings.driver_grace_s)
    owned = {
        "metadata": metadata(
            job,
            names.driver_pod(job.name, attempt),
            label=labels(job, component=names.COMPONENT_DRIVER, attempt=attempt),
            annotations={names.ANNOTATION_INPUTS: inputs(spec), names.ANNOTATION_LIFE: str(life)},
        ),
        "spec": _pod_spec(job, spec, names.pod_hostname("driver"), grace_s=grace_s, settings=settings)
        | {"containers": [container], "volumes": volumes},
    }
    layers = {
        "the operator's driver_template": administrators, "spec.template": spec.template,
        "spec.driver.template": spec.driver.template,
    }  # fmt: skip
    theirs = (*_ADMINISTRATORS_FIELDS, *(f for f in _USERS_FIELDS if container_in(jobs, names.CONTAINER_DRIVER).get(f)))
    return _merged(
        owned, wanted, container=names.CONTAINER_DRIVER, theirs=theirs,
        where=" or ".join(name for name, layer in layers.items() if layer),
    )  # fmt: skip


def driver_template(spec: RLJobSpec) -> Manifest:
    """All that the job says of its driver."""
    return templates.overlay(templates.without(spec.template, names.CONTAINER_AGENT), spec.driver.template)


def worker(
    job: JobMeta, spec: RLJobSpec, *, pool: str, ordinal: int, attempt: int, life: int, settings: OperatorSettings
) -> Rendered:
    own = spec.pool(pool)
    wanted = pool_template(spec, own)
    grace_s = _grace_s(wanted, otherwise=settings.worker_grace_s)
    values = _values(job, spec, attempt=attempt, life=life, settings=settings) | {
        names.ENV_POOL: pool,
        names.ENV_ORDINAL: str(ordinal),
        names.ENV_SLOTS: str(own.slots.per_pod),
        names.ENV_SLOT_RESOURCE: own.slots.resource,
        names.ENV_GRACE: str(grace_s),
    }
    container = _container(names.CONTAINER_AGENT, image=settings.worker_image, settings=settings) | {
        "env": _environment(values, without=_DRIVER_VARIABLES) + _runtime_environment(own),
        "ports": [
            {"name": "metrics", "containerPort": names.PORT_METRICS},
            *({"name": f"data-{k}", "containerPort": names.PORT_DATA_BASE + k} for k in range(own.slots.per_pod)),
        ],
        "resources": resources(own.slots),
    }
    volumes, container["volumeMounts"] = _volumes(
        job, f"pool:{pool}", shm_bytes=shm_bytes(own.slots, settings=settings), settings=settings
    )
    label = labels(job, component=names.COMPONENT_WORKER, pool=pool, ordinal=ordinal, attempt=attempt)
    owned = {
        "metadata": metadata(
            job,
            names.worker_pod(job.name, pool, ordinal=ordinal, attempt=attempt),
            label=label,
            annotations={names.ANNOTATION_INPUTS: inputs(spec, pool), names.ANNOTATION_LIFE: str(life)},
        ),
        "spec": _pod_spec(job, spec, names.pod_hostname(pool, ordinal), grace_s=grace_s, settings=settings)
        | {"containers": [container], "volumes": volumes},
    }
    where = f"spec.template or spec.pools[{pool}].template" if spec.template else f"spec.pools[{pool}].template"
    made = _merged(owned, wanted, container=names.CONTAINER_AGENT, theirs=_USERS_FIELDS, where=where)
    return replace(made, manifest=topology.placed(made.manifest, job, spec, pool=pool))


def pool_template(spec: RLJobSpec, pool: PoolSpec) -> Manifest:
    """All that the job says of the pool's pods, the more special over the more general."""
    found = templates.without(spec.template, names.CONTAINER_DRIVER)
    found = templates.overlay(found, templates.with_image(names.CONTAINER_AGENT, pool.image))
    return templates.overlay(found, pool.template)


def _grace_s(template: Manifest, *, otherwise: int) -> int:
    """One number for the pod and for its agent, which plans with it."""
    said = template.get("spec", {}).get("terminationGracePeriodSeconds")
    return otherwise if said is None else said


def _merged(
    owned: Manifest, wanted: dict[str, Any], *, container: str, theirs: tuple[str, ...], where: str
) -> Rendered:
    """`theirs`: fields of the container of which the operator only has a default."""
    own = (*theirs, "securityContext.readOnlyRootFilesystem")
    defaults = _DEFAULTS | {f"spec.containers[{container}].{field}" for field in own}
    merged, conflicts = template.merge(owned, wanted, path="", defaults=defaults)
    return Rendered(
        manifest={"apiVersion": "v1", "kind": "Pod", **merged}, conflicts=tuple(f"{where}.{text}" for text in conflicts)
    )


def resources(slots: SlotsSpec) -> Manifest:
    """Requests equal limits: a slot is a fixed share, and what a profile measured must hold on a busy node too.

    >>> resources(SlotsSpec(per_pod=4, cpu="500m", memory="2Gi"))["limits"]
    {'cpu': '2', 'memory': '8Gi'}
    >>> resources(SlotsSpec(per_pod=8, resource="nvidia.com/gpu", memory="80Gi", cpu="6", host_memory="48Gi"))["limits"]
    {'nvidia.com/gpu': '8', 'cpu': '48', 'memory': '384Gi'}
    """
    amount = {slots.resource: str(slots.per_pod)} if slots.resource else {}
    if cpu := slots.cpu or ("" if slots.resource else "1"):
        amount["cpu"] = _cores(quantities.parse(cpu, field="spec.pools[*].slots.cpu") * slots.per_pod)
    if memory := _host_bytes(slots):
        amount["memory"] = quantities.from_bytes(memory)
    return {"requests": dict(amount), "limits": dict(amount)}


def shm_bytes(slots: SlotsSpec, *, settings: OperatorSettings) -> int:
    memory, mebibyte = _host_bytes(slots), 1 << 20
    if not memory:
        return quantities.to_bytes(settings.accelerator_shm)
    return max(MIN_SHM_BYTES, int(memory * settings.shm_share) // mebibyte * mebibyte)


def agent_field(spec: RLJobSpec, pool: PoolSpec, field: str) -> Any:
    """A field of the templates' `agent` container."""
    return container_in(pool_template(spec, pool), names.CONTAINER_AGENT).get(field)


def checkpoint_uri(job: JobMeta, spec: RLJobSpec, *, settings: OperatorSettings) -> str:
    default = settings.default_checkpoint_uri.format(namespace=job.namespace, job=job.name, uid=job.uid)
    return spec.checkpoint.uri or default


def _values(job: JobMeta, spec: RLJobSpec, *, attempt: int, life: int, settings: OperatorSettings) -> dict[str, str]:
    driver_host = names.pod_dns(names.pod_hostname("driver"), job=job.name, namespace=job.namespace)
    return {
        names.ENV_JOB_NAME: job.name,
        names.ENV_JOB_UID: job.uid,
        names.ENV_JOB_FILE: f"{names.MOUNT_JOB}/{names.JOB_FILE}",
        names.ENV_ATTEMPT: str(attempt),
        names.ENV_LIFE: str(life),
        names.ENV_DRIVER_ADDRESS: f"{driver_host}:{names.PORT_DRIVER_GRPC}",
        names.ENV_SCHEDULER_ADDRESS: settings.scheduler_address,
        names.ENV_RUN_DIR: names.MOUNT_RUN,
        names.ENV_SHM_DIR: names.MOUNT_SHM,
        names.ENV_CACHE_DIR: names.MOUNT_CACHE,
        names.ENV_TLS_DIR: names.MOUNT_TLS,
        names.ENV_TERMINATION_LOG: names.TERMINATION_LOG,
        names.ENV_CHECKPOINT_URI: checkpoint_uri(job, spec, settings=settings),
    }


def _environment(values: dict[str, str], *, without: frozenset[str]) -> list[Manifest]:
    """The table of names.ENVIRONMENT in its order; the local backend's own lines are not the operator's to set."""
    found: list[Manifest] = []
    for line in names.ENVIRONMENT:
        if line.name in without:
            continue
        if line.name in _FIELD_OF:
            found.append({"name": line.name, "valueFrom": {"fieldRef": {"fieldPath": _FIELD_OF[line.name]}}})
        elif line.name in values:
            found.append({"name": line.name, "value": values[line.name]})
    return found


def _runtime_environment(pool: PoolSpec | None = None) -> list[Manifest]:
    """The root file system is read-only, so every cache of the kernels' compilers has a place of its own. Bytecode has
    none here: images are compiled when they are built, and a PYTHONPYCACHEPREFIX would make Python ignore that (12 s
    for torch). Where an image is not, its agent gives workers one in RLINF_CACHE_DIR (rlinf_worker/agent/spawning.py).

    PYTHONUNBUFFERED: without it a traceback comes before buffered output and is cut off from the termination message.
    expandable_segments:False: CUDA IPC cannot share expandable segments.
    """
    values = {
        "HOME": names.MOUNT_TMP,
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": f"{names.MOUNT_CACHE}/xdg",
        "TORCHINDUCTOR_CACHE_DIR": f"{names.MOUNT_CACHE}/inductor",
        "TRITON_CACHE_DIR": f"{names.MOUNT_CACHE}/triton",
    }
    if pool is not None and pool.slots.resource:
        values["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    return [{"name": name, "value": value} for name, value in values.items()]


def _container(name: str, *, image: str, settings: OperatorSettings) -> Manifest:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [PYTHON, "-m", "rlinf_worker", name],
        # A file inside the run emptyDir: the kubelet binds its own file over it, so it must be written in place, never
        # renamed into; local mode reads the same path.
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _pod_spec(job: JobMeta, spec: RLJobSpec, hostname: str, *, grace_s: int, settings: OperatorSettings) -> Manifest:
    scheduler = settings.gang_scheduler_pods or gangs.SCHEDULERS[settings.gang_scheduler].pod_scheduler
    return {
        **({"schedulerName": scheduler} if spec.all_or_nothing is not None and scheduler else {}),
        "restartPolicy": "Never",  # attempts are the operator's: a kubelet's restart would keep the attempt number
        "hostname": hostname,
        "subdomain": names.service_name(job.name),
        "terminationGracePeriodSeconds": grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [
            {
                "key": taint,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": settings.node_lost_toleration_s,
            }
            for taint in _TAINTS
        ],
        "securityContext": {
            "runAsNonRoot": True,
            **(dict.fromkeys(_IDS, names.POD_UID) if settings.pod_fixed_ids else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _volumes(
    job: JobMeta, part: str, *, shm_bytes: int, settings: OperatorSettings
) -> tuple[list[Manifest], list[Manifest]]:
    """/dev/shm is new with every pod; the agent removes nccl-* of killed workers before it starts others."""
    table: list[tuple[str, str, Manifest, bool]] = [
        ("rlinf-run", names.MOUNT_RUN, {"emptyDir": {"sizeLimit": settings.run_dir_size}}, False),
        (
            _SHM,
            names.MOUNT_SHM,
            {"emptyDir": {"medium": "Memory", "sizeLimit": quantities.from_bytes(shm_bytes)}},
            False,
        ),
        ("rlinf-tmp", names.MOUNT_TMP, {"emptyDir": {}}, False),
        ("rlinf-cache", names.MOUNT_CACHE, {"emptyDir": {}}, False),
        (
            "rlinf-tls",
            names.MOUNT_TLS,
            {"secret": {"secretName": names.secret_name(job.name, part, uid=job.uid), "defaultMode": 0o440}},
            True,
        ),
        ("rlinf-job", names.MOUNT_JOB, {"configMap": {"name": names.config_name(job.name)}}, True),
    ]
    volumes = [{"name": name, **source} for name, _, source, _ in table]
    mounts: list[Manifest] = []
    for name, mount, _, read_only in table:
        mounts.append({"name": name, "mountPath": mount, **({"readOnly": True} if read_only else {})})
    return volumes, mounts


def _host_bytes(slots: SlotsSpec) -> int:
    """What a whole pod asks for. 0: nobody has said it of one with accelerators."""
    field, said = ("hostMemory", slots.host_memory) if slots.resource else ("memory", slots.memory)
    return quantities.to_bytes(said, field=f"spec.pools[*].slots.{field}") * slots.per_pod if said else 0


def _cores(cores: Decimal) -> str:
    whole = cores == cores.to_integral_value()
    return str(int(cores)) if whole else f"{int(cores * 1000)}m"


def _own_image(spec: RLJobSpec) -> str:
    """The image of the user's own flow: of the first pool that names one."""
    images = (agent_field(spec, pool, "image") for pool in spec.pools)
    return next((image for image in images if isinstance(image, str) and image), "")
