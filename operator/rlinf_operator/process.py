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
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Final

from rlinf_api import job_rules, quantities, sentences, variables
from rlinf_api.errors import UserError
from rlinf_operator import gangs
from rlinf_operator.settings import DriverTemplate, OperatorSettings, Peers

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
    watch_namespace_selector: str = ""
    """Labels of the namespaces with jobs, as kubectl's --selector; which have them may change at any time. Empty: it
    goes by watch_namespaces."""
    kubeconfig: str = ""
    """A file, for an operator outside a cluster. Empty: the pod's service account."""
    context: str = ""
    """A context of the kubeconfig. Empty: its current one."""
    http_host: str = "0.0.0.0"
    """/healthz, /readyz, /metrics; the kubelet and Prometheus come from other addresses."""
    http_port: int = 8080
    """Port of these."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""

    lease_s: float = 12.0
    """How long a leader that is silent stays leader. With the retry below a killed leader is replaced within 14 s."""
    lease_renew_deadline_s: float = 8.0
    """A leader that could not renew for so long after it was due, lease_retry_s after the last time, ends itself:
    before anybody else may lead, so that two never do. One that reads of another holder ends at once."""
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
    stop_timeout_s: float = 8.0
    """What a graceful stop may take in all, the Lease's release included; the chart's grace period is 10 s more."""
    ca_life_days: float = 5 * 365.0
    """Life of the CA; rotated when two thirds are over, with both trusted until every leaf of the old one has ended."""


_DAY_S: Final = 86_400.0
_TIME: Final = (0.1, _DAY_S)
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "http_port": (0, 65_535),
    "lease_s": (1, 3600),
    "lease_renew_deadline_s": (1, 3600),  # below 1 s, of this and the next, each hiccup of the API server ends a leader
    "lease_retry_s": (1, 3600),
    "api_timeout_s": _TIME,
    "watch_inactivity_s": (1, _DAY_S),
    "watch_stale_s": (1, _DAY_S),
    "queue_stale_s": (1, _DAY_S),
    "stop_timeout_s": (1, 3600),
    "ca_life_days": (1, 36_500),
    "driver_grace_s": (0, _DAY_S),
    "worker_grace_s": (0, _DAY_S),
    "node_lost_toleration_s": (0, _DAY_S),
    "shm_share": (0.01, 1),
    "pods_ready_deadline_s": (1, 7 * _DAY_S),
    "homeless_s": (1, 7 * _DAY_S),
    "driver_silent_deadline_s": (5, _DAY_S),
    "driver_late_s": (1, _DAY_S),
    "agent_silent_deadline_s": (1, _DAY_S),
    "drain_deadline_s": (1, 7 * _DAY_S),
    "finish_grace_s": (0, _DAY_S),
    "exit_zero_grace_s": (0, _DAY_S),
    "infrastructure_restarts": (0, 999),
    "infrastructure_restarts_per_pod": (0, 999),
    "restart_delay_max_s": (1, _DAY_S),
    "progress_interval_s": _TIME,
    "coalesce_s": (0, 60),
    "resync_s": (1, _DAY_S),
    "call_timeout_s": _TIME,
    "retry_min_s": (0.01, 3600),
    "retry_max_s": _TIME,
    "certificate_life_s": (60, 3650 * _DAY_S),
}
"""Least and most of every number. Below the least the operator would do nothing but that (lists of all jobs in a loop,
calls that never have time to be answered); above the most is a slip of the unit, milliseconds mostly. 999 is what a
status can count (policies/restart.py). watch_inactivity_s may be less than the minute between two bookmarks, for tests
and for clusters that lose connections without a word: a kind of which nothing is heard is then listed so often."""

QUANTITIES: Final = ("driver_cpu", "driver_memory", "run_dir_size", "accelerator_shm")
GANG_SCHEDULERS: Final = tuple(gangs.SCHEDULERS)
PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")
CHECKPOINT_URI: Final = r"^$|^((file://(localhost)?)?/|(s3|gs)://[a-z0-9])([^{}]|\{(namespace|job|uid)\})*$"
"""The schemes of this version (rlinf_api/supported.py says so of a job's own), and the names that can be filled in."""


def read(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> tuple[ProcessSettings, OperatorSettings]:
    """Flags first, then variables, then defaults. UserError names the variable, the value and what it should be.

    >>> process, operator = read({"lease_s": "30"}, {"RLINF_OPERATOR_WORKER_IMAGE": "registry/worker:1"})
    >>> process.lease_s, operator.worker_image
    (30.0, 'registry/worker:1')
    """
    known = {f"{PREFIX}{field.name.upper()}" for kind in (ProcessSettings, OperatorSettings) for field in fields(kind)}
    variables.check(environ, prefix=PREFIX, known=known)
    process = ProcessSettings(**_values(ProcessSettings, flags, environ=environ))
    if not process.lease_s > process.lease_renew_deadline_s + process.lease_retry_s:
        raise UserError(
            "a leader would still lead when the next one may", got=f"lease_s {process.lease_s:g}",
            wanted="more than lease_renew_deadline_s + lease_retry_s "
            f"({process.lease_renew_deadline_s + process.lease_retry_s:g})",
            next=f"raise {PREFIX}LEASE_S",
        )  # fmt: skip
    operator = OperatorSettings(**_values(OperatorSettings, flags, environ=environ))
    _check_texts(operator)
    _check_pairs(process, operator)
    return process, operator


def _check_texts(operator: OperatorSettings) -> None:
    """What would be refused only with the first pod of each job, or break every pass."""

    def refused(field: str, **said: str) -> UserError:
        return UserError(
            f"{PREFIX}{field.upper()} cannot be used", got=said.pop("got", repr(getattr(operator, field))), **said
        )

    for field in QUANTITIES:
        if quantities.is_within(getattr(operator, field), least=Decimal(0), most=quantities.MOST):
            continue
        raise refused(field, wanted="a quantity of Kubernetes", next="write for example 500m or 2Gi")
    for field, known in (("image_pull_policy", PULL_POLICIES), ("gang_scheduler", GANG_SCHEDULERS)):
        if getattr(operator, field) not in known:
            raise refused(field, wanted=f"one of {', '.join(known)}", next="write it so")
    uri = operator.default_checkpoint_uri
    if not re.fullmatch(CHECKPOINT_URI, uri):
        raise refused(
            "default_checkpoint_uri",
            wanted="/path, file:///path, s3://bucket/prefix or gs://bucket/prefix, in it {namespace}, {job} and {uid} "
            "and no other braces",
            next="name a bucket, or the path of a volume that the pools mount, or leave it empty",
        )
    for problem in job_rules.check_uri("default_checkpoint_uri", uri):
        raise refused(problem.field, got=problem.message.removeprefix("got "))


def _check_pairs(process: ProcessSettings, operator: OperatorSettings) -> None:
    """What leans on each other over more than one field."""
    if process.watch_namespaces and process.watch_namespace_selector:
        raise UserError(
            "namespaces are both listed and selected by labels",
            got=f"watch_namespaces {process.watch_namespaces!r}, "
            f"watch_namespace_selector {process.watch_namespace_selector!r}",
            wanted="one of them", next=f"remove {PREFIX}WATCH_NAMESPACES or {PREFIX}WATCH_NAMESPACE_SELECTOR",
        )  # fmt: skip
    if operator.certificate_life_s * 6 >= process.ca_life_days * _DAY_S:
        raise UserError(
            "the CA would be replaced before every certificate of it has been renewed",
            got=f"certificate_life_s {operator.certificate_life_s:g}",
            wanted=f"less than a sixth of ca_life_days ({process.ca_life_days * _DAY_S / 6:g} s)",
            next=f"lower {PREFIX}CERTIFICATE_LIFE_S or raise {PREFIX}CA_LIFE_DAYS",
        )
    if process.watch_inactivity_s >= process.watch_stale_s:
        raise UserError(
            "the operator would be unready, and started again, before a watch that is quiet is made anew",
            got=f"watch_stale_s {process.watch_stale_s:g}",
            wanted=f"more than watch_inactivity_s ({process.watch_inactivity_s:g}), twice as much at best",
            next=f"raise {PREFIX}WATCH_STALE_S or lower {PREFIX}WATCH_INACTIVITY_S",
        )
    if process.lease_renew_deadline_s < 1.5 * process.lease_retry_s:  # the second begins a pause later
        raise UserError(
            "a leader would have one try to renew its Lease", got=f"lease_retry_s {process.lease_retry_s:g}",
            wanted=f"at most two thirds of lease_renew_deadline_s ({process.lease_renew_deadline_s:g})",
            next=f"lower {PREFIX}LEASE_RETRY_S",
        )  # fmt: skip
    if process.stop_timeout_s <= 2 * process.lease_retry_s:
        raise UserError(
            "a stop would leave no time for passes to end", got=f"stop_timeout_s {process.stop_timeout_s:g}",
            wanted=f"more than twice lease_retry_s ({process.lease_retry_s:g}), which the Lease's release may take",
            next=f"raise {PREFIX}STOP_TIMEOUT_S or lower {PREFIX}LEASE_RETRY_S",
        )  # fmt: skip
    if operator.driver_late_s >= operator.driver_silent_deadline_s:
        raise UserError(
            "a driver would be replaced before it is called late", got=f"driver_late_s {operator.driver_late_s:g}",
            wanted=f"less than driver_silent_deadline_s ({operator.driver_silent_deadline_s:g})",
            next=f"lower {PREFIX}DRIVER_LATE_S",
        )  # fmt: skip
    if operator.retry_min_s > operator.retry_max_s:
        raise UserError(
            "pauses between tries could not grow", got=f"retry_min_s {operator.retry_min_s:g}",
            wanted=f"at most retry_max_s ({operator.retry_max_s:g})", next=f"lower {PREFIX}RETRY_MIN_S",
        )  # fmt: skip


def namespaces(process: ProcessSettings) -> tuple[str, ...]:
    return tuple(name.strip() for name in process.watch_namespaces.split(",") if name.strip())


def parse_flags(words: Sequence[str]) -> dict[str, str | None]:
    parser = argparse.ArgumentParser(prog="python -m rlinf_operator", description="Watches RLJobs and runs them.")
    for kind in (ProcessSettings, OperatorSettings):
        for field in fields(kind):
            parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="VALUE")
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
        name = variable if flag is None else f"--{field.name.replace('_', '-')}"
        try:
            found[field.name] = _SWITCH[text.strip().lower()] if wanted is bool else wanted(text)
        except (ValueError, KeyError) as error:
            form = {
                bool: "true or false", Peers: f"peers of a NetworkPolicy as JSON ({error})",
                DriverTemplate: f"a pod template as JSON ({error})",
            }.get(wanted, "a number")  # fmt: skip
            got = "" if wanted in (Peers, DriverTemplate) else sentences.shown(text)  # a template may hold a token
            raise UserError(f"{name} is no {wanted.__name__}", got=got, wanted=form, next="write one") from error
        least, most = BOUNDS.get(field.name, (-math.inf, math.inf))
        if wanted in (int, float) and not least <= found[field.name] <= most:  # also where it is no number (nan)
            raise UserError(
                f"{name} is out of its bounds", got=text, wanted=f"{least:g} to {most:g}",
                next="correct the value; its unit is in the setting's name",
            )  # fmt: skip
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
