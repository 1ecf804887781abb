"""How many failures are too many (spec.failurePolicy): of the workers of a job, of the warm spares of a role.

failures.add(now)  # True: more than maxRestarts within resetAfterSeconds
"""

from __future__ import annotations

from collections import deque

from rlinf_api.job import FailurePolicySpec


class Failures:
    def __init__(self, policy: FailurePolicySpec) -> None:
        self._policy = policy
        self._at: deque[float] = deque(maxlen=policy.max_restarts + 1)

    def add(self, now: float) -> bool:
        """Whether this one is too many."""
        self._at.append(now)
        return len(self._at) > self._policy.max_restarts and now <= self.forgotten_at

    @property
    def count(self) -> int:
        return len(self._at)

    @property
    def forgotten_at(self) -> float:
        """When the oldest of them counts no more."""
        return self._at[0] + self._policy.reset_after_seconds
