"""Who this agent is: the pod contract's variables that an agent reads, checked once at the start.

>>> PodIdentity.read({})
Traceback (most recent call last):
rlinf_api.errors.UserError: the pod contract is not kept: got no RLINF_JOB_UID, RLINF_POD_NAME, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlinf_api import names
from rlinf_api.errors import UserError

_NEEDED = (
    names.ENV_JOB_UID,
    names.ENV_POD_NAME,
    names.ENV_POD_UID,
    names.ENV_POD_IP,
    names.ENV_POOL,
    names.ENV_ORDINAL,
    names.ENV_ATTEMPT,
    names.ENV_SLOTS,
    names.ENV_DRIVER_ADDRESS,
)
_MAX_SOCKET_PATH = 107  # bytes, of sun_path without its end


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    job_uid: str
    pod: str
    pod_ip: str
    node: str
    pool: str
    ordinal: int
    attempt: int
    slots: int
    driver_address: str
    run_dir: str
    tls_dir: str
    output_dir: str
    worker_log_dir: str
    termination_log: str
    slot_resource: str = ""
    grace_s: float = 0.0
    """The pod's, from the word to end until SIGKILL; 0: unknown."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PodIdentity:
        if missing := [name for name in _NEEDED if not environ.get(name)]:
            raise UserError(
                "the pod contract is not kept", got="no " + ", ".join(missing),
                wanted="every variable of rlinf_api.names.ENVIRONMENT that an agent reads",
                next="start agents by the operator or by `rljob run`",
            )  # fmt: skip
        identity = cls(
            job_uid=environ[names.ENV_JOB_UID],
            pod=environ[names.ENV_POD_NAME],
            pod_ip=environ[names.ENV_POD_IP],
            node=environ.get(names.ENV_NODE_NAME, ""),
            pool=environ[names.ENV_POOL],
            ordinal=_number(environ, names.ENV_ORDINAL),
            attempt=_number(environ, names.ENV_ATTEMPT),
            slots=_number(environ, names.ENV_SLOTS),
            slot_resource=environ.get(names.ENV_SLOT_RESOURCE, ""),
            driver_address=environ[names.ENV_DRIVER_ADDRESS],
            run_dir=environ.get(names.ENV_RUN_DIR) or names.MOUNT_RUN,
            tls_dir=environ.get(names.ENV_TLS_DIR) or names.MOUNT_TLS,
            output_dir=environ.get(names.ENV_OUTPUT_DIR, ""),
            worker_log_dir=environ.get(names.ENV_WORKER_LOG_DIR, ""),
            termination_log=environ.get(names.ENV_TERMINATION_LOG, ""),
            grace_s=_number(environ, names.ENV_GRACE) if environ.get(names.ENV_GRACE) else 0,
        )
        if (length := len(identity.socket_path.encode())) > _MAX_SOCKET_PATH:
            raise UserError(
                f"the path of the agent's socket is too long for Linux: {identity.socket_path}",
                got=f"{length} bytes", wanted=f"at most {_MAX_SOCKET_PATH}",
                next=f"use a shorter {names.ENV_RUN_DIR} (in local mode a work dir nearer to the root)",
            )  # fmt: skip
        return identity

    @property
    def socket_path(self) -> str:
        return f"{self.run_dir}/agent.sock"


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise UserError(f"{name} is not a number", got=repr(environ[name])) from error
