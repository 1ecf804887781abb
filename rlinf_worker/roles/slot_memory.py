"""spec.roles[].config.memory: what a role declares of its memory on a slot, by which it is placed beside others or in
turns with them (rlinf_api/declared.py reads it).

For: the schemas of kinds that have it. Pydantic alone.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rlinf_api.job import Model

Mebibytes = Annotated[float, Field(ge=0, le=100_000_000, allow_inf_nan=False)]


class MemoryConfig(Model):
    """MiB per slot."""

    resident: Mebibytes
    peak: Mebibytes
    """At most while active, `resident` included."""
    offloaded: Mebibytes = 0.0

    @model_validator(mode="after")
    def _ordered(self) -> MemoryConfig:
        if self.peak < self.resident:
            raise ValueError(f"peak {self.peak:g} is below resident {self.resident:g}, which it includes; raise it")
        return self
