"""spec.roles[].config of kind `torch`, as pydantic checks it before anything starts."""

from __future__ import annotations

import re
from typing import Final

from pydantic import field_validator

from rlinf_api.job import Model

_DEVICE: Final = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


class TorchConfig(Model):
    device: str = "cpu"
    """Where the policy infers: cpu, cuda or cuda:N. cpu: a pool without accelerators has nothing else."""

    @field_validator("device")
    @classmethod
    def _is_known(cls, device: str) -> str:
        """Any other word would mean the CPU, in silence."""
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"got {device!r}, wanted cpu, cuda or cuda:N; write cuda for a slot's own GPU")
        return device
