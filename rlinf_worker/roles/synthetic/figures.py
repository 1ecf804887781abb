"""The numbers of a synthetic role as its worker needs them, and what they come to for one unit. Pure, stdlib only.

Sizes and jitter are drawn from hashes: a unit has the same size whoever works on it, wherever, however often.

>>> figures = Figures.of({"time": {"perItemMs": 4, "perBatchMs": 1}}, role="reward")
>>> figures.per_batch_s, figures.item_s("demo:1/0", step=1)
(0.001, 0.004)
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlinf_api import options

JITTER_BOUNDS: Final = (0.5, 2.0)
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One role on the slots of one worker: times are already divided by the pool's speed and the slots' scaling."""

    role: str
    workload: str
    per_item_s: float
    per_batch_s: float
    sigma: float
    jitter: float
    concurrent: bool
    lanes: int
    gang: bool
    gang_sync_s: float
    load_s: float
    offload_s: float
    resident_bytes: int
    peak_bytes: int
    offloaded_bytes: int
    micro_batch: int | None
    payload_bytes: int
    weights_bytes: int
    drift_step: int
    """From then on the time per item is multiplied by `drift_factor`."""
    drift_factor: float

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        *,
        role: str,
        workload: str = "",
        slots: int = 1,
        speed: float = 1.0,
        drift: Mapping[str, Any] | None = None,
        option: str = "",
    ) -> Figures:
        """`option`: the plan's, by the name that it has there; empty: the config's."""
        time, memory = config["time"], config.get("memory") or {}
        chosen = options.chosen(config, option) or {}
        seconds = 1e-3 / (speed * slots ** float(config.get("scaling", 1.0)))
        lanes = int(config.get("lanes", 1))
        concurrent = config.get("service", "serial") == "concurrent"
        return cls(
            role=str(config.get("name") or role),
            workload=workload,
            per_item_s=float(chosen.get("perItemMs", time["perItemMs"])) * seconds,
            per_batch_s=float(time.get("perBatchMs", 0.0)) * seconds,
            sigma=float(time.get("sigma", 0.0)),
            jitter=float(time.get("jitter", 0.0)),
            concurrent=concurrent,
            lanes=lanes if concurrent else 1,
            gang=bool(config.get("gang", False)),
            gang_sync_s=float(config.get("syncMs", 0.0)) * seconds,
            load_s=float(config.get("loadMs", 0.0)) * 1e-3 / speed,
            offload_s=float(config.get("offloadMs", 0.0)) * 1e-3 / speed,
            resident_bytes=int(float(memory.get("resident", 0.0)) * MIB),
            peak_bytes=int(float(chosen.get("peak", memory.get("peak", 0.0))) * MIB),
            offloaded_bytes=int(float(memory.get("offloaded", 0.0)) * MIB),
            micro_batch=config.get("microBatch"),
            payload_bytes=int(config.get("payloadBytes", 256)),
            weights_bytes=int(config.get("weightsBytes", 4096)),
            drift_step=int(drift["step"]) if drift else 0,
            drift_factor=float(drift["factor"]) if drift else 1.0,
        )

    # --- what one unit costs, without jitter --------------------------------------------------------------------------
    def item_s(self, key: str, *, step: int) -> float:
        """Seconds for one unit that is worked on alone."""
        drift = self.drift_factor if step >= self.drift_step else 1.0
        return self.per_item_s * self.size(key) * drift

    def lane_s(self, key: str, *, step: int) -> float:
        """How long the unit holds its lane: a full engine makes one unit per item's time."""
        return self.lanes * self.item_s(key, step=step)

    def size(self, key: str) -> float:
        """Lognormal with mean 1; the same for the same (workload, role, key).

        >>> Figures.of({"time": {"perItemMs": 4}}, role="rollout", workload="w").size("w:1/7")
        1.0
        """
        if self.sigma == 0.0:
            return 1.0
        digest = hashlib.blake2b(f"{self.workload}\0{self.role}\0{key}".encode(), digest_size=16).digest()
        first = (int.from_bytes(digest[:8], "big") + 1) / (2**64 + 1)  # in (0, 1): its logarithm is finite
        second = int.from_bytes(digest[8:], "big") / 2**64
        normal = math.sqrt(-2.0 * math.log(first)) * math.cos(2.0 * math.pi * second)
        return math.exp(self.sigma * normal - self.sigma * self.sigma / 2.0)


class Jitter:
    """The factor of each timed piece of one worker; another worker, or another life of it, draws others."""

    def __init__(self, *, jitter: float, seed: str) -> None:
        self._jitter, self._random = jitter, random.Random(seed)

    def __call__(self, seconds: float) -> float:
        if self._jitter == 0.0 or seconds == 0.0:
            return seconds
        low, high = JITTER_BOUNDS
        return seconds * min(high, max(low, self._random.gauss(1.0, self._jitter)))
