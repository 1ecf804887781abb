"""Who this worker is and where everything is: the pod contract's environment as one frozen value."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker import devices as devices_of_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """One life of one worker."""

    worker: WorkerId
    role: str
    kind: str
    rank: int = 0
    world: int = 1
    attempt: int = 1
    slots: tuple[int, ...] = ()
    pool: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    job_uid: str = ""
    pod_uid: str = ""
    pod_ip: str = ""
    driver_address: str = ""
    run_dir: str = ""
    shm_dir: str = names.MOUNT_SHM
    tls_dir: str = ""
    slots_socket: str = ""
    folder: str = ""
    """This process' own, made and removed by the agent."""
    checkpoint_uri: str = ""
    devices: tuple[str, ...] = ()
    """UUIDs of the pod's GPUs, one per slot; none where its slots are none."""

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs of its slots, in their order."""
        return tuple(self.devices[slot] for slot in self.slots) if self.devices else ()

    @property
    def data_port(self) -> int:
        """The port of its listener for other pods; 0: any."""
        return names.PORT_DATA_BASE + self.slots[0] if self.slots else 0

    @property
    def slot(self) -> str:
        return ",".join(str(s) for s in self.slots)


def read(environ: Mapping[str, str]) -> WorkerIdentity:
    """Raises UserError that names the variable which is missing or cannot be read."""
    worker = _get(environ, names.ENV_WORKER_ID)
    return WorkerIdentity(
        worker=WorkerId(worker),
        role=_get(environ, names.ENV_WORKER_ROLE),
        kind=_get(environ, names.ENV_WORKER_KIND),
        rank=_number(environ, names.ENV_WORKER_RANK),
        world=_number(environ, names.ENV_WORKER_WORLD),
        attempt=_number(environ, names.ENV_WORKER_ATTEMPT),
        slots=tuple(int(s) for s in environ.get(names.ENV_WORKER_SLOTS, "").split(",") if s.strip().isdigit()),
        pool=environ.get(names.ENV_POOL, ""),
        config=_config(environ),
        job_uid=_get(environ, names.ENV_JOB_UID),
        pod_uid=_get(environ, names.ENV_POD_UID),
        pod_ip=_get(environ, names.ENV_POD_IP),
        driver_address=_get(environ, names.ENV_DRIVER_ADDRESS),
        run_dir=environ.get(names.ENV_RUN_DIR, names.MOUNT_RUN),
        shm_dir=environ.get(names.ENV_SHM_DIR, names.MOUNT_SHM),
        tls_dir=environ.get(names.ENV_TLS_DIR, names.MOUNT_TLS),
        slots_socket=_get(environ, names.ENV_SLOTS_SOCKET),
        folder=os.path.dirname(_get(environ, names.ENV_WORKER_CONFIG)),
        checkpoint_uri=environ.get(names.ENV_CHECKPOINT_URI, ""),
        devices=devices_of_slots.of(environ),
    )


def _get(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UserError(
            f"environment variable {name} is not set", wanted="what the pod contract says",
            next="start workers through their agent",
        )  # fmt: skip
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _get(environ, name)
    if not value.isdigit():
        raise UserError(f"environment variable {name} is no number", got=repr(value), wanted="0 or more")
    return int(value)


def _config(environ: Mapping[str, str]) -> Mapping[str, Any]:
    path = _get(environ, names.ENV_WORKER_CONFIG)
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the role's config cannot be read from {path}", got=str(error), wanted="a JSON object"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"the role's config in {path} is no JSON object", got=type(config).__name__)
    return config
