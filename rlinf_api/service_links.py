"""Variables that Kubernetes puts into every container for each Service of its namespace: never a setting of ours.

A Service called rlinf-operator-metrics gives RLINF_OPERATOR_METRICS_SERVICE_HOST and more, with our prefix. Read by
whoever refuses variables that name no setting.
"""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$")
_VALUE: Final = re.compile(r"^(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """
    >>> is_service_link("RLINF_SCHEDULER_PORT", "tcp://10.96.0.9:7080")
    True
    >>> is_service_link("RLINF_OPERATOR_HTTP_PORT", "8080")
    False
    """
    return bool(_NAME.search(name) or (name.endswith("_PORT") and _VALUE.match(value)))
