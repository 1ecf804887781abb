"""The error tree, split first by who can put it right. Raised by every part; caught by name, never broadly.

    RLinfError
    ├─ UserError              the manifest, the data or the code of the user must change
    │   ├─ InvalidManifest        a field of RLJob or RLPlan            -> condition Valid=False
    │   ├─ NotSupportedYet        a field whose feature does not exist  -> condition Valid=False/NotSupportedYet
    │   └─ Refused                a call that this caller may never make (identity, protocol, other job)
    ├─ RetryableError         wait and try again, within a bound
    │   ├─ WorkerUnreachable      a peer, agent or driver is away
    │   ├─ ClusterBusy            the API server or the scheduler says later
    │   ├─ Conflict               somebody else wrote first
    │   └─ Stale                  the caller is of an older attempt, plan or roster and must catch up or exit
    ├─ DeadlineExceeded       a named wait ran out; says what was awaited and what was there
    └─ InvariantBroken        a bug in us: stop, loudly

A message has four parts: what, got, wanted, next:

>>> str(UserError("role 'env' has kind 'gymnasiun'", got="'gymnasiun'", wanted="one of gymnasium, synthetic",
...               next="write kind: gymnasium"))
"role 'env' has kind 'gymnasiun': got 'gymnasiun', wanted one of gymnasium, synthetic; write kind: gymnasium"
"""

from __future__ import annotations


class RLinfError(Exception):
    """What went wrong (`what`), the value met (`got`), the value that would do (`wanted`), what to do (`next`)."""

    def __init__(self, what: str, *, got: str = "", wanted: str = "", next: str = "") -> None:
        self.what, self.got, self.wanted, self.next = what, got, wanted, next
        detail = ", ".join(part for part in (f"got {got}" if got else "", f"wanted {wanted}" if wanted else "") if part)
        super().__init__(what + (f": {detail}" if detail else "") + (f"; {next}" if next else ""))

    @property
    def reason(self) -> str:
        """CamelCase reason for conditions and counters: the class name."""
        return type(self).__name__


class UserError(RLinfError):
    """The manifest, the data or the user's code must change; trying again is pointless."""


class InvalidManifest(UserError):
    """A field of an RLJob or RLPlan is wrong in a way that CEL cannot or did not catch."""


class NotSupportedYet(UserError):
    """A field is set to a value whose feature this version does not have. Never ignored silently."""


class Refused(UserError):
    """This caller may not do this: wrong certificate, other job, other protocol number."""


class RetryableError(RLinfError):
    """Wait and try again; `delay_s` is the suggested pause before the next try."""

    def __init__(self, what: str, *, got: str = "", wanted: str = "", next: str = "", delay_s: float = 1.0) -> None:
        super().__init__(what, got=got, wanted=wanted, next=next)
        self.delay_s = delay_s


class WorkerUnreachable(RetryableError):
    """A worker, agent or driver does not answer or its connection broke."""


class ClusterBusy(RetryableError):
    """The API server (429, 5xx, time-out) or a queue asks for patience."""


class Conflict(RetryableError):
    """Somebody else wrote first; read again, decide again."""


class Stale(RetryableError):
    """The sender's attempt, plan revision or roster is older than the receiver's."""


class DeadlineExceeded(RLinfError):
    """A named wait ran out."""

    def __init__(self, what: str, *, timeout_s: float, missing: str = "", next: str = "") -> None:
        super().__init__(
            f"{what} did not happen within {timeout_s:g} s",
            got=f"still missing: {missing}" if missing else "",
            next=next,
        )
        self.timeout_s, self.missing = timeout_s, missing


class InvariantBroken(RLinfError):
    """A bug in this project. Stops what it is in, with everything that helps to find it."""
