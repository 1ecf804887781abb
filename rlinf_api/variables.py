"""Environment variables with a process' prefix that name none of its settings: a mistyped one would do nothing.

Not for: those that Kubernetes puts into every container for each Service of its namespace. A Service called
rlinf-operator-metrics gives RLINF_OPERATOR_METRICS_SERVICE_HOST and more, with our prefix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from rlinf_api.errors import UserError

_NAME: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$")
_VALUE: Final = re.compile(r"^(tcp|udp|sctp)://")


def check(environ: Mapping[str, str], *, prefix: str, known: Collection[str]) -> None:
    """UserError names the first that sets nothing."""
    ours = {name: value for name, value in environ.items() if name.startswith(prefix) and name not in known}
    if strange := sorted(name for name, value in ours.items() if not _is_service_link(name, value)):
        raise UserError(
            f"environment variable {strange[0]} sets nothing", wanted=f"one of {', '.join(sorted(known))}",
            next="correct its name, or remove it",
        )  # fmt: skip


def _is_service_link(name: str, value: str) -> bool:
    """
    >>> _is_service_link("RLINF_SCHEDULER_PORT", "tcp://10.96.0.9:7080")
    True
    >>> _is_service_link("RLINF_OPERATOR_HTTP_PORT", "8080")
    False
    """
    return bool(_NAME.search(name) or (name.endswith("_PORT") and _VALUE.match(value)))
