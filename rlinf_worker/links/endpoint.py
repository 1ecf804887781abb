"""Where a worker can be reached: the value that its announcement and the routes of its peers carry.

For: the control plane, which passes it on, and `listener`, which listens there or dials it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rlinf_api.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one life of one worker listens.

    Endpoint(worker="rollout/0", attempt=2, pod_uid="8c1f...", unix_path="/run/rlinf/rollout-0-5c1d2a90-2.sock",
             host="10.1.0.7", port=40123, pool="gpu")
    """

    worker: str
    attempt: int
    pod_uid: str = ""
    unix_path: str = ""
    host: str = ""
    port: int = 0
    """0: not reachable from other pods."""
    pool: str = ""
    """The pool of its pod, which its certificate has to name; empty: not known."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Endpoint:
        """Raises UserError for fields that are missing or of another type."""
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError as err:
            raise UserError("cannot read an endpoint", got=str(err), wanted=", ".join(cls.__slots__)) from err
