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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlinf_api import options

JITTER_BOUNDS: Final = (0.5, 2.0)
MIB: Final = 1 << 20
TOKENS: Final = "\0tokens"  # no role is called so


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
    mean_tokens: float = 0.0
    """The tokens of a mean unit; 0: the flow says nothing of tokens."""
    sigma_tokens: float = 0.0
    by_tokens: bool = False
    """A unit is as long as it has tokens, for each such role."""

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
        tokens: Mapping[str, Any] | None = None,
    ) -> Figures:
        """`option`: the plan's, by the name that it has there; empty: the config's. `tokens`: the flow's."""
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
            mean_tokens=float(tokens["mean"]) if tokens else 0.0,
            sigma_tokens=float(tokens.get("sigma", 0.0)) if tokens else 0.0,
            by_tokens=bool(time.get("byTokens", False)),
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
        """Lognormal with mean 1; the same for the same (workload, role, key), or of tokens for each role.

        >>> Figures.of({"time": {"perItemMs": 4}}, role="rollout", workload="w").size("w:1/7")
        1.0
        """
        if self.by_tokens:
            return self._drawn(TOKENS, key, sigma=self.sigma_tokens)
        return self._drawn(self.role, key, sigma=self.sigma)

    def tokens(self, keys: Iterable[str]) -> float:
        """The tokens of all these units; 0 where the flow says nothing of them."""
        if not self.mean_tokens:
            return 0.0
        return self.mean_tokens * math.fsum(self._drawn(TOKENS, key, sigma=self.sigma_tokens) for key in keys)

    def _drawn(self, name: str, key: str, *, sigma: float) -> float:
        if sigma == 0.0:
            return 1.0
        digest = hashlib.blake2b(f"{self.workload}\0{name}\0{key}".encode(), digest_size=16).digest()
        first = (int.from_bytes(digest[:8], "big") + 1) / (2**64 + 1)  # in (0, 1): its logarithm is finite
        second = int.from_bytes(digest[8:], "big") / 2**64
        normal = math.sqrt(-2.0 * math.log(first)) * math.cos(2.0 * math.pi * second)
        return math.exp(sigma * normal - sigma * sigma / 2.0)


class Jitter:
    """The factor of each timed piece of one worker; another worker, or another life of it, draws others."""

    def __init__(self, *, jitter: float, seed: str) -> None:
        self._jitter, self._random = jitter, random.Random(seed)

    def __call__(self, seconds: float) -> float:
        if self._jitter == 0.0 or seconds == 0.0:
            return seconds
        low, high = JITTER_BOUNDS
        return seconds * min(high, max(low, self._random.gauss(1.0, self._jitter)))
