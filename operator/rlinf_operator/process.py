"""How the operator's process is set up: environment variables `RLINF_OPERATOR_<FIELD>`, flags `--<field>` before them.

Every field of `ProcessSettings` and of `OperatorSettings` (settings.py) has one, named after it:

    RLINF_OPERATOR_SCHEDULER_ADDRESS=rlinf-scheduler.rlinf-system.svc:7080
    python -m rlinf_operator --scheduler-address 10.89.0.1:7080 --resync-s 60

The chart writes the variables, tests give flags. A variable with the prefix that names no field is an error: a mistyped
one would otherwise do nothing. Called by `__main__` only.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_api.service_links import is_service_link
from rlinf_operator.settings import OperatorSettings, Peers

PREFIX: Final = "RLINF_OPERATOR_"
_M_ARENA_MAX: Final = -8  # malloc.h
_SWITCH: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    namespace: str = "rlinf-system"
    """The operator's own: its Lease, its CA, the scheduler's certificate. The chart sets it by fieldRef."""
    identity: str = ""
    """Who holds the Lease. The pod's name, by fieldRef; empty: host name and a random tail."""
    watch_namespaces: str = ""
    """Comma-separated namespaces with jobs. Empty: all (needs a ClusterRole)."""
    kubeconfig: str = ""
    """A file, for an operator outside a cluster. Empty: the pod's service account."""
    context: str = ""
    """Of the kubeconfig. Empty: its current one."""
    http_host: str = "0.0.0.0"
    """/healthz, /readyz, /metrics; the kubelet and Prometheus come from other addresses."""
    http_port: int = 8080
    """Port of these."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    lease_s: float = 12.0
    """How long a leader that is silent stays leader. With the retry below a killed leader is replaced within 14 s."""
    lease_renew_deadline_s: float = 8.0
    """A leader that could not renew for so long ends itself: before anybody else may lead, so that two never do."""
    lease_retry_s: float = 2.0
    """Pause between two tries; also the time that one try may take."""

    api_timeout_s: float = 10.0
    """Deadline of one call to the API server; a list page has it for itself. It answers in milliseconds when well."""
    watch_inactivity_s: float = 90.0
    """A watch that says nothing for so long is opened anew. The API server sends a bookmark every minute."""
    watch_stale_s: float = 240.0
    """/readyz fails when a watch has said nothing for so long: two new tries have failed by then."""
    queue_stale_s: float = 120.0
    """/readyz fails when a key that is due has waited for so long. Passes take well under a second."""
    jobs_check_s: float = 60.0
    """How often Kopf's view of the RLJobs is compared with a list: a missed change is late by no more than this."""
    stop_timeout_s: float = 8.0
    """What a graceful stop may take in all, the Lease's release included; the chart's grace period is 10 s more."""
    ca_life_days: float = 5 * 365.0
    """Life of the CA; rotated when two thirds are over, with both trusted until every leaf of the old one has ended."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    for kind in (ProcessSettings, OperatorSettings):
        for field in fields(kind):
            parser.add_argument(f"--{field.name.replace('_', '-')}", dest=field.name, default=None, metavar="VALUE")


def read(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> tuple[ProcessSettings, OperatorSettings]:
    """Flags first, then variables, then defaults. UserError names the variable, the value and what it should be.

    >>> process, operator = read({"lease_s": "30"}, {"RLINF_OPERATOR_WORKER_IMAGE": "registry/worker:1"})
    >>> process.lease_s, operator.worker_image
    (30.0, 'registry/worker:1')
    """
    known = {f"{PREFIX}{field.name.upper()}" for kind in (ProcessSettings, OperatorSettings) for field in fields(kind)}
    strange = sorted(
        name
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in known and not is_service_link(name, value)
    )
    if strange:
        raise UserError(
            f"environment variable {strange[0]} sets nothing", wanted=f"one of {', '.join(sorted(known))}",
            next="correct its name, or remove it",
        )  # fmt: skip
    process = ProcessSettings(**_values(ProcessSettings, flags, environ=environ))
    if not process.lease_s > process.lease_renew_deadline_s + process.lease_retry_s:
        raise UserError(
            "a leader would still lead when the next one may", got=f"lease_s {process.lease_s:g}",
            wanted="more than lease_renew_deadline_s + lease_retry_s "
            f"({process.lease_renew_deadline_s + process.lease_retry_s:g})",
            next=f"raise {PREFIX}LEASE_S",
        )  # fmt: skip
    return process, OperatorSettings(**_values(OperatorSettings, flags, environ=environ))


def namespaces(process: ProcessSettings) -> tuple[str, ...]:
    return tuple(name.strip() for name in process.watch_namespaces.split(",") if name.strip())


def parse_flags(words: Sequence[str]) -> dict[str, str | None]:
    parser = argparse.ArgumentParser(prog="python -m rlinf_operator", description="Watches RLJobs and runs them.")
    add_flags(parser)
    found: dict[str, str | None] = vars(parser.parse_args(words))
    return found


def _values(kind: type, flags: Mapping[str, str | None], *, environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(kind):
        variable = f"{PREFIX}{field.name.upper()}"
        flag = flags.get(field.name)
        text = flag if flag is not None else environ.get(variable)
        if text is None:
            continue
        wanted: type[Any] = type(field.default)
        try:
            found[field.name] = _SWITCH[text.strip().lower()] if wanted is bool else wanted(text)
        except (ValueError, KeyError) as error:
            form = {bool: "true or false", Peers: f"peers of a NetworkPolicy as JSON ({error})"}.get(wanted, "a number")
            raise UserError(
                f"{variable if flag is None else '--' + field.name.replace('_', '-')} is no {wanted.__name__}",
                got=repr(text), wanted=form, next="write one",
            ) from error  # fmt: skip
    return found


def share_one_heap() -> None:
    """One for all threads, before the first thread starts. glibc gives each of gRPC's and asyncio's a heap of its
    own, in which 10 MB stay that it does not need any more: half of the memory with a thousand jobs. The threads
    hardly ever allocate at once, as Python runs one at a time. Without glibc there is nothing to set."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)


def give_memory_back() -> None:
    """To the system what the first lists and a thousand handshakes left: free() keeps it. A few milliseconds."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
