"""spec.roles[].config of kind `synthetic`, as pydantic checks it before anything starts. See docs/synthetic.md.

For the driver and `rljob validate`. A worker has no use for it and is spared the import: it reads the checked numbers
(figures.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlinf_api.job import Model
from rlinf_worker.roles.slot_memory import Mebibytes, MemoryConfig

Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)]


class TimeConfig(Model):
    per_item_ms: Milliseconds
    """Time for a unit of size 1, on one slot of a pool of speed 1."""
    per_batch_ms: Milliseconds = 0.0
    sigma: Annotated[float, Field(ge=0, le=5)] = 0.0
    """Width of the lognormal sizes of units, whose mean is 1. 0: all are of size 1."""
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Standard deviation of the factor that each timed piece is multiplied by, cut to 0.5 to 2."""
    by_tokens: bool = False
    """A unit's size is its tokens over the flow's mean, the same for all such roles. False: drawn for this role."""

    @model_validator(mode="after")
    def _one_size(self) -> TimeConfig:
        if self.by_tokens and self.sigma:
            raise ValueError(f"sigma {self.sigma:g} with byTokens: true; write it in spec.flow.config.tokens")
        return self


class OptionConfig(Model):
    peak: Mebibytes
    per_item_ms: Milliseconds


class SyntheticConfig(Model):
    """A role of workloads.jsonl, word for word; what a plan chooses has a field of its own below."""

    name: Annotated[str, Field(max_length=63)] = ""
    """The role's name in the workload; sizes are drawn by it. Empty: the role's name in the job."""
    service: Literal["serial", "concurrent"] = "serial"
    time: TimeConfig
    memory: MemoryConfig = MemoryConfig(resident=0, peak=0)
    """Reported as if measured."""
    load_ms: Milliseconds = 0.0
    offload_ms: Milliseconds = 0.0
    lanes: Annotated[int, Field(ge=1, le=4096)] = 1
    """Units that a concurrent role works on at once."""
    gang: bool = False
    sync_ms: Milliseconds = 0.0
    ranks: Annotated[list[Annotated[int, Field(ge=1, le=100_000)]], Field(max_length=1000)] = []
    """World sizes that a gang may have. Empty: any."""
    slots_per_worker: Annotated[int, Field(ge=1, le=64)] = 1
    scaling: Annotated[float, Field(ge=0, le=1)] = 1.0
    """A worker on s slots is s ** scaling times as fast as on one."""
    options: Annotated[list[OptionConfig], Field(max_length=16)] = []
    option: Annotated[int, Field(ge=0, le=15)] | None = None
    """Which of `options` is in force; none: `time` and `memory` as they stand."""
    micro_batch: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Units that a serial worker takes at once, at most. None: what the plan says of the channel it takes from."""
    payload_bytes: Annotated[int, Field(ge=0, le=64 << 20)] = 256
    """Size of each unit that it hands on. 256: a header's worth, so that moving it costs next to nothing."""
    weights_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = 4096
    """Size of an edition that it publishes. 4 KiB: a real publish whose own time is far below any syncMs."""

    @model_validator(mode="after")
    def _fits(self) -> SyntheticConfig:
        if self.lanes > 1 and self.service != "concurrent":
            raise ValueError(f"lanes {self.lanes} with service serial; write service: concurrent or remove lanes")
        if self.gang and self.service == "concurrent":
            raise ValueError("a gang takes rounds together and cannot be concurrent; write service: serial")
        if self.ranks and not self.gang:
            raise ValueError(f"ranks {self.ranks} without gang: true; remove ranks or write gang: true")
        if self.option is not None and self.option >= len(self.options):
            raise ValueError(f"option {self.option} of {len(self.options)} options; write a smaller number, or null")
        return self
